"""What a replica says when vLLM does not start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO

import pytest

from verl.utils.config import ConfigError
from verl.workers.rollout import RolloutReplica
from verl.workers.rollout.errors import ReplicaTimeout, RolloutError
from verl.workers.rollout.vllm import refusals

NEEDED = "No available memory for the cache blocks."
CONSEQUENCE = "Exception: WorkerProc initialization failed. See stack trace for root cause."


@pytest.fixture
def log(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Iterator[IO[str]]:
    """The file in which the processes of vLLM write."""
    with (tmp_path / "worker.out").open("w+") as file:
        monkeypatch.setattr(refusals, "STREAMS", (file.fileno(),))
        yield file


def fail(log: IO[str], *errors: str) -> None:
    """As vLLM does when a process of it fails."""
    for error in errors:
        for line in ("Traceback (most recent call last):", "    raise ValueError(", error):
            log.write(f"(EngineCore pid=7) ERROR 11-24 03:00:33 [core.py:1510] {line}\n")
    log.flush()
    raise RuntimeError("Engine core initialization failed. See root cause above.")


def test_the_first_error_that_a_process_of_vllm_logged_is_told(log):
    told = "^replica-0: vLLM did not start: OSError: no file$"
    with pytest.raises(RolloutError, match=told), refusals.told_in_a_line("replica-0", "cpu"):
        fail(log, "OSError: no file", CONSEQUENCE)


def test_settings_that_a_process_of_vllm_refused_are_a_mistake_of_the_configuration(log):
    told = f"^replica-0: vLLM refuses its settings: {NEEDED}$"
    with pytest.raises(ConfigError, match=told), refusals.told_in_a_line("replica-0", "cpu"):
        fail(log, f"ValueError: {NEEDED}", CONSEQUENCE)


def test_errors_that_were_logged_before_are_somebody_elses(log):
    log.write(f"(EngineCore pid=7) ERROR 11-24 03:00:33 [core.py:1510] ValueError: {NEEDED}\n")
    log.flush()
    with pytest.raises(RolloutError, match="See root cause above"), refusals.told_in_a_line("replica-0", "cpu"):
        fail(log)


def test_settings_that_the_server_refused_are_a_mistake_of_the_configuration(log):
    told = "^replica-0: vLLM refuses its settings: two\nlines$"
    with pytest.raises(ConfigError, match=told), refusals.told_in_a_line("replica-0", "cpu"):
        raise ValueError("two\nlines")


@pytest.mark.vllm
async def test_memory_too_small_for_one_request_is_told_by_vllm(
    ray_cluster, make_replica: Callable[..., RolloutReplica]
):
    replica = make_replica("vllm", cpu_kvcache_gib=1e-6)
    with pytest.raises(ConfigError, match=r"^replica-0: vLLM refuses its settings: .*rollout.cpu_kvcache_gib\)$"):
        await replica.init_standalone()


@pytest.mark.vllm
async def test_an_argument_that_vllm_refuses_is_told_by_its_name(
    ray_cluster, make_replica: Callable[..., RolloutReplica]
):
    replica = make_replica("vllm", engine_kwargs={"vllm": {"kv_cache_dtype": "gold"}})
    with pytest.raises(
        ConfigError, match=r"^replica-0: vLLM refuses its settings: cache_dtype: Input should be 'auto'"
    ):
        await replica.init_standalone()


async def test_a_start_that_takes_too_long_names_the_key_of_its_deadline(
    ray_cluster, make_replica: Callable[..., RolloutReplica]
):
    replica = make_replica("hf", startup_timeout_s=0.01)
    with pytest.raises(
        ReplicaTimeout, match=r"did not answer start within 0.01 s \(actor_rollout_ref.rollout.startup_"
    ):
        await replica.init_standalone()
