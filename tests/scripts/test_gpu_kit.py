"""`scripts/gpu_kit.py`: what a machine without a network gets.

That the parser finds what `cuobjdump` finds was tried with vLLM's libraries, and that the rest of them runs on an H200.
"""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.gpu_kit import CUBIN, FATBIN, LEFT_OUT, PTX, ROOT, archive_of, fat_binaries, into_parts, only_kernels_for

HOPPER = 90


def entry(kind: int, capability: int, payload: bytes) -> bytes:
    own = 64
    head = struct.pack("<HHIQ", kind, 0x101, own, len(payload)) + bytes(12) + struct.pack("<I", capability)
    return head.ljust(own, b"\0") + payload


def library(*binaries: list[tuple[int, int, bytes]]) -> bytes:
    """An ELF file of which one section has these fat binaries, with padding between them."""
    held = b""
    for entries in binaries:
        body = b"".join(entry(*one) for one in entries)
        held += struct.pack("<IHHQ", FATBIN, 1, 16, len(body)) + body
        held += bytes(-len(held) % 8 + 8)
    names = b"\0.nv_fatbin\0.shstrtab\0"
    at = 64
    sections = [(0, 0, 0), (1, at, len(held)), (12, at + len(held), len(names))]
    table = b"".join(struct.pack("<IIQQQQ", name, 0, 0, 0, start, size) + bytes(24) for name, start, size in sections)
    header = bytearray(at)
    header[:4] = b"\x7fELF"
    struct.pack_into("<Q", header, 0x28, at + len(held) + len(names))
    struct.pack_into("<HHH", header, 0x3A, 64, len(sections), 2)
    return bytes(header) + held + names + table


def kept(of: bytes) -> list[set[tuple[int, int]]]:
    """(kind, compute capability) of what has bytes, for each fat binary."""
    return [
        {(kind, capability) for kind, capability, start, size in entries if any(of[start : start + size])}
        for entries in fat_binaries(of)
    ]


def test_machine_code_for_other_gpus_is_left_out():
    whole = library([(CUBIN, 80, b"a" * 40), (CUBIN, HOPPER, b"b" * 24), (PTX, HOPPER, b"c" * 16), (CUBIN, 120, b"d")])
    trimmed = only_kernels_for(HOPPER, whole)
    assert kept(trimmed) == [{(CUBIN, HOPPER)}]
    assert len(trimmed) == len(whole), "what the loader reads is where it was"
    assert b"b" * 24 in trimmed


def test_without_machine_code_of_its_own_a_gpu_gets_the_newest_text_that_it_can_compile():
    whole = library(
        [(PTX, 80, b"a" * 8), (PTX, 89, b"b" * 8), (PTX, 120, b"c" * 8), (CUBIN, 80, b"d" * 8)],
        [(CUBIN, HOPPER, b"e" * 8)],
    )
    assert kept(only_kernels_for(HOPPER, whole)) == [{(PTX, 89)}, {(CUBIN, HOPPER)}]


def make_wheel(directory: Path) -> Path:
    path = directory / "some_package-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("some/module.py", "value = 3\n")
        wheel.writestr("ray/jars/large.jar", "left out")
        program = zipfile.ZipInfo("some_package-1.0.data/scripts/program")
        program.external_attr = 0o755 << 16
        wheel.writestr(program, "#!/bin/sh\n")
    return path


def packed(directory: Path) -> Path:
    made = directory / "made"
    made.mkdir()
    (part,) = into_parts(archive_of(make_wheel(directory), HOPPER, made), directory, 1 << 20)
    return directory / str(part["part"])


def unpack(site: Path, *parts: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "gpu_kit.py", "unpack", site, *parts]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_part_is_unpacked_without_what_is_left_out(tmp_path: Path):
    site = tmp_path / "site"
    done = unpack(site, packed(tmp_path))
    assert done.returncode == 0, done.stderr
    assert (site / "some/module.py").read_text() == "value = 3\n"
    assert (site / "bin/program").stat().st_mode & 0o111
    assert not (site / "ray").exists()
    assert "ray/jars/*" in LEFT_OUT


def test_a_damaged_part_is_named(tmp_path: Path):
    part = packed(tmp_path)
    (archive,) = part.glob("*.xz")
    content = bytearray(archive.read_bytes())
    content[len(content) // 2] ^= 1
    archive.write_bytes(content)
    done = unpack(tmp_path / "site", part)
    assert done.returncode == 1
    assert f"error: {archive} is damaged" in done.stderr
    archive.unlink()
    assert f"error: {archive} did not arrive" in unpack(tmp_path / "site", part).stderr
    assert "is no part of a kit" in unpack(tmp_path / "site", tmp_path).stderr


def test_what_no_transfer_can_carry_is_refused(tmp_path: Path):
    (tmp_path / "made").mkdir()
    archives = archive_of(make_wheel(tmp_path), HOPPER, tmp_path / "made")
    with pytest.raises(ValueError, match=r"some_package\.tar\.xz has .* bytes; a part may have 10"):
        into_parts(archives, tmp_path, 10)


def test_what_a_machine_must_have_and_lacks_is_named(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # without installed packages
    python.chmod(0o755)
    command = [ROOT / "scripts" / "gpu_run.sh", tmp_path / "site", tmp_path / "output", "--"]
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: this Python lacks torch, transformers,")
    assert not (tmp_path / "output").exists()


def test_the_script_says_how_it_is_called():
    done = subprocess.run([ROOT / "scripts" / "gpu_run.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "scripts/gpu_run.sh SITE OUTPUT PART... [-- OPTIONS]" in done.stderr
