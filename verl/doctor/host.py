"""Checks one host's packages, memory, files and network devices. Called on that host; measures no rates."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil
from packaging.requirements import Requirement

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import CheckpointEngineError
from verl.checkpoint_engine.links.rdma import get_rdma_devices, list_ib_devices
from verl.checkpoint_engine.registry import resolve_backend
from verl.checkpoint_engine.support import envs
from verl.checkpoint_engine.support.admission import LOOK_S, can_filter
from verl.checkpoint_engine.support.device import device_module, resolve_device
from verl.checkpoint_engine.support.network import unknown_interfaces
from verl.doctor.finding import Finding
from verl.doctor.rails import rails
from verl.utils.config import ConfigError
from verl.utils.torch_companions import remedy, unloadable

DISTRIBUTION = "verl-sync"
PYTHONS = ((3, 11), (3, 13))
"""The tested versions of Python."""
LEAST_FILES = 4096
"""Ray opens some thousands of sockets and files for a job of a few dozen actors."""
LEAST_PORTS = 5000
SHOWN = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "UCX_NET_DEVICES")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What keys of the job ask of a host with trainer ranks."""

    device: str | None = None
    """`trainer.device`; None: what is there."""
    ranks: int = 1
    """`trainer.n_gpus_per_node`, where it was given."""


def host_findings(config: CheckpointEngineConfig, asked: Asked | None = None) -> list[Finding]:
    """All checks of this host. None of them raises. `asked`: None of a host of a cluster, which may have rollouts only,
    or the head alone."""
    host = socket.gethostname()
    before, after = (
        (_python, _packages, _videos, _shared_memory, _memory, _files, _ports, _backend),
        (_rdma, _network, _strangers),
    )
    found = [finding for check in before for finding in check(host, config)]
    found += _devices(host, asked or Asked())
    return [*found, *(finding for check in after for finding in check(host, config))]


