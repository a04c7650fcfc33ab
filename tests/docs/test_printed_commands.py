"""Every command that documents, READMEs and docstrings print is read by the parser of its program, as it is printed.

What a program would do then is for tests of the program; here a flag, key, choice, file or module that is none is red.
A name alone, without arguments, has to exist.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from torch.distributed.run import get_args_parser

from tests.cli.runs import write_run
from tests.docs.printed import FOLDERS, ROOT, Printed, printed
from verl.cli.main import COMMANDS, MODULES, cli
from verl.trainer.config.loader import load_config
from verl.trainer.config.validate import validate
from verl.utils.config import ConfigError

ALL = [*{one.text.partition("#")[0].strip(): one for one in reversed(printed())}.values()][::-1]
"""Each once, with the first page that prints it."""
TRAINERS = (
    "verl.trainer.main_ppo",
    "verl.experimental.one_step_off_policy.main_ppo",
    "verl.experimental.fully_async_policy.fully_async_main",
    "recipe.dapo.main_dapo",
)
ELSEWHERE = {
    "docker": "a daemon",
    "git": "a remote repository",
    "kubectl": "a cluster",
    "mkdocs": "an environment of its own; `make docs` runs it",
    "pytest": "a server",
    "pre-commit": "changes the repository",
    "ray": "its own parser is Ray's",
    "sglang.launch_server": "a device",
    "vllm.entrypoints.openai.api_server": "vLLM: tests/docs/test_printed_servers.py",
}
"""Programs of others, or of other environments: what they need."""


class Parsed(Exception):
    """A command line was understood: the program goes no further."""


@contextmanager
def up_to_its_command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Raises AssertionError, with what the parser says, where the command line of what runs inside is refused."""
    parse = argparse.ArgumentParser.parse_args

    def parse_and_stop(self: Any, *arguments: Any, **options: Any) -> None:
        parse(self, *arguments, **options)
        raise Parsed

    def refuse(self: Any, message: str) -> None:
        raise AssertionError(f"{self.prog}: {message}")

    with monkeypatch.context() as patch, pytest.raises(Parsed):
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        patch.setattr(argparse.ArgumentParser, "error", refuse)
        yield


def of(*programs: str) -> Any:
    found = [one for one in ALL if one.words[0] in programs]
    return pytest.mark.parametrize("command", found, ids=str)


@of("python")
def test_a_program_of_python_is_there_and_takes_the_words(command: Printed, monkeypatch: pytest.MonkeyPatch):
    _, *words = command.words
    take(words, monkeypatch)


