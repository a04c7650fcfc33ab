import numpy as np
import pytest
import torch

from tests.experimental.agent_loop.scripted_server import said
from verl.experimental.agent_loop import AgentLoopOutput, PromptTooLong, Response
from verl.experimental.agent_loop.base import fit_prompt
from verl.experimental.agent_loop.batching import to_batch
from verl.experimental.agent_loop.output import token_versions
from verl.workers.rollout.records import TokenOutput, WeightVersionSpan


def output(prompt, response, *, mask=None, log_probs=None, versions=None, turns=2, stop="completed"):
    return AgentLoopOutput(
        prompt_ids=prompt,
        response_ids=response,
        response_mask=mask or [1] * len(response),
        response_logprobs=log_probs,
        response_versions=versions or [3] * len(response),
        num_turns=turns,
        stop_reason=stop,
    )


def batch_of(*outputs, prompt_length=3, response_length=4):
    return to_batch(outputs, prompt_length=prompt_length, response_length=response_length, pad_token_id=9)


def test_prompts_are_padded_on_the_left_and_responses_on_the_right():
    data = batch_of(
        output([1, 2], [5, 6, 7], mask=[1, 0, 1], log_probs=[-1.0, 0.0, -2.0], versions=[3, -1, 4], turns=4),
        output([1, 2, 3], [], log_probs=[], stop="aborted"),
    )
    rows = {key: data.batch[key].tolist() for key in data.batch.keys()}  # noqa: SIM118 - a TensorDict iterates rows
    assert rows == {
        "prompts": [[9, 1, 2], [1, 2, 3]],
        "responses": [[5, 6, 7, 9], [9, 9, 9, 9]],
        "response_mask": [[1, 0, 1, 0], [0, 0, 0, 0]],
        "rollout_versions": [[3, -1, 4, -1], [-1, -1, -1, -1]],
        "input_ids": [[9, 1, 2, 5, 6, 7, 9], [1, 2, 3, 9, 9, 9, 9]],
        "attention_mask": [[0, 1, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]],
        "position_ids": [[0, 0, 1, 2, 3, 4, 4], [0, 1, 2, 2, 2, 2, 2]],
        "rollout_log_probs": [[-1.0, 0.0, -2.0, 0.0], [0.0, 0.0, 0.0, 0.0]],
    }
    assert data.batch["rollout_log_probs"].dtype == torch.float32
    assert {data.batch[key].dtype for key in rows if key != "rollout_log_probs"} == {torch.int64}
    assert data.non_tensor_batch["__num_turns__"].tolist() == [4, 2]
    assert data.non_tensor_batch["__stop_reason__"].tolist() == ["completed", "aborted"]


def test_a_generated_padding_token_is_attended_to():
    data = batch_of(output([9], [9, 9]))
    assert data.batch["attention_mask"].tolist() == [[0, 0, 1, 1, 1, 0, 0]]


def test_without_log_probs_the_batch_has_none():
    assert "rollout_log_probs" not in batch_of(output([1], [2])).batch.keys()  # noqa: SIM118


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([output([1] * 4, [2])], "sample 0: a prompt of 4 tokens where at most 3 fit"),
        ([output([1], [2]), output([1], [2] * 5)], "sample 1: a response of 5 tokens where at most 4 fit"),
        ([output([1], [2]), output([1], [2], log_probs=[0.0])], "only some samples have log-probs; without: [0]"),
    ],
)
def test_trajectories_that_do_not_fit_together_are_an_error(outputs, message):
    with pytest.raises(ValueError) as caught:
        batch_of(*outputs)
    assert message in str(caught.value)


def test_lists_of_different_lengths_are_an_error():
    with pytest.raises(ValueError, match="'response_ids': 2, 'response_mask': 1"):
        output([1], [2, 3], mask=[1])


def test_a_response_collects_generated_and_inserted_tokens():
    response = Response(10)
    response.add_generated(said([1, 2], version=5))
    response.add_inserted([7])
    response.add_generated(said([3], version=6))
    assert response.room == 6
    collected = response.output([0], num_turns=4, stop_reason="completed", metrics={})
    assert collected.response_ids == [1, 2, 7, 3]
    assert collected.response_mask == [1, 1, 0, 1]
    assert collected.response_versions == [5, 5, -1, 6]
    assert collected.response_logprobs == [-0.5, -0.5, 0.0, -0.5]


