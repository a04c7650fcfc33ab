"""What is asked of an SGLang server, with stand-ins for its answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.free_ports import free_port
from tests.checkpoint_engine.stand_in_vllm import stand_in
from tests.checkpoint_engine.test_update import answering, server_that_answers  # noqa: F401 - a fixture
from verl.checkpoint_engine.config import CheckpointEngineConfig
from verl.checkpoint_engine.errors import ConfigError, TransportError
from verl.checkpoint_engine.publisher.endpoint_replica import EndpointReplica
from verl.checkpoint_engine.publisher.hosts import HERE
from verl.checkpoint_engine.publisher.reports import ReportsHere
from verl.checkpoint_engine.publisher.sglang_endpoint import FLAG, LOADER

ABOUT = {"custom_weight_loader": [LOADER], "tp_size": 1, "dp_size": 1, "pp_size": 1}


@pytest.mark.parametrize(
    ("about", "config", "message"),
    [
        ({"custom_weight_loader": []}, {}, f"cannot take our weights: start it with {FLAG}"),
        ({"tp_size": None}, {}, "does not report its number of ranks"),
        ({"dp_size": 2}, {}, "runs with dp_size=2, and needs 1"),
        ({"enable_lora": True}, {}, "serves LoRA adapters, .* start it without --enable-lora"),
        ({"enable_lora": None, "lora_paths": ["one=/models/one"]}, {}, "serves LoRA adapters"),
        ({"speculative_algorithm": "EAGLE"}, {}, r"has a second model, .*\(EAGLE\).*without --speculative-algorithm"),
        ({"enable_eplb": True}, {}, "moves experts between ranks: start it without --enable-eplb"),
        ({}, {"pause_mode": "wait"}, "pause_mode=wait: .* needs keep or abort"),
    ],
)
def test_what_sglang_has_not_is_refused_before_anything_is_paused(
    answering: Callable[..., str],  # noqa: F811
    about: dict[str, Any],
    config: dict[str, Any],
    message: str,
    tmp_path: Path,
):
    url = answering({"/model_info": (200, {"weight_version": "default"}), "/server_info": (200, ABOUT | about)})
    settings = CheckpointEngineConfig.from_mapping(config)
    replica = EndpointReplica(url, HERE, settings, timeout_s=20, reports=ReportsHere(tmp_path))
    with pytest.raises(ConfigError, match=message):
        asyncio.run(replica.check({"a": ("float32", (1,))}))


async def test_a_server_that_was_started_anew_is_another_than_before(tmp_path: Path):
    """By what it says, a process that is started in its place serves other weights: then it is asked when it began."""
    says = {"/model_info": (200, {"weight_version": "default"}), "/server_info": (200, ABOUT | {"startup_time": 1.25})}
    with server_that_answers(says) as url:
        config, reports = CheckpointEngineConfig(check_engine="off"), ReportsHere(tmp_path)
        first, second = (EndpointReplica(url, HERE, config, timeout_s=20, reports=reports) for _ in range(2))
        for one in (first, second):
            await one.check({"a": ("float32", (1,))})
        assert await first.claim() == await second.claim()  # one server under two names
        before = await first.claim()
        says["/model_info"] = 200, {"weight_version": "7"}  # pushed
        assert await first.claim() == before
        says |= {"/model_info": (200, {"weight_version": "default"}), "/server_info": (200, {"startup_time": 2.5})}
        assert await first.claim() != before
        await first.release()


def test_an_endpoint_is_called_by_the_engine_that_it_said_it_was_and_by_none_before(tmp_path: Path):
    def replica(url: str) -> EndpointReplica:
        config = CheckpointEngineConfig(check_engine="off")
        return EndpointReplica(url, HERE, config, timeout_s=20, reports=ReportsHere(tmp_path))

    tensors = {"a": ("float32", (1,))}
    url = f"http://127.0.0.1:{free_port()}"
    said = (
        f"no server of vLLM or SGLang answers at {url} (Connection refused): start it, or remove it from the endpoints"
    )
    with pytest.raises(TransportError, match=f"^{re.escape(said)}$"):
        asyncio.run(replica(url).check(tensors))

    with server_that_answers({"/model_info": (200, {"weight_version": "1"}), "/server_info": (200, ABOUT)}) as url:
        of_sglang = replica(url)
        asyncio.run(of_sglang.check(tensors))
    with stand_in(1) as (_, url):
        of_vllm = replica(url)
        asyncio.run(of_vllm.check(tensors))
    for known, engine in ((of_sglang, "SGLang"), (of_vllm, "vLLM")):
        with pytest.raises(TransportError, match=f"{engine} does not answer: Connection refused") as caught:
            asyncio.run(known.pause("keep"))
        assert caught.value.member == known.name
