"""Models that see, in FSDP: sequences with no picture, one and several of different sizes, against transformers."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import MODEL_MAPPING, AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from tests.checkpoint_engine.fakes import Fleet
from tests.experimental.agent_loop.scripted_server import said
from tests.experimental.agent_loop.seeing_tools import CALL, SHOWN, tool_file
from tests.pictures import HAS_TORCHVISION, in_bytes, noise, row, with_torchvision, write
from tests.seeing import FAMILIES, NEED_TORCHVISION, as_a_whole, make_seeing, processor_of
from tests.workers.engine.engine_cases import (
    LEARNING_RATE,
    assemble,
    held_parts,
    make_engine,
    own_rows,
    weighted_loss,
)
from verl.experimental.agent_loop.base import DictConfigWrap
from verl.experimental.agent_loop.batching import to_batch
from verl.experimental.agent_loop.manager import AgentLoopManager
from verl.experimental.agent_loop.output import AgentLoopOutput
from verl.experimental.agent_loop.registry import known_loops
from verl.experimental.agent_loop.server_manager import ServerManager
from verl.experimental.agent_loop.single_turn import SingleTurnAgentLoop
from verl.experimental.agent_loop.worker import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.generation import joined
from verl.utils.builtin import make_tiny_model
from verl.utils.builtin.seeing import ARCHITECTURES, make_tiny_seeing_model
from verl.utils.dataset import PromptLoader, RLHFDataset
from verl.utils.language_model import PARTLY_COMPUTED
from verl.utils.pictures import MULTI_MODAL_DATA
from verl.workers.config import DataConfig, HFModelConfig
from verl.workers.engine.micro_batches import MicroBatchLimits, partition, sequence_widths
from verl.workers.losses import LossTotals
from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.hf.engine import HFEngine
from verl.workers.rollout.records import SamplingOptions

NUM_PROMPT, NUM_RESPONSE = 320, 6
TEMPERATURE = 0.7
FROZEN, RECOMPUTED = {"freeze_vision_tower": True}, {"enable_gradient_checkpointing": True}
PACKED = {"use_remove_padding": True, "require_remove_padding": True}
PACKED_WHERE_THEY_CAN_BE = {"use_remove_padding": True}
LORA = {"lora_rank": 3, "lora_alpha": 12}
NAMED = ["q_proj", "down_proj", "qkv"]
"""Of language models and of towers."""
SINGLE = MicroBatchLimits(max_sequences=1)
SMALL = MicroBatchLimits(max_tokens=150)
WHOLE = MicroBatchLimits(max_sequences=100)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Any) -> Path:
    return make_tiny_seeing_model(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def one_model(tmp_path_factory: pytest.TempPathFactory, cache: Any) -> Path:
    return make_tiny_seeing_model(tmp_path_factory.mktemp("model"))


PICTURES = [
    [],
    [noise(1)],
    [noise(2, 112, 56), noise(3, 60, 200), noise(4, 28, 28)],
    [],
    [noise(5, 140, 140), noise(6)],
    [noise(1)],
    [],
    [],
]
"""The last two share a rank where there are four: nothing is to be seen there."""


def batch_of(directory: Path, folder: Path, responses: list[list[int]] | None = None) -> DataProto:
    rows = [row(f"{number}" + "<image> and" * len(images), in_bytes(*images)) for number, images in enumerate(PICTURES)]
    return batch_of_rows(rows, directory, folder, responses)


def batch_of_rows(
    rows: list[dict[str, Any]], directory: Path, folder: Path, responses: list[list[int]] | None = None
) -> DataProto:
    """Read as a job reads it, with responses of 1 to R tokens."""
    data = RLHFDataset(
        write(folder / "d.parquet", rows),
        AutoTokenizer.from_pretrained(directory),
        DataConfig(max_prompt_length=NUM_PROMPT),
        processor_of(directory),
    )
    chooser = random.Random(0)
    items = [data[number] for number in range(len(data))]
    responses = responses or [chooser.choices(range(3, 250), k=1 + number % NUM_RESPONSE) for number in range(8)]
    outputs = [
        AgentLoopOutput(prompt_ids=item["prompt_ids"], response_ids=said, response_mask=[1] * len(said))
        for item, said in zip(items, responses, strict=True)
    ]
    batch = to_batch(outputs, prompt_length=NUM_PROMPT, response_length=NUM_RESPONSE, pad_token_id=0)
    batch.batch["advantages"] = torch.randn(len(items), NUM_RESPONSE, generator=torch.Generator().manual_seed(1))
    seen = np.empty(len(items), dtype=object)
    seen[:] = [item[MULTI_MODAL_DATA] for item in items]
    batch.non_tensor_batch[MULTI_MODAL_DATA] = seen
    return batch


def of_transformers(directory: Path, images: list[Any]) -> dict[str, torch.Tensor]:
    """What the model's own processor makes of pictures, all at once, without what it makes of their text."""
    whole = processor_of(directory).of_transformers
    text = whole.image_token * len(images)
    given = whole(images=images, text=[text], return_tensors="pt", return_mm_token_type_ids=False)
    base: Any = MODEL_MAPPING[type(AutoConfig.from_pretrained(directory))]
    of_model = inspect.signature(base.forward).parameters
    of_text = (*whole.tokenizer.model_input_names, "mm_token_type_ids", "token_type_ids")
    return {name: given[name] for name in given if name in of_model and name not in of_text}


