"""The command line of `python -m verl.doctor`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from rich.console import Console

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.doctor.finding import STATES, Finding, can_sync, worst
from verl.doctor.host import Asked, host_findings
from verl.doctor.miniature import miniature_here
from verl.doctor.rates import rate_findings
from verl.utils.config import ConfigError

EXIT_CODES = {"ok": 0, "slow": 0, "wrong": 1}
COLOURS = {"ok": "green", "slow": "yellow", "wrong": "red"}
EPILOG = """\
exit code: 0 all is well, or slow; 1 something is wrong; 2 the command line

  verl-sync doctor                                            this host
  verl-sync doctor checkpoint_engine.backend=tcp              for a job with that key
  verl-sync doctor --address 10.0.0.1:6379 --json             every host of a Ray cluster
"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="verl-sync doctor",
        description="Looks whether this host, or every host of a Ray cluster, can run a job, and\n"
        "measures what a sync of weights needs of it. One line for each check: ok, slow\n"
        "or wrong, and the remedy.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="keys of the job: checkpoint_engine.backend=..."
    )
    parser.add_argument("--address", help="of a running Ray cluster, as `ray start` prints it: every host is checked")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of lines")
    options = parser.parse_args(arguments)
    try:
        config, asked = _of_job(options.overrides)
        findings = _over(options.address, config) if options.address is not None else _here(config, asked)
    except ConfigError as exc:
        print(f"error: {exc}", file=sys.stderr)  # noqa: T201
        return 2
    state = worst(findings)
    if options.json:
        print(json.dumps({"state": state, "findings": [asdict(finding) for finding in findings]}, indent=2))  # noqa: T201
    else:
        _show(findings)
    return EXIT_CODES[state]


def _of_job(overrides: Sequence[str]) -> tuple[CheckpointEngineConfig, Asked]:
    """What a job with `overrides` has; of its deadlines none is longer than a doctor's patience."""
    from verl.trainer.config.loader import load_config

    job = load_config(overrides)
    counted = any(word.lstrip("+").startswith("trainer.n_gpus_per_node=") for word in overrides)
    asked = Asked(device=job.trainer.device, ranks=job.trainer.n_gpus_per_node if counted else 1)
    config: CheckpointEngineConfig = job.checkpoint_engine
    deadlines = replace(config.deadlines, **{name: min(value, 20.0) for name, value in vars(config.deadlines).items()})
    return replace(config, deadlines=deadlines, retries=0), asked


def _here(config: CheckpointEngineConfig, asked: Asked) -> list[Finding]:
    found = [*host_findings(config, asked), *rate_findings()]
    return [*found, asyncio.run(miniature_here(config))] if can_sync(found) else found


def _over(address: str, config: CheckpointEngineConfig) -> list[Finding]:
    from verl.doctor.cluster import cluster_findings, hosts_of_cluster
    from verl.doctor.miniature_ranks import miniature_over
    from verl.trainer.fleet.session import RaySession, check_arguments

    check_arguments({"address": address})
    session = RaySession()
    session.start({"address": address})
    try:
        hosts = hosts_of_cluster()
        found = cluster_findings(config, hosts)
        return [*found, miniature_over(config, list(hosts.values()))] if can_sync(found) else found
    finally:
        session.close()


def _show(findings: Sequence[Finding]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    width = max(len(finding.check) for finding in findings)
    several = len({finding.where for finding in findings}) > 1
    for finding in findings:
        where = f"{finding.where}: " if several else ""
        console.print(f"[{COLOURS[finding.state]}]{finding.state:5}[/] {finding.check:{width}}  ", end="")
        console.print(f"{where}{finding.found}", markup=False)
        if finding.remedy:
            console.print(f"{'':{width + 6}}  -> {finding.remedy}", markup=False)
    counts = {state: sum(finding.state == state for finding in findings) for state in STATES}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items()), markup=False)
