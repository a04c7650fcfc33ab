"""What every rollout engine promises, over every engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import ray

from tests.workers.rollout.conftest import MAX_MODEL_LEN, PROMPT, Served
from verl.checkpoint_engine.errors import ActivationError
from verl.workers.rollout.errors import NoWeights, RolloutError
from verl.workers.rollout.records import CallName, SamplingOptions, TokenOutput, WeightVersionSpan

LONG = MAX_MODEL_LEN - len(PROMPT)
BRIEFLY_S = 0.3
ATTEMPTS = 10
"""To interrupt a response before it is complete: on a busy machine an engine may be done before it is told."""
CROWDS = (4, 8, 16, 32, 64, 128)
"""How many requests, until some are still in the engine when it is told to abort them."""


def lengths(outputs: list[TokenOutput]) -> list[int]:
    return [len(output.token_ids) for output in outputs]


def assert_log_probs_fit(served: Served, output: TokenOutput, version: int, temperature: float) -> None:
    assert output.log_probs == pytest.approx(
        served.trainer.log_probs(version, PROMPT, output.token_ids, temperature), abs=2e-4
    )


def test_generate_is_refused_before_the_first_version(shared: Served):
    assert isinstance(shared.refusal, NoWeights)
    assert "replica-0" in str(shared.refusal)
    assert "sync the weights first" in str(shared.refusal)


async def test_a_response_ends_after_max_tokens(served: Served):
    output = await served.generate(max_tokens=7, ignore_eos=True)
    assert len(output.token_ids) == len(output.log_probs) == 7
    assert output.stop_reason == "length"
    assert output.weight_versions == (WeightVersionSpan(0, 7, 1),)


async def test_a_response_ends_where_the_model_is_full(served: Served):
    output = await served.generate(max_tokens=10 * MAX_MODEL_LEN, ignore_eos=True)
    assert len(output.token_ids) == LONG
    assert output.stop_reason == "length"


async def test_a_response_ends_with_a_stop_token_and_includes_it(served: Served):
    whole = await served.generate(max_tokens=20, temperature=0.0, ignore_eos=True)
    stop = whole.token_ids[3]
    options = {"max_tokens": 20, "temperature": 0.0, "stop_token_ids": (stop,)}
    if served.replica.config.name == "sglang-on-cpu":  # which ends at both or at none
        with pytest.raises(RolloutError, match="SGLang takes one"):
            await served.generate(**options, ignore_eos=True)
        output = await served.generate(**options)
    else:
        output = await served.generate(**options, ignore_eos=True)
    assert output.stop_reason == "completed"
    assert output.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]


async def test_a_response_ends_with_the_models_end_of_sequence_token(served: Served):
    eos = next(iter(served.trainer.models.values())).config.eos_token_id
    outputs = await asyncio.gather(*[served.submit(max_tokens=LONG, temperature=2.0) for _ in range(16)])
    assert {"completed"} <= {output.stop_reason for output in outputs}
    for output in outputs:
        assert (output.stop_reason == "completed") == (output.token_ids[-1] == eos)
        assert eos not in output.token_ids[:-1]


async def test_log_probs_are_those_of_the_trainers_model_at_the_sampling_temperature(served: Served):
    for temperature in (1.0, 0.6):
        output = await served.generate(max_tokens=20, temperature=temperature, ignore_eos=True)
        assert_log_probs_fit(served, output, 1, temperature)


async def test_log_probs_are_left_out_where_not_asked_for(served: Served):
    assert (await served.generate(logprobs=False)).log_probs is None


async def test_greedy_tokens_are_those_of_the_trainers_model_in_every_version(served: Served):
    import torch

    seen = []
    for version in (1, 2, 1):
        await served.serve(version)
        model = served.trainer.models[version]
        expected = model.generate(
            torch.tensor([PROMPT]), max_new_tokens=12, min_new_tokens=12, do_sample=False, eos_token_id=None
        )[0, len(PROMPT) :].tolist()
        output = await served.generate(max_tokens=12, temperature=0.0, ignore_eos=True)
        assert output.token_ids == expected
        assert output.weight_versions == (WeightVersionSpan(0, 12, version),)
        assert_log_probs_fit(served, output, version, 1.0)
        seen.append(expected)
    assert seen[0] != seen[1]


async def test_top_k_leaves_only_the_likeliest_tokens(served: Served):
    greedy = await served.generate(max_tokens=12, temperature=0.0, ignore_eos=True)
    only_one = await served.generate(max_tokens=12, top_k=1, ignore_eos=True)
    assert only_one.token_ids == greedy.token_ids
    assert only_one.log_probs == pytest.approx([0.0] * 12)


async def test_a_seed_makes_a_response_repeatable(served: Served):
    if served.replica.config.name == "sglang-on-cpu":
        with pytest.raises(RolloutError, match="SGLang takes none per request"):
            await served.generate(seed=5)
        return
    first, again, other = [
        (await served.generate(max_tokens=16, seed=seed, ignore_eos=True)).token_ids for seed in (5, 5, 6)
    ]
    assert first == again != other


async def test_equal_prompts_get_different_responses(served: Served):
    outputs = await asyncio.gather(*[served.submit(max_tokens=16, ignore_eos=True) for _ in range(8)])
    assert len({tuple(output.token_ids) for output in outputs}) == 8


@pytest.mark.parametrize("length", [0, MAX_MODEL_LEN])
async def test_a_prompt_that_does_not_fit_is_refused_with_both_numbers(served: Served, length: int):
    with pytest.raises(RolloutError, match=rf"prompt of {length} tokens.*max_model_len={MAX_MODEL_LEN}"):
        await served.replica.server_handle.generate.remote([3] * length, _options(), f"unfit-{length}")


async def test_abort_returns_what_there_is_and_the_next_request_waits_for_resume(served: Served):
    for crowd in CROWDS:
        running = [served.submit(max_tokens=LONG, ignore_eos=True) for _ in range(crowd)]
        await served.submit(max_tokens=1, ignore_eos=True)  # those before it are in the engine, too
        await served.replica.abort_all_requests()
        outputs = await asyncio.wait_for(asyncio.gather(*running), 120)
        reasons = {output.stop_reason for output in outputs}
        if "aborted" in reasons:
            break
        await served.replica.resume_generation()
    assert "aborted" in reasons and reasons <= {"aborted", "length"}
    for output in outputs:
        assert len(output.log_probs) == len(output.token_ids)
        assert sum(span.stop - span.start for span in output.weight_versions) == len(output.token_ids)
    held = asyncio.ensure_future(served.generate(max_tokens=2, ignore_eos=True))
    await asyncio.sleep(BRIEFLY_S)
    assert not held.done()
    await served.replica.resume_generation()
    assert (await asyncio.wait_for(held, 120)).stop_reason == "length"


async def test_pause_and_resume_may_be_repeated(served: Served):
    for mode in ("keep", "keep", "abort", "abort"):
        await served.replica.pause(mode)
    for _ in range(2):
        await served.replica.resume()
    assert len((await served.generate(max_tokens=3, ignore_eos=True)).token_ids) == 3


async def test_wait_lets_requests_finish_before_it_returns(served: Served):
    running = [served.submit(max_tokens=100, ignore_eos=True) for _ in range(4)]
    await served.submit(max_tokens=1, ignore_eos=True)  # the four before it are in the engine, too
    await served.replica.pause("wait")
    outputs = await asyncio.wait_for(asyncio.gather(*running), 120)
    assert lengths(outputs) == [100] * 4


async def test_kept_requests_go_on_with_the_new_version_and_say_where_it_begins(served: Served):
    for _ in range(ATTEMPTS):
        running = [served.submit(max_tokens=LONG, ignore_eos=True) for _ in range(2)]
        await served.submit(max_tokens=1, ignore_eos=True)  # the two before it are in the engine, too
        await served.replica.pause("keep")
        served.trainer.commit(2)
        await served.replica.activate(served.trainer.arena_path, 2)
        await served.replica.resume()
        outputs = await asyncio.gather(*running)
        assert lengths(outputs) == [LONG] * 2
        if all(len(output.weight_versions) == 2 for output in outputs):
            break
        await served.serve(1)
    for output in outputs:
        old, new = output.weight_versions
        assert (old.version, new.version) == (1, 2)
        assert (old.start, old.stop, new.stop) == (0, new.start, LONG)
        first, second = (served.trainer.log_probs(version, PROMPT, output.token_ids, 1.0) for version in (1, 2))
        assert output.log_probs[: new.start] == pytest.approx(first[: new.start], abs=2e-4)
        assert output.log_probs[new.start :] == pytest.approx(second[new.start :], abs=2e-4)


async def test_kept_requests_can_be_aborted(served: Served):
    for crowd in CROWDS:
        running = [served.submit(max_tokens=LONG, ignore_eos=True) for _ in range(crowd)]
        await served.submit(max_tokens=1, ignore_eos=True)  # those before it are in the engine, too
        await served.replica.pause("keep")
        await served.replica.pause("abort")
        outputs = await asyncio.wait_for(asyncio.gather(*running), 120)
        await served.replica.resume()
        if "aborted" in {output.stop_reason for output in outputs}:
            break
    assert "aborted" in {output.stop_reason for output in outputs}
    for output in outputs:
        assert len(output.log_probs) == len(output.token_ids)
        assert sum(span.stop - span.start for span in output.weight_versions) == len(output.token_ids)
    assert len((await served.generate(max_tokens=3, ignore_eos=True)).token_ids) == 3


async def test_requests_that_come_while_weights_change_wait_and_get_the_new_version(served: Served):
    await served.replica.pause("abort")
    served.trainer.commit(2)
    activating = asyncio.ensure_future(served.replica.activate(served.trainer.arena_path, 2))
    asked = []
    while not activating.done():
        asked.append(served.submit(max_tokens=2, ignore_eos=True))
        await asyncio.sleep(0.005)
    await activating
    await served.replica.resume()
    outputs = await asyncio.wait_for(asyncio.gather(*asked), 120)
    assert outputs
    assert {output.weight_versions for output in outputs} == {(WeightVersionSpan(0, 2, 2),)}


async def test_control_calls_are_answered_while_hundreds_of_requests_are_parked(served: Served):
    import ray

    await served.replica.pause("abort")
    parked = [served.submit(max_tokens=2, ignore_eos=True) for _ in range(300)]
    await asyncio.sleep(BRIEFLY_S)
    await served.replica.health()
    answered, _ = ray.wait(parked, num_returns=1, timeout=0)
    assert not answered
    await served.replica.resume()
    assert lengths(await asyncio.gather(*parked)) == [2] * 300


async def test_a_version_that_the_arena_does_not_hold_is_an_error_and_nothing_is_served_until_one_is(served: Served):
    await served.replica.pause("abort")
    with pytest.raises(ActivationError) as failure:
        await served.replica.activate(served.trainer.arena_path, 99)
    assert (failure.value.version, failure.value.member) == (99, "replica-0")
    with pytest.raises(NoWeights, match="its last activation failed"):
        await served.replica.resume()
    with pytest.raises(NoWeights):
        await served.generate()
    await served.replica.activate(served.trainer.arena_path, 1)
    await served.replica.resume()
    output = await served.generate(max_tokens=8, ignore_eos=True)
    assert_log_probs_fit(served, output, 1, 1.0)


async def test_what_an_engine_serves_already_it_may_keep_and_computes_with_it(served: Served):
    await served.replica.pause("abort")
    checked = await served.replica.activate(served.trainer.arena_path, 1)
    assert (checked is not None and checked.tensors_kept > 0) == (served.replica.config.name == "vllm")
    await served.replica.resume()
    assert_log_probs_fit(served, await served.generate(max_tokens=8, ignore_eos=True), 1, 1.0)


async def test_sleep_does_nothing_where_the_engine_cannot(served: Served):
    await served.replica.sleep()
    await served.replica.release_kv_cache()
    assert len((await served.generate(max_tokens=3, ignore_eos=True)).token_ids) == 3
    await served.replica.wake_up()
    await served.replica.resume_kv_cache()
    await served.replica.clear_kv_cache()
    assert len((await served.generate(max_tokens=3, ignore_eos=True)).token_ids) == 3


async def test_a_request_that_its_caller_cancels_leaves_the_engine(served: Served):
    import ray

    await served.replica.pause("keep")
    ref = served.submit(max_tokens=LONG, ignore_eos=True)
    await asyncio.sleep(BRIEFLY_S)
    ray.cancel(ref)
    with pytest.raises(ray.exceptions.TaskCancelledError):
        await asyncio.wait_for(_wait(ref), 120)
    await served.replica.resume()
    assert len((await served.generate(max_tokens=3, ignore_eos=True)).token_ids) == 3


async def _wait(ref: object) -> object:
    return await ref


def _options():
    from verl.workers.rollout import SamplingOptions

    return SamplingOptions(max_tokens=4)


async def test_a_worker_that_died_leaves_its_answers_and_unfinished_tokens_with_the_server(served: Served):
    handle, sampling = served.replica.server_handle, SamplingOptions(max_tokens=5, ignore_eos=True)
    done = await handle.generate.remote(PROMPT, sampling, "done", name=CallName("worker", "one", "a", 5, 0))
    for attempt in range(ATTEMPTS):
        name = CallName("worker", attempt, "a", LONG, 0)
        begun = handle.generate.remote(PROMPT, replace(sampling, max_tokens=LONG), f"begun-{attempt}", name=name)
        await served.generate(max_tokens=5, ignore_eos=True)
        await served.replica.pause("keep")
        taken = dict(await handle.take_calls.remote("worker"))
        await served.replica.resume()
        if name not in taken or taken[name].stop_reason == "died":
            break
    if attempt == 0:
        assert taken.pop(CallName("worker", "one", "a", 5, 0)) == done
    with pytest.raises(ray.exceptions.TaskCancelledError):
        await begun
    assert list(taken) == [name]
    assert 0 < len(taken[name].token_ids) < LONG
    assert taken[name].weight_versions == (WeightVersionSpan(0, len(taken[name].token_ids), 1),)
    assert_log_probs_fit(served, taken[name], 1, 1.0)
    assert await handle.take_calls.remote("worker") == []


async def test_unfinished_tokens_are_told_with_the_version_that_sampled_each(served: Served):
    handle, sampling = served.replica.server_handle, SamplingOptions(max_tokens=LONG, ignore_eos=True)
    for attempt in range(ATTEMPTS):
        await served.serve(1)
        begun = handle.generate.remote(PROMPT, sampling, f"two-{attempt}")
        await served.submit(max_tokens=1, ignore_eos=True)
        await served.replica.pause("keep")
        served.trainer.commit(2)
        await served.replica.activate(served.trainer.arena_path, 2)
        before = await handle.tokens_since.remote({f"two-{attempt}": 0})
        await served.replica.resume()
        await served.submit(max_tokens=5, ignore_eos=True)
        since = await handle.tokens_since.remote({f"two-{attempt}": len(each.token_ids) for each in before.values()})
        whole = await begun
        if before and since:
            break
    (old,), (new,) = before.values(), since.values()
    stop = len(old.token_ids)
    assert [*old.token_ids, *new.token_ids] == whole.token_ids[: stop + len(new.token_ids)]
    assert [*old.log_probs, *new.log_probs] == pytest.approx(whole.log_probs[: stop + len(new.token_ids)])
    assert [(span.start, span.version) for span in whole.weight_versions] == [(0, 1), (stop, 2)]
    assert [(span.stop, span.version) for span in old.weight_versions] == [(stop, 1)]
    assert new.weight_versions == (WeightVersionSpan(0, len(new.token_ids), 2),)
