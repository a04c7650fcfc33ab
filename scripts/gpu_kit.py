#!/usr/bin/env python3
"""Packs Ray, vLLM and what they need for a machine with a GPU that reaches no network, and unpacks it there.

    scripts/gpu_kit.py pack DIRECTORY          where there is a network: parts of tens of MiB, each for one transfer
    scripts/gpu_kit.py unpack SITE PART...     there, as parts arrive: SITE then belongs on PYTHONPATH

`requirements/gpu-kit.txt` names the packages. Left out is what a text model does not import, and kernels for other
GPUs: what remains of vLLM is less than a sixth of its wheel. Needs Python 3.11 or newer, and pip to pack.
"""

from __future__ import annotations

import argparse
import compileall
import fnmatch
import hashlib
import json
import lzma
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "requirements" / "gpu-kit.txt"
SOURCE_ONLY = ("antlr4-python3-runtime",)
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 26, 24, 17, 12, 5)]
PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
LEFT_OUT = (
    "vllm/vllm-rs",
    "vllm/third_party/deep_gemm/*",
    "vllm/third_party/fmha_sm100/*",
    "vllm/third_party/tml_fa4/*",
    "vllm/vllm_flash_attn/_vllm_fa2_C*",
    "vllm/_deepselect_C*",
    "vllm/_flashkda_C*",
    "vllm/_flashmla*",
    "vllm/_qutlass_C*",
    "ray/jars/*",
    "ray/rllib/*",
    "ray/llm/*",
    "ray/serve/*",
    "ray/tune/*",
    "ray/train/*",
    "ray/data/*",
    "ray/dashboard/client/*",
    "verl/*",  # the tree that travels beside the parts has them
    "recipe/*",
    "*/tests/*",
)
BIG = 1 << 20
"""Bytes from which a shared library is searched for kernels."""
FATBIN, CUBIN, PTX = 0xBA55ED50, 2, 1


# -- kernels ----------------------------------------------------------------------------------------------------------


def fat_binaries(library: bytes) -> Iterator[list[tuple[int, int, int, int]]]:
    """Of each fat binary in an ELF library's section `.nv_fatbin`: (kind, compute capability, offset, bytes) of its
    entries. The format is what `cuobjdump` of CUDA 13 shows of the same files."""
    (sections,) = struct.unpack_from("<Q", library, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, sections + size * index) for index in range(count)]
    names = headers[names_at][4]
    for name, _, _, _, start, length in headers:
        if not library.startswith(b".nv_fatbin\0", names + name):
            continue
        at, end = start, start + length
        while at + 16 <= end:
            magic, _, header, held = struct.unpack_from("<IHHQ", library, at)
            if magic != FATBIN:  # padding
                at += 8
                continue
            entries, inside, stop = [], at + header, at + header + held
            while inside < stop:
                kind, _, own, payload = struct.unpack_from("<HHIQ", library, inside)
                (capability,) = struct.unpack_from("<I", library, inside + 28)
                entries.append((kind, capability, inside + own, payload))
                inside += own + payload
            yield entries
            at = (stop + 7) // 8 * 8


def only_kernels_for(capability: int, library: bytes) -> bytes:
    """The library with zeros, which take no room once compressed, in place of kernels that such a GPU does not load:
    of a fat binary it takes its own machine code, or else the newest PTX that is not newer than it."""
    kept = bytearray(library)
    for entries in fat_binaries(library):
        has = any(kind == CUBIN and of == capability for kind, of, _, _ in entries)
        newest = max((of for kind, of, _, _ in entries if kind == PTX and of <= capability), default=None)
        for kind, of, start, size in entries:
            if not (kind == CUBIN and of == capability if has else kind == PTX and of == newest):
                kept[start : start + size] = bytes(size)
    return bytes(kept)


# -- packing ----------------------------------------------------------------------------------------------------------


def download(into: Path, python: str) -> list[Path]:
    """The wheels that REQUIREMENTS names, for `python` (3.12) on Linux, and the project's own."""
    names = [line.strip() for line in REQUIREMENTS.read_text().splitlines() if line.strip() and line[0] != "#"]
    from_source = [name for name in names if name.partition("==")[0] in SOURCE_ONLY]
    pip = [sys.executable, "-m", "pip", "-qq", "--disable-pip-version-check"]
    chosen = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    chosen += [word for platform in PLATFORMS for word in ("--platform", platform)]
    wanted = [name for name in names if name not in from_source]
    subprocess.run([*pip, "download", "--no-deps", *chosen, "--dest", str(into), *wanted], check=True)
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(into), *from_source, str(ROOT)], check=True)
    return sorted(into.glob("*.whl"))


