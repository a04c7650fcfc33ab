"""Tables of docs/conformance.md, of what recorded runs found."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.conformance.contract import INJECTED, Fault
from verl.checkpoint_engine.conformance.distance import TOLERANCES
from verl.checkpoint_engine.conformance.routes import ROUTES, SGLANG_ROUTES

SCRIPTS = Path(__file__).resolve().parent
RUNS = SCRIPTS / "conformance_runs.json"
"""Of each route its run with faults: engine, dtype, date, and what came of each cell."""
SGLANG = "SGLang "
"""Begins the name of a route of SGLang there."""
SEEDS = SCRIPTS / "conformance_seeds.json"
"""How each fault that conformance_seeds.py put into a real vLLM was named."""
ARCHITECTURES = SCRIPTS / "conformance_architectures.json"
"""The verdict on each architecture that conformance_architectures.py has had vLLM serve in bfloat16."""
VERSIONS = SCRIPTS / "conformance_versions.json"
"""What came of servers of each version of vLLM, as conformance_matrix.py writes it."""
RESULTS = """Each cell has the state after the fault, then what broke the contract in **bold**. `disk` and
`checkpoint_engine` are drivers of public calls: pause, load, clear the caches, label, and at last, after an error, too,
resume. A server that a driver leaves paused resumed after `POST /resume`. The servers had `--enforce-eager --dtype
float32`. Three cells of `arena` had broken the contract before: the label after a lost answer to a load, a network
that was down until the publisher had given up, and a pusher that waited ten minutes for a stopped worker. A bit that
flips in shared memory after it was verified is loaded."""


RESULTS_OF_SGLANG = """`disk`, `tensor` and `distributed` are drivers of public calls: pause with `abort`, wait until
the batches have ended, load, and at last, after an error, too, resume. `tensor` and `distributed` load in four
requests, between a begin and an end; *loaded* is the answer to the last one. A server that a driver leaves paused
resumed after `POST /continue_generation`. After *no way on* it took an update again after `POST /end_weight_update` and
a load from disk. Each pusher over `tensor` leaves a process of torch, `torch_shm_manager`, until the server ends."""


COARSE = """A head that was rounded to eight bits is 0.022 nats away. Without a pause, every answer of this tiny model
had ended when the server began to load; they are three times as long since."""
OTHERS = """vLLM computes some otherwise than transformers with the weights that it starts with: `certify` says so, and
judges no update. The same weights are then compared in float32, which tells what rounding alone does."""
ROUNDING = "rounding alone, in bfloat16 nearly as much as is let pass"
WHY = {
    "gemma4_unified_text": ROUNDING,
    "llama-biased": ROUNDING,
    "cohere2": "vLLM's window has one token more; with a window of 512 tokens it is certified",
    "mamba2": "transformers normalizes its gated output over all groups, vLLM over each, as mamba_ssm does; with "
    "such a norm the two are 1e-6 nats apart",
    "lfm2": "vLLM's kernel for CPUs rotates other heads, see [below](#found-in-vllm); a transformers that rotates the "
    "same is 1e-6 nats away",
    "ernie4_5": "vLLM's model leaves out the biases of our configuration, from disk, too",
    "gemma3n_text": "vLLM's model for text alone is given no embeddings of single layers; transformers without them is "
    "2e-6 nats away",
    "youtu": "vLLM's latent attention takes no such heads: *Head dimension 16 is not supported by MLA*",
    "falcon_h1": "beside prefix caching, Mamba 2 on a CPU has no states of chunks "
    "([vllm-project/vllm#54504](https://github.com/vllm-project/vllm/issues/54504)): *index 9 is out of bounds*. With "
    "`--no-enable-prefix-caching` it is 1e-6 nats away, in float32",
}
"""Of architectures that are not certified, what is known."""


def versions() -> list[str]:
    """The table of VERSIONS."""
    rows = json.loads(VERSIONS.read_text())
    lines = [
        "| vLLM | model | " + " | ".join(f"`{route}`" for route in ROUTES) + " |",
        "|---" * (len(ROUTES) + 2) + "|",
    ]
    for row in rows:
        found = [row["routes"].get(route, "not tried") for route in ROUTES]
        lines.append(f"| {row['vllm']}, {row['date']} | {row['model']} | " + " | ".join(found) + " |")
    return lines


def seeds() -> str:
    """A sentence and the table of SEEDS."""
    runs = json.loads(SEEDS.read_text())
    first, *others = runs
    found = runs[first]["found"]
    by_class: dict[str, list[str]] = {}
    for name, what in found.items():
        by_class.setdefault(what, []).append(name)
    lines = [
        f"Faults put into a real vLLM 0.32.0, {len(found)} in all, and the class that each was given "
        f"(`python scripts/conformance_seeds.py`, {runs[first]['date']}, Qwen3, {first}, `disk`, `lora`, and the steps "
        "of `--level full`):",
        "",
        "| class | faults |",
        "|---|---|",
    ]
    lines += [f"| {what} | {', '.join(names)} |" for what, names in by_class.items()]
    for dtype in others:
        differ = [f"{name} ({what})" for name, what in runs[dtype]["found"].items() if what != found[name]]
        said = f"the same, but: {', '.join(differ)}" if differ else "the same"
        text = f"The classes of {len(runs[dtype]['found'])} of them in {dtype} ({runs[dtype]['date']}): {said}."
        lines += ["", text + (f" {COARSE}" if differ else "")]
    return "\n".join(lines) + "\n"


def false_alarms() -> str:
    """A paragraph and the table of ARCHITECTURES."""
    run = json.loads(ARCHITECTURES.read_text())
    found = run["found"]
    by_verdict: dict[str, list[str]] = {}
    for name, one in found.items():
        by_verdict.setdefault(one["verdict"], []).append(name)
    experts, tried = by_verdict.pop("has experts", []), sum(map(len, by_verdict.values()))
    noise = {name: found[name]["noise"] for name in by_verdict.get("certified", [])}
    noisiest = max(noise, key=noise.__getitem__)
    lines = [
        f"False alarms in bfloat16 (`python scripts/conformance_architectures.py`, {run['date']}). vLLM {run['vllm']} "
        f"loads {run['of']} of the tiny models of [Models](models.md) that are for text alone. {len(experts)} have "
        f"experts, of which a rounding chooses others: `certify` refuses them in bfloat16. {tried} more were tried "
        f"over `arena`, which compares every tensor: {len(noise)} are certified, and of the others the verdict is "
        f"below; {run['of'] - len(found)} are not tried. "
        "A false alarm is a finding where a server that starts "
        f"with the version is as far from transformers: {len(by_verdict.get('false alarm', []))}. Noise is the largest "
        f"distance of a version that the server has, at most {noise[noisiest]:.2g} nats ({noisiest}), and "
        f"{sorted(noise.values())[len(noise) // 2]:.2g} in the middle; {TOLERANCES['bfloat16']} are let "
        "pass. Effect is the smallest distance of a missing tensor that `certify` says it sees.",
        "",
        "| certified | noise, nats | effect, nats | tensors | not seen |",
        "|---|---:|---:|---:|---:|",
    ]
    for name in noise:
        one = found[name]
        lines.append(f"| {name} | {one['noise']:.2g} | {one['weakest']:.2g} | {one['parts']} | {one['unseen']} |")
    lines += ["", OTHERS, "", "| not certified | verdict | in float32, nats | why |", "|---|---|---:|---|"]
    for name in (name for what, names in by_verdict.items() if what != "certified" for name in names):
        one = found[name]
        why = WHY.get(name) or one.get("error", "not known")
        lines.append(f"| {name} | {one['verdict']} | {_short(one.get('float32', ''))} | {why} |")
    return "\n".join(lines) + "\n"


def _short(found: float | str) -> str:
    return f"{found:.2g}" if isinstance(found, float) else found


def results() -> list[str]:
    if not RUNS.exists():
        return []
    runs = json.loads(RUNS.read_text())
    of_sglang = {name.removeprefix(SGLANG): run for name, run in runs.items() if name.startswith(SGLANG)}
    of_vllm = {name: run for name, run in runs.items() if not name.startswith(SGLANG)}
    lines = ["### Results with faults", "", *_table(RESULTS, of_vllm)]
    return [*lines, "", "### Results with faults, SGLang", "", *_table(RESULTS_OF_SGLANG, of_sglang)]


def _table(text: str, runs: dict[str, Any]) -> list[str]:
    """`runs`: by route."""
    lines = [f"* `{name}`: {run['engine']}, {run['dtype']}, {run['date']}" for name, run in runs.items()]
    lines += ["", text, ""]
    lines += ["| fault, phase | " + " | ".join(f"`{name}`" for name in runs) + " |", "|---" * (len(runs) + 1) + "|"]
    for fault in INJECTED:
        for name in (f"{fault.name}, {phase}" for phase in fault.phases):
            found = [run["cells"].get(name) or _not_run(fault, route) for route, run in runs.items()]
            lines.append(f"| {name} | " + " | ".join(found) + " |")
    return lines


def _not_run(fault: Fault, route: str) -> str:
    return f"not tried: {fault.not_for[route]}" if route in fault.not_for else "not run"


def take_over(files: list[Path]) -> None:
    """Put the results of `certify --faults --json` into RUNS."""
    runs = json.loads(RUNS.read_text()) if RUNS.exists() else {}
    for file in files:
        said = json.loads(file.read_text())
        of_sglang = said["engine"].startswith(SGLANG)
        run = runs.setdefault((SGLANG if of_sglang else "") + said["route"], {"cells": {}})
        run["engine"], run["dtype"] = said["engine"], said["dtype"]
        run["date"] = datetime.datetime.fromtimestamp(file.stat().st_mtime).date().isoformat()
        found = {step["name"]: _outcome(step) for step in said["steps"] if "fault" in step}
        run["cells"] |= found
    known = [*ROUTES, *(SGLANG + name for name in SGLANG_ROUTES)]
    RUNS.write_text(json.dumps({name: runs[name] for name in known if name in runs}, indent=1) + "\n")


def _outcome(step: dict[str, Any]) -> str:
    if step["skipped"]:
        return f"not tried: {step['skipped']}"
    broken = dict.fromkeys(finding["fault"] for finding in step["findings"])
    return ", ".join([step["state"], *(f"**{fault}**" for fault in broken)])
