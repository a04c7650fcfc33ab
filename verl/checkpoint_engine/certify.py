"""Whether vLLM, after a sync, computes with a model exactly as after its own load from disk.

    python -m verl.checkpoint_engine.certify --model DIRECTORY

Three engines are started, one after the other: from disk; from disk with a second version, whose weights are others;
and with dummy weights, into which the first version and then the second are synced. Every tensor that the workers
compute with is compared, bit for bit, and so are greedy tokens with transformers' own model.

Exit code: 0 all equal, 1 something differs, 2 it could not be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from verl.checkpoint_engine.arena import NodeArena, SlotView
from verl.checkpoint_engine.digest import Manifest, digest_pieces
from verl.checkpoint_engine.layout import Layout
from verl.checkpoint_engine.plan import make_plan
from verl.checkpoint_engine.shards import ShardTable
from verl.checkpoint_engine.types import Box, Shard, TensorSpec

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8]
NUM_TOKENS = 16
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 1e-2}
"""By how much of the largest logit a greedy token's may lie below it in transformers' model: rounding."""
MOST_NAMES = 8
Digests = list[dict[str, str]]
"""By rank."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that an engine computed with."""

    digests: Digests
    tokens: list[int]
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Row:
    start: str
    compared: int
    different: dict[str, str] = field(default_factory=dict)
    tokens: str = ""
    """`equal`, or where they differ from transformers'."""
    error: str | None = None

    @property
    def right(self) -> bool:
        return not self.different and self.error is None and self.tokens == "equal" and self.compared > 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m verl.checkpoint_engine.certify", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--model", required=True, type=Path, help="directory with config.json and safetensors files")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(TOLERANCE), help="that vLLM computes in")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the rows here, too")
    options = parser.parse_args(arguments)
    try:
        began = time.perf_counter()
        rows = certify(options.model, options.dtype, options.tensor_parallel_size)
    except (ValueError, OSError, RuntimeError) as exc:
        sys.stderr.write(f"certify: {' '.join(str(exc).split())[:500]}\n")
        return 2
    sys.stdout.write(table(rows))
    right = all(row.right for row in rows)
    if options.json is not None:
        result = {
            "model": str(options.model),
            "dtype": options.dtype,
            "tensor_parallel_size": options.tensor_parallel_size,
            "right": right,
            "seconds": round(time.perf_counter() - began, 1),
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=1))
    return 0 if right else 1


def certify(model: Path, dtype: str, ranks: int) -> list[Row]:
    """Raises ValueError if `model` is no checkpoint, RuntimeError if an engine does not start."""
    if not (model / "config.json").is_file() or not list(model.glob("*.safetensors")):
        raise ValueError(f"--model {model}: no directory with config.json and *.safetensors")
    with tempfile.TemporaryDirectory(prefix="certify-") as directory:
        other = _other_version(model, Path(directory) / "other")
        versions = {1: model, 2: other}
        with _arenas(versions) as paths:
            disk = {version: _in_process(path, dtype, ranks, "auto", {})[0] for version, path in versions.items()}
            synced = _in_process(model, dtype, ranks, "dummy", paths)
        starts = {1: "dummy weights, then a sync", 2: "after a second version"}
        rows = [_row(f"version {v}: from disk", disk[v], disk[v], versions[v], dtype) for v in versions]
        rows += [
            _row(starts[version], step, disk[version], versions[version], dtype)
            for version, step in zip(versions, synced, strict=False)
        ]
    return rows


def table(rows: list[Row]) -> str:
    lines = [f"{'start':<28} {'tensors':>8} {'different':>10}  greedy tokens"]
    for row in rows:
        lines.append(f"{row.start:<28} {row.compared:>8} {len(row.different):>10}  {row.error or row.tokens}")
        lines += [f"    {name}: {text}" for name, text in list(row.different.items())[:MOST_NAMES]]
    lines.append("right" if all(row.right for row in rows) else "WRONG")
    return "\n".join(lines) + "\n"


def differences(found: Digests, expected: Digests) -> dict[str, str]:
    different = {}
    for rank, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name in sorted(one.keys() | other.keys()):
            if one.get(name) != other.get(name):
                different[f"rank {rank}: {name}"] = f"{one.get(name, 'not there')}, from disk {other.get(name, 'none')}"
    return different


def _row(start: str, step: Step, expected: Step, directory: Path, dtype: str) -> Row:
    if step.error is not None:
        return Row(start=start, compared=0, error=step.error)
    return Row(
        start=start,
        compared=sum(map(len, step.digests)),
        different=differences(step.digests, expected.digests),
        tokens=_tokens_against_transformers(directory, dtype, step.tokens),
    )


