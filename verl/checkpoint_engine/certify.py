"""Prove that a model's weights reach vLLM complete. Run it before you train a new architecture.

    python -m verl.checkpoint_engine.certify --model DIR
    python -m verl.checkpoint_engine.certify --model DIR --server URL --route disk
    python -m verl.checkpoint_engine.certify --model DIR --server URL --route disk --faults
    python -m verl.checkpoint_engine.certify --model DIR --engine vllm

The first form: a real engine starts from dummy weights and gets three versions through the checkpoint engine: the
model's, another one, and the model's again. After each the program compares every tensor of vLLM with vLLM's own load
from disk, and greedy tokens with Hugging Face's. It needs vLLM, memory for about six copies of the model (two of
Hugging Face, two of vLLM, two slots of the arena) and room for one in the temporary directory ($TMPDIR).

The second form certifies a running server that serves the model, by log-probs alone; nothing is loaded into it but
versions. The server gets a changed version, the model, and both again, with requests in flight. On its host it must be
able to read the temporary directory. With --level full updates follow after each level of sleep, while clients leave,
in each other pause mode, and with an adapter on top. What the server cannot do is reported as not tried.

With --engine certify starts that server itself, for this run alone, with the flags that the route needs.

The third form has updates fail, one fault after another, and reports in which state each leaves the server, and which
promises of the recovery contract (docs/conformance.md) that breaks.

Exit code 0: all is equal; 1: something differs; 2: it could not be tried; 3: skipped, the route needs a device; 130:
ended by Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .config import CheckpointEngineConfig
from .conformance.command_line import add_options, certify_server
from .errors import BackendUnavailable, CheckpointEngineError, ConfigError
from .memory.janitor import scratch_directory
from .parameter_server.checkpoint_directory import checkpoint_files
from .parameter_server.safetensors_files import read_checkpoint
from .registry import resolve_backend
from .support.console import log_to_console
from .support.files import why_not_written
from .support.lifetime import kill_children
from .support.package import PACKAGE
from .support.signals import end_when_told, ending_at_once

if TYPE_CHECKING:
    import torch

    from .engines.vllm.certify import CertifiedEngine
    from .plan.types import Shard, TensorSpec

PROMPT_LENGTHS = (3, 8, 17)
NUM_TOKENS = 12
CLOSE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.05}
"""By dtype: a token differs from Hugging Face's if its score is lower by more than this, in standard deviations."""
VERSIONS = (("dummy weights", "model"), ("the model's weights", "other"), ("other weights", "model"))
"""(weights that the engine has, version that it gets) of each step."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """The comparison after one version."""

    before: str
    seconds: float
    tensors: int
    """Tensors that vLLM computes with, on all ranks."""
    different: Mapping[str, str]
    """Tensor name to its difference, in words."""
    tokens: int
    """Tokens generated."""
    wrong_tokens: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """The result of `certify`: the model, the engine and all steps."""

    model: str
    architecture: str
    dtype: str
    tensor_parallel_size: int
    backend: str
    vllm: str
    steps: list[Step] = field(default_factory=list)
    refusal: str | None = None

    @property
    def passed(self) -> bool:
        return self.refusal is None and not any(step.different or step.wrong_tokens for step in self.steps)


class FileSource:
    """A `WeightSource` of safetensors files: one trainer rank with the whole model."""

    def __init__(self, files: Sequence[Path]) -> None:
        """Raises ConfigError if a file cannot be loaded."""
        from safetensors import safe_open

        self._tensors = read_checkpoint(files)
        self._open: dict[str, Any] = {}
        for file in files:
            opened: Any = safe_open(file, framework="pt", device="cpu")
            self._open |= dict.fromkeys(opened.keys(), opened)

    def specs(self) -> Sequence[TensorSpec]:
        from .plan.types import TensorSpec

        return [TensorSpec(name=tensor.name, shape=tuple(tensor.shape), dtype=tensor.dtype) for tensor in self._tensors]

    def shards(self) -> Sequence[Shard]:
        from .plan.types import Box, Shard

        return [Shard(tensor.name, Box.whole(tuple(tensor.shape))) for tensor in self._tensors]

    def copy(self, shard: Shard, destination: torch.Tensor) -> None:
        rows = tuple(map(slice, shard.box.start, shard.box.stop))
        opened = self._open[shard.name]
        destination.copy_(opened.get_slice(shard.name)[rows] if rows else opened.get_tensor(shard.name))


def certify(model: Path, *, dtype: str, ranks: int, backend: str, scratch: Path) -> Certificate:
    """Run all steps. Raises ConfigError or BackendUnavailable if they cannot run, OSError if the disk is full."""
    config = CheckpointEngineConfig.from_mapping({"backend": backend})
    resolve_backend(config).check_host(config)
    read_checkpoint(checkpoint_files(model))
    directories = {"model": model, "other": scratch / "other"}
    _write_other(model, directories["other"])
    prompts = list(_prompts(model))
    expected = {name: HuggingFace(directory, dtype) for name, directory in directories.items()}  # before vLLM is there
    dtype = expected["model"].dtype

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm

        from .engines.vllm.certify import CertifiedEngine
    except ImportError as exc:
        raise BackendUnavailable(f"certify starts a vLLM engine, and vLLM cannot be imported: {exc}") from exc

    hf_config = json.loads((model / "config.json").read_text("utf-8"))
    certificate = Certificate(
        model=str(model),
        architecture=", ".join(hf_config.get("architectures") or [hf_config.get("model_type", "?")]),
        dtype=dtype,
        tensor_parallel_size=ranks,
        backend=backend,
        vllm=vllm.__version__,
    )
    max_model_len = max(PROMPT_LENGTHS) + NUM_TOKENS + 1
    try:
        engine = CertifiedEngine(model, dtype=dtype, ranks=ranks, max_model_len=max_model_len, check_engine="always")
    except Exception as exc:
        raise BackendUnavailable(f"vLLM cannot run {model}: {' '.join(str(exc).split())}") from exc
    try:
        asyncio.run(_run(certificate, engine, directories, expected, prompts, config, scratch))
    except CheckpointEngineError as exc:
        return Certificate(**{**vars(certificate), "refusal": str(exc)})
    finally:
        engine.close()
    return certificate


async def _run(
    certificate: Certificate,
    engine: CertifiedEngine,
    directories: Mapping[str, Path],
    expected: Mapping[str, HuggingFace],
    prompts: Sequence[Sequence[int]],
    config: CheckpointEngineConfig,
    scratch: Path,
) -> None:
    from .support import envs
    from .sync.manager import CheckpointEngineManager
    from .sync.rollout_node import RolloutNode
    from .sync.trainer_rank import TrainerRank

    for version, (before, name) in enumerate(VERSIONS):
        source = FileSource(checkpoint_files(directories[name]))
        job = f"certify-{scratch.name}-{version}"
        manager = CheckpointEngineManager(
            config=config,
            trainers=[TrainerRank(0, source, config)],
            nodes=[RolloutNode(0, config, job=job, shm_dir=envs.shm_dir())],
        )
        try:
            await manager.add_replicas([engine])
            began = time.monotonic()
            await manager.update_weights(version)
            seconds = time.monotonic() - began
            tensors, different = await asyncio.to_thread(engine.compare_with_disk, directories[name])
            tokens = await asyncio.to_thread(engine.generate, prompts, NUM_TOKENS)
        finally:
            await manager.close()
        answers = zip(prompts, tokens, strict=True)
        wrong = [text for prompt, found in answers for text in expected[name].differs(prompt, found)]
        certificate.steps.append(
            Step(
                before=before,
                seconds=seconds,
                tensors=tensors,
                different=different,
                tokens=sum(map(len, tokens)),
                wrong_tokens=wrong,
            )
        )


class HuggingFace:
    """The model as transformers computes it."""

    def __init__(self, directory: Path, dtype: str) -> None:
        import torch
        from transformers import (
            MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
            AutoConfig,
            AutoModelForCausalLM,
            AutoModelForImageTextToText,
        )
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]

        asked = "auto" if dtype == "auto" else getattr(torch, dtype)
        try:
            sees = type(AutoConfig.from_pretrained(directory)) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
            auto: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            self._model = auto.from_pretrained(directory, dtype=asked, attn_implementation="eager").eval()
        except (OSError, ValueError, KeyError, ImportError) as exc:
            reason = " ".join(str(exc).split())
            raise ConfigError(f"--model {directory}: transformers cannot load it: {reason}") from exc
        self.dtype = str(self._model.dtype).removeprefix("torch.")
        self._close = CLOSE.get(self.dtype, CLOSE["bfloat16"])

    def differs(self, prompt: Sequence[int], tokens: Sequence[int]) -> list[str]:
        """Describe the first of `tokens` that is less likely than the best one by more than CLOSE; empty if none is."""
        import torch

        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = self._model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        if not logits.isfinite().all():
            return ["Hugging Face's scores are not finite"]
        for place, (scores, token) in enumerate(zip(logits, tokens, strict=True)):
            behind = float((scores.max() - scores[token]) / scores.std())
            if behind > self._close:
                likely = int(scores.argmax())
                return [
                    f"token {place} after {len(prompt)} is {token}, Hugging Face's is {likely} ({behind:.2g} std ahead)"
                ]
        return []


def _write_other(model: Path, directory: Path) -> None:
    """A second version: the rows of every tensor in another order."""
    from safetensors.torch import load_file, save_file

    directory.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin"):
            shutil.copyfile(file, directory / file.name)
    for file in checkpoint_files(model):
        tensors = {name: _changed(tensor) for name, tensor in load_file(file).items()}
        save_file(tensors, directory / file.name, metadata={"format": "pt"})


def _changed(tensor: torch.Tensor) -> torch.Tensor:
    """As large as it was, and of the same values where they are not all the same."""
    if not tensor.is_floating_point():
        return tensor
    moved = tensor.flatten().roll(1).reshape(tensor.shape)
    return moved if not moved.equal(tensor) else (tensor.float() * 1.0625).to(tensor.dtype)


def _prompts(model: Path) -> Iterator[list[int]]:
    import torch
    from transformers import AutoConfig

    vocab = AutoConfig.from_pretrained(model).get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    for length in PROMPT_LENGTHS:
        yield torch.randint(0, vocab, (length,), generator=generator).tolist()


def table(certificate: Certificate) -> str:
    """The certificate as a text for the terminal."""
    lines = [
        f"{certificate.architecture} in {certificate.dtype}, tensor parallel {certificate.tensor_parallel_size}, "
        f"{certificate.backend}, vLLM {certificate.vllm}",
        f"{'the engine had':<22}{'sync':>9}{'tensors':>10}{'different':>11}{'tokens':>8}{'wrong':>7}",
    ]
    lines += [
        f"{step.before:<22}{step.seconds:>7.2f} s{step.tensors:>10}{len(step.different):>11}{step.tokens:>8}"
        f"{len(step.wrong_tokens):>7}"
        for step in certificate.steps
    ]
    for step in certificate.steps:
        lines += [f"  after {step.before}: {name} {text}" for name, text in list(step.different.items())[:10]]
        lines += [f"  after {step.before}: {text}" for text in step.wrong_tokens[:10]]
    if any(step.wrong_tokens for step in certificate.steps) and not any(step.different for step in certificate.steps):
        lines.append("  every tensor is that of vLLM's own load from disk: vLLM computes this model differently itself")
    if certificate.refusal:
        lines.append(f"  refused: {certificate.refusal}")
    lines.append("certified: the engine computes with what the files say" if certificate.passed else "NOT certified")
    return "\n".join(lines)


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="a Hugging Face model directory")
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", *CLOSE), help="the engine's (default: that of the model's files)"
    )
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks of the engine (default 1)"
    )
    parser.add_argument("--backend", default="naive", metavar="B", help="of the checkpoint engine (default naive)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    add_options(parser)
    return parser


PROGRAM = f"python -m {PACKAGE}.certify"
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Print the table, or an error on stderr; return the exit code. `program`: the name in the help.

    Ctrl-C and SIGTERM end this process and vLLM's at once, because vLLM may hang after a KeyboardInterrupt in its
    constructor. The janitors then remove their shared memory and files. A running server first gets its version back.
    """
    options = _parser(program).parse_args(arguments)
    if options.server is not None or options.engine is not None:
        try:
            return _main(options)
        except KeyboardInterrupt:
            sys.stderr.write("interrupted\n")
            return INTERRUPTED
    with ending_at_once(_interrupted):
        return _main(options)