def members(wheel: Path, capability: int) -> Iterator[tuple[str, int, bytes]]:
    """(name, mode, content) of what is packed of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            name = info.filename
            if info.is_dir() or any(fnmatch.fnmatch(name, pattern) for pattern in LEFT_OUT):
                continue
            where, found, rest = name.partition(".data/")
            if found:
                kind, _, name = rest.partition("/")
                if kind == "scripts":
                    name = f"bin/{name}"
                elif kind not in ("purelib", "platlib"):
                    continue
            content = archive.read(info)
            if name.endswith(".so") and len(content) >= BIG:
                content = only_kernels_for(capability, content)
            yield name, (info.external_attr >> 16) & 0o777 or 0o644, content


def archive_of(wheel: Path, capability: int, into: Path) -> list[Path]:
    """The wheel as `.tar.xz` files: one for each large library, one for the rest."""
    rest, made = [], []
    for name, mode, content in members(wheel, capability):
        if len(content) < 16 * BIG:
            rest.append((name, mode, content))
        else:
            made.append(_written(into / f"{Path(name).name}.tar.xz", [(name, mode, content)]))
    if rest:
        made.append(_written(into / f"{wheel.name.partition('-')[0]}.tar.xz", rest))
    return made


def _written(path: Path, files: list[tuple[str, int, bytes]]) -> Path:
    with lzma.open(path, "wb", preset=3) as stream, tarfile.open(fileobj=stream, mode="w|") as archive:
        for name, mode, content in files:
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(content), mode
            archive.addfile(info, BytesIO(content))
    return path


def into_parts(archives: list[Path], directory: Path, most: int) -> list[dict[str, object]]:
    """Move archives into folders `part-1`, `part-2`, … of at most `most` bytes each. Raises ValueError for one that is
    larger than that."""
    parts: list[list[Path]] = []
    for archive in sorted(archives, key=lambda path: -path.stat().st_size):
        size = archive.stat().st_size
        if size > most:
            raise ValueError(f"{archive.name} has {size:,} bytes; a part may have {most:,} (--part-mib)")
        fitting = [part for part in parts if sum(path.stat().st_size for path in part) + size <= most]
        if fitting:
            fitting[0].append(archive)
        else:
            parts.append([archive])
    made = []
    for number, part in enumerate(parts, start=1):
        folder = directory / f"part-{number}"
        folder.mkdir()
        digests = {}
        for path in part:
            digests[path.name] = hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.move(path, folder / path.name)
        (folder / "SHA256.json").write_text(json.dumps(digests, indent=1) + "\n")
        made.append({"part": folder.name, "bytes": sum((folder / name).stat().st_size for name in digests), **digests})
    return made


def pack(directory: Path, *, python: str, capability: int, part_mib: int) -> None:
    began = time.monotonic()
    if directory.exists() and any(directory.iterdir()):
        sys.exit(f"error: {directory} is not empty: name another folder, or remove it")
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        wheels, made = Path(scratch, "wheels"), Path(scratch, "archives")
        wheels.mkdir()
        made.mkdir()
        found = download(wheels, python)
        print(f"{len(found)} wheels, {_mib(found)}", flush=True)
        found.sort(key=lambda path: -path.stat().st_size)
        with ProcessPoolExecutor() as pool:
            work = [pool.submit(archive_of, wheel, capability, made) for wheel in found]
            archives = [path for each in work for path in each.result()]
        parts = into_parts(archives, directory, part_mib << 20)
    for part in parts:
        print(f"{directory / str(part['part'])}: {int(str(part['bytes'])) / 2**20:.1f} MiB")
    print(f"packed in {time.monotonic() - began:.0f} s")


def _mib(paths: list[Path]) -> str:
    return f"{sum(path.stat().st_size for path in paths) / 2**20:.1f} MiB"


# -- unpacking --------------------------------------------------------------------------------------------------------


def unpack(site: Path, parts: list[Path]) -> None:
    """Raises SystemExit for a part that is incomplete or damaged."""
    began, work = time.monotonic(), []
    for part in parts:
        listed = part / "SHA256.json"
        if not listed.is_file():
            sys.exit(f"error: {part} is no part of a kit: it has no {listed.name}")
        work += [(part / name, digest, site) for name, digest in json.loads(listed.read_text()).items()]
    site.mkdir(parents=True, exist_ok=True)
    with ProcessPoolExecutor() as pool:
        for said in pool.map(_unpacked, *zip(*work, strict=True)):
            if said:
                sys.exit(f"error: {said}")
    compileall.compile_dir(site, quiet=2, workers=0)  # once, not in each of many processes at once
    print(f"unpacked {len(work)} archives, {_mib([path for path, _, _ in work])}, in {time.monotonic() - began:.1f} s")


def _unpacked(archive: Path, digest: str, site: Path) -> str | None:
    if not archive.is_file():
        return f"{archive} did not arrive"
    content = archive.read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        return f"{archive} is damaged: pack or send it again"
    with tarfile.open(fileobj=BytesIO(content), mode="r:xz") as files:
        if hasattr(tarfile, "tar_filter"):  # from Python 3.11.4 on
            files.extraction_filter = tarfile.tar_filter
        files.extractall(site)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("pack", help="download, trim and pack")
    packing.add_argument("directory", type=Path, help="gets part-1, part-2, …; must be empty or new")
    packing.add_argument("--python", default="3.12", help="of the machine (default: %(default)s)")
    packing.add_argument("--capability", type=int, default=90, help="of its GPU; 90 is Hopper (default: %(default)s)")
    packing.add_argument("--part-mib", type=int, default=50, help="most of one transfer (default: %(default)s)")
    unpacking = commands.add_parser("unpack", help="check and unpack parts")
    unpacking.add_argument("site", type=Path, help="folder for packages, which belongs on PYTHONPATH")
    unpacking.add_argument("parts", type=Path, nargs="+", help="folders of `pack`")
    given = vars(parser.parse_args())
    command = given.pop("command")
    try:
        if command == "pack":
            pack(given.pop("directory"), **given)
        else:
            unpack(**given)
    except (OSError, ValueError, subprocess.CalledProcessError) as exc:
        sys.exit(f"error: {exc}")


if __name__ == "__main__":
    main()