def take(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    if words[0] != "-m":
        assert (ROOT / words[0]).is_file(), words[0]
        if "argparse" in (ROOT / words[0]).read_text():
            with up_to_its_command_line(monkeypatch):
                monkeypatch.setattr(sys, "argv", words)
                runpy.run_path(str(ROOT / words[0]), run_name="__main__")
        return
    _, module, *arguments = words
    module = re.sub(r"^verl_sync\.(?!for_verl)", "verl.checkpoint_engine.", module)
    if module in ELSEWHERE:
        return
    if module.startswith("verl_sync.for_verl"):
        assert (ROOT / "distributions/verl_sync/for_verl/__main__.py").is_file()
        assert not arguments
        return
    assert importlib.util.find_spec(module), f"there is no module {module}"
    if module in TRAINERS:
        compose(module, arguments)
    elif arguments:
        main = importlib.import_module(module).main
        with up_to_its_command_line(monkeypatch):
            monkeypatch.setattr(sys, "argv", [module, *arguments])
            main()


def compose(module: str, words: list[str]) -> None:
    """The configuration of a run with these words, checked as far as no model and no data are needed."""
    entry = importlib.import_module(module)
    own = module != "verl.trainer.main_ppo"
    where = {"config_path": entry.CONFIG_DIR, "config_name": entry.CONFIG_NAME} if own else {}
    overrides = [word for word in words if not word.startswith("--") and word != "key=value"]
    overrides = [word for word in overrides if "=data/guess/agents.yaml" not in word]  # an earlier command writes it
    assert all("=" in word for word in overrides), words
    if "data.train_batchsize=64" in overrides:  # shown for its error
        with pytest.raises(ConfigError, match=r"Did you mean 'data\.train_batch_size'\?"):
            load_config(overrides)
        return
    validate(load_config(overrides, **where))


async def no_longer_than_it_starts(*_: object) -> None:
    """In the place of a server that goes on until Ctrl-C."""


@of("verl-sync")
def test_a_subcommand_takes_the_words(command: Printed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    _, name, *arguments = command.words
    if name == "--help":
        assert CliRunner().invoke(cli, ["--help"]).exit_code == 0
    elif name in COMMANDS:
        monkeypatch.chdir(tmp_path)
        for directory in ("DIR", "OTHER", "RUN_A", "RUN_B", "checkpoints/verl_sync/default"):
            write_run(tmp_path / directory)
        monkeypatch.setattr("verl.cli.watch.served", no_longer_than_it_starts)
        done = CliRunner().invoke(cli, [name, *arguments])
        assert done.exit_code == 0, done.output
    elif name == "completion":
        assert CliRunner().invoke(cli, [name, *arguments]).exit_code == 0
    elif name == "train":
        compose("verl.trainer.main_ppo", arguments)
    elif arguments:
        with up_to_its_command_line(monkeypatch):
            importlib.import_module(MODULES[name].name).main(arguments)
    else:
        assert name in MODULES


@of("torchrun")
def test_torchrun_and_what_it_starts_take_the_words(command: Printed, monkeypatch: pytest.MonkeyPatch):
    options = get_args_parser().parse_args(command.words[1:])
    script = ["-m"] * options.module + [options.training_script]
    if len(options.training_script_args) > 0 and command.text.rstrip().split("#")[0].strip().endswith("..."):
        return  # some of its words are left to the reader
    take([*script, *options.training_script_args], monkeypatch)


@of("make")
def test_a_target_of_make_is_there_and_takes_the_words(command: Printed, monkeypatch: pytest.MonkeyPatch):
    makefile = (ROOT / "Makefile").read_text()
    for word in command.words[1:]:
        variable, _, value = word.partition("=")
        if not value:
            assert re.search(rf"(?m)^{word}:", makefile), f"make has no target {word}"
        elif variable == "ARGS" and "run" in command.words:
            compose("verl.trainer.main_ppo", shlex.split(value))
        elif variable == "ARGS" and "soak" in command.words:
            take(["-m", "benchmarks.soak", *shlex.split(value)], monkeypatch)
        else:
            assert re.search(rf"\$[({{][^)]*\b{variable}\b|^{variable} \?=", makefile, re.MULTILINE), word


@of("pip", "uv")
def test_what_pip_installs_are_extras_and_files_that_exist(command: Printed):
    for page, extras in re.findall(r"(verl[-_]sync[\w.-]*|\.)\[(\w+)\]", command.text):
        project = "distributions/verl_sync/pyproject.toml" if "engine" in page else "pyproject.toml"
        known = tomllib.loads((ROOT / project).read_text())["project"]["optional-dependencies"]
        assert extras in known, f"{project} has no extra {extras}"


@pytest.mark.parametrize("command", [one for one in ALL if "scripts/" in one.words[0]], ids=str)
def test_a_script_is_there_and_takes_the_words(command: Printed, monkeypatch: pytest.MonkeyPatch):
    assert (ROOT / command.words[0]).is_file()
    if command.words[0].endswith(".py"):
        take(command.words, monkeypatch)


@pytest.mark.parametrize("command", [one for one in ALL if one.words[0] in (*ELSEWHERE, "sbatch")], ids=str)
def test_files_that_a_program_of_others_is_given_exist(command: Printed):
    files = [word for word in command.words[1:] if re.fullmatch(r"(?:docker|examples|scripts)/\S+", word)]
    for word in files:
        assert (ROOT / word).is_file(), word


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("python -m verl.trainer.main_ppo trainer.save_frek=1", "trainer.save_freq"),
        ("python -m verl.checkpoint_engine.update --checkpoint-pth DIR --endpoint http://h", "--checkpoint-pth"),
        ("python -m benchmarks.push --size-gib 2", "--size-gib"),
        ("python -m verl.trainer.main_ppoo trainer.save_freq=1", "no module"),
        ("python examples/any_trainer/train.py MODEL http://h --step 3 --nothing", "--nothing"),
        ("python scripts/plot_rewards.py DIR", "scripts/plot_rewards.py"),
    ],
)
def test_a_wrong_word_is_found(words: str, said: str, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises((AssertionError, ConfigError), match=re.escape(said)):
        take(Printed("here", words).words[1:], monkeypatch)


def test_no_kind_of_program_is_left_out():
    known = {"eval", "make", "pip", "python", "sbatch", "torchrun", "uv", "verl-sync", *ELSEWHERE}
    assert {one.words[0] for one in ALL if not one.words[0].startswith(FOLDERS)} <= known
    assert len(ALL) > 120
