"""Traces of trainer ranks, and what Nsight Systems is told."""

import gzip
import json

import torch

from verl.workers.config import PPOConfig
from verl.workers.config.profiler import GlobalProfilerConfig
from verl.workers.profiling import RankProfiler


def test_a_trace_holds_what_ran_between_start_and_stop(tmp_path):
    profiler = RankProfiler("cpu")
    profiler.start("torch")
    torch.ones(8, 8) @ torch.ones(8, 8)
    profiler.stop(tmp_path / "traces" / "step_2_rank_0")
    (trace,) = (tmp_path / "traces").iterdir()
    assert trace.name == "step_2_rank_0.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


def test_a_rank_that_was_not_started_writes_nothing(tmp_path):
    RankProfiler("cpu").stop(tmp_path / "traces" / "step_2_rank_0")
    assert list(tmp_path.iterdir()) == []


def test_nsys_ends_its_capture_after_the_last_step_and_writes_where_traces_go():
    options = GlobalProfilerConfig(tool="nsys", steps=[2, 5]).nsight("/traces")
    assert options["capture-range-end"] == "repeat-shutdown:2"
    assert options["o"] == "/traces/process_%p"
    assert options["capture-range"] == "cudaProfilerApi"


def test_ranks_run_under_nothing_unless_nsys_has_steps():
    assert GlobalProfilerConfig(tool="nsys").nsight("/traces") is None
    assert GlobalProfilerConfig(tool="torch", steps=[1]).nsight("/traces") is None


def test_traces_are_below_the_output_directory_unless_they_have_a_place(tmp_path):
    assert PPOConfig().profile_directory.endswith("/profile")
    config = PPOConfig(global_profiler=GlobalProfilerConfig(save_path=str(tmp_path)))
    assert config.profile_directory == str(tmp_path)
