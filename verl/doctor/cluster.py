"""Checks every host of a Ray cluster, and the network between hosts."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from typing import Any

import ray
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.doctor.finding import Finding
from verl.doctor.host import host_findings
from verl.doctor.rates import rate_findings

PROBE_NBYTES = 2**26
PROBE_TIMEOUT_S = 20.0
ANSWERS_WITHIN_S = 120.0
"""Deadline for all hosts; each starts a process and measures its own rates."""
ROUNDS = 20
LEAST_GBIT_PER_S = 0.5
MOST_LATENCY_MS = 5.0
MOST_SKEW_S = 1.0
MAX_PAIRS = 64
"""The most pairs of hosts that are all measured; in a larger cluster only neighbours are."""


class Prober:
    """The actor on each host that checks the host, and measures connections to others."""

    def findings(self, config: CheckpointEngineConfig) -> list[Finding]:
        return [*host_findings(config), *rate_findings()]

    def clock(self) -> float:
        return time.time()

    def listen(self) -> int:
        """Start a thread that accepts one connection and answers or receives its bytes; returns the port."""
        server = socket.create_server(("", 0))
        server.settimeout(PROBE_TIMEOUT_S)
        threading.Thread(target=_answer, args=(server,), daemon=True).start()
        port: int = server.getsockname()[1]
        return port

    def probe(self, address: str, port: int) -> tuple[float, float]:
        """(seconds of a round trip, bits per second) to the prober that listens there. Raises OSError."""
        with socket.create_connection((address, port), PROBE_TIMEOUT_S) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            trips = []
            for _ in range(ROUNDS):
                start_s = time.perf_counter()
                connection.sendall(b"?")
                connection.recv(1)
                trips.append(time.perf_counter() - start_s)
            block, start_s = bytes(2**20), time.perf_counter()
            for _ in range(PROBE_NBYTES // len(block)):
                connection.sendall(block)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            return sorted(trips)[ROUNDS // 2], 8 * PROBE_NBYTES / (time.perf_counter() - start_s)


def _answer(server: socket.socket) -> None:
    with server, server.accept()[0] as connection:
        connection.settimeout(PROBE_TIMEOUT_S)
        for _ in range(ROUNDS):
            connection.sendall(connection.recv(1))
        while connection.recv(2**20):
            pass
        connection.sendall(b"!")


def _ray_nodes() -> list[dict[str, Any]]:
    nodes: Any = ray.nodes
    return list(nodes())


def hosts_of_cluster() -> dict[str, dict[str, Any]]:
    """By address of every live host: options of `ray.remote` that place an actor there."""
    return {
        node["NodeManagerAddress"]: {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False)
        }
        for node in _ray_nodes()
        if node["Alive"]
    }


def cluster_findings(config: CheckpointEngineConfig, hosts: dict[str, dict[str, Any]]) -> list[Finding]:
    """Findings on every host, on clocks, and on connections between hosts."""
    actor: Any = ray.remote(Prober)
    probers = {address: actor.options(num_cpus=0, **options).remote() for address, options in hosts.items()}
    try:
        found: list[Finding] = []
        answering: dict[str, Any] = {}
        calls = {address: prober.findings.remote(config) for address, prober in probers.items()}
        ends_s = time.monotonic() + ANSWERS_WITHIN_S
        for address, call in calls.items():
            try:
                found += ray.get(call, timeout=max(0.0, ends_s - time.monotonic()))
                found.append(_clock(address, probers[address]))
                answering[address] = probers[address]
            except (GetTimeoutError, RayActorError, ActorUnschedulableError) as exc:
                found.append(_silent(address, exc))
        for source, target in itertools.islice(_pairs(list(answering)), MAX_PAIRS):
            found.append(_way(source, target, answering))
        return found
    finally:
        for prober in probers.values():
            ray.kill(prober)


def _silent(address: str, exc: Exception) -> Finding:
    why = f"none within {ANSWERS_WITHIN_S:g} s" if isinstance(exc, GetTimeoutError) else str(exc).splitlines()[0]
    return Finding(
        check="answer",
        where=address,
        state="wrong",
        found=f"a process of Ray's there: {why}",
        remedy="look at that host's raylet and its log (/tmp/ray/session_latest/logs), or take it out of the cluster",
    )


def _pairs(addresses: list[str]) -> list[tuple[str, str]]:
    """All, in both directions, if they are few; else each with the next one."""
    pairs = list(itertools.permutations(addresses, 2))
    if len(pairs) <= MAX_PAIRS:
        return pairs
    return list(zip(addresses, addresses[1:] + addresses[:1], strict=True))


def _clock(address: str, prober: Any) -> Finding:
    before = time.time()
    there = ray.get(prober.clock.remote(), timeout=PROBE_TIMEOUT_S)
    after = time.time()
    skew = max(before - there, there - after, 0.0)
    wrong = skew > MOST_SKEW_S
    return Finding(
        check="clock",
        where=address,
        state="wrong" if wrong else "ok",
        found=f"{skew:.3f} s from this host's" if skew else "as this host's, to what a call takes",
        remedy="run chrony or ntpd: logs and timelines of hosts are compared" if wrong else "",
        value=skew,
    )


def _way(source: str, target: str, probers: dict[str, Any]) -> Finding:
    where = f"{source} -> {target}"
    try:
        port = ray.get(probers[target].listen.remote(), timeout=PROBE_TIMEOUT_S)
        latency_s, bits_per_s = ray.get(probers[source].probe.remote(target, port), timeout=2 * PROBE_TIMEOUT_S)
    except Exception as exc:  # noqa: BLE001 - whatever it is, this is the finding
        reason = str(getattr(exc, "cause", None) or exc).strip().splitlines()[-1]
        return Finding(
            check="way",
            where=where,
            state="wrong",
            found=f"no connection: {reason}",
            remedy="open the ports between the hosts of the job: members of a sync listen on ports that are free",
        )
    rate, latency = bits_per_s / 1e9, latency_s * 1e3
    slow = rate < LEAST_GBIT_PER_S or latency > MOST_LATENCY_MS
    return Finding(
        check="way",
        where=where,
        state="slow" if slow else "ok",
        found=f"{rate:.2f} Gbit/s in one TCP connection, {latency:.2f} ms to and fro",
        remedy="a faster interface (engine_kwargs.<backend>.interface), or checkpoint_engine.delta=always"
        if slow
        else "",
        value=rate,
    )
