"""The console script: what it offers, what it passes on, and what it does not load."""

from __future__ import annotations

import runpy
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from click.testing import CliRunner

import verl
from tests import forked
from verl.cli.main import COMMANDS, COMPLETES, MODULES, cli, main

PROGRAM = Path(sys.executable).with_name("verl-sync")
HEAVY = ("torch", "ray", "vllm", "transformers", "hydra", "matplotlib", "pandas")


def verl_sync(*arguments: str, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False, env=environment
    )


def test_the_command_is_installed_and_says_its_version():
    (script,) = entry_points(group="console_scripts", name="verl-sync")
    assert script.value == "verl.cli.main:main"
    assert verl_sync("--version").stdout == f"verl-sync {verl.__version__}\n"


def test_the_page_of_help_names_every_subcommand_with_a_line():
    page = CliRunner().invoke(cli, ["--help"], terminal_width=100).output
    lines = {line.split()[0]: line for line in page.split("commands\n")[1].splitlines() if line.strip()}
    assert lines.keys() == {*MODULES, *COMMANDS, "completion"}
    assert all(len(line.split()) > 3 for line in lines.values())


@pytest.mark.parametrize("width", [52, 80, 200])
@pytest.mark.parametrize("command", [[], *[[name] for name in COMMANDS]])
def test_help_wraps_at_the_width_of_the_terminal(width: int, command: list[str]):
    page = verl_sync(*command, "--help", environment={"COLUMNS": str(width)}).stdout
    longest = max((line for line in page.splitlines() if "eval" not in line), key=len)  # commands are to be copied
    assert 20 < len(longest) <= min(width, 110)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *[[name, "--help"] for name in COMMANDS]])
def test_help_loads_none_of_the_heavy_packages(arguments: list[str]):
    code = (
        "import sys\nfrom verl.cli.main import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as exc:\n    assert not exc.code\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_line_of_a_subcommand_is_the_first_of_its_own_page(name: str):
    page = CliRunner().invoke(cli, [name, "--help"], terminal_width=110).output
    assert COMMANDS[name][1] in page


def test_an_unknown_subcommand_is_an_error_that_names_a_near_one():
    done = verl_sync("trian")
    assert done.returncode == 2
    assert "no such command: trian. Did you mean 'train'?" in done.stderr


def test_train_gets_everything_that_follows_it():
    assert "--config-name NAME" in forked.run(main, ["train", "--help"]).stdout
    done = forked.run(main, ["train", "trainer.nnode=2"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "trainer.nnodes" in done.stderr


def test_train_composes_the_configuration_that_its_module_composes():
    arguments = ["--cfg", "job", "--package", "trainer", "trainer.save_freq=7"]
    module = forked.run(as_program, "verl.trainer.main_ppo", arguments)
    assert "save_freq: 7" in module.stdout
    assert forked.run(main, ["train", *arguments]).stdout == module.stdout


def as_program(module: str, arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["update", "--help"], 0, "usage: verl-sync update [-h]"),
        (["certify", "--help"], 0, "usage: verl-sync certify [-h]"),
        (["update", "--endpoint", "http://127.0.0.1:1"], 2, "give either --checkpoint-path"),
        (["certify", "--help"], 0, "--tensor-parallel-size"),
        (["certify", "--model", "/nowhere"], 2, "/nowhere is not a directory"),
        (["certify", "--model", "/nowhere", "--html", "f"], 2, "--html is of a running server"),
        (["certify", "--model", "/nowhere", "--json", "/no/f"], 2, "--json /no/f: there is no directory /no"),
        (["plan", "/nowhere", "--device", "cpu", "--backend", "nccl"], 2, "--backend nccl needs CUDA devices"),
        (["watch", "DIR", "--host", ""], 2, "the argument after `verl-sync watch DIR --host` is empty"),
        (["doctor", "--address="], 2, "the argument after `verl-sync doctor` is empty: is a variable"),
    ],
)
def test_modules_get_their_arguments_and_give_their_exit_code(arguments: list[str], code: int, said: str):
    done = verl_sync(*arguments)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tra"], "train"),
        (["train", "trainer.save_f"], "trainer.save_freq="),
        (["completion", "z"], "zsh"),
    ],
)
def test_the_tab_key_completes_commands_and_keys(words: list[str], expected: str):
    environment = {
        "PATH": str(PROGRAM.parent),
        COMPLETES: "bash_complete",
        "COMP_WORDS": " ".join(["verl-sync", *words]),
        "COMP_CWORD": str(len(words)),
    }
    found = verl_sync(environment=environment).stdout.split()
    assert f"plain,{expected}" in found
    assert all(line.split(",")[1].startswith(words[-1]) for line in found)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_its_shell_reads(shell: str):
    script = verl_sync("completion", shell).stdout
    assert COMPLETES in script
    assert "verl-sync" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, timeout=60, check=True)


@pytest.mark.parametrize(
    "words",
    [
        ("report", "empty"),
        ("report", "run", "-o", "/proc/page.html"),
        ("report", "damaged"),
        ("watch", "empty", "--text"),
        ("watch", "run", "--host", "192.0.2.77"),
        ("watch", "run", "--text", "--port", "7000"),
        ("report", "run", "./run"),
        ("report", "run", "-o", "page.pdf"),
        ("trace", "empty"),
        ("trace", "run", "-o", "/proc/trace.json"),
        ("diff", "run", "empty"),
        ("diff", "run", "damaged"),
        ("mismatch", "empty", "--step", "1"),
        ("init", "run"),
        ("init", "/proc/project"),
        ("plan", "empty"),
        ("certify", "--model", "empty"),
        ("serve", "--model", "empty"),
        ("update", "--checkpoint-path", "empty"),
        ("train", "--config-path", "empty", "--config-name", "none"),
        ("train", "trainer.default_local_dir=/proc/run"),
    ],
    ids=" ".join,
)
def test_what_the_command_line_names_and_cannot_be_used_is_exit_code_2(words: list[str], tmp_path: Path):
    for name, text in (("empty", None), ("run", '{"step": 0}\n'), ("damaged", "{damaged\n")):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "metrics.jsonl").write_text(text)
    done = forked.run(main, words, cwd=tmp_path)
    assert (done.returncode, "error: " in done.stderr, "Traceback" in done.stderr) == (2, True, False)


@pytest.mark.parametrize("words", ["--version", "report --help"])
def test_a_full_disk_behind_standard_output_is_one_line(words: str):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [PROGRAM, *words.split()], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (1, "error: standard output cannot be written: No space left on device\n")
