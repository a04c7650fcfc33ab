"""Commands as documents, READMEs of examples, docstrings and `--help` print them, and output as documents show it."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from verl.cli.main import COMMANDS, MODULES, cli

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("", "bash", "sh", "console")
PROGRAMS = (
    *("docker", "eval", "git", "kubectl", "make", "pip", "python", "ray", "sbatch", "torchrun", "uv", "verl-sync"),
    *("mkdocs", "pre-commit", "pytest", "vllm"),
)
FOLDERS = ("scripts/", "examples/")
RAY = ("start", "job", "get-auth-token", "stop")
PLACEHOLDER = re.compile(r"^\[?(\w+=\w+)?\s*\.\.\.\]?$|^\[?key=value$")

SHOWN = {
    "training builtin:tiny-qwen2": "tests/e2e/test_training.py",
    "step  0/20 | held-out builtin/shapes": "tests/e2e/test_training.py",
    "A  RUN_A": "verl-sync diff RUN_A RUN_B",
    "ok    python": "verl-sync doctor",
    "the key is made": "verl-sync node --key-file sync.key",
    "warning: trainer rank": "tests/e2e/test_recovery.py",
    "warning: rollouter": "tests/e2e/test_fully_async_recovery.py",
    "warning: the driver": "tests/e2e/test_recovery.py",
    "warning: replica-0": "tests/workers/rollout/test_death.py",
    "data/guess/train.parquet: ": "tests/experimental/agent_loop/test_verifiers.py",
    "data/counter/train.parquet: ": "tests/experimental/agent_loop/test_nemo_gym.py",
    "distillation.": "keys, no output",
    "reward_model.": "keys, no output",
    "curl ": "against a server of vLLM",
    "cp -r DIR CUT": "the same, with a file that is cut off",
    "ask() {": "against a server of vLLM",
    "ask": "the same, with an adapter",
    "load() {": "the same",
    "for i in 1 2 3 4; do (for n in": "the same, while others ask",
    "post": "against a server of SGLang",
}
"""How lines begin that are no command in a block: the command that prints them, or where else they are looked at."""


@dataclass(frozen=True)
class Printed:
    page: str
    text: str
    inline: bool = field(default=False, compare=False)
    """Whether it is part of a sentence."""

    @property
    def words(self) -> list[str]:
        """Without variables before the program, its directory in an environment, and what stands for more words."""
        words = shlex.split(self.text, comments=True)
        while re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        program = re.sub(r"^\.venv(-\w+)?/bin/", "", words[0])
        return [program, *(word for word in words[1:] if not PLACEHOLDER.match(word))]

    @property
    def environment(self) -> dict[str, str]:
        return dict(word.split("=", 1) for word in shlex.split(self.text) if re.match(r"[A-Z_]+=", word))

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.text.split())[:70]}"


def pages() -> list[Path]:
    named = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md", "distributions/verl_sync/README.md"]
    written = [path for path in ROOT.glob("docs/**/*.md") if path.parent.name not in ("adr", "lab")]
    beside = [path for folder in ("examples", "recipe", "docker") for path in (ROOT / folder).glob("**/*.md")]
    return [*(ROOT / name for name in named), *sorted(written), *sorted(beside)]


def docstrings() -> list[Path]:
    """Of modules that may show commands; many of them are the help of a program."""
    folders = ("verl", "examples", "recipe", "benchmarks", "scripts", "distributions/verl_sync/for_verl")
    return sorted(path for folder in folders for path in (ROOT / folder).glob("**/*.py"))


def printed() -> list[Printed]:
    found = [one for path in pages() for one in _of_page(_name(path), path.read_text(encoding="utf-8"))]
    for path in docstrings():
        if head := re.match(r'(r?)"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL):
            text = head[2] if head[1] else head[2].replace("\\\\", "\\")
            found += [Printed(_name(path), one) for one in _of_lines(_indented(text))]
    return list(dict.fromkeys(found))


def helped() -> list[Printed]:
    """Of the help of `verl-sync` and its subcommands."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")  # no line is divided
        for name in ("", *MODULES, *COMMANDS):
            with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
                cli.main([name, "--help"] if name else ["--help"], prog_name="verl-sync", standalone_mode=False)
            lines = "\n".join(line.replace(" #", "   #") for line in text.getvalue().splitlines() if line[:2] == "  ")
            found += [Printed(f"verl-sync {name} --help", one) for one in _of_lines(lines)]
    return list(dict.fromkeys(found))


def fences(text: str) -> list[tuple[str, str]]:
    """(language, content) of every fenced block."""
    return re.findall(r"(?m)^```([a-z]*)\n(.*?)\n```$", text, re.DOTALL)


def outputs() -> list[tuple[str, list[str]]]:
    """(page, lines) of every block for shells: what is no command, nor what a program is given there."""
    blocks = [(path, *fence) for path in pages() for fence in fences(path.read_text(encoding="utf-8"))]
    found = [(_name(path), _output(block)) for path, language, block in blocks if language in SHELL]
    return [(page, lines) for page, lines in found if lines]


def shown(by: str) -> list[tuple[str, str]]:
    """(page, line) of what `by` prints, a command or a test of `SHOWN`."""
    beginnings = tuple(line for line, printed_by in SHOWN.items() if printed_by == by)
    return [(page, line) for page, lines in outputs() if lines[0].startswith(beginnings) for line in lines]


def _output(block: str) -> list[str]:
    commands = set(_of_lines(block))
    lines = re.sub(r"(?s)<<'EOF'.*?^EOF$", "<<", re.sub(r"\\\n\s*", "", block), flags=re.MULTILINE).splitlines()
    return [
        line for line in lines if line.strip() and line != "..." and _command(line) not in commands and "<<" not in line
    ]


def form(line: str) -> str:
    """A line without numbers and paths, without what a model wrote into a box, and what the doctor found on a host."""
    line = re.sub(r"(?<![\w-])-\d[\w.+-]*|\d[\w.+-]*", "0", " ".join(line.replace("held-out sample", "sample").split()))
    line = re.sub(r"\S*[^\s0]/\S*|\S*/[^\s0]\S*", "PATH", re.sub("-{3,}", "--", line))
    if found := re.match(r"(?:ok|slow|wrong) (\w+)|(->|\| \w+) ", line):
        return found[1] or found[2]
    return line


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _of_page(page: str, text: str) -> Iterator[Printed]:
    blocks = [block for language, block in fences(text) if language in SHELL]
    rest = re.sub(r"(?ms)^```.*?^```$", "", text)
    for block in (*blocks, _indented(rest)):
        yield from (Printed(page, one) for one in _of_lines(block))
    for span in re.findall(r"`([^`\n]+)`", rest):
        if " " in span:
            yield from (Printed(page, one, inline=True) for one in _of_lines(span))


def _indented(text: str) -> str:
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))


def _of_lines(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        command = _command(line)
        program = re.sub(r"^([A-Z_]+=\S+ )*(\.venv(-\w+)?/bin/)?", "", command).partition(" ")[0]
        is_known = program in PROGRAMS or program.startswith(FOLDERS)
        if not is_known or " " not in command or "<<" in command:
            continue
        if program == "ray" and command.split()[1] not in RAY:
            continue
        if command != "vllm serve":  # its name
            yield command


def _command(line: str) -> str:
    return line.strip().removeprefix("$ ").split("   ")[0]  # what comes then is its explanation
