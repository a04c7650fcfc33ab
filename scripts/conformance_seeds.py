"""Put faults into a real vLLM, and certify it: is each found, and by its right name?

    python scripts/conformance_seeds.py                        all
    python scripts/conformance_seeds.py bfloat16 --kinds full   some

In each dtype one server for the route `disk`, one for `lora`, and one for the steps of `--level full`, each with the
plugin of seeded_faults.py. What came of it goes into scripts/conformance_seeds.json, of which
scripts/conformance_page.py makes a table. Exit code 1 if one is not found, or has another name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from scripts.conformance_matrix import WITH_ADAPTERS, served  # noqa: E402
from scripts.seeded_faults import ADAPTERS, DENSE, FILE, STEPS, Seed  # noqa: E402
from verl.checkpoint_engine.conformance.adapters import AdapterRun, adapter_versions, on_top  # noqa: E402
from verl.checkpoint_engine.conformance.command import prompts_of  # noqa: E402
from verl.checkpoint_engine.conformance.distance import TOLERANCES  # noqa: E402
from verl.checkpoint_engine.conformance.full import Leaving, Slept, in_mode  # noqa: E402
from verl.checkpoint_engine.conformance.oracle import changed_version  # noqa: E402
from verl.checkpoint_engine.conformance.probes import ProbedVLLM  # noqa: E402
from verl.checkpoint_engine.conformance.routes import AdapterRoute, DiskRoute  # noqa: E402
from verl.checkpoint_engine.conformance.sequence import PROBE_TOKENS, Run  # noqa: E402
from verl.checkpoint_engine.conformance.verdicts import Step  # noqa: E402
from verl.utils.builtin import make_tiny_model  # noqa: E402

FOUND = REPOSITORY / "scripts" / "conformance_seeds.json"
DTYPES = ("float32", "bfloat16")
DISK, LORA = "disk", "lora"
SEEDS = {DISK: DENSE, LORA: ADAPTERS, "full": STEPS}
"""By kind of server."""
TIMEOUT_S = 120.0
FLIGHT_TOKENS = 480
"""Of a model that is so small that 160 tokens may end before an update begins."""


def plugin(directory: Path) -> str:
    """A directory for PYTHONPATH in which vLLM finds the plugin."""
    about = directory / "conformance_seeds-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance-seeds\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nseeds = scripts.seeded_faults:register\n")
    return str(directory)


def runs(scratch: Path, model: Path, url: str, dtype: str, *, adapters: bool) -> Run:
    tolerance, prompts = TOLERANCES[dtype], prompts_of(250, PROBE_TOKENS)
    if not adapters:
        oracle, _ = changed_version(model, scratch / "B", prompts, dtype, tolerance, print)
        return Run(
            server=ProbedVLLM(url, timeout_s=TIMEOUT_S),
            route=DiskRoute(url, timeout_s=TIMEOUT_S, pause_mode="wait"),
            oracle=oracle,
            directories=(model, scratch / "B"),
            tolerance=tolerance,
            timeout_s=TIMEOUT_S,
            flight_tokens=FLIGHT_TOKENS,
        )
    made = adapter_versions(model, scratch, prompts, dtype, tolerance, print)
    route = adapter_route(url)
    return AdapterRun(
        server=ProbedVLLM(url, timeout_s=TIMEOUT_S, name=route.name),
        route=route,
        oracle=made.oracle,
        directories=made.directories,
        tolerance=tolerance,
        timeout_s=TIMEOUT_S,
        base=ProbedVLLM(url, timeout_s=TIMEOUT_S),
        model=made.base,
    )


def adapter_route(url: str) -> AdapterRoute:
    route = AdapterRoute(url, timeout_s=TIMEOUT_S, pause_mode="wait")
    route.check()
    return route


def tried(kind: str, seeds: dict[str, Seed], scratch: Path, dtype: str) -> Iterator[tuple[str, str]]:
    """(seed, what was found: the class, and whether that is right)."""
    scratch.mkdir()
    seed, log = scratch / "seed", scratch / "server.log"
    seed.write_text("")
    os.environ[FILE] = str(seed)
    model = make_tiny_model(scratch / "A0", "qwen3")
    flags = ["--dtype", dtype, *([] if kind == DISK else WITH_ADAPTERS)]
    with served(model, flags, [plugin(scratch / "plugin")], log) as url:
        if url is None:
            raise SystemExit("vLLM did not start:\n" + log.read_text()[-3000:])
        run = runs(scratch, model, url, dtype, adapters=kind == LORA)
        for name, fault in seeds.items():
            seed.write_text("")
            healthy = run.warm("A", in_flight=False)
            if healthy.findings:
                raise SystemExit(f"before {name!r}: {healthy.findings}")
            seed.write_text(name)
            yield name, (stepped(run, fault, scratch, dtype) if fault.step else told(run, fault))
        seed.write_text("")
        run.route.close()


def stepped(run: Run, seed: Seed, scratch: Path, dtype: str) -> str:
    """Of a fault that the step shows alone."""
    if any(run.warm(to).findings for to in "BA"):
        return "**found without its step**"
    make: dict[str, Callable[[], Step]] = {
        "after sleep 1": lambda: run.warm("B", beside=Slept(1)),
        "after sleep 2": lambda: run.warm("B", beside=Slept(2), in_flight=False),
        "clients leave": lambda: run.warm("B", beside=Leaving()),
        "pause mode abort": lambda: in_mode(run, "abort"),
        "pause mode keep": lambda: in_mode(run, "keep"),
        "adapter on top": lambda: run.warm("B", beside=on_top(run, scratch, dtype, adapter_route(run.server.url))),
    }
    return named(make[seed.step](), seed)


def told(run: Run, seed: Seed) -> str:
    return named(run.warm("B", in_flight=seed.fault == "mixed versions"), seed)


def named(step: Step, seed: Seed) -> str:
    """The class that the fault was given, and whether that is right."""
    first = next(iter(step.findings), None)
    if first is None:
        return "**not found**"
    tensors = {tensor.partition("[")[0] for tensor in first.tensors}
    if first.fault != seed.fault:
        return f"**{first.fault}**"
    return first.fault if set(seed.tensors) <= tensors else f"{first.fault}, **of other tensors**"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtypes", nargs="*", metavar="DTYPE", default=DTYPES, help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--kinds", nargs="+", choices=SEEDS, default=[*SEEDS], help="servers; default: all")
    options = parser.parse_args()
    record = json.loads(FOUND.read_text())
    for dtype in options.dtypes:
        run = record.setdefault(dtype, {"found": {}})
        with tempfile.TemporaryDirectory() as directory:
            for kind in options.kinds:
                for name, what in tried(kind, SEEDS[kind], Path(directory, kind), dtype):
                    print(f"  {dtype}, {name}: {what}", flush=True)
                    run["found"][name] = what
        run["date"] = datetime.date.today().isoformat()
        FOUND.write_text(json.dumps(record, indent=1) + "\n")
    return int(any("**" in what for dtype in options.dtypes for what in record[dtype]["found"].values()))


if __name__ == "__main__":
    sys.exit(main())
