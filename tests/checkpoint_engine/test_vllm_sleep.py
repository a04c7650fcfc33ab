"""Workers of vLLM, with a stand-in for them, say why they take no weights: they sleep, or move experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from verl.checkpoint_engine import ConfigError
from verl.checkpoint_engine.compat.vllm import let_workers_answer, note_sleep
from verl.checkpoint_engine.engines.vllm.plugin import answer_of
from verl.checkpoint_engine.engines.vllm.receiver import ArenaWeightTransferEngine
from verl.checkpoint_engine.parameter_server.writers import Ledger, Writer, answers_to, order, require_own


class SleepyWorker:
    def __init__(self, engine: Any = None) -> None:
        self.weight_transfer_engine = engine

    def sleep(self, level: int = 1) -> None:
        if level > 2:
            raise ValueError(level)

    def wake_up(self, tags: list[str] | None = None) -> None: ...

    def discard(self, tags: tuple[str, ...]) -> None: ...


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    kind = type("Worker", (SleepyWorker,), dict(vars(SleepyWorker)))
    for place in ("gpu_worker.Worker", "worker_base.WorkerBase"):
        monkeypatch.setattr(f"vllm.v1.worker.{place}", kind)
    note_sleep()
    note_sleep()
    let_workers_answer("asked", answer_of)
    engine = SimpleNamespace(
        vllm_config=SimpleNamespace(lora_config=None), parallel_config=None, ledger=Ledger(), _rank=0, _copies={}
    )
    engine.answer = lambda *asked, **named: ArenaWeightTransferEngine.answer(engine, *asked, **named)
    return kind(engine)


def claim(worker: Any) -> None:
    writer = Writer.here("publisher")
    asked = order("claim", writer)
    said = worker.asked(msgspec.json.encode(asked).decode())
    try:
        require_own(answers_to(asked, [said], "there"), writer, "there")
    finally:
        worker.weight_transfer_engine.ledger = Ledger()


def test_a_server_that_sleeps_takes_no_weights_until_all_of_it_is_awake(worker: Any):
    claim(worker)
    worker.sleep(2)
    with pytest.raises(ConfigError, match=r"at there takes no weights: it sleeps \(weights, kv_cache\): wake it up"):
        claim(worker)
    worker.wake_up(["weights"])
    with pytest.raises(ConfigError, match=r"it sleeps \(kv_cache\)"):
        claim(worker)
    worker.wake_up(["kv_cache"])
    claim(worker)
    worker.sleep()
    worker.wake_up()
    claim(worker)


def test_a_server_that_has_given_back_its_kv_cache_alone_takes_no_weights_until_it_has_one(worker: Any):
    worker.discard(("kv_cache",))
    with pytest.raises(ConfigError, match=r"it sleeps \(kv_cache\): wake it up first \(POST /wake_up\)"):
        claim(worker)
    worker.wake_up()
    claim(worker)


def test_a_worker_that_could_not_fall_asleep_is_awake(worker: Any):
    with pytest.raises(ValueError, match="3"):
        worker.sleep(3)
    claim(worker)


def test_a_server_that_moves_experts_between_ranks_takes_no_weights(worker: Any):
    worker.weight_transfer_engine.parallel_config = SimpleNamespace(enable_eplb=True)
    with pytest.raises(ConfigError, match="takes no weights: it moves experts .* vLLM without --enable-eplb"):
        claim(worker)
