"""Agent loops written for verl."""

import pytest

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput
from verl.experimental.agent_loop.registry import LoopEntry, constructor_arguments, loop_factory
from verl.utils.config import ConfigError
from verl.workers.config import PPOConfig
from verl.workers.rollout.records import SamplingOptions, TokenOutput, WeightVersionSpan


class TwoTurns(AgentLoopBase):
    def __init__(self, trainer_config, server_manager, tokenizer, processor, **kwargs):
        super().__init__(trainer_config, server_manager, tokenizer, processor, **kwargs)
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.get("response_length")

    async def run(self, sampling_params, **kwargs):
        first = await self.server_manager.generate(
            request_id="r", prompt_ids=[1], sampling_params=sampling_params, image_data=None
        )
        second = await self.server_manager.generate(request_id="r", prompt_ids=[1], sampling_params=sampling_params)
        ids = [*first.token_ids, 9, *second.token_ids]
        return AgentLoopOutput(
            prompt_ids=[1],
            response_ids=ids[: self.response_length],
            response_mask=[1, 1, 0, 1][: self.response_length],
            response_logprobs=[*first.log_probs, 0.0, *second.log_probs],
            num_turns=4,
            metrics=AgentLoopMetrics(generate_sequences=0.5),
            reward_score=0.75,
            extra_fields={"turn_scores": [1.0]},
        )


class NoColumns(AgentLoopBase):
    async def run(self, sampling_params): ...


class OtherNames(AgentLoopBase):
    def __init__(self, config, servers): ...

    async def run(self, sampling_params, **kwargs): ...


def generated(version, *tokens):
    return TokenOutput(list(tokens), [-1.0] * len(tokens), "completed", (WeightVersionSpan(0, len(tokens), version),))


class Scripted:
    def __init__(self, *outputs):
        self.outputs = list(outputs)
        self.asked = []

    async def generate(self, request_id, prompt_ids, sampling_params, image_data=None):
        self.asked.append(sampling_params)
        return self.outputs.pop(0)


async def test_a_loop_written_for_verl_runs():
    outputs = generated(3, 5, 6), generated(4, 7)
    servers = Scripted(*outputs)
    make = loop_factory("mine", {"mine": LoopEntry(TwoTurns)})
    loop = make(**constructor_arguments(PPOConfig(), servers, None))
    sampling = SamplingOptions(max_tokens=8, temperature=0.5)
    output = await loop.run(sampling.as_dict(), raw_prompt=[])
    assert [SamplingOptions.of(asked) for asked in servers.asked] == [sampling] * 2
    assert servers.asked[0]["temperature"] == 0.5
    assert output.numbers == {"generate_sequences": 0.5, "tool_calls": 0.0}
    assert output.with_versions(outputs).response_versions == [3, 3, -1, 4]
    assert output.with_versions([generated(3, 8)]).response_versions == [-1] * 4


@pytest.mark.parametrize(
    ("loop", "message"),
    [
        (NoColumns, r"run\(self, sampling_params\) cannot take"),
        (OtherNames, r"OtherNames\(config, servers\) cannot take \(trainer_config, server_manager, .*"),
    ],
)
def test_a_loop_that_cannot_be_called_is_an_error_before_anything_starts(loop, message):
    with pytest.raises(ConfigError, match=f"agent loop 'mine': .*{message}"):
        loop_factory("mine", {"mine": LoopEntry(loop)})


@pytest.mark.parametrize(
    ("params", "options"),
    [
        ({"max_tokens": 3, "logprobs": True, "repetition_penalty": 1.0}, SamplingOptions(max_tokens=3)),
        ({"max_tokens": 3, "logprobs": 0, "top_p": 0.5}, SamplingOptions(max_tokens=3, top_p=0.5)),
        ({"max_tokens": 3, "stop_token_ids": [1]}, SamplingOptions(max_tokens=3, stop_token_ids=(1,), logprobs=False)),
    ],
)
def test_sampling_parameters_may_be_a_dict_of_verls(params, options):
    assert SamplingOptions.of(params) == options


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"max_tokens": 3, "repetition_penalty": 1.1}, "repetition_penalty.*not supported"),
        ({"max_tokens": 3, "stop": ["x"]}, "stop.*not supported"),
        ({"temperature": 1.0}, "lack max_tokens"),
    ],
)
def test_sampling_parameters_that_no_engine_gets_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingOptions.of(params)
