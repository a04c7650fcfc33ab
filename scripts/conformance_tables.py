"""Tables of docs/conformance.md, of what recorded runs found."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

from verl.checkpoint_engine.conformance.contract import INJECTED, Fault
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
    run = json.loads(SEEDS.read_text())
    by_class: dict[str, list[str]] = {}
    for name, what in run["found"].items():
        by_class.setdefault(what, []).append(name)
    lines = [
        f"Faults put into a real vLLM 0.32.0, {len(run['found'])} in all, and the class that each was given "
        f"(`python scripts/conformance_seeds.py`, {run['date']}, Qwen3, float32, `disk` and `lora`):",
        "",
        "| class | faults |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(f"| {what} | {', '.join(names)} |" for what, names in by_class.items())]) + "\n"


def false_alarms() -> str:
    """A paragraph of ARCHITECTURES."""
    run = json.loads(ARCHITECTURES.read_text())
    found = run["found"]
    by_verdict: dict[str, list[str]] = {}
    for name, one in found.items():
        far = f"{name} ({one['cold']:.2g} nats)" if "cold" in one else name
        by_verdict.setdefault(one["verdict"], []).append(far)
    experts, served = by_verdict.pop("has experts", []), sum(map(len, by_verdict.values()))
    largest = max(found[name]["largest"] for name in by_verdict.get("certified", []))
    lines = [
        f"False alarms in bfloat16 (`python scripts/conformance_architectures.py`, {run['date']}). vLLM {run['vllm']} "
        f"loads {run['of']} of the tiny models of [Models](models.md) that are for text alone. {len(experts)} have "
        f"experts, of which a rounding chooses others: `certify` refuses them in bfloat16. {served} more were served, "
        "and updated over `arena`, which compares every tensor. Log-probs of certified ones differ by at most "
        f"{largest:.2g} nats. vLLM computes some otherwise than transformers with the weights that it starts with: "
        "`certify` says so, and tries nothing. A false alarm is a finding where a server that starts with the version "
        "is as far from transformers. Of two we know why vLLM computes otherwise. Its window of cohere2 has one token "
        "more, and its gpt_neox has the key and value heads of our configuration, which transformers does not read. "
        "With a window of 512 tokens, and with as many such heads as of queries, both are certified.",
    ]
    lines += ["", "| verdict | architectures |", "|---|---|"]
    return "\n".join([*lines, *(f"| {what} | {', '.join(names)} |" for what, names in by_verdict.items())]) + "\n"


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
