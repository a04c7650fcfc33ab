"""Commands as documents, READMEs of examples and docstrings print them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SHELL = ("", "bash", "sh", "console")
PROGRAMS = (
    *("docker", "eval", "git", "kubectl", "make", "pip", "python", "ray", "sbatch", "torchrun", "uv", "verl-sync"),
    *("mkdocs", "pre-commit", "vllm"),
)
RAY = ("start", "job", "get-auth-token", "stop")
PLACEHOLDER = re.compile(r"^\[?(\w+=\w+)?\s*\.\.\.\]?$|^\[key=value$")


@dataclass(frozen=True)
class Printed:
    page: str
    text: str

    @property
    def words(self) -> list[str]:
        """Without variables before the program, its directory in an environment, and what stands for more words."""
        words = shlex.split(self.text, comments=True)
        while re.match(r"[A-Z_]+=", words[0]):
            words = words[1:]
        program = re.sub(r"^\.venv(-docs)?/bin/", "", words[0])
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
    found = [Printed(_name(path), text) for path in pages() for text in _of_page(path.read_text(encoding="utf-8"))]
    for path in docstrings():
        if head := re.match(r'(r?)"""(.*?)"""', path.read_text(encoding="utf-8"), re.DOTALL):
            text = head[2] if head[1] else head[2].replace("\\\\", "\\")
            found += [Printed(_name(path), one) for one in _of_lines(_indented(text))]
    return list(dict.fromkeys(found))


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _of_page(text: str) -> Iterator[str]:
    for language, block in re.findall(r"(?m)^```([a-z]*)\n(.*?)\n```$", text, re.DOTALL):
        if language in SHELL:
            yield from _of_lines(block)
    rest = re.sub(r"(?ms)^```.*?^```$", "", text)
    yield from _of_lines(_indented(rest))
    for span in re.findall(r"`([^`\n]+)`", rest):
        if " " in span:
            yield from _of_lines(span)


def _indented(text: str) -> str:
    return "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))


def _of_lines(block: str) -> Iterator[str]:
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        command = line.strip().removeprefix("$ ").split("   ")[0]  # what comes then is its explanation
        program = re.sub(r"^([A-Z_]+=\S+ )*(\.venv(-docs)?/bin/)?", "", command).partition(" ")[0]
        is_known = program in PROGRAMS or program.startswith("scripts/")
        if not is_known or " " not in command or "<<" in command:
            continue
        if program == "ray" and command.split()[1] not in RAY:
            continue
        if command != "vllm serve":  # its name
            yield command
