"""What workers of vLLM 0.24 are adapted to, with a stand-in for them: `vllm_0_24` says what they do differently."""

from __future__ import annotations

import pytest
from vllm.config import VllmConfig, WeightTransferConfig

from verl.checkpoint_engine.compat.vllm_0_24 import adapt_workers, configuration, makes_engines_of_less
from verl.checkpoint_engine.parameter_server.endpoints import ENGINE_NAME


class OldWorker:
    """Makes its engine after `load_model`, and takes a model apart unless it is told not to."""

    def __init__(self, backend: str | None) -> None:
        self.vllm_config = VllmConfig()
        self.vllm_config.weight_transfer_config = WeightTransferConfig(backend=backend) if backend else None
        self.made_with = self.is_taken_apart = None

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.made_with = (configuration(), load_dummy_weights)

    def start_weight_update(self, is_checkpoint_format: bool = True) -> None:
        self.is_taken_apart = is_checkpoint_format


@pytest.fixture
def worker_class(monkeypatch: pytest.MonkeyPatch) -> type[OldWorker]:
    worker = type("Worker", (OldWorker,), dict(vars(OldWorker)))
    monkeypatch.setattr("vllm.v1.worker.gpu_worker.Worker", worker)
    return worker


def test_engines_are_made_where_the_configuration_can_be_asked_for(worker_class):
    adapt_workers(ENGINE_NAME)
    worker = worker_class(ENGINE_NAME)
    worker.load_model(load_dummy_weights=True)
    assert worker.made_with == (worker.vllm_config, True)


@pytest.mark.parametrize(
    ("backend", "said", "is_taken_apart"),
    [
        (ENGINE_NAME, {}, False),
        (ENGINE_NAME, {"is_checkpoint_format": True}, False),
        ("nccl", {}, True),
        ("nccl", {"is_checkpoint_format": False}, False),
        (None, {}, True),
    ],
)
def test_the_model_is_left_to_our_engine_and_to_no_other(worker_class, backend, said, is_taken_apart):
    adapt_workers(ENGINE_NAME)
    worker = worker_class(backend)
    worker.start_weight_update(**said)
    assert worker.is_taken_apart is is_taken_apart


def test_workers_are_adapted_once(worker_class):
    adapt_workers(ENGINE_NAME)
    methods = dict(vars(worker_class))
    adapt_workers(ENGINE_NAME)
    assert dict(vars(worker_class)) == methods


def test_the_vllm_that_is_installed_needs_none_of_it():
    assert not makes_engines_of_less()
