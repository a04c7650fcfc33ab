"""Which teacher is asked about what, by how many engines, and what becomes of its answers."""

from math import inf

import numpy as np
import pytest

from verl.protocol import DataProto
from verl.trainer.config.checks.teachers import distillation
from verl.trainer.config.loader import load_config
from verl.trainer.fleet.counts import num_teacher_engines
from verl.trainer.fleet.teachers import Teachers, padded_scores
from verl.utils.config import ConfigError
from verl.utils.device import any_device
from verl.workers.teacher.scores import Scores

TEACHERS = "distillation.teacher_models"


def config(*keys):
    return load_config(["distillation.enabled=true", "distillation.nnodes=1", *keys])


def two(*keys):
    own = [
        f"{TEACHERS}.{name}.{key}"
        for name, source in (("one", "math"), ("two", "code"))
        for key in (f"key={source}", "model_path=builtin:tiny-qwen2", "num_replicas=1")
    ]
    return config(*own, "data.max_prompt_length=64", "data.max_response_length=64", *keys)


def samples(**columns):
    return DataProto.from_dict(non_tensors={name: np.array(each, dtype=object) for name, each in columns.items()})


def test_a_teacher_that_is_alone_has_every_sample():
    alone = Teachers(config(f"{TEACHERS}.teacher_model.model_path=builtin:tiny-qwen2"), "cpu")
    assert alone.routes(samples(data_source=["a", "b"])) == ["teacher_model", "teacher_model"]


def test_of_several_each_has_the_samples_with_its_key():
    assert Teachers(two(), "cpu").routes(samples(data_source=["code", "math", "code"])) == ["two", "one", "two"]
    by_ability = Teachers(two("distillation.teacher_key=ability"), "cpu")
    assert by_ability.routes(samples(data_source=["x", "x"], ability=["math", "code"])) == ["one", "two"]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"data_source": ["math", "poems"]}, r"no teacher has the key poems, .* data_source of samples \(code, math\)"),
        ({"ability": ["math"]}, "distillation.teacher_key=data_source: samples have no such column"),
    ],
)
def test_a_sample_without_a_teacher_is_an_error(columns, said):
    with pytest.raises(ConfigError, match=said):
        Teachers(two(), "cpu").routes(samples(**columns))


@pytest.mark.parametrize(
    ("keys", "device", "engines"),
    [
        (["inference.tensor_model_parallel_size=2"], "cuda", 4),
        (["inference.tensor_model_parallel_size=4"], "cuda", 2),
        (["num_replicas=3", "inference.data_parallel_size=2"], "cuda", 6),
        (["inference.tensor_model_parallel_size=2"], "cpu", 1),
        (["num_replicas=2"], "cpu", 2),
    ],
)
def test_a_teacher_has_the_engines_that_its_devices_allow(keys, device, engines):
    of_run = config(*(f"{TEACHERS}.t.{key}" for key in ("model_path=x", *keys)))
    assert num_teacher_engines(of_run, of_run.distillation.teachers["t"], device) == engines


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["distillation.nnodes=0"], "needs distillation.nnodes, 1 or more"),
        ([f"{TEACHERS}.two.key=null"], "two.key must select its samples"),
        ([f"{TEACHERS}.two.key=math"], "one.key=math is another teacher's, too"),
        ([f"{TEACHERS}.two.num_replicas=0"], "two.num_replicas must say how many"),
        ([f"{TEACHERS}.teacher_model.model_path=x"], "teacher_model is the name of a single teacher"),
        ([f"{TEACHERS}.one.inference.expert_parallel_size=4"], "expert_parallel_size=4 is neither 1 nor tensor_model"),
        ([f"{TEACHERS}.one.inference.engine_kwargs.sglang.x=1"], "engine_kwargs.sglang: teachers are served by vllm"),
        (["trainer.device=cuda"], "are 8 devices, and the replicas of distillation.teacher_models have 4"),
        (
            ["trainer.device=cuda", f"{TEACHERS}.one.inference.tensor_model_parallel_size=3"],
            "tensor_model_parallel_size=3 does not divide distillation.n_gpus_per_node=8",
        ),
    ],
)
def test_what_does_not_fit_is_told_by_name(keys, said):
    with any_device():
        assert any(said in problem for problem in distillation(two(*keys)))


def test_two_teachers_fit():
    assert list(distillation(two())) == []
    with any_device():
        fitting = two("trainer.device=cuda", "distillation.n_gpus_per_node=4")
        assert list(distillation(fitting)) == []


def test_verls_defaults_of_a_teacher_that_is_not_used_are_no_teacher():
    unused = two(f"{TEACHERS}.teacher_model.inference.tensor_model_parallel_size=2")
    assert list(unused.distillation.teachers) == ["one", "two"]


def test_answers_stand_where_their_tokens_do_and_strange_tokens_are_none():
    scores = {
        1: Scores(
            np.array([-1.0, -2.0], dtype=np.float32),
            np.array([[3, 99], [4, 5]], dtype=np.int32),
            np.array([[-0.5, -1.0], [-0.25, -2.0]], dtype=np.float32),
        )
    }
    log_probs, candidates, of_candidates = padded_scores(scores, (2, 3), vocabulary=99)
    assert log_probs.tolist() == [[0, 0, 0], [-1, -2, 0]]
    assert candidates[1].tolist() == [[3, 0], [4, 5], [0, 0]]
    assert of_candidates[1].tolist() == [[-0.5, -inf], [-0.25, -2.0], [0, 0]]
    assert not candidates[0].any()
    assert not of_candidates[0].any()
