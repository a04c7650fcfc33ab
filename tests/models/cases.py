"""A built trainer engine beside what transformers makes of the same directory, and how the two are compared."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.models.configurations import WINDOW, WRAPPERS
from tests.workers.engine.engine_cases import assemble, make_engine, shown_by
from verl.checkpoint_engine.errors import PlanError
from verl.protocol import DataProto
from verl.utils.config import ConfigError
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.engine.fsdp.engine import FSDPEngine
from verl.workers.engine.micro_batches import MicroBatchLimits
from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.hf.engine import HFEngine
from verl.workers.rollout.records import SamplingOptions, TokenOutput

Tensors = dict[str, torch.Tensor]

NUM_PROMPT, NUM_RESPONSE = WINDOW + 5, WINDOW + 2
"""Longer than a window, both."""
PACKS = "fsdp2"
"""The strategy that is tried with packed sequences; another one has a row for each."""
NEIGHBOURHOODS = ((0, 1, 2, 3), (3, 2, 0), (2, 1))
"""Rows of `padded_batch` that share a micro-batch: each is beside others, and elsewhere."""
OFFSETS = (0, 5)
"""Columns of padding in front of a batch. At the second one the same neighbours are in the other order, so that
sequences which share a row begin elsewhere in it, too."""
SHORTEST = 1
"""Of those rows."""
DECODED = ((NUM_PROMPT, NUM_RESPONSE), (2, 2 * NUM_RESPONSE), (WINDOW - 1, 4))
"""Tokens of prompts and of responses: beyond a window while they are decoded, and before."""
ORDERS = ((0, 1, 2), (2, 1))
"""Prompts that are decoded at once."""
TOWERS = (
    *("vision_tower.", "vision_model.", "multi_modal_projector."),
    *("model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.embed_vision."),
)
"""How tensors begin in a file that are for seeing."""
EXTRA = ("mtp.", *TOWERS)
"""Those of a file that are no part of the causal LM: kept, and not trained."""


@dataclass(frozen=True, kw_only=True)
class Built:
    directory: Path
    strategy: str
    engine: FSDPEngine | None
    refusal: Exception | None
    """What ended the build. Exactly one of the two is None."""

    @property
    def model(self) -> Any:
        assert self.engine is not None
        return self.engine.model


def build(directory: Path, strategy: str) -> Built:
    """Needs a default process group. Any error but a refusal goes to the caller."""
    try:
        engine = make_engine(directory, strategy=strategy, model={"use_remove_padding": strategy == PACKS})
    except (ConfigError, PlanError) as refusal:
        return Built(directory=directory, strategy=strategy, engine=None, refusal=refusal)
    return Built(directory=directory, strategy=strategy, engine=engine, refusal=None)


def reference(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """transformers' model of a directory, whole, and what it says about the tensors that it did not find or use."""
    wrapped = AutoConfig.from_pretrained(directory).model_type in WRAPPERS
    auto: Any = AutoModelForImageTextToText if wrapped else AutoModelForCausalLM
    model, info = auto.from_pretrained(directory, dtype=dtype, attn_implementation="eager", output_loading_info=True)
    info["unexpected_keys"] = {name for name in info["unexpected_keys"] if not name.startswith(EXTRA)}
    return model.eval(), {key: value for key, value in info.items() if value}


