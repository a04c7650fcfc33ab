"""Three tiers: `make check`, `make test` and `make test-all`.

`make check` runs what is quick and needs no engine, no Ray, no several processes. What needs more gets the marker `job`
here: from its fixtures, its markers, or its place. With `-m "not job"` the rest has to keep to a budget of processor
time, which other work on the machine does not use up: a test that takes its file beyond it fails, and so does one that
connects to Ray.

`make test` adds the jobs that get the marker `once` here: each capability once, with its real parts. `make test-all`
adds the others; long matrices among them run in parts (tests/cells.py).
"""

from __future__ import annotations

import resource
import sys
from collections import Counter

import pytest

MAKE_TEST = "not job or once"
FIXTURES = {"ray_cluster", "warm", "ranks", "environments", "resources_servers"}
MARKERS = ("vllm", "sglang", "e2e", "alone", "gpu", "npu")
PLACES = (
    "tests/checkpoint_engine/conformance/test_action.py::test_a_server",
    "tests/checkpoint_engine/conformance/test_faults.py",
    "tests/checkpoint_engine/conformance/test_faults_of_sglang.py",
    "tests/checkpoint_engine/conformance/test_verdicts.py",
    "tests/benchmarks/",
    "tests/distributions/",
    "tests/e2e/",
    "tests/models/",
    "tests/originals/",
    "tests/weight_sync/",
    "tests/checkpoint_engine/parameter_server/test_failures.py",
    "tests/checkpoint_engine/parameter_server/test_server.py",
    "tests/checkpoint_engine/publisher/test_random_pushes.py",
    "tests/checkpoint_engine/test_chain.py",
    "tests/checkpoint_engine/publisher/test_rescue.py::test_a_publisher_that_is_killed_leaves_no_server_paused",
    "tests/checkpoint_engine/publisher/test_rescue.py::test_a_server_of_another_host_serves_what_it_holds_or_refuses_to",
    "tests/checkpoint_engine/publisher/test_rescue.py::test_an_update_of_two_ranks_that_is_killed_while_it_loads",
    "tests/checkpoint_engine/publisher/test_rescue.py::test_files_that_are_not_those_of_the_update_are_not_loaded",
    "tests/checkpoint_engine/test_collective.py",
    "tests/checkpoint_engine/test_collective_deltas.py::test_whatever_happens_in_whatever_order",
    "tests/checkpoint_engine/test_contract.py",
    "tests/checkpoint_engine/test_deltas.py",
    "tests/checkpoint_engine/test_failures.py",
    "tests/checkpoint_engine/test_kimi_ckpt_engine.py",
    "tests/checkpoint_engine/test_late_nodes.py",
    "tests/checkpoint_engine/test_leaving_nodes.py",
    "tests/checkpoint_engine/test_naive_hosts.py",
    "tests/checkpoint_engine/test_namespaces.py",
    "tests/checkpoint_engine/test_strangers.py",
    "tests/docs/test_parameter_server_example.py",
    "tests/experimental/agent_loop/test_openenv.py",
    "tests/tenants/test_tinker_client.py",
    "tests/trainer/fleet/test_session.py",
    "tests/trainer/ppo/test_even_batches.py::test_three_ranks_learn",
    "tests/utils/test_tracking_services.py",
    "tests/workers/engine/test_together.py::test_decoded",
    "tests/workers/engine/test_together.py::test_gradients",
    "tests/workers/engine/test_together.py::test_log_probs",
    "tests/workers/rollout/test_leftovers.py",
)
"""How names of tests begin that start members, ranks or runs as processes, or are long."""
ONCE: dict[str, tuple[str, ...]] = {
    "a hybrid run whose vLLM generates with the weights of every step, its files, metrics and reports": (
        "tests/e2e/test_training.py::test_vllm_has_the_trainers_weights_on_every_step",
        "tests/e2e/test_training.py::test_every_sync_leaves_a_report_whose_phases_add_up",
        "tests/e2e/test_training.py::test_metrics_have_verls_names",
        "tests/e2e/test_training.py::test_the_console_shows_progress_steps_and_a_summary_and_no_noise",
        "tests/e2e/test_training.py::test_a_killed_driver_takes_every_process_and_its_shared_memory_along",
        "tests/e2e/test_training.py::test_a_killed_run_goes_on_where_its_last_checkpoint_was",
        "tests/e2e/test_training.py::test_the_run_before_the_kill_keeps_its_place_in_the_metrics",
        "tests/e2e/test_training.py::test_each_sync_and_each_span_of_the_timeline_is_told_once_after_a_resume",
        "tests/e2e/test_training.py::test_only_as_many_checkpoints_as_configured_are_kept",
        "tests/e2e/test_training.py::test_the_hugging_face_export_loads_in_transformers",
    ),
    "an engine and a trainer that agree bit for bit": ("tests/e2e/test_exact.py",),
    "a run that generates one step ahead": ("tests/e2e/test_one_step_off.py::test_what_the_trainer_learns_from_is",),
    "a fully asynchronous run": (
        "tests/e2e/test_fully_async.py::test_responses_that_a_sync_interrupts_go_on_with_the_new_weights",
        "tests/e2e/test_fully_async.py::test_it_is_told_how_long_samples_took_and_how_long_the_trainer_waited_for_them",
        "tests/e2e/test_fully_async.py::test_the_timeline_shows_engines_that_generate_while_a_version_is_published",
        "tests/e2e/test_fully_async.py::test_the_benchmark_of_the_modes_understands_the_files_of_a_run[stale]",
        "tests/e2e/test_fully_async.py::test_a_step_that_shall_be_profiled_leaves_a_trace_of_every_rank[stale]",
    ),
    "code written for verl": ("tests/e2e/test_written_for_verl.py",),
    "trainer ranks that die in every phase": (
        "tests/e2e/test_recovery.py::test_deaths_in_every_phase_change_nothing_when_the_state_is_in_memory",
    ),
    "a rollouter and a queue that die": (
        "tests/e2e/test_fully_async_recovery.py::test_a_rollouter_and_a_queue_that_die_in_any_phase_lose_nothing[draining]",
    ),
    "a rollout node, an agent loop's worker, and an interrupt": (
        "tests/e2e/test_interrupts.py::test_a_rollout_node_that_is_lost_is_started_again_after_a_sync_has_failed_and_the_"
        "run_goes_on[gloo, killed]",
        "tests/experimental/agent_loop/test_manager.py::test_a_worker_that_dies_fails_the_batch_at_once",
        "tests/e2e/test_interrupts.py::test_an_interrupt_during_generation_ends_the_run",
    ),
    "an engine that is killed": ("tests/workers/rollout/test_death.py::test_killing_any_process_of_vllm",),
    "a killed member of a sync, and a flipped byte": ("tests/weight_sync/test_faults.py",),
    "every wire, bit for bit": (
        "tests/checkpoint_engine/test_contract.py::test_weights_are_cast_to_the_rollout_dtype",
        "tests/checkpoint_engine/test_contract.py::test_nothing_is_left_behind_when_the_manager_closes",
        "tests/checkpoint_engine/test_collective.py::test_the_default_group_of_the_trainer_is_not_touched",
        "tests/checkpoint_engine/test_processes.py",
    ),
    "chains, broadcasts, and deltas": (
        "tests/checkpoint_engine/test_chain.py::test_only_the_first_node_reads_the_bytes_of_owners",
        "tests/checkpoint_engine/test_kimi_ckpt_engine.py::test_every_byte_leaves_its_owner_once",
        "tests/checkpoint_engine/test_deltas.py::test_nodes_pass_deltas_on",
        "tests/checkpoint_engine/test_collective_deltas.py::test_whatever_happens_in_whatever_order_nodes_hold_what_"
        "was_committed[0]",
    ),
    "hosts with networks of their own": (
        "tests/checkpoint_engine/test_namespaces.py::test_weights_cross_from_host_to_host[mooncake]",
    ),
    "other users of the host": (
        "tests/checkpoint_engine/test_strangers.py::test_another_user_of_the_host_gets_no_answer_wherever_a_member_"
        "listens[kimi_ckpt_engine-auto]",
    ),
    "FSDP and Megatron ranks that bring weights to an engine of vLLM, which is the same one": (
        *(
            f"tests/weight_sync/test_bit_equality.py::test_{name}[{case}]"
            for name in (
                "a_sync_starts_no_collective_and_gathers_nothing",
                "every_rank_computes_with_the_cast_weights_of_the_trainer_after_every_sync",
            )
            for case in ("qwen3", "megatron_tp2")
        ),
        "tests/weight_sync/test_bit_equality.py::test_greedy_tokens_equal_those_of_hugging_face_after_every_sync",
    ),
    "training engines": (
        "tests/workers/engine/test_fsdp_engine.py::test_steps_equal_those_of_one_process_that_sees_the_whole_mini_batch[",
        "tests/workers/engine/test_megatron_engine.py",
        "tests/workers/engine/test_fsdp_checkpoint.py::test_a_run_goes_on_with_another_number_of_ranks",
        "tests/workers/test_fsdp_workers.py::test_a_group_on_ray_computes_trains_saves_loads_and_exports",
    ),
    "tenants that vLLM samples for": (
        "tests/tenants/test_vllm_sampler.py::test_eight_tenants_at_once_get_what_peft_computes_with_each_adapter",
        "tests/tenants/test_vllm_sampler.py::test_more_versions_than_the_engine_holds_take_turns",
        "tests/tenants/test_vllm_sampler.py::test_stops_seeds_and_scores_of_prompts_mean_what_they_mean_with_transformers",
        "tests/tenants/test_vllm_sampler.py::test_a_version_that_is_not_what_its_record_says_does_not_serve",
    ),
    "adapters alone": ("tests/weight_sync/test_adapters.py",),
    "rollout engines: transformers, vLLM and SGLang's Python": tuple(
        f"tests/workers/rollout/test_replica_contract.py::test_{name}[{engine}"
        for engine in ("hf", "vllm", "sglang")
        for name in (
            "greedy_tokens_are_those_of_the_trainers_model_in_every_version",
            "kept_requests_go_on_with_the_new_version_and_say_where_it_begins",
            "log_probs_are_those_of_the_trainers_model_at_the_sampling_temperature",
        )
    ),
    "a publisher beside a server of vLLM": (
        "tests/checkpoint_engine/publisher/test_publisher.py::TestAgainstVLLM::test_every_push_is_what_the_server_then",
        "tests/checkpoint_engine/publisher/test_what_is_pushed.py",
    ),
    "ParameterServer and update": (
        "tests/checkpoint_engine/parameter_server/test_server.py::test_a_broadcast_brings_all_parts",
        "tests/checkpoint_engine/parameter_server/test_server.py::test_p2p_brings_all_parts",
        "tests/checkpoint_engine/test_update.py::TestAgainstVLLM::test_dummy_weights_become_the_checkpoints",
    ),
    "a publisher that is killed before and while a server loads": tuple(
        f"tests/checkpoint_engine/publisher/test_rescue.py::test_a_publisher_that_is_killed_leaves_no_server_paused[{at}]"
        for at in ("/pause", "/update_weights")
    ),
    "a publisher of another host that is killed while a server loads": (
        "tests/checkpoint_engine/publisher/test_rescue.py::test_a_server_of_another_host_serves_what_it_holds_or_refuses_"
        "to[amid the load]",
    ),
    "a server whose fault is known": (
        "tests/checkpoint_engine/conformance/test_verdicts.py::test_the_command_writes_its_reports",
        "tests/checkpoint_engine/conformance/test_verdicts.py::test_wrong_input",
        "tests/checkpoint_engine/conformance/test_verdicts.py::test_a_tied_head",
        "tests/checkpoint_engine/conformance/test_faults.py::test_weights_that_are_mixed",
        "tests/checkpoint_engine/conformance/test_faults_of_sglang.py::test_a_server_that_answers_a_resume",
    ),
    "a certified model": ("tests/checkpoint_engine/test_certify.py::test_a_model_that_vllm_serves_right_is_certified",),
    "calls of ranks on Ray": (
        "tests/single_controller/test_worker_group.py::TestCalls",
        "tests/single_controller/test_worker_group.py::TestDeath::test_a_killed_worker_ends_the_call_and_its_group",
        "tests/single_controller/test_colocated.py::test_roles_share_the_processes_their_thread_and_their_ranks",
    ),
    "a cluster that a doctor looks at": ("tests/doctor/test_cluster.py",),
    "teachers": ("tests/workers/teacher/test_scoring.py",),
    "PyPI's verl beside us": ("tests/originals/test_losses.py",),
    "one model of each kind in the trainers": tuple(
        f"tests/models/test_trainer_models.py::test_log_probs_equal_the_eager_reference_packed_and_in_rows_that_were_"
        f"padded[fsdp2-{name}]"
        for name in ("qwen3", "gemma3_text", "qwen3_moe", "deepseek_v3", "mamba2", "qwen3_next")
    ),
    "odd models, whose sequences may not go together": tuple(
        f"tests/workers/engine/test_together.py::test_{what}_alone[{name}"
        for what in ("log_probs_are_those_of_each_sequence", "gradients_are_those_of_the_sequences")
        for name in ("doge", "llama4 without tuning")
    ),
    "input that is wrong": ("tests/e2e/test_bad_input.py::test_a_missing_column_is_named_with_its_file",),
}
"""What `make test` shows, and how the names of the tests begin that show it. If the rest of the tests of one job or
engine take no time beside it, they are here as well: the other stage of the whole run does not start it again."""
FILE_CPU_S = 60.0
"""Of all tests of a file together, in this process and in those that it has waited for."""