def _python(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    (low, high), version = PYTHONS, sys.version_info[:2]
    is_known = low <= version <= high
    yield Finding(
        check="python",
        where=host,
        state="ok" if is_known else "wrong",
        found=f"Python {platform.python_version()}, {platform.machine()}, Linux {platform.release()}",
        remedy="" if is_known else f"use Python {low[0]}.{low[1]} to {high[0]}.{high[1]}",
    )


def _packages(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    try:
        wanted = [Requirement(text) for text in metadata.requires(DISTRIBUTION) or []]
    except metadata.PackageNotFoundError:
        yield _wrong("packages", host, f"{DISTRIBUTION} is not installed here", "install it on every host of the job")
        return
    problems, core = [], [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    for one in core:
        try:
            version = metadata.version(one.name)
        except metadata.PackageNotFoundError:
            problems.append(f"{one.name} is missing")
            continue
        if not one.specifier.contains(version, prereleases=True):
            problems.append(f"{one.name} is {version}, not {one.specifier}")
    if problems:
        yield _wrong("packages", host, "; ".join(problems), f"pip install --upgrade {DISTRIBUTION}")
        return
    if broken := unloadable():
        told = ", ".join(f"{name} {metadata.version(name)}" for name in broken)
        yield _wrong("packages", host, f"not built for torch {_version('torch')}: {told}", remedy(broken))
        return
    shown = [f"{name} {_version(name)}" for name in ("torch", "ray", "vllm", "transformers", "numpy")]
    yield Finding(check="packages", where=host, state="ok", found=f"{', '.join(shown)} and {len(core)} requirements")


def _videos(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    """Never wrong: most jobs have none."""
    lacks = [name for name, module in (("torchvision", "torchvision"), ("PyAV", "av")) if find_spec(module) is None]
    found = "are read, in frames and files" if not lacks else "are read in frames, not from files"
    yield Finding(
        check="videos",
        where=host,
        state="ok",
        found=f"are not read: {' and '.join(lacks)} missing" if "torchvision" in lacks else found,
        remedy="for prompts with videos, pip install 'verl-sync[video]', and torchvision for this torch"
        if lacks
        else "",
    )


def _version(name: str) -> str:
    for distribution in (name, f"{name}-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "is not installed"


def _shared_memory(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    directory = envs.shm_dir()
    if not directory.is_dir() or not os.access(directory, os.W_OK):
        yield _wrong(
            "shared memory", host, f"{directory} cannot be written", "mount a tmpfs there, or set VERL_SHM_DIR"
        )
        return
    usage, memory = shutil.disk_usage(directory), psutil.virtual_memory().total
    found = f"{directory}: {usage.free / 2**30:.1f} of {usage.total / 2**30:.1f} GiB free"
    enough = usage.total >= memory / 4
    yield Finding(
        check="shared memory",
        where=host,
        state="ok" if enough else "wrong",
        found=found,
        remedy=""
        if enough
        else "two versions of the weights lie there: enlarge it (containers: --shm-size or an "
        "emptyDir of medium Memory), or set VERL_SHM_DIR to another tmpfs",
        value=usage.free / 2**30,
    )
    huge = HUGE.read_text("utf-8") if HUGE.exists() else ""
    on = any(f"[{choice}]" in huge for choice in ("always", "within_size", "advise", "force")) or "huge=" in _mount(
        directory
    )
    yield Finding(
        check="huge pages",
        where=host,
        state="ok",
        found="used for shared memory" if on else "not used for shared memory",
        remedy="" if on else "engines load faster from a tmpfs that is mounted with huge=always",
    )


def _mount(directory: Path) -> str:
    for line in Path("/proc/mounts").read_text("utf-8").splitlines():
        _, place, _, options, *_ = line.split()
        if place == str(directory):
            return options
    return ""


def _memory(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    yield Finding(
        check="memory",
        where=host,
        state="ok",
        found=f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB available, "
        f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}",
        value=memory.available / 2**30,
    )


def _files(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = hard == resource.RLIM_INFINITY or hard >= LEAST_FILES
    yield Finding(
        check="open files",
        where=host,
        state="ok" if enough else "wrong",
        found=f"limit {soft}, at most {hard}",
        remedy="" if enough else f"ulimit -n {LEAST_FILES}, or LimitNOFILE of the service",
    )


def _ports(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    low, high = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text("utf-8").split())
    used = sum(low <= int(line.split()[1].rpartition(":")[2], 16) <= high for line in _sockets())
    free = high - low + 1 - used
    enough = free >= LEAST_PORTS
    yield Finding(
        check="ports",
        where=host,
        state="ok" if enough else "wrong",
        found=f"{free} of {low} to {high} are free",
        remedy="" if enough else "sysctl net.ipv4.ip_local_port_range='15000 65000'",
    )


def _sockets() -> list[str]:
    return Path("/proc/net/tcp").read_text("utf-8").splitlines()[1:]


def _backend(host: str, config: CheckpointEngineConfig) -> Iterator[Finding]:
    try:
        resolve_backend(config).check_host(config)
    except CheckpointEngineError as exc:
        yield _wrong("backend", host, f"{config.backend}: {exc.message}", "as it says, or choose another backend")
        return
    yield Finding(check="backend", where=host, state="ok", found=f"{config.backend} can be used")


def _devices(host: str, asked: Asked) -> Iterator[Finding]:
    import torch

    try:
        device = resolve_device(asked.device)
    except ConfigError as exc:
        yield _wrong("devices", host, f"trainer.device={asked.device}: {exc}", "as it says, or choose another device")
        return
    count = device_module(device).device_count() if device != "cpu" else asked.ranks
    if count < asked.ranks:
        found = f"{count} {device} devices, and trainer.n_gpus_per_node={asked.ranks}"
        yield _wrong("devices", host, found, f"trainer.n_gpus_per_node={count}, or trainer.device=cpu")
        return
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    missing = bool(list(Path("/dev").glob("nvidia[0-9]*"))) and not names
    yield Finding(
        check="devices",
        where=host,
        state="wrong" if missing else "ok",
        found=found or ("NVIDIA devices that torch does not see" if missing else "none; everything runs on the CPU"),
        remedy=f"torch {torch.__version__} is no build for CUDA, or the driver is too old" if missing else "",
    )


def _rdma(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    devices = list_ib_devices()
    if not devices:
        yield Finding(check="rdma", where=host, state="ok", found="no RDMA devices: NCCL, UCX and Mooncake use TCP")
        return
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    yield Finding(
        check="rdma",
        where=host,
        state="wrong" if limited else "ok",
        found=f"{', '.join(devices)}; ParameterServers would use {', '.join(get_rdma_devices())}"
        + (f"; locked memory is limited to {soft / 2**20:.0f} MiB" if limited else ""),
        remedy="ulimit -l unlimited: RDMA pins what it reads" if limited else "",
    )
    yield from rails(host, get_rdma_devices())


def _network(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    stats = psutil.net_if_stats()
    up = [
        f"{name} {address.address}{f' {stats[name].speed} Mbit/s' if stats[name].speed > 0 else ''}"
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and stats[name].isup and not address.address.startswith("127.")
    ]
    if unknown := unknown_interfaces():
        yield _wrong("network", host, "; ".join(unknown.values()), f"set {', '.join(unknown)} to one of them, or not")
        return
    chosen = {name: value for name in SHOWN if (value := os.environ.get(name))}
    settings = "".join(f"; {name}={value}" for name, value in chosen.items())
    yield Finding(check="network", where=host, state="ok", found=(", ".join(up) or "only loopback") + settings)


def _strangers(host: str, _: CheckpointEngineConfig) -> Iterator[Finding]:
    found, remedy = "the kernel keeps other users away", ""
    if not can_filter():
        found = f"other users are cut off within {LOOK_S * 1000:.0f} ms: this kernel lets only CAP_NET_ADMIN filter"
        remedy = "on a host with other users, run jobs in a container with a network of its own"
    yield Finding(check="sockets", where=host, state="ok", found=found, remedy=remedy)


def _wrong(check: str, where: str, found: str, remedy: str) -> Finding:
    return Finding(check=check, where=where, state="wrong", found=found, remedy=remedy)
