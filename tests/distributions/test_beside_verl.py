"""The wheel `verl-sync-engine`, installed in an environment where `verl` is PyPI's."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

from tests.distributions.environments import BESIDE, ROOT, renamed_tests, run

RUN = (
    "support/test_records.py",
    "support/test_registry.py",
    "publisher/test_model_source.py",
    "test_arena.py",
    "test_copying.py",
    "test_digest.py",
    "test_imports.py",
    "test_janitor.py",
    "test_layout.py",
    "test_tcp.py",
    "test_transaction.py",
)
"""Of the tests of the checkpoint engine: configuration, memory, a wire, whole syncs of a fleet, and processes."""

WHERE = """
from importlib import metadata, util

print(util.find_spec("verl").origin, util.find_spec("verl_sync").origin, metadata.version("verl"), sep="\\n")
"""

PLUGINS = """
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.plugins import load_general_plugins

load_general_plugins()
for name in ("verl_arena", "verl_sync_arena"):
    try:
        WeightTransferEngineFactory.register_engine(name, "nowhere", "Nothing")
    except ValueError:
        print("registered:", name)
"""


def test_unit_tests_and_syncs_of_a_fleet_pass_against_the_wheel_beside_pypi_s_verl(site: Path, tmp_path: Path):
    tests = renamed_tests(tmp_path)
    told = run([sys.executable, "-c", WHERE], path=[site, BESIDE], cwd=tests).stdout.splitlines()
    assert told == [str(BESIDE / "verl/__init__.py"), str(site / "verl_sync/__init__.py"), "0.9.1"]

    options = ["-q", "-c", ROOT / "pyproject.toml", "--rootdir", tests, "-p", "no:cacheprovider"]
    files = [tests / "tests/checkpoint_engine" / name for name in RUN]
    done = run([sys.executable, "-m", "pytest", *options, *files], path=[site, BESIDE], cwd=tests)
    assert int(done.stdout.splitlines()[-1].split()[0]) > 200, done.stdout  # "260 passed in 20 s"


def test_the_check_of_the_adapter_says_in_one_line_that_verl_is_not_installed(site: Path):
    told = run([sys.executable, "-m", "verl_sync.for_verl"], path=[site], returns=1)
    assert told.stderr.splitlines() == ["error: verl is not installed here: pip install --no-deps verl==0.9.1"]
    assert told.stdout == ""


def test_vllm_knows_the_engine_of_each_distribution_where_both_are_installed(site: Path):
    told = run([sys.executable, "-c", PLUGINS], path=[site]).stdout.splitlines()
    assert [line for line in told if line.startswith("registered")] == [
        "registered: verl_arena",
        "registered: verl_sync_arena",
    ]


def test_both_distributions_have_one_version():
    versions = [
        tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]["version"]
        for name in ("", "distributions/verl_sync")
    ]
    assert versions[0] == versions[1]
