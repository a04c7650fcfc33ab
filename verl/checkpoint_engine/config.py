"""The `checkpoint_engine` section: which backend moves the weights, how, and within which deadlines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import ConfigError
from .support import config as strict
from .support.config import option, section

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DeadlinesConfig:
    """Seconds after which a phase of a sync is given up. Each phase has its own compensating action."""

    prepare_s: float = option(
        120.0, "collect shards, plan, create and pre-fault the node arenas (first sync only)", above=0
    )
    publish_s: float = option(120.0, "every trainer rank copies its own shards", above=0)
    stage_s: float = option(300.0, "every rollout node holds all bytes in its spare slot", above=0)
    verify_s: float = option(120.0, "every rollout node has digested its spare slot", above=0)
    commit_s: float = option(30.0, "every rollout node has made the new version current", above=0)
    activate_s: float = option(300.0, "every replica has paused, loaded the new version and answered", above=0)
    resume_s: float = option(60.0, "every replica generates again", above=0)


@dataclass(frozen=True, kw_only=True)
class GlooOptions:
    """Options of the backend `gloo`."""

    bucket_megabytes: int = option(
        64, "most bytes in one broadcast, in MiB; update_weights_bucket_megabytes caps it", least=1
    )
    in_flight: int = option(2, "broadcasts that one trainer rank has under way at a time", least=1)
    interface: str | None = option(None, "network interface to use; null: the one of the default route")


@dataclass(frozen=True, kw_only=True)
class NaiveOptions(GlooOptions):
    """Options of the backend `naive`. They only matter when trainer ranks are on several hosts."""


@dataclass(frozen=True, kw_only=True)
class NcclOptions(GlooOptions):
    """Options of the backend `nccl`. `in_flight` buckets of device memory are taken on every member."""

    bucket_megabytes: int = option(
        128, "most bytes in one broadcast, in MiB; update_weights_bucket_megabytes caps it", least=1
    )


@dataclass(frozen=True, kw_only=True)
class HcclOptions(NcclOptions):
    """Options of the backend `hccl`. `in_flight` buckets of device memory are taken on every member."""


@dataclass(frozen=True, kw_only=True)
class NixlOptions:
    """Options of the backend `nixl`. Variables of UCX that are set in the environment win."""

    ucx_tls: str | None = option(
        None, "UCX transports, as in `tcp` or `rc,sm,self`; null: `sm,self` on nodes that share the trainer's host"
    )
    ucx_net_devices: str | None = option(
        None,
        "network devices that UCX may use, as in `mlx5_0:1,mlx5_1:1`; null: all that fit to its transports; a trainer "
        "rank leaves out RDMA devices far from its GPU, unless its host has more of them than ranks. `all` is all",
    )
    error_handling: str | None = option(
        None,
        "ucx_error_handling_mode; null: none where all of `ucx_tls` is shared memory, else peer",
        choices=(None, "none", "peer"),
    )
    num_workers: int = option(1, "UCX workers per member", least=1)
    num_threads: int | None = option(
        None,
        "threads with which a node reads, but for topology=chain, where it is one; null: where all of `ucx_tls` is "
        "shared memory, by the host's cores, else 1",
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class TcpOptions:
    """Options of the backend `tcp`."""

    num_connections: int = option(4, "most connections from a rollout node to each member that it reads from", least=1)
    host: str | None = option(
        None, "address under which a member is reached; null: that of `interface`, or of the default route"
    )
    interface: str | None = option(None, "network interface to use; null: the one of the default route")


@dataclass(frozen=True, kw_only=True)
class MooncakeOptions:
    """Options of the backend `mooncake`."""

    protocol: str = option("tcp", "wire of the transfer engine", choices=("tcp", "rdma"))
    rdma_devices: str = option("", "RDMA devices to use, as in `mlx5_0,mlx5_1`; empty: all")
    host: str | None = option(
        None, "address under which a member is reached; null: that of `interface`, or of the default route"
    )
    interface: str | None = option(None, "network interface to use; null: the one of the default route")

    def __post_init__(self) -> None:
        _require_rdma(self.rdma_devices, "protocol", self.protocol)


@dataclass(frozen=True, kw_only=True)
class KimiCkptEngineOptions:
    """Options of the backend `kimi_ckpt_engine`. Deadlines are those of `checkpoint_engine.deadlines`."""

    p2p_protocol: str = option("tcp", "wire over which nodes pull from trainer ranks", choices=("tcp", "rdma"))
    rdma_devices: str = option(
        "",
        "RDMA devices of every member, as in `mlx5_0,mlx5_1`; empty: PS_P2P_STORE_RDMA_DEVICES, else NCCL_IB_HCA, else "
        "all; a trainer rank then takes the one that belongs to its local rank",
    )
    bucket_size_megabytes: int = option(
        64, "most bytes in one pull or broadcast, in MiB; update_weights_bucket_megabytes caps it", least=1
    )
    mem_fraction: float = option(
        0.1,
        "share of a node's free memory that the bounce buffers may take; buckets are made smaller to fit into it",
        above=0,
        most=1,
    )
    in_flight: int = option(2, "buckets that a receiver pulls, and parts that a node takes over, at a time", least=1)
    rebuild_group: bool = option(False, "of verl, without effect: nodes pass a version on without process groups")
    host: str | None = option(
        None, "address under which a member is reached; null: that of `interface`, or of the default route"
    )
    interface: str | None = option(None, "network interface to reach members by; null: the one of the default route")

    def __post_init__(self) -> None:
        _require_rdma(self.rdma_devices, "p2p_protocol", self.p2p_protocol)


def _require_rdma(devices: str, key: str, protocol: str) -> None:
    """Who names devices does not want TCP, which would be used without a word."""
    if devices and protocol != "rdma":
        raise strict.ConfigError(f"rdma_devices={devices} needs {key}=rdma, not {key}={protocol}")


@dataclass(frozen=True, kw_only=True)
class CheckpointEngineConfig:
    """How weights move from the trainer to the rollout engines."""

    backend: str = option("naive", "name in CheckpointEngineRegistry; auto: nccl on cuda, hccl on npu, gloo on cpu")
    update_weights_bucket_megabytes: int = option(2048, "largest run of bytes in flight per sender, in MiB", least=1)
    engine_kwargs: dict[str, Any] = option({}, "options of one backend: engine_kwargs.<backend>.<option>")
    custom_backend_module: str | None = option(
        None, "module imported on every process that registers a backend of yours"
    )
    block_kilobytes: int = option(1024, "largest piece with a digest of its own, in KiB", least=4)
    topology: str = option(
        "auto",
        "who sends to whom; chain: each rollout node serves the next; tree: two others; p2p_broadcast: as a chain, but "
        "several nodes read from trainer ranks, a part each (all three: tcp, nixl, mooncake); auto: the backend's own, "
        "and chain where there are more hosts of rollout nodes than of trainer ranks",
        choices=("auto", "direct", "broadcast", "chain", "tree", "p2p_broadcast"),
    )
    delta: str = option(
        "auto",
        "move only what changed since the version before: auto: where the job's own measurements say that it is "
        "faster; always: wherever it is possible. Every piece is verified either way (all backends but naive)",
        choices=("auto", "off", "always"),
    )
    delta_full_every: int | None = option(
        None, "one of so many syncs moves the whole version all the same; null: none has to, digests tell", least=2
    )
    slots: int = option(2, "arena slots per rollout node; 1 saves memory and gives up rollback", choices=(1, 2))
    verify: bool = option(True, "digest every byte on the rollout node and compare with the trainer's digests")
    check_engine: str = option(
        "first",
        "compare what an engine computes with after loading: at its first version every tensor with a load as from "
        "disk, which needs the memory of a second model meanwhile; always: at later versions also that all of them "
        "were written anew",
        choices=("first", "always", "off"),
    )
    activation: str = option(
        "together",
        "replicas activate at once, or one after the other while the rest generate",
        choices=("together", "rolling"),
    )
    pause_mode: str = option(
        "abort", "what happens to requests in flight at activation", choices=("abort", "wait", "keep")
    )
    retries: int = option(
        1, "how often a failed publish, stage or verify is tried again before the sync is aborted", least=0
    )
    report_path: str | None = option(
        None, "JSONL file that receives every SyncReport; null: <default_local_dir>/sync_reports.jsonl"
    )
    deadlines: DeadlinesConfig = section(DeadlinesConfig, "seconds per phase")

    @property
    def block_nbytes(self) -> int:
        return self.block_kilobytes * 1024

    @property
    def bucket_nbytes(self) -> int:
        return self.update_weights_bucket_megabytes * 1024 * 1024

    def options_of(self, backend: str, kind: type[T]) -> T:
        """`engine_kwargs.<backend>`, which the dataclass `kind` describes. Raises `support.config.ConfigError`."""
        return strict.from_mapping(
            kind, self.engine_kwargs.get(backend, {}), f"checkpoint_engine.engine_kwargs.{backend}"
        )

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> CheckpointEngineConfig:
        """Raises ConfigError for anything that is not a valid `checkpoint_engine` section."""
        try:
            return strict.from_mapping(cls, values, "checkpoint_engine")
        except strict.ConfigError as exc:
            raise ConfigError(str(exc)) from exc
