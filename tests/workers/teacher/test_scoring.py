"""A real vLLM engine as a teacher, against transformers with the same weights."""

import numpy as np
import pytest
import ray
import torch
from transformers import AutoModelForCausalLM

from verl.utils.builtin import make_tiny_model
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.engine import EngineSpec
from verl.workers.rollout.vllm.replica import VLLMReplica
from verl.workers.teacher.server import TeacherServer

pytestmark = pytest.mark.vllm
SEQUENCES = ([5, 17, 3, 60, 9, 33, 2], [8, 8, 40], list(range(3, 90)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("teacher") / "tiny")


@torch.no_grad()
def expected(model, token_ids):
    """Log-probs of each token's whole distribution, [n - 1, V]."""
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return network(torch.tensor([token_ids])).logits[0, :-1].float().log_softmax(-1)


@pytest.mark.parametrize(("candidates", "parallel"), [(0, 1), (24, 2)])
def test_an_engine_says_what_transformers_says(ray_cluster, model, candidates, parallel):
    """More candidates than the 20 that vLLM tells about by default."""
    config = RolloutConfig(
        dtype="float32",
        tensor_model_parallel_size=parallel,
        load_format="auto",
        max_model_len=128,
        cpu_kvcache_gib=0.05,
        max_num_seqs=4,
        max_num_batched_tokens=128,
    )
    hf = HFModelConfig(path=str(model))
    spec = EngineSpec(name="teacher-0", engine="", config=config, model=hf, device="cpu", max_model_len=128, seed=0)
    environment = VLLMReplica(replica_rank=0, config=config, model=hf).env_vars()
    options = {"num_cpus": 0, "runtime_env": {"env_vars": environment}}
    actor = ray.remote(TeacherServer).options(**options).remote(spec, candidates)
    try:
        ray.get(actor.start.remote(), timeout=600)
        counts = [3, 2, 80]
        asked = [actor.score.remote(list(ids), count) for ids, count in zip(SEQUENCES, counts, strict=True)]
        for ids, count, scores in zip(SEQUENCES, counts, ray.get(asked, timeout=300), strict=True):
            whole = expected(model, ids)[-count:]
            own = whole.gather(-1, torch.tensor(ids[-count:])[:, None])[:, 0]
            np.testing.assert_allclose(scores.log_probs, own.numpy(), atol=1e-4)
            assert scores.candidates.shape == (count, candidates)
            top = whole.topk(candidates).values if candidates else whole[:, :0]
            np.testing.assert_allclose(scores.candidate_log_probs, top.numpy(), atol=1e-4)
            named = whole.gather(-1, torch.from_numpy(scores.candidates.copy()).long())
            np.testing.assert_allclose(scores.candidate_log_probs, named.numpy(), atol=1e-4)
    finally:
        ray.get(actor.shutdown.remote(), timeout=300)
        ray.kill(actor)