def test_the_oldest_version_that_a_token_attends_to_reaches_the_batch():
    response = Response(10)
    response.add_generated(said([1, 2], version=5))
    response.add_inserted([7])
    response.add_generated(said([3], version=6).on_cache_of(5))
    collected = response.output([0], num_turns=4, stop_reason="completed", metrics={})
    assert collected.response_kv_versions == [5, 5, -1, 5]
    sizes = {"prompt_length": 1, "response_length": 5, "pad_token_id": 0}
    assert "rollout_kv_versions" not in to_batch([collected], **sizes).batch
    assert to_batch([collected], **sizes, kv_versions=True).batch["rollout_kv_versions"].tolist() == [[5, 5, -1, 5, -1]]


def test_a_loop_that_gives_versions_alone_gets_those_of_caches_from_its_servers():
    generated = said([1, 2], version=6).on_cache_of(4)
    own = AgentLoopOutput(prompt_ids=[0], response_ids=[1, 2], response_mask=[1, 1], response_versions=[6, 6])
    assert own.with_versions([generated]).response_kv_versions == [4, 4]


def test_one_part_without_log_probs_leaves_the_response_without():
    response = Response(10)
    response.add_generated(said([1], log_prob=None))
    response.add_inserted([7])
    response.add_generated(said([2]))
    assert response.output([0], num_turns=4, stop_reason="length", metrics={}).response_logprobs is None


@pytest.mark.parametrize("spans", [(), ((0, 1),), ((0, 2), (3, 4)), ((1, 3),), ((0, 4),)])
def test_version_spans_that_do_not_cover_the_tokens_are_an_error(spans):
    broken = TokenOutput([1, 2, 3], None, "completed", tuple(WeightVersionSpan(a, b, 1) for a, b in spans))
    with pytest.raises(ValueError, match="do not cover 3 tokens"):
        token_versions(broken)


@pytest.mark.parametrize(("truncation", "expected"), [("left", [3, 4, 5]), ("right", [1, 2, 3]), ("middle", [1, 4, 5])])
def test_a_long_prompt_is_cut_as_configured(truncation, expected):
    assert fit_prompt([1, 2, 3, 4, 5], 3, truncation) == expected
    assert fit_prompt([1, 2, 3], 3, truncation) == [1, 2, 3]


def test_a_long_prompt_is_an_error_where_that_is_configured():
    with pytest.raises(PromptTooLong, match="5 tokens exceeds data.max_prompt_length=3"):
        fit_prompt([1, 2, 3, 4, 5], 3, "error")


def routes(*experts):
    """Of tokens, for one layer that takes two experts."""
    return np.array([[[expert, expert + 10]] for expert in experts], dtype=np.uint8)


def spoken(tokens, experts=None):
    return TokenOutput(tokens, None, "completed", (WeightVersionSpan(0, len(tokens), 1),), experts)


def test_experts_stand_at_their_tokens_and_no_token_has_those_of_another():
    first = AgentLoopOutput(
        prompt_ids=[1, 2], response_ids=[5, 6], response_mask=[1, 1], routed_experts=routes(1, 2, 3)
    )
    data = batch_of(first, output([1, 2, 3], [4]))
    found = data.batch["routed_experts"]
    assert (found.dtype, found.shape) == (torch.int16, (2, 7, 1, 2))
    assert found[0, :, 0].tolist() == [[-1, -1], [1, 11], [2, 12], [3, 13], [-1, -1], [-1, -1], [-1, -1]]
    assert found[1].unique().tolist() == [-1]
    assert "routed_experts" not in batch_of(output([1], [2])).batch.keys()  # noqa: SIM118


def test_a_token_keeps_the_experts_that_it_had_when_it_was_read_first():
    response = Response(8)
    response.add_generated(spoken([5, 6], routes(1, 2, 3)))  # a prompt of two, and the first of the response
    response.add_inserted([7])
    response.add_generated(spoken([8], routes(91, 92, 93, 4, 5)))  # all read once more, and two others
    found = response.output([1, 2], num_turns=4, stop_reason="completed", metrics={})
    assert np.array_equal(found.routed_experts, routes(1, 2, 3, 4, 5))


def test_experts_of_more_tokens_than_there_are_are_an_error():
    with pytest.raises(ValueError, match=r"routed_experts of the shape \(3, 1, 2\) for 2 tokens"):
        AgentLoopOutput(prompt_ids=[1], response_ids=[5], response_mask=[1], routed_experts=routes(1, 2, 3))