def alone(model: Any, directory: Path, data: DataProto) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies by transformers: each sequence by itself, positions and patches of its own making."""
    base: Any = MODEL_MAPPING[type(model.config)]
    accepted = inspect.signature(base.forward).parameters
    kinds = next((name for name in ("token_type_ids", "mm_token_type_ids") if name in accepted), None)
    log_probs = torch.zeros(len(data), NUM_RESPONSE)
    entropies = torch.zeros(len(data), NUM_RESPONSE)
    for number in range(len(data)):
        ids = data.batch["input_ids"][number][data.batch["attention_mask"][number].bool()][None]
        images = PICTURES[number]
        given = of_transformers(directory, images) if images else {}
        if images and kinds is not None:
            given[kinds] = (ids == model.config.image_token_id).int()
        count = int(data.batch["response_mask"][number].sum())
        logits = model(input_ids=ids, **given).logits[0, -count - 1 : -1] / TEMPERATURE
        distribution = logits.log_softmax(-1)
        log_probs[number, :count] = distribution.gather(-1, ids[0, -count:, None])[:, 0]
        entropies[number, :count] = -(distribution.exp() * distribution).sum(-1)
    return log_probs, entropies


def log_probs(path: Path, data: DataProto, limits: MicroBatchLimits, options: dict[str, Any]) -> Any:
    engine = make_engine(path, **options)
    return engine.compute_log_prob(own_rows(data), temperature=TEMPERATURE, limits=limits, calculate_entropy=True)


def train(path: Path, data: DataProto, limits: MicroBatchLimits, options: dict[str, Any]) -> Any:
    engine = make_engine(path, grad_clip=0.5, **options)
    before = held_parts(engine)
    metrics = engine.train_mini_batch(
        own_rows(data), weighted_loss, temperature=TEMPERATURE, limits=limits, calculate_entropy=True
    )
    states = engine.optimizer.state
    names = {parameter: name for name, parameter in engine.model.named_parameters()}
    with_moments = sorted(names[parameter] for parameter in states if states[parameter])
    return metrics, before, held_parts(engine), with_moments


def one_step_alone(
    directory: Path, data: DataProto, *, frozen: bool = False, alone: Any = alone
) -> tuple[float, float, dict[str, torch.Tensor], list[str]]:
    """Loss, gradient norm, parameters after it, and names of those that the optimizer has moved."""
    model: Any = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    model.get_encoder(modality="image").requires_grad_(not frozen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.01)
    log_prob, entropy = alone(model, directory, data)
    loss, _ = weighted_loss(log_prob, entropy, data, LossTotals.of(data.batch["response_mask"]))
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    moved = sorted(name for name, each in model.named_parameters() if optimizer.state[each])
    return loss.item(), norm.item(), {name: each.detach() for name, each in model.named_parameters()}, moved


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("world_size", "limits", "options"),
    [
        pytest.param(1, WHOLE, {}, id="one rank, all together"),
        pytest.param(2, SMALL, {}, id="two ranks, dynamic micro-batches"),
        pytest.param(4, SINGLE, {}, id="four ranks, of which one sees nothing"),
        pytest.param(4, SMALL, {"strategy": "fsdp"}, id="fsdp1: four ranks"),
        pytest.param(1, WHOLE, {"model": PACKED}, id="packed, in one row"),
        pytest.param(4, SMALL, {"model": PACKED}, id="packed: four ranks, of which one sees nothing"),
    ],
)
def test_log_probs_equal_those_of_transformers_alone(
    ranks: Any, model: Path, tmp_path: Path, world_size: int, limits: MicroBatchLimits, options: dict[str, Any]
) -> None:
    data = batch_of(model, tmp_path)
    with torch.no_grad():
        whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        expected = alone(whole, model, data)
    results = ranks.run(log_probs, world_size, model, data, limits, options)
    for place in (0, 1):
        found = torch.cat([result[place] for result in results])
        torch.testing.assert_close(found, expected[place], atol=1e-4, rtol=0.0)


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("world_size", "limits", "options"),
    [
        pytest.param(1, WHOLE, {}, id="one rank, all together"),
        pytest.param(4, SINGLE, {}, id="four ranks, of which one sees nothing"),
        pytest.param(2, SMALL, {"model": RECOMPUTED}, id="recomputed"),
        pytest.param(4, SMALL, {"strategy": "fsdp"}, id="fsdp1: four ranks"),
        pytest.param(1, WHOLE, {"model": PACKED}, id="packed, in one row"),
        pytest.param(4, SMALL, {"model": PACKED | RECOMPUTED}, id="packed: four ranks, recomputed"),
        pytest.param(2, SMALL, {"model": PACKED, "strategy": "fsdp"}, id="fsdp1: packed"),
        pytest.param(4, SINGLE, {"model": FROZEN}, id="a frozen tower"),
        pytest.param(2, SMALL, {"model": FROZEN | RECOMPUTED}, id="a frozen tower, recomputed"),
        pytest.param(2, SMALL, {"model": FROZEN, "strategy": "fsdp"}, id="fsdp1: a frozen tower"),
    ],
)
def test_a_step_equals_that_of_transformers_alone(
    ranks: Any, model: Path, tmp_path: Path, world_size: int, limits: MicroBatchLimits, options: dict[str, Any]
) -> None:
    compare_a_step(ranks, model, batch_of(model, tmp_path), world_size, limits, options)


def compare_a_step(
    ranks: Any,
    model: Path,
    data: DataProto,
    world_size: int,
    limits: MicroBatchLimits,
    options: dict[str, Any],
    alone: Any = alone,
) -> None:
    """What is loaded, loss, gradient norm and parameters after it, with those of transformers."""
    frozen = "freeze_vision_tower" in options.get("model", {})
    loss, norm, after, moved = one_step_alone(model, data, frozen=frozen, alone=alone)
    results = ranks.run(train, world_size, model, data, limits, options)
    saved = load_file(model / "model.safetensors")
    started = assemble([parts for _, parts, _, _ in results])
    assert started.keys() == saved.keys()
    for name, values in started.items():
        assert torch.equal(values, saved[name]), name
    for metrics, _, _, with_moments in results:
        assert abs(metrics["loss"] - loss) < 1e-4
        assert abs(metrics["grad_norm"] - norm) < 1e-4 * max(1.0, norm)
        if "strategy" not in options:  # FSDP1 has one parameter for all of a layer
            assert with_moments == moved
    whole = AutoModelForImageTextToText.from_pretrained(model)
    found = assemble([parts for _, _, parts, _ in results])
    whole.load_state_dict(_in_model(whole, found), strict=True)
    for name, parameter in whole.named_parameters():
        difference = (parameter.detach() - after[name]).abs()
        assert difference.max() < 0.05 * LEARNING_RATE, name
        assert difference.mean() < 1e-3 * LEARNING_RATE, name


WAYS: dict[str, tuple[int, MicroBatchLimits, dict[str, Any]]] = {
    "packed, four ranks": (4, SMALL, {"model": PACKED_WHERE_THEY_CAN_BE}),
    "fsdp1, in rows, recomputed": (2, SINGLE, {"model": RECOMPUTED, "strategy": "fsdp"}),
    "a frozen tower": (2, SMALL, {"model": FROZEN}),
}


def is_tried(family: str, way: str) -> bool:
    """What is not is refused: tests/trainer/ppo/test_sight.py."""
    return family not in PARTLY_COMPUTED or "strategy" not in WAYS[way][2]


def compare(ranks: Any, family: str, way: str, folder: Path) -> None:
    """Log-probs and a step of a family with those of transformers."""
    world_size, limits, options = WAYS[way]
    options = {**options, "model": options["model"] | as_a_whole(family)}
    model = make_seeing(folder / "model", family)
    data = batch_of(model, folder)
    with torch.no_grad():
        whole = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        expected = alone(whole, model, data)
    results = ranks.run(log_probs, world_size, model, data, limits, options)
    for place in (0, 1):
        found = torch.cat([result[place] for result in results])
        torch.testing.assert_close(found, expected[place], atol=1e-4, rtol=0.0)
    compare_a_step(ranks, model, data, world_size, limits, options)


@pytest.mark.cells(4)
@pytest.mark.parametrize(
    ("family", "way"),
    [(family, way) for family in FAMILIES if family not in NEED_TORCHVISION for way in WAYS if is_tried(family, way)],
)
def test_every_family_computes_and_learns_what_it_does_in_transformers_alone(
    ranks: Any, cache: Any, tmp_path: Path, family: str, way: str
) -> None:
    compare(ranks, family, way, tmp_path)


@pytest.mark.job
@pytest.mark.cells(3)
@pytest.mark.skipif(not HAS_TORCHVISION, reason="no torchvision: make vision")
@pytest.mark.parametrize("family", NEED_TORCHVISION)
def test_so_does_one_whose_processor_wants_torchvision(cache: Any, tmp_path: Path, family: str) -> None:
    """In a process of its own, which has it."""
    program = [sys.executable, "-m", "tests.workers.engine.seen_process", family, str(tmp_path)]
    ended = subprocess.run(program, env=with_torchvision(), capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == f"{family} is right in {len(WAYS)} ways"


async def test_a_frozen_tower_is_sent_with_the_first_version_alone(ranks: Any, one_model: Path, tmp_path: Path) -> None:
    data = batch_of(one_model, tmp_path)
    ((_, before, after, _),) = ranks.run(train, 1, one_model, data, WHOLE, {"model": FROZEN})
    first, second = assemble([before]), assemble([after])
    tower = [name for name in first if name.startswith("visual.")]
    assert len(tower) > 20
    async with Fleet(first, tmp_path, backend="tcp", delta="always", block_kilobytes=4) as fleet:
        await fleet.manager.update_weights(0)
        fleet.set_weights(second)
        delta = (await fleet.manager.update_weights(1)).delta
    assert delta is not None
    assert delta.tensors_unchanged == len(tower)
    of_text = sum(values.nbytes for name, values in second.items() if name not in tower)
    assert delta.nbytes_delta + delta.pieces_whole * 4096 < of_text * 1.1


def train_adapters(path: Path, data: DataProto, directory: Path, options: dict[str, Any]) -> Any:
    """Two steps, as the first one of new adapters moves half of each."""
    engine = make_engine(path, grad_clip=0.5, model=LORA | options)
    engine.save_checkpoint(directory, ("model",))
    for _ in range(2):
        metrics = engine.train_mini_batch(own_rows(data), weighted_loss, temperature=TEMPERATURE, limits=SMALL)
    return metrics, held_parts(engine)


@pytest.mark.cells(3)
@pytest.mark.parametrize(
    ("world_size", "targets", "same", "options"),
    [
        pytest.param(2, "all-linear", r".*language_model.*_proj", PACKED | RECOMPUTED, id="of the language model"),
        pytest.param(1, "all-linear", r".*language_model.*_proj", FROZEN, id="beside a frozen tower"),
        pytest.param(1, NAMED, NAMED, {}, id="of the tower, too"),
    ],
)
def test_adapters_learn_what_those_of_peft_learn(
    ranks: Any, model: Path, tmp_path: Path, world_size: int, targets: Any, same: Any, options: dict[str, Any]
) -> None:
    data, directory = batch_of(model, tmp_path), tmp_path / "new"
    results = ranks.run(train_adapters, world_size, model, data, directory, {"target_modules": targets} | options)
    saved = load_file(directory / "lora_adapter/adapter_model.safetensors")
    whole: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    peft = get_peft_model(whole, LoraConfig(r=LORA["lora_rank"], lora_alpha=LORA["lora_alpha"], target_modules=same))
    assert get_peft_model_state_dict(peft).keys() == saved.keys()
    set_peft_model_state_dict(peft, saved)
    trained = [each for each in peft.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.999), weight_decay=0.01)
    for _ in range(2):
        log_prob, _ = alone(peft, model, data)
        loss, _ = weighted_loss(log_prob, None, data, LossTotals.of(data.batch["response_mask"]))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for metrics, _ in results:
        assert abs(metrics["loss"] - loss.item()) < 1e-4
        assert abs(metrics["grad_norm"] - norm.item()) < 1e-4
    merged = peft.merge_and_unload()
    found = _in_model(merged, assemble([parts for _, parts in results]))
    for name, values in merged.state_dict().items():
        torch.testing.assert_close(found[name], values, rtol=1e-4, atol=1e-4, msg=name)


def _in_model(whole: Any, found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of the file under the names of the model, as `from_pretrained` has them."""
    import tempfile

    from safetensors.torch import save_file

    with tempfile.TemporaryDirectory() as folder:
        whole.config.save_pretrained(folder)
        save_file({name: values.contiguous() for name, values in found.items()}, Path(folder) / "model.safetensors")
        read: Any = AutoModelForImageTextToText.from_pretrained(folder)
    return dict(read.state_dict())


