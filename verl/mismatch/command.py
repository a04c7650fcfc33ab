"""Find where engine and trainer first compute other numbers from the same weights and tokens.

    verl-sync mismatch --model DIR
    verl-sync mismatch RUN_DIR --step 40

vLLM or SGLang loads the model and generates, as it serves: prompts at once, then token by token, and all tokens at once
again. transformers' model computes the same tokens, as a trainer does. The program compares the engine's weights with
the files, bit for bit, and what embeddings, every block and what is in it, the last norm, scores and log-probs are. A
module is reported that is farther from its result in a wider dtype than the trainer's rounding takes it. It needs the
engine, and memory for the model in it (twice) and in transformers (twice, once in the wider dtype). Exit code 0: no
cause was found, and probabilities differ by --tolerance at most; 1: otherwise; 2: the model could not be tried; 130:
ended by Ctrl-C or SIGTERM. docs/mismatch.md has the causes with their remedies.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from verl import envs
from verl.checkpoint_engine.errors import BackendUnavailable, CheckpointEngineError
from verl.checkpoint_engine.support.console import log_to_console
from verl.checkpoint_engine.support.files import why_not_written
from verl.checkpoint_engine.support.lifetime import kill_children
from verl.checkpoint_engine.support.signals import end_when_told, ending_at_once
from verl.utils.config import ConfigError

if TYPE_CHECKING:
    from verl.mismatch.engine import ProbedEngine
    from verl.mismatch.findings import Findings
    from verl.mismatch.recording import Sampling
    from verl.mismatch.trainer import TrainersModel

logger = logging.getLogger(__name__)

PROMPT_LENGTHS = (3, 17, 40)
NEW_TOKENS, SEQUENCES = 24, 8
ENGINES = {"vllm": "vLLM", "sglang": "SGLang"}
DTYPES = ("auto", "bfloat16", "float16", "float32")
TOLERANCE = 0.005
INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to compare."""

    model: Path
    engine: str = "vllm"
    """One of `ENGINES`."""
    dtype: str = "auto"
    ranks: int = 1
    sequences: Sequence[tuple[Sequence[int], Sequence[int]]] = ()
    """Token ids of prompts and responses; random prompts and what the engine answers if there are none."""
    new_tokens: int = NEW_TOKENS
    exact: bool = False
    """The engine computes as with `rollout.exact=true`, and no bit may differ."""
    kept: Sequence[Sequence[float | None] | None] = ()
    """Log-probs of the responses that an engine gave them before, where they are known."""
    kept_by_trainer: Sequence[Sequence[float | None] | None] = ()
    """The same of a trainer with the model's weights."""


@dataclass(frozen=True, kw_only=True)
class Sides:
    """The engine and the trainer's model, in the dtype of the engine and in the next wider one."""

    engine: ProbedEngine
    model: TrainersModel
    wide: TrainersModel


@contextmanager
def started(settings: Settings, extension: str | None = None) -> Iterator[Sides]:
    """Both sides, until the block ends. `extension`: the path of a subclass of the engine's `Probe`.

    Raises ConfigError for a model that transformers cannot load, BackendUnavailable for one that the engine cannot run.
    """
    from verl.mismatch.trainer import TrainersModel, dtype_of

    dtype = dtype_of(settings.model) if settings.dtype == "auto" else settings.dtype
    model, wide = (TrainersModel(settings.model, dtype, exact=settings.exact) for _ in range(2))
    wide.widen()
    longest = max((len(prompt) + len(response) for prompt, response in settings.sequences), default=max(PROMPT_LENGTHS))
    _require_room(settings, model, longest)
    options: dict[str, Any] = {"dtype": dtype, "max_model_len": longest + settings.new_tokens + 2}
    if extension is not None:
        options["extension"] = extension
    start = _start_vllm if settings.engine == "vllm" else _start_sglang
    engine = start(settings, int(model.config.vocab_size), options)
    try:
        yield Sides(engine=engine, model=model, wide=wide)
    finally:
        engine.close()


