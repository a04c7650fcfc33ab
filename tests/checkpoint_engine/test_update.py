"""The command line that pushes a checkpoint directory into running engines. Against a real vLLM server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.free_ports import free_port
from tests.checkpoint_engine.fakes import soon
from tests.checkpoint_engine.gate import passed_on
from tests.checkpoint_engine.served_vllm import ServedVLLM, served_vllm
from tests.http_server import http_server
from tests.warm_workers import WarmWorkers
from tests.weight_sync.expected import expected_on_rank, same_bits
from tests.weight_sync.greedy import hugging_face_tokens
from verl.checkpoint_engine.errors import ActivationError
from verl.checkpoint_engine.parameter_server import (
    ParameterServer,
    buffers,
    checkpoint_directory,
    request_inference_to_update,
)
from verl.checkpoint_engine.parameter_server.endpoints import Endpoint
from verl.checkpoint_engine.parameter_server.engine_link import EngineLink
from verl.checkpoint_engine.parameter_server.http_server import HttpServer, Refused
from verl.checkpoint_engine.parameter_server.update_options import parse
from verl.checkpoint_engine.update import main
from verl.utils.builtin import make_tiny_model

MODULE = "verl.checkpoint_engine.update"
RPC = "/collective_rpc"
KILLED = f"""
import json, os, pathlib, signal, sys, threading
from {buffers.__name__} import load_buffers
from {checkpoint_directory.__name__} import states_of
from {Endpoint.__module__} import Endpoint
from {EngineLink.__module__} import EngineLink
url, version, again, *names = sys.argv[1:]
files = [*map(pathlib.Path, names)]
(buffer,) = load_buffers(files=files, rank=0, world_size=1)
link = EngineLink("cpu-0", 1, halves=0, lent=[buffer.shared.fd], timeout_s=300)
sockets = {{"cpu-0": link.socket_path}}
more = {{"again": json.loads(again)}} if again else {{"files": states_of(files)}}
threading.Thread(target=Endpoint(url, timeout_s=300).update, args=(sockets, version), kwargs=more).start()
link.offer(0, buffer.tensors if version == "whole" else buffer.tensors[:5])
link.await_loaded(300)
os.kill(os.getpid(), signal.SIGKILL)
"""
"""An update that gives a server a part of its tensors, or all of them, and is killed."""
SMALL_BUCKETS = {"PS_MAX_BUCKET_SIZE_GB": str(80_000 / 2**30)}
"""Just enough for the largest tensor: the model has four times as many bytes, and layers span buckets."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "first", "qwen3", seed=1)


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another version of the model, in two files with an index."""
    path = make_tiny_model(tmp_path_factory.mktemp("model") / "second", "qwen3", seed=2)
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    parts = {"model-1.safetensors": names[::2], "model-2.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: weights[name] for name in own}, path / file)
    (path / "model.safetensors").unlink()
    weight_map = {name: file for file, own in parts.items() for name in own}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers) -> Iterator[ServedVLLM]:
    with served_vllm(model, tmp_path_factory.mktemp("vllm"), warm) as server:
        yield server


def command(*arguments: object, ranks: int = 1) -> list[str]:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    return [sys.executable, *(launcher if ranks > 1 else []), "-m", MODULE, *(str(argument) for argument in arguments)]


def run(*arguments: object, ranks: int = 1, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(*arguments, ranks=ranks), env=os.environ | environment, capture_output=True, text=True, timeout=600
    )


def assert_serves(server: ServedVLLM, directory: Path, version: str) -> None:
    """Hugging Face's greedy tokens, and bit for bit the checkpoint's weights."""
    hugging_face = AutoModelForCausalLM.from_pretrained(directory)
    assert Endpoint(server.url, timeout_s=300).version() == version
    assert server.greedy_tokens() == hugging_face_tokens(hugging_face)
    expected = expected_on_rank(dict(hugging_face.state_dict()), AutoConfig.from_pretrained(directory), 0, 1)
    found = server.weights()
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not same_bits(found[name], tensor)] == []


@pytest.mark.vllm
class TestAgainstVLLM:
    def test_dummy_weights_become_the_checkpoints(self, server: ServedVLLM, model: Path):
        assert server.greedy_tokens() != hugging_face_tokens(AutoModelForCausalLM.from_pretrained(model))
        done = run("--checkpoint-path", model, "--endpoint", server.url, "--weight-version", "v1", **SMALL_BUCKETS)
        assert done.returncode == 0, done.stderr
        assert "GB/s (broadcast" in done.stderr
        assert f"version 'v1' is served by {server.url}" in done.stderr
        assert_serves(server, model, "v1")

    def test_its_files_are_in_a_directory_that_is_removed_with_it(self, server: ServedVLLM):
        assert server.temporary is not None
        assert list(server.temporary.glob("vllm_dist_*"))

    def test_ranks_without_an_engine_hold_a_part_that_p2p_pulls(self, server: ServedVLLM, second: Path):
        done = run("--checkpoint-path", second, "--endpoint", server.url, "--update-method", "p2p", ranks=2)
        assert done.returncode == 0, done.stderr
        assert "GB/s (p2p" in done.stderr
        assert_serves(server, second, "second")

    def test_a_job_pulls_from_one_that_holds_the_checkpoint(
        self, server: ServedVLLM, model: Path, tmp_path: Path, capfd
    ):
        metas = tmp_path / "metas"
        with started("--checkpoint-path", model, "--save-metas-file", metas) as holder:
            await_that(metas.exists, holder)
            arguments = ["--load-metas-file", str(metas), "--endpoint", server.url, "--weight-version", "pulled"]
            assert main(arguments) == 0
            assert_serves(server, model, "pulled")
            holder.send_signal(signal.SIGINT)
            assert holder.wait(300) == 0
        assert not metas.exists()
        assert str(metas) in refusal(capfd, "--load-metas-file", metas, "--endpoint", server.url, code=2)

    def test_a_job_that_is_killed_while_it_pulls_leaves_the_server_with_a_whole_version(
        self, server: ServedVLLM, model: Path, second: Path, tmp_path: Path
    ):
        """With the one before if nothing was loaded; else with that which is pulled again."""
        metas = tmp_path / "metas"
        assert main(["--checkpoint-path", str(model), "--endpoint", server.url, "--weight-version", "before"]) == 0
        with started("--checkpoint-path", second, "--save-metas-file", metas) as holder:
            await_that(metas.exists, holder)
            with passed_on(server.url) as gate:
                pulling = ["--load-metas-file", str(metas), "--endpoint", gate.url]
                with started(*pulling) as job:
                    gate.before = lambda path: job.kill() if path == "/update_weights" else None
                    assert job.wait(600) == -signal.SIGKILL
                assert soon(lambda: not is_paused(server), timeout_s=600)
            assert_serves(server, model, "before")
            given = ["--load-metas-file", str(metas), "--endpoint", server.url, "--weight-version", "pulled"]
            again = parse(given, None, "update").again("pulled")
            files = sorted(second.glob("*.safetensors"))
            died = subprocess.run(
                [sys.executable, "-c", KILLED, server.url, "part", json.dumps(again), *files], timeout=600
            )
            assert died.returncode == -signal.SIGKILL
            assert soon(lambda: server.version() == "pulled" and not is_paused(server), timeout_s=600)
            assert_serves(server, second, "pulled")

    def test_a_checkpoint_that_does_not_fit_is_refused_and_the_engine_serves_on(
        self, server: ServedVLLM, model: Path, tmp_path: Path, capfd: pytest.CaptureFixture
    ):
        before = server.greedy_tokens()
        weights = load_file(model / "model.safetensors")
        weights["model.layers.0.extra.weight"] = torch.ones(3)
        weights["model.layers.1.mlp.gate_proj.weight"] = torch.ones(256, 64)
        weights["model.layers.1.input_layernorm.weight"] = torch.ones(7)
        del weights["model.layers.0.self_attn.k_proj.weight"], weights["model.norm.weight"]
        save_file(weights, tmp_path / "model.safetensors")
        assert main(["--checkpoint-path", str(tmp_path), "--endpoint", server.url]) == 1
        said = capfd.readouterr().err
        assert f"error: [{server.url}] the checkpoint does not fit the engine's Qwen3ForCausalLM, 5 problems" in said
        assert "model.layers.0.extra.weight [3] is refused" in said
        assert "model.layers.1.input_layernorm.weight [7] is refused" in said
        assert "model.layers.1.mlp.gate_proj.weight [256, 64] has another shape" in said
        assert "model.layers.0.self_attn.k_proj.weight is missing" in said
        assert "model.norm.weight is missing" in said
        assert server.greedy_tokens() == before

    def test_the_number_of_workers_has_to_be_the_engines(self, server: ServedVLLM, model: Path, capfd, monkeypatch):
        monkeypatch.setenv("WORLD_SIZE", "2")
        arguments = ["--checkpoint-path", str(model), "--endpoint", server.url, "--inference-parallel-size", "2"]
        assert main(arguments) == 1
        assert "has 1 workers: set --inference-parallel-size 1 (it is 2)" in capfd.readouterr().err

    def test_after_a_failure_in_the_middle_the_next_update_succeeds(self, server: ServedVLLM, model: Path):
        server.call("/start_weight_update")  # by somebody who was killed then
        with pytest.raises(ActivationError, match="no ParameterServer at .*No such file"):
            Endpoint(server.url, timeout_s=300).update({"cpu-0": "/nowhere"}, "torn")
        arguments = ["--checkpoint-path", str(model), "--endpoint", server.url, "--weight-version", "again"]
        assert main(arguments) == 0
        assert_serves(server, model, "again")

    def test_one_that_is_killed_while_it_loads_leaves_a_server_with_its_files(
        self, server: ServedVLLM, model: Path, second: Path
    ):
        files = [str(file) for file in sorted(second.glob("*.safetensors"))]
        for version, given in (("part", files), ("whole", [str(model / "model.safetensors")])):
            died = subprocess.run([sys.executable, "-c", KILLED, server.url, version, "", *given], timeout=600)
            assert died.returncode == -signal.SIGKILL
            assert soon(lambda version=version: server.version() == version)
            assert_serves(server, second if version == "part" else model, version)

    def test_workers_load_for_a_script_of_checkpoint_engine_without_a_weight_transfer_config(
        self, server: ServedVLLM, second: Path
    ):
        label = server.version()
        server.call(RPC, {"method": "forget_weight_transfer_engine"})
        with ParameterServer(rank=0, world_size=1) as owner:
            owner.register_checkpoint("second", files=sorted(second.glob("*.safetensors")))
            owner.gather_metas("second")
            owner.update("second", lambda paths: request_inference_to_update(f"{server.url}{RPC}", dict(paths)))
        server.call("/reset_prefix_cache")
        assert_serves(server, second, label)


def is_paused(server: ServedVLLM) -> bool:
    return bool(HttpServer(server.url, timeout_s=300).call("GET", "/is_paused")["is_paused"])


@contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def await_that(reached: Callable[[], bool], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 600
    while not reached() and time.monotonic() < deadline:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    assert reached()


@contextmanager
def server_that_answers(answers: dict[str, tuple[int, dict]], *, socket: Path | None = None) -> Iterator[str]:
    """A server that is no vLLM, or one without our engine, with these answers by path."""

    def answer(_method: str, path: str, _body: bytes) -> tuple[int, bytes]:
        status, body = answers.get(path if path in answers else path.partition("?")[0], (404, {"detail": "Not Found"}))
        return status, json.dumps(body).encode()

    with http_server(answer, socket=socket) as url:
        yield url


@pytest.fixture
def answering() -> Iterator[Callable[..., str]]:
    """Starts a server with these answers by path; gives its URL."""
    with ExitStack() as started:
        yield lambda answers: started.enter_context(server_that_answers(answers))


def refusal(capfd: pytest.CaptureFixture, *arguments: object, code: int = 1) -> str:
    """What the command says when it refuses to begin."""
    assert main([str(argument) for argument in arguments]) == code
    said: str = capfd.readouterr().err
    assert "Traceback" not in said
    return said


def test_an_endpoint_that_is_down_is_named_with_a_remedy(model: Path, capfd):
    url = f"http://127.0.0.1:{free_port()}"
    said = refusal(capfd, "--checkpoint-path", model, "--endpoint", url)
    assert f"error: no vLLM answers at {url} (Connection refused): start it, or correct --endpoint" in said


def test_a_server_is_reached_through_its_unix_socket_too(tmp_path: Path):
    answers = {RPC: (200, {}), "/other": (500, {"error": "no such method"})}
    with server_that_answers(answers, socket=tmp_path / "socket") as path:
        request_inference_to_update(f"http://vllm{RPC}", {"cpu-0": "path"}, uds=path)
        with pytest.raises(Refused, match="no such method"):
            request_inference_to_update("http://vllm/other", {"cpu-0": "path"}, uds=path)


@pytest.mark.parametrize(("status", "is_healthy"), [(200, True), (503, False)])
def test_a_server_is_healthy_if_it_says_so(answering, status: int, is_healthy: bool):
    assert Endpoint(answering({"/health": (status, {})}), timeout_s=60).is_healthy() == is_healthy


def test_a_server_that_is_not_there_is_not_healthy():
    assert not Endpoint(f"http://127.0.0.1:{free_port()}", timeout_s=60).is_healthy()


def test_a_server_without_the_routes_is_told_which_switch_it_lacks(model: Path, capfd, answering):
    said = refusal(capfd, "--checkpoint-path", model, "--endpoint", answering({}))
    assert "start vLLM with VLLM_SERVER_DEV_MODE=1" in said


@pytest.mark.parametrize(
    "text",
    [
        "Worker failed with error 'Weight transfer not configured. Please set weight_transfer_config', please check",
        "Call to collective_rpc method failed: Weight transfer not configured. Please set weight_transfer_config",
        "Invalid init_info for NCCLWeightTransferEngine: unexpected keyword argument 'tensors'",
    ],
)
def test_an_engine_with_another_weight_transfer_is_told_the_flag(model: Path, capfd, answering, text: str):
    url = answering(
        {
            "/get_world_size": (200, {"world_size": 1}),
            "/init_weight_transfer_engine": (500, {"error": {"message": text}}),
        }
    )
    said = refusal(capfd, "--checkpoint-path", model, "--endpoint", url)
    assert 'start vLLM with --weight-transfer-config \'{"backend": "verl_arena"}\'' in said


def test_a_server_of_another_kind_is_not_taken_for_vllm(model: Path, capfd, answering):
    url = answering({"/get_world_size": (200, {"hello": "world"})})
    assert f"the server at {url} is not vLLM" in refusal(capfd, "--checkpoint-path", model, "--endpoint", url)


def test_data_parallel_engines_behind_one_server_are_refused(model: Path, capfd, answering):
    url = answering(
        {
            "/get_world_size": (200, {"world_size": 4}),
            "/get_world_size?include_dp=false": (200, {"world_size": 2}),
        }
    )
    said = refusal(capfd, "--checkpoint-path", model, "--endpoint", url)
    assert "runs 2 data-parallel engines: start one server for each" in said


def test_a_truncated_file_is_named_with_the_bytes_expected_and_there(model: Path, tmp_path: Path, capfd):
    path = tmp_path / "model.safetensors"
    shutil.copy(model / "model.safetensors", path)
    size = path.stat().st_size
    os.truncate(path, size - 10)
    said = refusal(capfd, "--checkpoint-path", tmp_path, "--endpoint", "http://127.0.0.1:1", code=2)
    assert f"{path}: truncated: {size} bytes expected, {size - 10} there" in said


def test_a_directory_without_a_whole_checkpoint_is_an_error(second: Path, tmp_path: Path, capfd):
    end = ("--endpoint", "http://127.0.0.1:1")
    assert f"{tmp_path} has no *.safetensors files" in refusal(capfd, "--checkpoint-path", tmp_path, *end, code=2)
    assert "is not a directory" in refusal(capfd, "--checkpoint-path", tmp_path / "no", *end, code=2)
    for name in ("model-1.safetensors", "model.safetensors.index.json"):
        shutil.copy(second / name, tmp_path)
    said = refusal(capfd, "--checkpoint-path", tmp_path, *end, code=2)
    assert "lacks 1 of the 2 files in model.safetensors.index.json: model-2.safetensors" in said
    shutil.copy(tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors")
    said = refusal(capfd, "--checkpoint-path", tmp_path, *end, code=2)
    assert "in more than one file" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --checkpoint-path, or --load-metas-file"),
        (["--checkpoint-path", "d", "--load-metas-file", "f"], "give either --checkpoint-path"),
        (["--checkpoint-path", "d"], "give --endpoint"),
        (["--checkpoint-path", "d", "--endpoint", "localhost:8000"], "is not a URL like http://127.0.0.1:8000"),
        (["--load-metas-file", "f", "--endpoint", "http://h", "--update-method", "all"], "must be p2p"),
        (["--load-metas-file", "f", "--save-metas-file", "g"], "with --load-metas-file another job holds them"),
        (["--checkpoint-path", "d", "--endpoint", "http://h", "--timeout-s", "0"], "--timeout-s must be positive"),
        (["--checkpoint-path", "d", "--endpoint", "http://h", "http://i"], "need 2 ranks, not 1: torchrun"),
        (["--checkpoint-path", "d", "--endpoint", "http://h", "--inference-parallel-size", "0"], "must be 1 or more"),
        (["--checkpoint-path", "d", "--endpoint", "http://h", "--hold-seconds", "5"], "with --save-metas-file stays"),
        (["--checkpoint-path", "d", "--save-metas-file", "/no/f"], "written to /no/f: there is no directory /no"),
        (["--checkpoint-path", "d", "--save-metas-file", "/tmp"], "metas cannot be written to /tmp: Is a directory"),
    ],
)
def test_arguments_that_cannot_work_are_refused_with_what_to_change(capfd, arguments: list[str], message: str):
    assert message in refusal(capfd, *arguments, code=2)


def test_help_says_how_to_start_the_engines(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL" in said
    assert "--inference-parallel-size" in said
