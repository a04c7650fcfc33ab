"""`certify --server`: the run of a server that somebody else has started."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..errors import BackendUnavailable, CheckpointEngineError, ConfigError
from ..publisher.sglang_endpoint import is_sglang
from ..support.console import say
from .adapters import AdapterRun, Adapters, OnTop, adapter_versions, on_top
from .contract import INJECTED
from .distance import TOLERANCES
from .faults import CALLS, FaultRun, require_process
from .full import full
from .oracle import MARGIN, changed_version, configured_dtype, has_experts, vocabulary
from .probes import Probed, ProbedSGLang, ProbedVLLM
from .report import as_json, as_text, told, write_html, write_junit
from .routes import AdapterRoute, Route, require_route, route_of
from .sequence import FLIGHT_TOKENS, NUM_PROBES, NUM_TOKENS, PROBE_TOKENS, SHORT_TOKENS, Run, certify
from .verdicts import Report, Step

FEWEST_TOKENS = 32
"""Of a prompt and its answer: four probes of different lengths, and answers in flight."""
QUICK, FULL = "quick", "full"
SKIPPED = 3
"""Exit code: nothing was tried, because the route needs a device."""


@dataclass(frozen=True, kw_only=True)
class Options:
    server: str
    model: Path
    route: str
    dtype: str = "auto"
    pause_mode: str = "wait"
    timeout_s: float = 300.0
    level: str = QUICK
    """QUICK or FULL."""
    faults: Sequence[str] | None = None
    """Names of faults that hit the updates; empty: all; None: no fault does."""
    deadline_s: float = 20.0
    """Of faults: in which a pusher ends, and then the server serves or refuses."""
    worker_pid: int | None = None
    """The server's process that faults may stop and kill."""
    is_ours: bool = False
    """Whether the server ends with the run: it needs no version back."""


def run(options: Options, scratch: Path, tell: Callable[[str], None] = say) -> Report:
    """Certify a running server. `scratch`: a directory that the server's host can read, too.

    Raises ConfigError, BackendUnavailable, TransportError if nothing could be tried.
    """
    if options.worker_pid is not None:
        require_process(options.worker_pid)
    known = [fault.name for fault in INJECTED]
    if unknown := [name for name in options.faults or () if name not in known]:
        raise ConfigError(f"--faults {', '.join(unknown)}: unknown. There are {', '.join(known)}")
    server, route = _reached(options)
    dtype = options.dtype if options.dtype != "auto" else server.dtype() or configured_dtype(options.model)
    if dtype not in TOLERANCES:
        raise ConfigError(f"the server computes in {dtype}: {', '.join(TOLERANCES)} have an oracle")
    if dtype != "float32" and has_experts(options.model):
        raise ConfigError(
            f"{options.model} has experts, and in {dtype} a rounding chooses others than the oracle does: no tolerance "
            "tells that from a fault. Start the server with --dtype float32"
        )
    tolerance = TOLERANCES[dtype]
    longest = _longest(server)
    prompts = prompts_of(vocabulary(options.model), min(PROBE_TOKENS, longest - NUM_TOKENS - 1))
    adapters, computes = None, "transformers' model"
    directories = options.model, scratch / "B"
    if isinstance(route, AdapterRoute):
        adapters = adapter_versions(options.model, scratch, prompts, dtype, tolerance, tell)
        oracle, directories = adapters.oracle, adapters.directories
        computes = "PEFT's merged model"
    else:
        oracle, _ = changed_version(options.model, directories[1], prompts, dtype, tolerance, tell)
    power = oracle.power(tolerance)
    seen = [effect for effect in power.values() if effect > MARGIN * tolerance.nats]
    report = Report(
        server=server.url,
        model=str(options.model),
        route=options.route,
        engine=server.engine,
        dtype=dtype,
        oracle=f"log-probs of {computes}, computed in float32 with the weights of each version",
        tolerance=tolerance,
        groups=len(power),
        unseen=[name for name, effect in power.items() if effect <= MARGIN * tolerance.nats],
        weakest=min(seen, default=0.0),
    )
    given: dict[str, Any] = {
        "server": server,
        "route": route,
        "oracle": oracle,
        "directories": directories,
        "tolerance": tolerance,
        "timeout_s": options.timeout_s,
        "pause_mode": options.pause_mode,
        "flight_tokens": min(FLIGHT_TOKENS, longest - SHORT_TOKENS - 1),
        "steps": report.steps,
    }
    if options.faults is not None:
        given |= {"dtype": dtype, "scratch": scratch}
    whole, steps = _begun(options, given, adapters, tell)
    if options.level == FULL:
        steps = itertools.chain(steps, full(whole, partial(_on_top, whole, options, scratch, dtype)))
    try:
        for step in steps:
            tell(told(step))
    except BaseException:
        if whole.may_have_b and not options.is_ours:
            tell("broken off: bringing the server's own version back")
            if not whole.bring_back():
                tell(whole.remains(options.model))
        raise
    finally:
        route.close()
        whole.close()
    report.cache = whole.cache
    return report


