from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from verl.checkpoint_engine.support.device import current_device_setter
from verl.utils.config import ConfigError
from verl.utils.device import (
    allocated,
    distributed_backend,
    local_device,
    resolve_device,
    rng_state,
    seed_everything,
    set_rng_state,
)

NO_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def test_an_unknown_device_lists_the_known_ones():
    with pytest.raises(ConfigError, match="unknown device 'gpu'; known: cpu, cuda, npu"):
        resolve_device("gpu")
    with pytest.raises(ConfigError, match="cpu, cuda, npu"):
        distributed_backend("tpu")


@NO_CUDA
def test_a_device_that_is_not_here_says_why():
    with pytest.raises(ConfigError, match="'cuda' cannot be used here: .*CUDA.*On this machine: "):
        resolve_device("cuda")


@pytest.mark.skipif(hasattr(torch, "npu"), reason="this machine has torch_npu")
def test_a_missing_device_package_names_its_extra():
    with pytest.raises(ConfigError, match=r"torch_npu.*verl-sync\[npu\]"):
        resolve_device("npu")


@NO_CUDA
def test_the_default_is_what_is_there():
    assert resolve_device() == resolve_device("cpu") == "cpu"
    assert local_device("cpu", 3) == torch.device("cpu")


def test_every_device_has_gloo_for_control_messages():
    assert distributed_backend("cpu") == "gloo"
    assert distributed_backend("cuda") == "cpu:gloo,cuda:nccl"
    assert distributed_backend("npu") == "cpu:gloo,npu:hccl"


def test_random_numbers_repeat_after_the_same_seed_and_after_restoring_the_state():
    seed_everything(7)
    first = random.random(), torch.rand(2)
    state = rng_state("cpu")
    following = torch.rand(2)
    seed_everything(7)
    assert random.random() == first[0]
    assert torch.equal(torch.rand(2), first[1])
    set_rng_state("cpu", state)
    assert torch.equal(torch.rand(2), following)


def test_another_thread_computes_on_the_device_of_the_one_that_starts_it(monkeypatch: pytest.MonkeyPatch):
    current = {threading.get_ident(): 3}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.get(threading.get_ident(), 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.update({threading.get_ident(): device}))
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(torch.cuda.current_device).result() == 0
        thread.submit(current_device_setter()).result()
        assert thread.submit(torch.cuda.current_device).result() == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")
def test_the_most_that_a_device_held_is_told_once():
    allocated("cuda")
    held = torch.zeros(64 * 2**20, dtype=torch.uint8, device="cuda")
    del held
    now, peak = allocated("cuda")
    assert peak - now >= 64 * 2**20
    now, peak = allocated("cuda")
    assert peak == now
