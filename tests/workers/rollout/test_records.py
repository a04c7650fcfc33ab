"""Records, registry, configuration checks, core assignment: nothing is started."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file

from verl.checkpoint_engine.errors import BackendUnavailable
from verl.utils.config import ConfigError
from verl.workers.config import HFModelConfig, RolloutConfig, SamplingConfig
from verl.workers.config.model import LoRAConfig
from verl.workers.rollout import RolloutReplica, RolloutReplicaRegistry, SamplingOptions
from verl.workers.rollout import registry as registry_module
from verl.workers.rollout.engine import eos_token_ids
from verl.workers.rollout.errors import ReplicaDied
from verl.workers.rollout.registry import require_rollout
from verl.workers.rollout.vllm.adapter import adapter_files, engine_rank
from verl.workers.rollout.vllm.cores import assign_cores, omp_threads_bind


def test_training_options_come_from_the_rollout_section():
    rollout = RolloutConfig(temperature=0.7, top_k=5, top_p=0.9, ignore_eos=True)
    assert SamplingOptions.for_training(rollout, max_tokens=9) == SamplingOptions(
        max_tokens=9, temperature=0.7, top_k=5, top_p=0.9, ignore_eos=True, logprobs=True
    )
    assert SamplingOptions.for_training(RolloutConfig(do_sample=False), max_tokens=9).temperature == 0


def test_validation_is_greedy_unless_told_to_sample():
    greedy = RolloutConfig(val_kwargs=SamplingConfig(temperature=0.5))
    assert SamplingOptions.for_validation(greedy, max_tokens=3).temperature == 0
    sampled = RolloutConfig(val_kwargs=SamplingConfig(temperature=0.5, do_sample=True, top_k=3))
    options = SamplingOptions.for_validation(sampled, max_tokens=3)
    assert (options.temperature, options.top_k, options.logprobs) == (0.5, 3, False)


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.1}])
def test_impossible_sampling_options_are_refused(bad: dict[str, float]):
    with pytest.raises(ValueError, match=next(iter(bad))):
        SamplingOptions(**({"max_tokens": 1} | bad))


def test_errors_survive_pickling():
    error = pickle.loads(pickle.dumps(ReplicaDied("replica-0 died: why")))
    assert str(error) == "replica-0 died: why"


def test_an_unknown_engine_is_an_error_with_the_nearest_name_and_all_names():
    with pytest.raises(
        ConfigError, match=r"rollout.name='vlm' is not registered. Did you mean 'vllm'. Known: .*hf, .*vllm"
    ):
        RolloutReplicaRegistry.get("vlm")


def test_an_engine_whose_package_is_missing_names_the_remedy(monkeypatch: pytest.MonkeyPatch):
    absent = registry_module.Builtin(
        target="x:Y", package="surely_not_installed", remedy="pip install 'verl-sync[cuda]'"
    )
    monkeypatch.setitem(registry_module.BUILTIN, "absent", absent)
    with pytest.raises(BackendUnavailable, match=r"rollout.name=absent needs.*surely_not_installed.*verl-sync\[cuda\]"):
        RolloutReplicaRegistry.get("absent")


def test_an_engine_of_the_users_own_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RolloutReplicaRegistry, "functions", {})

    @RolloutReplicaRegistry.register("mine")
    class Mine(RolloutReplicaRegistry.get("hf")):
        pass

    assert RolloutReplicaRegistry.get("mine") is Mine
    assert "mine" in RolloutReplicaRegistry.names()
    with pytest.raises(ConfigError, match="rollout.name='mine' is already registered by"):
        RolloutReplicaRegistry.register("mine")(RolloutReplicaRegistry.get("hf"))


class TakesNoRequestId:
    async def start(self): ...
    async def generate(self, prompt_ids, sampling): ...


def test_an_engine_of_the_users_own_is_refused_before_work_starts_with_what_it_lacks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RolloutReplicaRegistry, "functions", {})
    base = RolloutReplicaRegistry.get("hf")

    @RolloutReplicaRegistry.register("mine")
    class Mine(base):  # type: ignore[misc, valid-type]
        engine = f"{__name__}:TakesNoRequestId"

    with pytest.raises(
        ConfigError, match=r"rollout.name=mine: .*TakesNoRequestId.generate\(self, prompt_ids, sampling\)"
    ):
        require_rollout("mine")
    Mine.engine = "surely_not_installed:Engine"  # where the server runs it may be
    require_rollout("mine")
    Mine.check_config = lambda self, more: None
    with pytest.raises(ConfigError, match=r"rollout.name=mine: .*check_config.* has check_config\(self\)"):
        require_rollout("mine")
    RolloutReplicaRegistry.functions["mine"] = TakesNoRequestId
    with pytest.raises(ConfigError, match="TakesNoRequestId is no subclass of .*RolloutReplica"):
        require_rollout("mine")


def test_looking_up_vllm_does_not_import_it():
    code = (
        "import sys; from verl.workers.rollout import RolloutReplicaRegistry as R; R.get('vllm');"
        "sys.exit('vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def replica(engine: str, model: HFModelConfig | None = None, **config: object) -> RolloutReplica:
    return RolloutReplicaRegistry.get(engine)(
        replica_rank=0,
        config=RolloutConfig(**({"name": engine, "max_model_len": 16} | config)),  # type: ignore[arg-type]
        model=model or HFModelConfig(path="/nowhere"),
    )


def test_the_longest_sequence_must_be_known():
    with pytest.raises(ConfigError, match="rollout.prompt_length"):
        replica("hf", max_model_len=None, prompt_length=3)
    replica("hf", max_model_len=None, prompt_length=3, response_length=4)


def test_transformers_cannot_be_spread_over_ranks():
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=1, not 2"):
        replica("hf", tensor_model_parallel_size=2)


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swap_spase": 1}, "vLLM has no argument 'swap_spase'"),
        ({"max_loggprobs": 1}, "Did you mean 'max_logprobs'"),
        ({"dtype": "float16"}, "engine_kwargs.vllm.dtype is decided by rollout.dtype"),
    ],
)
def test_bad_arguments_for_vllm_are_found_on_the_driver(arguments: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        replica("vllm", engine_kwargs={"vllm": arguments})


@pytest.mark.vllm
def test_a_rank_for_which_vllm_has_no_room_is_refused_where_adapters_are_sent_alone():
    with pytest.raises(ConfigError, match=r"lora_rank=513: vLLM loads adapters of ranks up to 512; .*lora.merge=true"):
        replica("vllm", HFModelConfig(path="/nowhere", lora_rank=513, lora=LoRAConfig(merge=False)))


@pytest.mark.parametrize(
    ("cores", "replicas", "ranks", "expected"),
    [
        ([0, 1], 1, 1, ["1"]),
        ([0, 1], 1, 2, ["0|1"]),
        ([0, 1], 2, 1, ["0", "1"]),
        ([0, 1], 2, 2, ["0|1", "0|1"]),
        ([0, 1], 3, 1, ["0", "1", "0"]),
        ([3], 1, 1, ["3"]),
        ([4, 5, 6, 7, 8, 9, 10], 2, 1, ["5,6", "8,9"]),
        ([0, 1, 2, 3], 1, 2, ["1|3"]),
    ],
)
def test_ranks_divide_the_cores_and_leave_some_to_the_rest(
    cores: list[int], replicas: int, ranks: int, expected: list[str]
):
    found = [
        omp_threads_bind(assign_cores(cores, replicas=replicas, ranks=ranks, replica=index))
        for index in range(replicas)
    ]
    assert found == expected


def test_end_of_sequence_tokens_are_collected_from_every_file(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert eos_token_ids(HFModelConfig(path=str(tmp_path))) == (7,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert eos_token_ids(HFModelConfig(path=str(tmp_path))) == (7, 9)


@pytest.mark.parametrize(
    "content", ["{", "[]", '{"eos_token_id": "9"}', '{"eos_token_id": [null]}', '{"eos_token_id": 1.5}']
)
def test_a_file_that_names_no_end_tokens_is_named(tmp_path: Path, content: str):
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json is damaged"):
        eos_token_ids(HFModelConfig(path=str(tmp_path)))


def test_adapters_become_files_that_peft_reads_and_are_gone_afterwards(tmp_path: Path):
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = {f"{layer}.lora_A.weight": torch.ones(3, 8), f"{layer}.lora_B.weight": torch.ones(4, 3).bfloat16()}
    model = HFModelConfig(path="unused", lora_rank=3, lora_alpha=12)
    with adapter_files(tmp_path, tensors, model) as directory:
        config = LoraConfig.from_pretrained(directory)
        assert (config.r, config.lora_alpha, config.target_modules) == (3, 12, {"q_proj"})
        found = load_file(directory / "adapter_model.safetensors")
        assert found.keys() == tensors.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("rank", "reserved"), [(1, 1), (2, 8), (16, 16), (17, 32), (512, 512)])
def test_vllm_reserves_memory_for_the_next_rank_that_it_knows(rank: int, reserved: int):
    assert engine_rank(rank) == reserved