def test_a_generated_token_for_pictures_is_text(ranks: Any, one_model: Path, tmp_path: Path) -> None:
    """transformers alone refuses such a sequence; what is compared is one in which the token's own row of the embedding
    is another token's."""
    whole: Any = AutoModelForImageTextToText.from_pretrained(one_model, dtype=torch.float32).eval()
    token, other = whole.config.image_token_id, 5
    said = [[7, token, 9, 11]] * len(PICTURES)
    data = batch_of(one_model, tmp_path, said)
    twin = tmp_path / "twin"
    with torch.no_grad():
        embeddings = whole.get_input_embeddings().weight
        embeddings[other] = embeddings[token]
    whole.save_pretrained(twin)
    for name in ("preprocessor_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (twin / name).write_bytes((one_model / name).read_bytes())
    plain = batch_of(twin, tmp_path, [[7, other, 9, 11]] * len(PICTURES))
    with torch.no_grad():
        expected, _ = alone(whole, twin, plain)
    (found, _) = ranks.run(log_probs, 1, twin, data, WHOLE, {})[0]
    compared = [0, 2, 3]  # the token itself has another probability than its twin
    torch.testing.assert_close(found[:, compared], expected[:, compared], atol=1e-4, rtol=0.0)


def test_a_model_that_reads_text_does_not_leave_out_pictures(ranks: Any, one_model: Path, tmp_path: Path) -> None:
    data, text = batch_of(one_model, tmp_path), make_tiny_model(tmp_path / "text", "qwen2")
    with pytest.raises(Exception, match="samples have pictures, and .* is trained on text alone"):
        ranks.run(log_probs, 1, text, data, WHOLE, {})


def test_dynamic_micro_batches_count_the_tokens_of_pictures(one_model: Path, tmp_path: Path) -> None:
    data = batch_of(one_model, tmp_path)
    token = AutoConfig.from_pretrained(one_model).image_token_id
    tokens = data.batch["attention_mask"].sum(1)
    assert (data.batch["input_ids"] == token).sum(1).tolist() == [0, 6, 23, 0, 22, 6, 0, 0]
    widths = sequence_widths(data)
    assert [sum(width) for width in widths] == tokens.tolist()
    assert all(int(tokens[group].sum()) <= 150 for group in partition(widths, SMALL, packed=True))


class Handle:
    """An engine in this process, called as the actor that serves one."""

    def __init__(self, engine: HFEngine) -> None:
        self.generate = self.tokens_since = self
        self._engine = engine

    def remote(self, *known: Any, **call: Any) -> Any:
        if known:
            return asyncio.sleep(0)
        call.pop("written_to", None)  # which only a server reads
        return asyncio.ensure_future(self._engine.generate(**call))


def engine_spec(config: Any, model: Path, max_model_len: int) -> EngineSpec:
    return EngineSpec(
        name="e",
        engine="",
        config=replace(config.actor_rollout_ref.rollout, dtype="float32", load_format="auto"),
        model=HFModelConfig(path=str(model)),
        device="cpu",
        max_model_len=max_model_len,
        seed=0,
    )


def test_what_the_trainer_scores_is_what_the_engine_saw(ranks: Any, one_model: Path, tmp_path: Path) -> None:
    """From rows of a file through loader, agent loop and engine to the log-probs of two responses of each sample."""
    rows = [row(f"{number}" + "<image> and" * len(images), in_bytes(*images)) for number, images in enumerate(PICTURES)]
    file = write(tmp_path / "d.parquet", rows)
    overrides = (f"data.train_files={file}", f"data.max_prompt_length={NUM_PROMPT}", "data.max_response_length=6")
    model_path = f"actor_rollout_ref.model.path={one_model}"
    config = load_config([*overrides, model_path, "actor_rollout_ref.rollout.name=hf", "data.train_batch_size=8"])
    tokenizer = AutoTokenizer.from_pretrained(one_model)
    processor = processor_of(one_model)
    data = RLHFDataset(file, tokenizer, config.data, processor)
    (batch,) = PromptLoader(data, config.data, batch_size=8, shuffle=True)
    samples = pickle.loads(pickle.dumps(DataProto.from_dict(non_tensors=batch).repeat(2)))

    async def run() -> list[AgentLoopOutput]:
        engine = HFEngine(engine_spec(config, one_model, 256))
        await engine.start()
        servers = ServerManager([Handle(engine)], timeout_s=100.0)
        options = SamplingOptions(max_tokens=NUM_RESPONSE, temperature=1.0).as_dict()
        loops = [SingleTurnAgentLoop(DictConfigWrap(config), servers, tokenizer) for _ in range(len(samples))]
        columns = samples.non_tensor_batch
        calls = [
            loop.run(options, **{name: values[number] for name, values in columns.items()})
            for number, loop in enumerate(loops)
        ]
        outputs = await asyncio.gather(*calls)
        await engine.shutdown()
        return outputs

    generated = to_batch(
        asyncio.run(run()), prompt_length=NUM_PROMPT, response_length=NUM_RESPONSE, pad_token_id=tokenizer.pad_token_id
    )
    whole = samples.union(generated)
    results = ranks.run(scored, 2, one_model, whole)
    found = torch.cat([result[0] for result in results])
    mask = whole.batch["response_mask"].bool()
    assert mask.sum() > 40
    torch.testing.assert_close(found[mask], whole.batch["rollout_log_probs"][mask], atol=1e-4, rtol=0.0)


def scored(path: Path, data: DataProto) -> Any:
    return make_engine(path).compute_log_prob(own_rows(data), temperature=1.0, limits=SMALL)


class Calling(Handle):
    """Writes the call of a tool in the place of each conversation's first message."""

    def __init__(self, engine: HFEngine, tokenizer: Any) -> None:
        super().__init__(engine)
        self._said, self._begun = [*tokenizer.encode(CALL), tokenizer.eos_token_id], set[str]()

    def remote(self, *known: Any, **call: Any) -> Any:
        conversation = call["request_id"].rpartition(".")[0] if call else ""
        if known or conversation in self._begun:
            return super().remote(*known, **call)
        self._begun.add(conversation)
        return asyncio.sleep(0, said(self._said))


def test_what_tools_show_is_what_engine_and_trainer_compute_with(ranks: Any, one_model: Path, tmp_path: Path) -> None:
    """With the patches and log-probs of transformers alone, which has the whole conversation. Half of the prompts have
    no picture."""
    images = [[], [noise(1)], [noise(2, 112, 56), noise(3, 60, 200)], []]
    rows = [row(f"{number}" + "<image> and" * len(each), in_bytes(*each)) for number, each in enumerate(images)]
    overrides = (
        f"data.train_files={write(tmp_path / 'd.parquet', rows)}",
        *(f"data.max_prompt_length={NUM_PROMPT}", "data.max_response_length=120", "data.train_batch_size=4"),
        *(f"actor_rollout_ref.model.path={one_model}", "actor_rollout_ref.rollout.name=hf"),
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tool_file(tmp_path, 'one')}",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
    )
    config = load_config(list(overrides))
    tokenizer, processor = AutoTokenizer.from_pretrained(one_model), processor_of(one_model)
    tools = AgentLoopManager.shown_tools(config, None)
    data = RLHFDataset(config.data.train_files, tokenizer, config.data, processor, shown_tools=lambda agent: tools)
    (batch,) = PromptLoader(data, config.data, batch_size=4, shuffle=False)
    samples = DataProto.from_dict(non_tensors=batch, meta_info={"validate": False})

    async def run() -> DataProto:
        engine = HFEngine(engine_spec(config, one_model, 480))
        await engine.start()
        worker = AgentLoopWorker(
            config=config,
            servers=[Calling(engine, tokenizer)],
            tokenizer_path=str(one_model),
            loops=known_loops(),
            rank=0,
            pictures=pickle.loads(pickle.dumps(processor)),
        )
        generated = await worker.generate_sequences(samples, 0)
        await engine.shutdown()
        return generated

    whole = joined(samples, asyncio.run(run()))
    shown = [[*each, SHOWN] for each in images]
    assert [len(each["images"]) for each in whole.non_tensor_batch[MULTI_MODAL_DATA]] == list(map(len, shown))
    results = ranks.run(scored, 2, one_model, whole)
    found = torch.cat([result[0] for result in results])
    responses, model = whole.batch["responses"], AutoModelForImageTextToText.from_pretrained(one_model).eval()
    token = model.config.image_token_id
    for number, pictures in enumerate(shown):
        ids = whole.batch["input_ids"][number][whole.batch["attention_mask"][number].bool()]
        mine = whole.batch["response_mask"][number].bool()
        given = of_transformers(one_model, pictures)
        with torch.no_grad():
            logits = model(input_ids=ids[None], mm_token_type_ids=(ids == token).int()[None], **given).logits[0]
        count = int(whole.batch["attention_mask"][number, NUM_PROMPT:].sum())
        expected = logits.log_softmax(-1)[-count - 1 : -1].gather(-1, responses[number, :count, None])[:, 0]
        mine = mine[:count]
        torch.testing.assert_close(found[number, :count], expected, atol=1e-4, rtol=0.0)
        later = mine & (torch.arange(count) >= int((~mine).nonzero().max()))  # the first message is a script's
        assert later.sum() > 10
        by_engine = whole.batch["rollout_log_probs"][number, :count]
        torch.testing.assert_close(by_engine[later], expected[later], atol=1e-4, rtol=0.0)