def _start_vllm(settings: Settings, vocab_size: int, options: dict[str, Any]) -> ProbedEngine:
    os.environ["VLLM_LOGGING_LEVEL"] = envs.vllm_logging_level("ERROR")
    try:
        from verl.mismatch.vllm.engine import ProbedVLLM
    except ImportError as exc:
        raise _unavailable(settings, f"cannot be imported: {exc}") from exc
    try:
        return ProbedVLLM(settings.model, ranks=settings.ranks, exact=settings.exact, **options)
    except Exception as exc:
        raise _unavailable(settings, f"cannot run {settings.model}: {exc}") from exc


def _start_sglang(settings: Settings, vocab_size: int, options: dict[str, Any]) -> ProbedEngine:
    import torch

    from verl.workers.rollout.sglang.environment import environment

    os.environ |= environment("cuda" if torch.cuda.is_available() else "cpu")
    try:
        with warnings.catch_warnings(action="ignore", category=UserWarning):  # as in its processes
            from verl.mismatch.sglang.engine import ProbedSGLang
    except ImportError as exc:
        raise _unavailable(settings, f"cannot be imported: {exc}") from exc
    try:
        return ProbedSGLang(settings.model, vocab_size=vocab_size, **options)
    except Exception as exc:
        raise _unavailable(settings, f"cannot run {settings.model}: {exc}") from exc


def _unavailable(settings: Settings, why: str) -> BackendUnavailable:
    return BackendUnavailable(f"{ENGINES[settings.engine]} {' '.join(why.split())}")


def _require_room(settings: Settings, model: TrainersModel, longest: int) -> None:
    size, vocabulary = getattr(model.config, "max_position_embeddings", None), int(model.config.vocab_size)
    if size is not None and longest + settings.new_tokens + 2 > int(size):
        raise ConfigError(f"sequences of {longest + settings.new_tokens + 2} tokens do not fit the model's {size}")
    for prompt, response in settings.sequences:
        if beyond := [token for token in (*prompt, *response) if not 0 <= token < vocabulary]:
            raise ConfigError(f"token {beyond[0]} is none of the model's {vocabulary}")


def look(sides: Sides, settings: Settings, *, engine_sampling: Sampling, sampling: Sampling) -> Findings:
    """Run the engine with `engine_sampling` and compare it with a trainer that takes `sampling` for granted."""
    from verl.mismatch.causes import another_version, causes, not_exact
    from verl.mismatch.compare import compared, not_compared, phases
    from verl.mismatch.findings import Findings, another_trainer, differing
    from verl.mismatch.recording import Sampling

    engine, model = sides.engine, sides.model
    given = settings.sequences or [(prompt, ()) for prompt in _prompts(int(model.config.vocab_size))]
    try:
        decode = engine.record(
            model.names,
            [[*prompt, *response] for prompt, response in given],
            [len(prompt) for prompt, _ in given],
            engine_sampling,
            new_tokens=settings.new_tokens,
        )
        whole = decode.tokens
        prefill = engine.record(model.names, whole, [len(tokens) for tokens in whole], Sampling(), new_tokens=1)
        weights = engine.compare_with_disk(settings.model)
    except Exception as exc:  # an engine meets shapes that its kernels do not take when it first computes
        what = f"{type(exc).__name__}: {exc}"
        raise _unavailable(settings, f"started, and cannot compute with {settings.model}: {what}") from exc
    found = phases({"decode": decode, "prefill": prefill}, model, sides.wide)
    places = compared(found)
    try:
        left_out = not_compared(found)
    except LookupError as exc:
        raise BackendUnavailable(f"{settings.model} cannot be compared: {exc}") from exc
    named = causes(found, places, weights, decode, sampling, model, sides.wide)
    named += another_version(decode, settings.kept, exact=settings.exact)
    if settings.exact:
        named += not_exact(places)
    tokens = differing(found, decode, sampling, bool(named))
    named += another_trainer(tokens, decode.prompts, settings.kept_by_trainer)
    return Findings(
        model=str(settings.model),
        architecture=model.architecture,
        engine=settings.engine,
        dtype=str(model.dtype).removeprefix("torch."),
        tensor_parallel_size=settings.ranks,
        causes=named,
        places=places,
        tokens=tokens,
        not_compared=left_out,
    )