def file_tensors(directory: Path) -> Tensors:
    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def parameters_and_buffers(model: Any) -> Tensors:
    """All of them, whole, those that no checkpoint holds, too. Of a world of one rank."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            return {name: tensor.clone() for name, tensor in _named(model)}
    return dict(_named(model))


def _named(model: Any) -> list[tuple[str, torch.Tensor]]:
    named = (*model.named_parameters(), *model.named_buffers(remove_duplicate=False))
    return [
        (own, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach())
        for name, tensor in named
        if (own := in_language_model(model, clean_tensor_name(name)))
    ]


def in_language_model(model: Any, name: str) -> str | None:
    """What the language model calls a tensor of `model` if it is alone; None for what is not in it."""
    if model.config.model_type not in WRAPPERS or name.startswith("lm_head."):
        return name
    for before, after in (("model.language_model.", "model."), ("language_model.", "")):
        if name.startswith(before):
            return after + name.removeprefix(before)
    return None


def sent(engine: FSDPEngine, dtype: str) -> Tensors:
    """What the rollouts get, whole."""
    return assemble([shown_by(engine.weight_source(dtype))])


def may_stay_wide(model: Any, name: str) -> bool:
    """Whether engines may want it in float32 at any dtype: buffers, and vectors that no layer calls weight or bias."""
    tensors = dict(model.named_parameters())
    if name not in tensors:
        return True
    return tensors[name].squeeze().dim() < 2 and name.rpartition(".")[2] not in ("weight", "bias")


def differences(found: Tensors, expected: Tensors) -> list[str]:
    """One line for every name that is missing, too many, or has another shape, dtype or value."""
    lines = [f"{name}: missing" for name in expected.keys() - found.keys()]
    lines += [f"{name}: not expected" for name in found.keys() - expected.keys()]
    for name in expected.keys() & found.keys():
        left, right = found[name], expected[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            lines.append(f"{name}: {left.dtype} {tuple(left.shape)}, not {right.dtype} {tuple(right.shape)}")
        elif not torch.equal(left, right):
            lines.append(f"{name}: {int((left != right).sum())} of {left.numel()} elements differ")
    return sorted(lines)


def padded_batch() -> DataProto:
    """Four rows of random tokens: full, padded on the left, on the right, on both sides."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([(NUM_PROMPT, NUM_RESPONSE), (2, NUM_RESPONSE), (NUM_PROMPT, 3), (NUM_PROMPT - 4, 4)])
    columns = torch.arange(NUM_PROMPT + NUM_RESPONSE)
    mask = ((columns >= NUM_PROMPT - lengths[:, :1]) & (columns < NUM_PROMPT + lengths[:, 1:])).long()
    ids = torch.where(mask.bool(), torch.randint(0, 250, mask.shape, generator=generator), 256)
    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :NUM_PROMPT],
            "responses": ids[:, NUM_PROMPT:],
            "response_mask": mask[:, NUM_PROMPT:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        }
    )


def placed(data: DataProto, rows: Sequence[int], offset: int) -> tuple[DataProto, list[int]]:
    """Rows of `data` at one of `OFFSETS`, and which rows they are, in their order."""
    rows = list(rows) if offset == 0 else list(reversed(rows))
    chosen = data[rows]
    padding = {"prompts": 256, "input_ids": 256, "attention_mask": 0, "position_ids": 0}
    tensors = {
        name: torch.nn.functional.pad(tensor, (offset, 0), value=padding[name]) if name in padding else tensor
        for name, tensor in chosen.batch.items()
    }
    return DataProto.from_dict(tensors=tensors), rows


def gradients(engine: FSDPEngine, data: DataProto) -> Tensors:
    """Of minus the sum of log-probs, whole, by parameter, with all rows in one micro-batch.

    A collective. The engine's weights are others afterwards.
    """
    found: Tensors = {}

    def summed(log_prob: torch.Tensor, entropy: Any, micro_batch: DataProto, totals: Any) -> Any:
        return -(log_prob * micro_batch.batch["response_mask"]).sum(), {}

    def keep() -> None:
        model: Any = engine.model
        if isinstance(model, FullyShardedDataParallel):
            with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
                found.update(_gradients(model))
        else:
            found.update(_gradients(model))

    engine._grad_clip, engine._before_step = float("inf"), keep
    limits = MicroBatchLimits(max_sequences=len(data))
    engine.train_mini_batch(data, summed, temperature=1.0, limits=limits)
    return found


def _gradients(model: Any) -> Tensors:
    return {
        own: grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
        for name, parameter in model.named_parameters()
        if (grad := parameter.grad) is not None and (own := in_language_model(model, clean_tensor_name(name)))
    }


def reference_gradients(model: Any, data: DataProto) -> Tensors:
    """Row by row, without padding. Dropout is off."""
    found: Tensors = {}
    for row in range(len(data)):
        alone = copy.deepcopy(model)
        (-_of_response(alone, data, row).sum()).backward()
        for name, gradient in _gradients(alone).items():
            found[name] = found[name] + gradient if name in found else gradient
    return found


