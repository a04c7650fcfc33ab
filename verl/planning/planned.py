"""A whole plan: the model's shards, the `SyncPlan` of them, every way, and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.checkpoint_engine.plan.sync_plan import SyncPlan, make_plan
from verl.checkpoint_engine.plan.topology import best_of
from verl.planning.forecast import Forecast, Road, Sizes, forecast
from verl.planning.hardware import Hardware
from verl.planning.job import Job
from verl.planning.memory import Need, needs, unfit
from verl.planning.request import Request
from verl.planning.shapes import PlannedModel, planned_model
from verl.planning.simulation import Outcome, SyncSeconds, described, simulate
from verl.planning.traffic import COLLECTIVES, Traffic, Way, members_of, wire_of
from verl.utils.config import ConfigError

UNEVEN = 1.5
"""A rank that sends more than so many times the mean is reported."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    model: PlannedModel
    job: Job
    plan: SyncPlan
    hardware: Hardware
    owned: tuple[int, ...]
    """Bytes that each trainer rank publishes."""
    forecasts: tuple[Forecast, ...]
    memory: tuple[Need, ...]
    notes: tuple[str, ...]
    steps: tuple[tuple[str, tuple[Outcome, ...]], ...]
    """Simulated steps with the best way, at its slower and faster bound."""
    unavailable: dict[str, str]
    """Unusable ways, and the reasons."""

    @property
    def fits(self) -> bool:
        return not any(unfit(self.memory))

    @property
    def best(self) -> Forecast:
        """The forecast with the lowest slower bound."""
        return min(self.forecasts, key=lambda one: one.slow.total)

    def document(self) -> dict[str, Any]:
        """The plan for JSON. Members' links are those of the best way; bytes are of a full sync."""
        best = self.best
        sizes = {"nbytes": self.plan.layout.payload_nbytes, "slot_nbytes": self.plan.layout.nbytes}
        return {
            "model": {
                "name": self.model.name,
                "parameters": self.model.parameters,
                "tensors": len(self.plan.layout.specs),
                **sizes,
            },
            "job": asdict(self.job),
            "plan": {"pieces": len(self.plan), "owner_nbytes": list(self.owned)},
            "ways": [_described(one) for one in self.forecasts],
            "best": {
                **_described(best),
                "links": [
                    {"from": one.sender.name, "to": one.receiver.name, "nbytes": one.nbytes, "messages": one.messages}
                    for one in best.way.transfers
                ],
            },
            "memory": [
                {
                    "where": need.where,
                    "phase": need.phase,
                    "parts": dict(need.parts),
                    "nbytes": need.nbytes,
                    "available_nbytes": need.available_nbytes,
                    "fits": need.fits,
                }
                for need in self.memory
            ],
            "rates_measured": sorted(self.hardware.measured),
            "rates_assumed": sorted(self.hardware.assumed),
            "steps": {bound: [described(one) for one in outcomes] for bound, outcomes in self.steps},
            "notes": list(self.notes),
            "unavailable": self.unavailable,
        }


def planned(request: Request, hardware: Hardware) -> Planned:
    """Plan a job. Raises ConfigError, PlanError."""
    job = request.job
    model = planned_model(request.path, job)
    plan = make_plan(model.layout, model.held, block_nbytes=job.block_nbytes)
    ways, unavailable = _ways(request, Traffic(plan, job))
    sizes = Sizes.of(plan, job)
    roads = {id(way.transfers): Road.of(way, job) for way in {id(way.transfers): way for way in ways}.values()}
    found = [
        forecast(
            way,
            roads[id(way.transfers)],
            sizes,
            job,
            hardware,
            delta=delta,
            rdma=request.rdma,
            device=request.device == "cuda",
        )
        for way in ways
        for delta in ((False, True) if job.changed is not None and way.backend != "naive" else (False,))
    ]
    memory = needs(
        model,
        plan,
        job,
        device_nbytes=request.device_nbytes,
        host_nbytes=hardware.host_nbytes,
        shared_nbytes=hardware.shared_nbytes,
    )
    return Planned(
        model=model,
        job=job,
        plan=plan,
        hardware=hardware,
        owned=plan.owner_nbytes,
        forecasts=tuple(found),
        memory=tuple(memory),
        steps=tuple(_steps(request, min(found, key=lambda one: one.slow.total))),
        notes=(*model.notes, *_notes(request, plan.owner_nbytes)),
        unavailable=unavailable,
    )