def _prompts(vocabulary: int) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocabulary, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def _parser(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="the output directory of a run; the source of settings, weights and tokens",
    )
    parser.add_argument("--step", type=int, metavar="N", help="the step of RUN_DIR whose weights and tokens are kept")
    parser.add_argument("--model", type=Path, metavar="DIR", help="a Hugging Face model directory")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help='sequences to compare, a line of JSON each: {"prompt_ids": [1, 2], "response_ids": [3]}. Without '
        "response_ids the engine answers. Default: three random prompts",
    )
    parser.add_argument(
        "--sequences",
        type=int,
        default=SEQUENCES,
        metavar="N",
        help=f"compare the first N of FILE (default {SEQUENCES}); scores of all their tokens are held",
    )
    parser.add_argument("--engine", choices=tuple(ENGINES), help="the engine (default: the run's, or vllm)")
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=DTYPES,
        help="of engine and trainer (default: that of the run, or of the model's files)",
    )
    parser.add_argument(
        "--exact", action="store_true", help="as with rollout.exact=true: one bit that differs is a mismatch"
    )
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks of the engine (default 1)"
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="of both sides (default: the run's, or 1)")
    parser.add_argument("--top-p", type=float, metavar="P", help="of the engine alone (default: the run's, or 1)")
    parser.add_argument("--top-k", type=int, metavar="K", help="of the engine alone (default: the run's, or -1: all)")
    parser.add_argument(
        "--new-tokens", type=int, default=NEW_TOKENS, metavar="N", help=f"to generate (default {NEW_TOKENS})"
    )
    parser.add_argument(
        "--tolerance",
        type=float,
        default=TOLERANCE,
        metavar="X",
        help=f"the largest mean difference of probabilities with exit code 0 (default {TOLERANCE})",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a plot there")
    return parser


PROGRAM = "python -m verl.mismatch.command"


def main(arguments: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Print the table, or an error on stderr; return the exit code. `program`: the name in the help."""
    with ending_at_once(_interrupted):
        return _main(_parser(program).parse_args(arguments))


def _interrupted() -> NoReturn:
    kill_children()
    os.write(sys.stderr.fileno(), b"interrupted\n")
    os._exit(INTERRUPTED)


def _settings(options: argparse.Namespace) -> Settings:
    """Raises ConfigError for a value that cannot be meant."""
    for flag, value, least in (
        ("--tensor-parallel-size", options.tensor_parallel_size, 1),
        ("--new-tokens", options.new_tokens, 1),
        ("--sequences", options.sequences, 1),
        ("--tolerance", options.tolerance, 0),
    ):
        if not value >= least:
            raise ConfigError(f"{flag} must be {least} or more, not {value}")
    if options.temperature is not None and not options.temperature > 0:
        raise ConfigError(f"--temperature must be above 0, not {options.temperature}: a greedy token says nothing")
    if options.top_p is not None and not 0 < options.top_p <= 1:
        raise ConfigError(f"--top-p must be above 0 and at most 1, not {options.top_p}")
    if options.top_k not in (None, -1) and options.top_k < 1:
        raise ConfigError(f"--top-k must be 1 or more, or -1 for all tokens, not {options.top_k}")
    if options.exact and options.tensor_parallel_size > 1:
        raise ConfigError("--exact is for an engine of one rank, as rollout.exact=true is")
    for flag, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and (why := why_not_written(path)):
            raise ConfigError(f"{flag} {path}: {why}")
    if options.run is not None and options.step is not None and options.model is None and options.data is None:
        return _of_run(options)
    if options.model is None or options.run is not None or options.step is not None:
        raise ConfigError("name either --model DIR, or RUN_DIR with --step N")
    model = options.model.expanduser().absolute()
    if not (model / "config.json").is_file():
        raise ConfigError(f"--model {options.model}: there is no config.json")
    return Settings(
        model=model,
        engine=_engine(options, options.engine or "vllm"),
        dtype=options.dtype,
        ranks=options.tensor_parallel_size,
        sequences=_sequences(options.data)[: options.sequences] if options.data is not None else (),
        new_tokens=options.new_tokens,
        exact=options.exact,
    )


def _engine(options: argparse.Namespace, engine: str, *, exact: bool = False) -> str:
    """Raises ConfigError for what this engine cannot be asked for, BackendUnavailable if it is not installed."""
    if engine == "sglang" and (exact or options.exact):
        raise ConfigError("--exact needs --engine vllm: SGLang has no exact mode")
    if engine == "sglang" and options.tensor_parallel_size > 1:
        raise ConfigError("--engine sglang compares an engine of one rank: leave out --tensor-parallel-size")
    if find_spec(engine) is None:
        raise BackendUnavailable(
            f"mismatch starts an engine, and {ENGINES[engine]} is not installed: pip install {engine}"
        )
    return engine


def _of_run(options: argparse.Namespace) -> Settings:
    """Fills in what the command line leaves to the run."""
    from verl.mismatch.kept import kept_step

    kept = kept_step(options.run.expanduser().absolute(), options.step)
    options.temperature = kept.temperature if options.temperature is None else options.temperature
    options.top_p = kept.top_p if options.top_p is None else options.top_p
    options.top_k = kept.top_k if options.top_k is None else options.top_k
    if (engine := options.engine or kept.engine) not in ENGINES:
        raise ConfigError(f"{options.run} generated with rollout.name={engine}: name --engine vllm or sglang")
    exact = kept.exact or options.exact
    return Settings(
        model=kept.model,
        engine=_engine(options, engine, exact=exact),
        dtype=kept.dtype if options.dtype == "auto" else options.dtype,
        ranks=options.tensor_parallel_size,
        sequences=kept.sequences,
        kept=kept.log_probs,
        kept_by_trainer=kept.trainer_log_probs,
        exact=exact,
    )


def _sequences(path: Path) -> list[tuple[list[int], list[int]]]:
    """Raises ConfigError for a file that cannot be read, and names the line of what is no sequence."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--data {path}: {exc}") from exc
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            prompt, response = (row.get(name) or [] for name in ("prompt_ids", "response_ids"))
            whole = all(type(token) is int for token in (*prompt, *response))
        except (ValueError, AttributeError, TypeError) as exc:
            raise ConfigError(f"--data {path}, line {number} is no JSON object with lists of token ids") from exc
        if not prompt or not whole:
            raise ConfigError(f"--data {path}, line {number}: prompt_ids must be a list of token ids, not empty")
        found.append((prompt, response))
    if not found:
        raise ConfigError(f"--data {path} has no sequences")
    return found


def _main(options: argparse.Namespace) -> int:
    try:
        settings = _settings(options)
        from verl.mismatch.page import html, table
        from verl.mismatch.recording import Sampling

        temperature = 1.0 if options.temperature is None else options.temperature
        sampling = Sampling(temperature=temperature)
        top_p, top_k = options.top_p or 1.0, options.top_k or -1
        of_engine = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
        with started(settings) as sides:
            found = look(sides, settings, engine_sampling=of_engine, sampling=sampling)
        passed = found.passes(options.tolerance)
        if options.json is not None:
            options.json.write_text(json.dumps(found.as_dict() | {"passed": passed}, indent=2) + "\n", "utf-8")
        if options.html is not None:
            options.html.write_text(html(found, options.tolerance), encoding="utf-8")
    except (CheckpointEngineError, ConfigError, OSError) as exc:
        sys.stderr.write(f"error: {exc}\n")
        return 2
    sys.stdout.write(table(found, options.tolerance) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    log_to_console()
    end_when_told()
    sys.exit(main())