def other_gradients(found: Tensors, expected: Tensors) -> dict[str, float]:
    """The distance of those that are not as `expected`, in their norms: by more than 1e-4 of it.

    One that is nothing but rounding, as that of a bias of all keys, may be off by 1e-6 of the norm of all.
    """
    if missing := expected.keys() - found.keys():
        raise AssertionError(f"no gradients of {sorted(missing)}")
    whole = float(torch.stack([gradient.norm() for gradient in expected.values()]).norm())
    wrong = {}
    for name, gradient in found.items():
        right = expected.get(name, torch.zeros(()))
        distance = float((gradient - right).norm())
        if not distance <= 1e-4 * float(right.norm()) + 1e-6 * whole:
            wrong[name] = distance / float(right.norm())
    return wrong


def log_probs(engine: FSDPEngine, data: DataProto) -> torch.Tensor:
    """All rows in one micro-batch."""
    return engine.compute_log_prob(data, temperature=1.0, limits=MicroBatchLimits(max_sequences=len(data)))[0]


@torch.no_grad()
def reference_log_probs(model: Any, data: DataProto) -> torch.Tensor:
    """Row by row, without padding, from the logits of every position.

    By a new model each: some remember how long the sequences of earlier calls were.
    """
    found = torch.zeros(len(data), NUM_RESPONSE)
    for row in range(len(data)):
        values = _of_response(copy.deepcopy(model), data, row)
        found[row, : len(values)] = values
    return found


def _of_response(model: Any, data: DataProto, row: int) -> torch.Tensor:
    ids = data.batch["input_ids"][row][data.batch["attention_mask"][row].bool()]
    num_response = int(data.batch["response_mask"][row].sum())
    logits = model(input_ids=ids[None], use_cache=False).logits[0, -num_response - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[-num_response:, None])[:, 0]


async def decoded(
    directory: Path, orders: Sequence[Sequence[int]], **model: Any
) -> list[list[tuple[list[int], TokenOutput]]]:
    """Prompts of `PROMPTS` and what the hf engine says after them: those of an order, at once.

    Two sequences are decoded together, so that others join and leave. Raises what the start of the engine raises.
    """
    config = RolloutConfig(name="hf", dtype="float32", load_format="auto", max_num_seqs=2, ignore_eos=True)
    spec = EngineSpec(
        name="replica-0",
        engine="verl.workers.rollout.hf.engine:HFEngine",
        config=config,
        model=HFModelConfig(path=str(directory)),
        device="cpu",
        max_model_len=64,
        seed=1,
    )
    engine = HFEngine(spec)
    await engine.start()
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 250, (length,), generator=generator).tolist() for length, _ in DECODED]
    try:
        return [
            [(prompts[row], output) for row, output in zip(order, await _answers(engine, prompts, order), strict=True)]
            for order in orders
        ]
    finally:
        await engine.shutdown()


async def _answers(engine: HFEngine, prompts: list[list[int]], order: Sequence[int]) -> list[TokenOutput]:
    return await asyncio.gather(
        *(
            engine.generate(
                prompts[row], SamplingOptions(max_tokens=DECODED[row][1], ignore_eos=True, logprobs=True), str(row)
            )
            for row in order
        )
    )


@torch.no_grad()
def foretold(model: Any, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probs of the response, from the logits of the whole sequence.

    By a new model: some remember how long the sequences of earlier calls were.
    """
    ids = torch.tensor([*prompt, *response])
    logits = copy.deepcopy(model)(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[len(prompt) :, None])[:, 0]


@torch.no_grad()
def foretold_as_it_grows(make: Callable[[], Any], prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probs of the response, each by a model that `make` makes and that is given the tokens before it alone."""
    found = []
    for step, token in enumerate(response):
        before = torch.tensor([[*prompt, *response[:step]]])
        logits = make()(input_ids=before, use_cache=False).logits[0, -1].float()
        found.append(logits.log_softmax(-1)[token])
    return torch.stack(found)