@pytest.hookimpl(tryfirst=True)  # before pytest itself looks at markers
def pytest_collection_modifyitems(config, items):
    if config.getoption("markexpr") == MAKE_TEST and not config.getoption("file_or_dir"):
        ids = [item.nodeid for item in items]
        gone = [begin for begins in ONCE.values() for begin in begins if not any(one.startswith(begin) for one in ids)]
        if gone:
            raise pytest.UsageError(f"no test begins with what ONCE in tests/tiers.py says: {', '.join(gone)}")
    for item in items:
        marked = any(item.get_closest_marker(name) for name in MARKERS)
        if marked or FIXTURES & set(item.fixturenames) or item.nodeid.startswith(PLACES):
            item.add_marker(pytest.mark.job)
            if item.nodeid.startswith(tuple(begin for begins in ONCE.values() for begin in begins)):
                item.add_marker(pytest.mark.once)


def pytest_configure(config):
    if config.getoption("markexpr") == "not job":
        config.pluginmanager.register(Budget(FILE_CPU_S), "budget")


class Budget:
    def __init__(self, file_cpu_s: float) -> None:
        self._file_cpu_s = file_cpu_s
        self._used: Counter[str] = Counter()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = processor_time_s()
        result = yield
        file = item.nodeid.split("::")[0]
        self._used[file] += processor_time_s() - before
        if self._used[file] > self._file_cpu_s:
            pytest.fail(
                f"the tests of {file} took {self._used[file]:.0f} s of processor time, up to this one; `make check` "
                f"gives a file {self._file_cpu_s:.0f}. Mark its long tests with pytest.mark.job, or add it to PLACES",
                pytrace=False,
            )
        ray = sys.modules.get("ray")
        if ray is not None and ray.is_initialized():
            pytest.fail("it has connected to Ray without the marker `job`: use the fixture ray_cluster", pytrace=False)
        return result


def processor_time_s() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)