def _interrupted() -> NoReturn:
    kill_children()
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)


def _main(options: argparse.Namespace) -> int:
    try:
        if options.tensor_parallel_size < 1:
            raise ConfigError(f"--tensor-parallel-size must be 1 or more, not {options.tensor_parallel_size}")
        for flag in ("json", "html", "junit"):
            if (path := getattr(options, flag)) is not None and (why := why_not_written(path)):
                raise ConfigError(f"--{flag} {path}: {why}")
        if options.server is not None or options.engine is not None:
            return certify_server(options)
        for flag in ("route", "level", "pause_mode", "faults", "worker_pid", "html", "junit"):
            if getattr(options, flag) is not None:
                raise ConfigError(f"--{flag.replace('_', '-')} is of a running server: name it with --server URL")
        if options.flags:
            raise ConfigError(f"{' '.join(options.flags)}: flags after -- are of a server that --engine starts")
        with scratch_directory() as scratch:
            certificate = certify(
                options.model.expanduser().absolute(),
                dtype=options.dtype,
                ranks=options.tensor_parallel_size,
                backend=options.backend,
                scratch=scratch,
            )
    except (CheckpointEngineError, OSError) as exc:  # a full disk among them
        sys.stderr.write(f"error: {exc}\n")
        return 2
    if options.json is not None:
        options.json.write_text(
            json.dumps(asdict(certificate) | {"passed": certificate.passed}, indent=2) + "\n", "utf-8"
        )
    sys.stdout.write(table(certificate) + "\n")
    return 0 if certificate.passed else 1


if __name__ == "__main__":
    log_to_console()
    end_when_told()
    sys.exit(main())
