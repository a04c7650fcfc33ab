"""The engine of transformers with pictures: the tokens of `generate` of transformers, alone and beside others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

from tests.pictures import noise
from tests.seeing import make_seeing, processor_of
from verl.utils.builtin.seeing import ARCHITECTURES, make_tiny_seeing_model
from verl.utils.pictures import PictureProcessor, keep
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.hf.seeing import Sight
from verl.workers.rollout.engine import EngineSpec, SeeingEngine
from verl.workers.rollout.errors import RolloutError
from verl.workers.rollout.hf.batch import DecodeBatch
from verl.workers.rollout.hf.engine import HFEngine
from verl.workers.rollout.hf.weights import load_weights
from verl.workers.rollout.records import SamplingOptions

PROMPTS: list[list[Image.Image]] = [
    [noise(2, 112, 56), noise(3, 60, 200), noise(4, 28, 28)],
    [],
    [noise(1)],
    [noise(5, 140, 140), noise(6)],
]


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module", params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_seeing_model(tmp_path_factory.mktemp("model"), request.param)


def engine_of(directory: Path, **config: Any) -> HFEngine:
    return HFEngine(
        EngineSpec(
            name="e",
            engine="",
            config=RolloutConfig(**{"name": "hf", "dtype": "float32", "load_format": "auto", **config}),
            model=HFModelConfig(path=str(directory)),
            device="cpu",
            max_model_len=256,
            seed=0,
        )
    )


def prompt_text(directory: Path, images: list[Image.Image]) -> str:
    """With one mark for each picture."""
    parts = [part for _ in images for part in ({"type": "image"}, {"type": "text", "text": "and"})]
    tokenizer: Any = AutoTokenizer.from_pretrained(directory)
    return str(
        tokenizer.apply_chat_template(
            [{"role": "user", "content": [*parts, {"type": "text", "text": f"{len(images)}?"}]}],
            add_generation_prompt=True,
            tokenize=False,
        )
    )


def prompt_ids(directory: Path, images: list[Image.Image]) -> list[int]:
    processor, tokenizer = processor_of(directory), AutoTokenizer.from_pretrained(directory)
    expanded = processor.expanded(prompt_text(directory, images), [processor.text(keep(image)) for image in images])
    return list(tokenizer.encode(expanded, add_special_tokens=False))


def by_transformers(whole: Any, directory: Path, images: list[Image.Image], count: int) -> list[int]:
    processor: Any = AutoImageProcessor.from_pretrained(directory, backend="pil")
    ids = torch.tensor([prompt_ids(directory, images)])
    given = dict(processor(images=images, return_tensors="pt")) if images else {}
    if images:
        given["mm_token_type_ids"] = (ids == whole.config.image_token_id).int()
    found = whole.generate(input_ids=ids, **given, max_new_tokens=count, do_sample=False, eos_token_id=None)
    return list(found[0, ids.shape[1] :].tolist())


def test_greedy_tokens_are_those_of_transformers_alone(model: Path) -> None:
    """Responses of different lengths, so that some end while others go on and others join."""
    whole: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    counts = [12, 5, 9, 7]
    expected = [by_transformers(whole, model, images, count) for images, count in zip(PROMPTS, counts, strict=True)]

    async def run() -> list[list[int]]:
        engine = engine_of(model, max_num_seqs=3)
        await engine.start()
        assert isinstance(engine, SeeingEngine)
        options = [SamplingOptions(max_tokens=count, temperature=0.0, ignore_eos=True) for count in counts]
        calls = [
            engine.generate(prompt_ids(model, images), option, str(number), [keep(image) for image in images])
            for number, (images, option) in enumerate(zip(PROMPTS, options, strict=True))
        ]
        outputs = await asyncio.gather(*calls)
        await engine.shutdown()
        return [output.token_ids for output in outputs]

    assert asyncio.run(run()) == expected


def test_log_probs_are_those_of_whole_sequences_where_tokens_for_pictures_were_generated(model: Path) -> None:
    whole: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    token = whole.config.image_token_id
    prompt, images = prompt_ids(model, PROMPTS[2]), PROMPTS[2]

    async def run(prompt: list[int]) -> Any:
        engine = engine_of(model)
        await engine.start()
        option = SamplingOptions(max_tokens=4, temperature=0.0, ignore_eos=True)
        output = await engine.generate(prompt, option, "r", [keep(image) for image in images])
        await engine.shutdown()
        return output

    with torch.no_grad():  # the token for pictures is embedded like another one, which transformers takes as text
        embeddings = whole.get_input_embeddings().weight
        embeddings[5] = embeddings[token]
    whole.save_pretrained(model)
    one, other = asyncio.run(run([*prompt, 9, token, 8])), asyncio.run(run([*prompt, 9, 5, 8]))
    assert one.token_ids == other.token_ids
    assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.parametrize("family", ["gemma4", "gemma3", "qwen3_vl_moe", "internvl"])
@torch.no_grad()
def test_tokens_for_media_without_any_are_text_as_another_token_is(family: str, tmp_path: Path) -> None:
    """For engine and trainer, as transformers computes a token of text with the same embeddings. Gemma 4 would take its
    padding for them."""
    model = make_seeing(tmp_path / "model", family)
    whole: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    kinds = [getattr(whole.config, f"{kind}_token_id", None) for kind in ("image", "video", "audio")]
    media, twins = [kind for kind in kinds if kind is not None], [5, 6, 7]
    of_layers = getattr(whole.get_decoder(), "embed_tokens_per_layer", None)
    for embeddings in (whole.get_input_embeddings(), of_layers):
        for token, twin in zip(media, twins, strict=False):
            if embeddings is not None:
                embeddings.weight[twin] = embeddings.weight[token]
    written = [3, *media, 8, *media, 4, 9]
    as_text = torch.tensor([[dict(zip(media, twins, strict=False)).get(token, token) for token in written]])
    expected = whole(input_ids=as_text).logits[0]
    batch = DecodeBatch(whole)
    found = [batch.next_logits([written[:length]])[0] for length in range(2, len(written) + 1)]
    torch.testing.assert_close(torch.stack(found), expected[1:], atol=1e-4, rtol=0.0)
    ids = torch.tensor([written])
    seen = Sight(processor=PictureProcessor(None, whole.config), pictures=[[]]).of(whole, ids, torch.ones_like(ids))
    for each in (seen, seen.packed(whole)):
        with each.embedded(whole):
            torch.testing.assert_close(whole(**each.inputs).logits[0], expected, atol=1e-4, rtol=0.0)


def test_a_request_whose_pictures_are_wrong_fails_alone(model: Path) -> None:
    gone = keep(noise(9))
    Path(gone.path).unlink()

    async def run() -> None:
        engine = engine_of(model)
        await engine.start()
        option = SamplingOptions(max_tokens=2)
        try:
            errors = [
                await asyncio.gather(engine.generate(ids, option, "r", [image]), return_exceptions=True)
                for ids, image in (([3, 4], keep(noise())), (prompt_ids(model, PROMPTS[2]), gone))
            ]
            assert (await engine.generate([3, 4], option, "t")).token_ids  # the others go on
        finally:
            await engine.shutdown()
        assert all(isinstance(error, RolloutError) for (error,) in errors)
        assert "request r: pictures become 6 tokens, and there are 0" in str(errors[0][0])
        assert "where there is no file" in str(errors[1][0])

    asyncio.run(run())


def test_an_engine_without_sight_refuses_pictures(tmp_path: Path) -> None:
    from verl.utils.builtin import make_tiny_model

    async def run() -> None:
        engine = engine_of(make_tiny_model(tmp_path / "text"))
        await engine.start()
        try:
            await engine.generate([3, 4], SamplingOptions(max_tokens=2), "r", [keep(noise())])
        finally:
            await engine.shutdown()

    with pytest.raises(RolloutError, match="has pictures, and the model reads text alone"):
        asyncio.run(run())


def test_a_version_is_loaded_with_the_tower(model: Path) -> None:
    config = AutoConfig.from_pretrained(model)
    auto: Any = AutoModelForImageTextToText
    found = auto.from_config(config, dtype=torch.float32)
    load_weights(found, config, load_file(model / "model.safetensors"))
    expected = auto.from_pretrained(model, dtype=torch.float32).state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in found.state_dict().items())


def test_a_picture_of_several_sequences_is_computed_once(model: Path) -> None:
    """As of responses to one prompt; the logits are those of each sequence by itself."""
    whole: Any = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    processor, one, other = processor_of(model), noise(1), noise(5, 140, 140)
    images = [[one], [other, one], [one]]
    pictures = [[keep(image) for image in each] for each in images]
    rows = [torch.tensor(prompt_ids(model, each)) for each in images]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    patches: list[int] = []
    tower = whole.get_encoder(modality="image")
    tower.register_forward_pre_hook(lambda module, args: patches.append(len(args[0])))

    def logits(number: list[int]) -> torch.Tensor:
        seen = Sight(processor=processor, pictures=[pictures[row] for row in number]).of(
            whole, ids[number], mask[number]
        )
        with torch.no_grad(), seen.embedded(whole):
            found: torch.Tensor = whole(**seen.inputs, use_cache=False).logits
            return found

    together = logits([0, 1, 2])
    assert patches == [len(processor.inputs([keep(one), keep(other)])["pixel_values"])]
    for number, row in enumerate(rows):
        torch.testing.assert_close(together[number, : len(row)], logits([number])[0, : len(row)], atol=1e-4, rtol=0.0)
