"""Put faults into a real vLLM, and certify it: is each found, and by its right name?

    python scripts/conformance_seeds.py

One server for the route `disk`, one for `lora`, each with the plugin of seeded_faults.py. What came of it goes into
scripts/conformance_seeds.json, of which scripts/conformance_page.py makes a table. Exit code 1 if one is not found, or
has another name.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from scripts.conformance_matrix import WITH_ADAPTERS, served  # noqa: E402
from scripts.seeded_faults import ADAPTERS, DENSE, FILE, Seed  # noqa: E402
from verl.checkpoint_engine.conformance.adapters import AdapterRun, adapter_versions  # noqa: E402
from verl.checkpoint_engine.conformance.command import prompts_of  # noqa: E402
from verl.checkpoint_engine.conformance.oracle import changed_version  # noqa: E402
from verl.checkpoint_engine.conformance.probes import ProbedVLLM  # noqa: E402
from verl.checkpoint_engine.conformance.routes import AdapterRoute, DiskRoute  # noqa: E402
from verl.checkpoint_engine.conformance.sequence import PROBE_TOKENS, Run  # noqa: E402
from verl.utils.builtin import make_tiny_model  # noqa: E402

FOUND = REPOSITORY / "scripts" / "conformance_seeds.json"
TOLERANCE = 2e-4
TIMEOUT_S = 120.0


def plugin(directory: Path) -> str:
    """A directory for PYTHONPATH in which vLLM finds the plugin."""
    about = directory / "conformance_seeds-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: conformance-seeds\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nseeds = scripts.seeded_faults:register\n")
    return str(directory)


def runs(scratch: Path, model: Path, url: str, *, adapters: bool) -> Run:
    prompts = prompts_of(250, PROBE_TOKENS)
    if not adapters:
        oracle, _ = changed_version(model, scratch / "B", prompts, "float32", TOLERANCE, print)
        return Run(
            server=ProbedVLLM(url, timeout_s=TIMEOUT_S),
            route=DiskRoute(url, timeout_s=TIMEOUT_S, pause_mode="wait"),
            oracle=oracle,
            directories=(model, scratch / "B"),
            tolerance=TOLERANCE,
            timeout_s=TIMEOUT_S,
        )
    made = adapter_versions(model, scratch, prompts, "float32", TOLERANCE, print)
    route = AdapterRoute(url, timeout_s=TIMEOUT_S, pause_mode="wait")
    route.check()
    return AdapterRun(
        server=ProbedVLLM(url, timeout_s=TIMEOUT_S, name=route.name),
        route=route,
        oracle=made.oracle,
        directories=made.directories,
        tolerance=TOLERANCE,
        timeout_s=TIMEOUT_S,
        base=ProbedVLLM(url, timeout_s=TIMEOUT_S),
        model=made.base,
    )


def tried(seeds: dict[str, Seed], scratch: Path, *, adapters: bool) -> Iterator[tuple[str, str]]:
    """(seed, what was found: the class, and whether that is right)."""
    scratch.mkdir()
    seed, log = scratch / "seed", scratch / "server.log"
    seed.write_text("")
    os.environ[FILE] = str(seed)
    model = make_tiny_model(scratch / "A0", "qwen3")
    with served(model, WITH_ADAPTERS if adapters else [], [plugin(scratch / "plugin")], log) as url:
        if url is None:
            raise SystemExit("vLLM did not start:\n" + log.read_text()[-3000:])
        run = runs(scratch, model, url, adapters=adapters)
        for name, fault in seeds.items():
            seed.write_text("")
            healthy = run.warm("A", in_flight=False)
            if healthy.findings:
                raise SystemExit(f"before {name!r}: {healthy.findings}")
            seed.write_text(name)
            yield name, told(run, name, fault)
        seed.write_text("")
        run.route.close()


def told(run: Run, name: str, seed: Seed) -> str:
    (first, *_) = [*run.warm("B", in_flight=seed.fault == "mixed versions").findings, None]
    if first is None:
        return "**not found**"
    named = {tensor.partition("[")[0] for tensor in first.tensors}
    if first.fault != seed.fault:
        return f"**{first.fault}**"
    return first.fault if set(seed.tensors) <= named else f"{first.fault}, **of other tensors**"


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as directory:
        for adapters, seeds in ((False, DENSE), (True, ADAPTERS)):
            for name, what in tried(seeds, Path(directory, "lora" if adapters else "disk"), adapters=adapters):
                print(f"  {name}: {what}", flush=True)
                found[name] = what
    today = datetime.date.today().isoformat()
    FOUND.write_text(json.dumps({"date": today, "found": found}, indent=1) + "\n")
    return int(any("**" in what for what in found.values()))


if __name__ == "__main__":
    sys.exit(main())