def _tokens_against_transformers(directory: Path, dtype: str, tokens: list[int]) -> str:
    from transformers import AutoModelForCausalLM

    kind: Any = AutoModelForCausalLM
    model = kind.from_pretrained(directory, dtype=getattr(torch, dtype), attn_implementation="eager").eval()
    with torch.inference_mode():
        ids = torch.tensor([PROMPT + tokens])
        logits = model(ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1].float()
    allowed = TOLERANCE[dtype] * logits.abs().max(-1).values
    below = logits.max(-1).values - logits.gather(-1, torch.tensor(tokens)[:, None])[:, 0]
    wrong = (below > allowed).nonzero()
    return "equal" if not len(wrong) else f"differ from transformers' at token {int(wrong[0])} of {len(tokens)}"


def _file_tensors(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def _other_version(model: Path, directory: Path) -> Path:
    """The same names and shapes; other values of the same size: rows in another order, vectors a tenth larger."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    for file in model.glob("*.safetensors"):
        changed = {
            name: (tensor.flip(-1) if tensor.dim() > 1 else tensor * 1.125).contiguous()
            if tensor.is_floating_point()
            else tensor
            for name, tensor in load_file(file).items()
        }
        save_file(changed, directory / file.name, metadata={"format": "pt"})
    return directory


@contextmanager
def _arenas(versions: dict[int, Path]) -> Iterator[dict[int, str]]:
    """An arena for each version, committed as a rollout node commits it."""
    from verl import envs

    arenas = {}
    try:
        for version, directory in versions.items():
            tensors = _file_tensors(directory)
            specs = [
                TensorSpec(name=name, shape=tuple(t.shape), dtype=str(t.dtype).removeprefix("torch."))
                for name, t in tensors.items()
            ]
            layout = Layout.of(specs)
            shards = [Shard(spec.name, Box.whole(spec.shape)) for spec in specs]
            plan = make_plan(layout, [ShardTable.of(layout, shards)], block_nbytes=2**20)
            job = f"certify-{uuid.uuid4().hex[:8]}"
            arena = NodeArena.create(shm_dir=Path(envs.shm_dir()), job=job, node="0", layout=layout, slots=1)
            arenas[version] = arena
            slot = SlotView(arena.begin(version), layout, writable=True)
            for name, tensor in slot.tensors():
                tensor.copy_(tensors[name])
            arena.commit(version, Manifest.of(version, plan, [digest_pieces(slot.bytes.numpy(), plan.extents)]))
            slot.close()
        yield {version: str(arena.directory) for version, arena in arenas.items()}
    finally:
        for arena in arenas.values():
            arena.close()


def _in_process(model: Path, dtype: str, ranks: int, load_format: str, arenas: dict[int, str]) -> list[Step]:
    """Each engine has a process of its own: vLLM does not give everything back."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_engine_steps, str(model), dtype, ranks, load_format, arenas).result()
        except BrokenProcessPool as exc:
            raise RuntimeError(f"the engine's process ended while it ran {model}") from exc


def _engine_steps(model: str, dtype: str, ranks: int, load_format: str, arenas: dict[int, str]) -> list[Step]:
    """Without `arenas`: what it started with. Otherwise each of them, one after the other."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from vllm import LLM, SamplingParams
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
    from vllm.inputs import TokensPrompt

    from verl.checkpoint_engine.receivers import vllm_plugin

    vllm_plugin.register()
    arguments: dict[str, Any] = {"kv_cache_memory_bytes": 2**27} if not torch.cuda.is_available() else {}
    if ranks == 1:
        arguments["distributed_executor_backend"] = "uni"
    llm = LLM(
        model=model,
        dtype=dtype,
        load_format=load_format,
        tensor_parallel_size=ranks,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_seqs=2,
        generation_config="vllm",
        weight_transfer_config=WeightTransferConfig(backend=vllm_plugin.ENGINE_NAME),
        worker_extension_cls="verl.checkpoint_engine.receivers.vllm_extension.LiveDigests",
        **arguments,
    )

    def step() -> Step:
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)
        (output,) = llm.generate(TokensPrompt(prompt_token_ids=PROMPT), sampling, use_tqdm=False)
        return Step(digests=llm.collective_rpc("live_digests"), tokens=list(output.outputs[0].token_ids))

    if not arenas:
        return [step()]
    # Tensors are compared here and not by the guard, which is another way to the same answer.
    llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"check_engine": "off"}))
    steps = []
    for version, path in arenas.items():
        try:
            llm.start_weight_update()
            update = {"arena_path": path, "version": version}
            llm.update_weights(WeightTransferUpdateRequest(update_info=update))
            llm.finish_weight_update()
        except Exception as exc:  # noqa: BLE001 - told in its row; the engine is done
            return [*steps, Step(digests=[], tokens=[], error=" ".join(str(exc).split())[:500])]
        llm.reset_prefix_cache()
        steps.append(step())
    return steps


if __name__ == "__main__":
    sys.exit(main())
