"""Interactions that nobody would hear are told before a run."""

import json

import pytest

from tests.trainer.config.launches import Launch, check
from verl.experimental.agent_loop import AgentLoopBase, AgentLoopManager, ToolAgentLoop
from verl.trainer.config.loader import load_config
from verl.trainer.ppo.data import build_dataloaders, unheard_interactions
from verl.utils.config import ConfigError

MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
TALKS = {"extra_info": {"interaction_kwargs": {"name": "recorded"}}}
HERE = "tests.experimental.agent_loop.test_interaction_check"


class Derived(ToolAgentLoop):
    pass


class Own(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        raise NotImplementedError


@pytest.fixture
def overrides(tmp_path):
    """Of a job with such samples, with a file of interactions or without."""

    def with_samples(*samples, file=True):
        rows = [
            {
                "data_source": "builtin/arithmetic",
                "prompt": [{"role": "user", "content": "1+1="}],
                "reward_model": {"ground_truth": "2"},
            }
            | sample
            for sample in samples
        ]
        (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
        listed = "interaction: [{class_name: tests.experimental.agent_loop.test_interactions.Recorded}]"
        (tmp_path / "partners.yaml").write_text(listed)
        return [
            f"data.train_files={tmp_path / 'data.jsonl'}",
            f"data.val_files={tmp_path / 'data.jsonl'}",
            "data.train_batch_size=1",
            "trainer.n_gpus_per_node=1",
            "trainer.device=cpu",
            "actor_rollout_ref.actor.ppo_mini_batch_size=1",
            *([f"{MULTI_TURN}.interaction_config_path={tmp_path / 'partners.yaml'}"] if file else []),
        ]

    return with_samples


@pytest.fixture
def warnings(tokenizer):
    def found(overrides):
        config = load_config(overrides)
        return unheard_interactions(config, build_dataloaders(config, tokenizer, AgentLoopManager), AgentLoopManager)

    return found


@pytest.mark.parametrize("agent", [None, f"{HERE}:Derived", "tool_agent"])
def test_samples_that_are_answered_are_nothing_to_warn_of(overrides, warnings, agent):
    assert warnings([*overrides(TALKS | {"agent_name": agent}), f"{MULTI_TURN}.enable=true"]) == []


def test_a_run_without_interactions_has_nothing_to_warn_of(overrides, warnings):
    assert warnings(overrides({}, file=False)) == []


@pytest.mark.parametrize(
    ("agent", "remedy"), [(None, rf"{MULTI_TURN}\.enable=true"), ("single_turn_agent", "agent_name=tool_agent")]
)
def test_samples_that_would_be_generated_without_their_partner_are_refused(overrides, warnings, agent, remedy):
    asked = overrides({}, TALKS | {"agent_name": agent})
    with pytest.raises(ConfigError, match=rf"line 2 of .*: no interaction would answer the 2 samples .*\({remedy}\)"):
        warnings(asked)


@pytest.mark.parametrize("sample", [{}, {"agent_name": f"{HERE}:Own"}, TALKS | {"agent_name": f"{HERE}:Own"}])
def test_a_file_that_no_loop_in_use_reads_is_told(overrides, warnings, sample):
    [told] = warnings(overrides(sample))
    assert "partners.yaml is not read" in told
    assert sample.get("agent_name", "single_turn_agent") in told


@pytest.mark.parametrize("sample", [TALKS, TALKS["extra_info"], TALKS | {"agent_name": "tool_agent"}])
def test_samples_that_name_a_partner_without_a_file_are_told(overrides, warnings, sample):
    [told] = warnings(overrides(sample, {}, file=False))
    assert told.startswith("no interaction answers 2 samples")  # of both splits


def test_what_a_loop_of_ones_own_does_with_them_is_its_own_affair(overrides, warnings):
    assert warnings(overrides(TALKS | {"agent_name": f"{HERE}:Own"}, file=False)) == []


def test_check_says_it_too(overrides):
    code, out, told = check(Launch("", "hybrid", " ".join(overrides(TALKS, file=False))))
    assert code == 0, told
    assert "warning: no interaction answers 2 samples" in out
    code, _, errors = check(Launch("", "hybrid", " ".join(overrides(TALKS))))
    assert code == 2
    assert "no interaction would answer the 2 samples" in errors[0]