def _steps(request: Request, best: Forecast) -> Iterator[tuple[str, tuple[Outcome, ...]]]:
    """With syncs as the best way has them."""
    if request.workload is None:
        return
    for bound, found in (("fast", best.fast), ("slow", best.slow)):
        pause_s = found.phases["activate"] + found.phases["resume"]
        sync = SyncSeconds(total_s=found.total, blocked_s=found.phases["publish"], pause_s=pause_s)
        yield bound, tuple(simulate(request.workload, sync))


def _ways(request: Request, traffic: Traffic) -> tuple[list[Way], dict[str, str]]:
    """Raises ConfigError if there is none."""
    ways, unavailable = [], {}
    for backend in request.backends:
        topologies = topologies_of(backend)
        if request.topology is not None and request.topology not in topologies:
            unavailable[backend] = f"has no topology {request.topology}, but {', '.join(topologies)}"
            continue
        for topology in (request.topology,) if request.topology else topologies:
            try:
                ways.append(traffic.way(backend, topology))
            except BackendUnavailable as exc:
                unavailable[backend] = exc.message
    if not ways:
        raise ConfigError("; ".join(f"{name} {reason}" for name, reason in unavailable.items()))
    return ways, unavailable


def topologies_of(backend: str) -> tuple[str, ...]:
    """The topologies that a run could configure, the backend's default first."""
    from verl.checkpoint_engine.registry import CheckpointEngineRegistry

    found: tuple[str, ...] = CheckpointEngineRegistry.get(backend).capabilities.topologies
    return found


def _notes(request: Request, owned: tuple[int, ...]) -> list[str]:
    job, notes = request.job, []
    most, mean = max(owned), float(np.mean(owned))
    if most > UNEVEN * mean:
        idle = sum(nbytes < mean / UNEVEN for nbytes in owned)
        notes.append(
            f"ranks are uneven: one publishes {most / 1e9:.2f} GB, {most / mean:.1f} times the mean, and {idle} of "
            f"{len(owned)} little: rows of stacked experts, or stages, are cut into equal parts that do not come out "
            "even"
        )
    if job.rollout_tp > job.rollouts.each:
        notes.append(
            f"--rollout-tp {job.rollout_tp} spans {job.rollout_tp / job.rollouts.each:g} hosts of {job.rollouts.each} "
            "devices: no run starts such a replica today; bytes and seconds are those of one arena on each host"
        )
    trainers, nodes = members_of(job)
    asked = [name for name in request.backends if name not in COLLECTIVES and len(topologies_of(name)) > 1]
    if asked:
        hosts = {member.host for member in trainers}, {member.host for member in nodes}
        chosen = best_of(topologies_of(asked[0]), trainer_hosts=hosts[0], node_hosts=hosts[1])
        notes.append(f"checkpoint_engine.topology=auto would be {chosen} with {', '.join(asked)}")
    wires = {wire_of(name, rdma=request.rdma) for name in request.backends}
    if "nccl" in wires:
        notes.append("nccl has been run by nobody between hosts: its seconds are those of its contract")
    return notes


def _described(one: Forecast) -> dict[str, Any]:
    return {
        "backend": one.way.backend,
        "topology": one.way.topology,
        "delta": one.delta,
        "hops": max(one.way.hops.values(), default=0),
        "nbytes_sent": sum(one.way.sent_nbytes.values()),
        "seconds": {"fast": one.fast.phases, "slow": one.slow.phases},
        "total_s": [one.fast.total, one.slow.total],
        "bound": one.bound,
        "helps": [{"what": what, "saves_s": saved} for what, saved in one.helps],
    }