def _longest(server: Probed) -> int:
    """The tokens of a prompt and its answer. Raises ConfigError."""
    longest = server.longest() or PROBE_TOKENS + NUM_TOKENS + 1
    if longest < FEWEST_TOKENS:
        raise ConfigError(
            f"the server takes {longest} tokens of a prompt and its answer: at least {FEWEST_TOKENS} show an update. "
            "Start it with a larger --max-model-len (SGLang: --context-length)"
        )
    return longest


def _begun(
    options: Options, given: dict[str, Any], adapters: Adapters | None, tell: Callable[[str], None]
) -> tuple[Run, Iterator[Step]]:
    """The run of this kind, and its steps as they end."""
    server, route = given["server"], given["route"]
    if options.faults is not None:
        faulted = FaultRun(
            **given,
            route_name=options.route,
            sglang=isinstance(server, ProbedSGLang),
            deadline_s=options.deadline_s,
            worker_pid=options.worker_pid,
            only=options.faults,
        )
        return faulted, faulted.all(tell)
    if adapters is not None:
        given["server"] = ProbedVLLM(server.url, timeout_s=options.timeout_s, name=route.name)
        whole: Run = AdapterRun(**given, base=server, model=adapters.base)
    else:
        whole = Run(**given)
    return whole, certify(whole, tell)


def _on_top(run: Run, options: Options, scratch: Path, dtype: str) -> OnTop:
    """Raises ConfigError with the reason if the run tries no adapter on top of its versions."""
    if isinstance(run, AdapterRun):
        raise ConfigError("the route's versions are adapters")
    if isinstance(run.server, ProbedSGLang):
        raise ConfigError("there is no route for adapters into SGLang")
    if options.route != "disk":
        raise ConfigError(f"--route {options.route} takes no server with --enable-lora")
    route = AdapterRoute(options.server, timeout_s=options.timeout_s, pause_mode=options.pause_mode)
    route.check()
    return on_top(run, scratch, dtype, route)


def _reached(options: Options) -> tuple[Probed, Route]:
    """The server, and the way to it, which it has. Raises what `run` does."""
    require_route(options.route)
    if options.faults is not None and options.level != QUICK:
        raise ConfigError(f"--level {options.level} is of a run without --faults")
    sglang = is_sglang(options.server)
    if options.faults is not None and options.route == "lora":
        raise ConfigError("--faults has no cells for --route lora")
    route = route_of(
        options.route, options.server, timeout_s=options.timeout_s, pause_mode=options.pause_mode, sglang=sglang
    )
    longest_s = CALLS * options.deadline_s if options.faults is not None else options.timeout_s
    probed = ProbedSGLang if sglang else ProbedVLLM
    server: Probed = probed(options.server, timeout_s=min(options.timeout_s, longest_s))
    route.check()
    return server, route


def prompts_of(vocab: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, vocab, (length - 3 * at,), generator=generator).tolist() for at in range(NUM_PROBES)]


def main(options: Options, scratch: Path, *, html: Path | None, junit: Path | None, answer: Path | None) -> int:
    """Exit code 0: certified; 1: not; 2: the server could not be tried; 3: skipped, the route needs a device."""
    try:
        report = run(options, scratch)
    except BackendUnavailable as exc:
        say(f"skipped: {exc}")
        return SKIPPED
    except CheckpointEngineError as exc:
        say(f"error: {exc}")
        return 2
    writers: list[tuple[Path | None, Callable[[Report, Path], Any]]] = [(html, write_html), (junit, write_junit)]
    writers.append((answer, lambda found, file: file.write_text(json.dumps(as_json(found), indent=2) + "\n", "utf-8")))
    for file, write in writers:
        if file is not None:
            write(report, file)
    sys.stdout.write(as_text(report) + "\n")
    return 0 if report.passed else 1
