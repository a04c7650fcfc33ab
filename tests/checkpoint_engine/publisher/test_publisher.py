"""A training loop pushes into a vLLM server, which then says what transformers says with those weights."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from urllib.error import HTTPError

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.free_ports import free_port
from tests.checkpoint_engine.fakes import arenas_in, soon
from tests.checkpoint_engine.gate import passed_on
from tests.checkpoint_engine.kept_process import commit, plan_of
from tests.checkpoint_engine.publisher import killed_publisher
from tests.checkpoint_engine.served_vllm import ServedVLLM, served_vllm
from tests.warm_workers import WarmWorkers
from tests.weight_sync.expected import expected_on_rank, same_bits
from tests.weight_sync.greedy import hugging_face_tokens
from verl.checkpoint_engine import (
    ActivationError,
    ConfigError,
    SyncAborted,
    TRLWeightTransfer,
    WeightPublisher,
    certify,
)
from verl.checkpoint_engine.memory.arena import NodeArena
from verl.checkpoint_engine.parameter_server.endpoints import ANSWERS
from verl.utils.builtin import make_tiny_model

ROOT = Path(__file__).parents[3]
LOOK = {"method": ANSWERS, "args": ['{"number": "1", "act": "look"}']}
EXAMPLE = ROOT / "examples" / "any_trainer" / "train.py"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory, warm: WarmWorkers) -> Iterator[ServedVLLM]:
    with served_vllm(directory, tmp_path_factory.mktemp("vllm"), warm) as server:
        yield server


def nudge(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator)


def assert_serves(server: ServedVLLM, model: torch.nn.Module, directory: Path) -> None:
    assert server.greedy_tokens() == hugging_face_tokens(model)
    expected = expected_on_rank(dict(model.state_dict()), AutoConfig.from_pretrained(directory), 0, 1)
    found = server.weights()
    assert [name for name, tensor in expected.items() if not same_bits(found[name], tensor)] == []


@contextmanager
def node_process(key: Path, place: str) -> Iterator[subprocess.Popen]:
    host, _, port = place.partition(":")
    command = [sys.executable, "-m", "verl.checkpoint_engine.node", "--key-file", key, "--host", host, "--port", port]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            while "publishers that have the key" not in (line := process.stderr.readline()):
                assert line, process.wait()
            yield process
        finally:
            process.terminate()


def test_a_push_of_trls_that_would_end_what_is_in_flight_is_refused():
    with pytest.raises(ConfigError, match="pause_mode=abort: TRL would train on aborted responses"):
        TRLWeightTransfer(["http://127.0.0.1:8000"], config={"pause_mode": "abort"})


@pytest.mark.vllm
class TestAgainstVLLM:
    @pytest.mark.cells(14)  # a minute each
    @pytest.mark.parametrize("route", ["arena", "update"])
    def test_a_server_is_certified_by_what_it_answers(
        self, server: ServedVLLM, directory: Path, capsys: pytest.CaptureFixture[str], route: str
    ):
        model = AutoModelForCausalLM.from_pretrained(directory)
        with WeightPublisher(model, [server.url]) as publisher:
            publisher.push(version=0)  # it began with other weights
        asked = ["--model", str(directory), "--server", server.url, "--route", route, "--dtype", "float32"]
        assert certify.main(asked) == 0, capsys.readouterr()
        assert "certified: the server computes with every version that it was sent" in capsys.readouterr().out

    def test_trl_pushes_through_the_adapter(self, server: ServedVLLM, directory: Path, shm: Path):
        """In the order of `AsyncGRPOTrainer`; each tensor is gone when the next one is asked for."""
        model = AutoModelForCausalLM.from_pretrained(directory)

        def gathered() -> Iterator[tuple[str, torch.Tensor]]:
            for name, parameter in model.named_parameters():
                whole = parameter.detach().clone()
                yield name, whole
                whole.fill_(torch.nan)

        transfer = TRLWeightTransfer([server.url])
        transfer.init_weight_transfer()
        try:
            for version in range(2):
                nudge(model, version)
                transfer.pause()
                transfer.send_weights(gathered())
                transfer.resume()
                assert (transfer.version, server.version()) == (version, str(version))
                assert_serves(server, model, directory)
            name, first = next(gathered())
            with pytest.raises(ConfigError, match=r"TRL sent \d+ tensors fewer than before"):
                transfer.send_weights([(name, first)])
            with pytest.raises(
                ConfigError, match=r"another shape or dtype than before: \[1, \d+\] .*, and \[\d\d+, \d+\]"
            ):
                transfer.send_weights([(name, first[:1])])
            with pytest.raises(ConfigError, match="has not sent before: another"):
                transfer.send_weights([("another", first)])
            assert server.version() == "1"
        finally:
            transfer.destroy()
        transfer.destroy()
        assert arenas_in(shm) == []

    def test_what_trl_has_asked_for_comes_whole_though_a_push_finds_it_without_a_token(
        self, server: ServedVLLM, directory: Path, shm: Path
    ):
        """TRL asks once, and takes what comes: of an aborted request without a token it cannot even read the answer."""
        model = AutoModelForCausalLM.from_pretrained(directory)
        body = {"model": str(directory), "prompt": [3, 4, 5], "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
        transfer = TRLWeightTransfer([server.url])
        server.call("/pause?mode=keep")
        connection = HTTPConnection(server.url.removeprefix("http://"), timeout=300)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            server.version()  # of what is asked after it, the answer is there
            time.sleep(0.5)
            transfer.send_weights(model.named_parameters())
            (choice,) = json.loads(connection.getresponse().read())["choices"]
        finally:
            connection.close()
            transfer.destroy()
        assert choice["finish_reason"] == "length"
        assert len(choice["logprobs"]["token_logprobs"]) == 8

    def test_every_push_is_what_the_server_then_computes_with(self, server: ServedVLLM, directory: Path, shm: Path):
        model = AutoModelForCausalLM.from_pretrained(directory)
        with WeightPublisher(model, [server.url + "/"], report_path=shm / "reports.jsonl") as publisher:
            for version in range(2):
                nudge(model, version)
                report = publisher.push(version)
                assert report.replicas_updated == (server.url,)
                assert server.version() == str(version)
                assert_serves(server, model, directory)
            before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            pending = publisher.push_async(2)
            nudge(model, 2)  # it has been copied
            assert pending.result().version == 2
            model.load_state_dict(before)
            assert_serves(server, model, directory)
        assert arenas_in(shm) == []
        assert len((shm / "reports.jsonl").read_text().splitlines()) == 3

    def test_a_server_has_one_writer_and_what_a_dead_one_has_begun_is_ended(
        self, server: ServedVLLM, directory: Path, shm: Path
    ):
        model = AutoModelForCausalLM.from_pretrained(directory)
        other = AutoModelForCausalLM.from_pretrained(directory)
        nudge(model, 20)
        with WeightPublisher(model, [server.url]) as publisher, WeightPublisher(other, [server.url]) as second:
            publisher.push(100)
            with pytest.raises(
                ConfigError, match=f"belongs to another publisher: the publisher of process {os.getpid()} on"
            ):
                second.push(100)
            assert_serves(server, model, directory)
            server.call("/start_weight_update", {})
            nudge(model, 21)
            publisher.push(101)
            assert (server.version(), server.call("/collective_rpc", LOOK)["results"][0]["version"]) == ("101", 101)
            assert_serves(server, model, directory)
            publisher.close()
            second.push(100)
            assert_serves(server, other, directory)

    @pytest.mark.parametrize("step", ["/pause", "/update_weights"])
    def test_a_publisher_that_is_killed_leaves_it_serving_what_it_names(
        self, step: str, server: ServedVLLM, directory: Path, shm: Path
    ):
        with passed_on(server.url) as gate:
            command = [sys.executable, "-m", killed_publisher.__name__, gate.url, directory]
            with subprocess.Popen(command, cwd=ROOT) as process:
                at_each = iter([lambda: None, process.kill])  # in its second push
                gate.before = lambda path: next(at_each, lambda: None)() if path == step else None
                assert process.wait() == -signal.SIGKILL
            assert soon(lambda: [*shm.iterdir()] == [])
        version = "1" if step == "/pause" else "2"
        assert server.version() == version
        model = AutoModelForCausalLM.from_pretrained(directory)
        model.load_state_dict(killed_publisher.weights_of(int(version), directory), strict=False)
        assert_serves(server, model, directory)

    def test_a_server_whose_load_did_not_end_does_not_go_on_until_it_has_a_version(
        self, server: ServedVLLM, directory: Path, shm: Path
    ):
        model = AutoModelForCausalLM.from_pretrained(directory)
        nudge(model, 30)
        *held, _ = model.named_parameters()
        plan = plan_of(dict(held))
        with NodeArena.create(shm_dir=shm, job="torn", node="here", layout=plan.layout, slots=2) as arena:
            with torch.no_grad():
                commit(arena, plan, 1, dict(held))
            server.call("/pause?mode=keep")
            server.call("/start_weight_update", {})
            with pytest.raises(HTTPError):
                server.call("/update_weights", {"update_info": {"arena_path": str(arena.directory), "version": 1}})
        with pytest.raises(HTTPError) as caught:
            server.call("/resume")
        assert "a load of weights has begun and not ended" in caught.value.read().decode()
        with WeightPublisher(model, [server.url]) as publisher:
            publisher.push(31)
        assert_serves(server, model, directory)

    def test_named_tensors_and_a_file_of_endpoints(self, server: ServedVLLM, directory: Path, shm: Path):
        model = AutoModelForCausalLM.from_pretrained(directory)
        nudge(model, 5)
        endpoints = shm / "endpoints"
        endpoints.write_text(f"# servers\n{server.url}\n\n")
        with WeightPublisher(dict(model.named_parameters()), endpoints) as publisher:
            publisher.push(7)
            assert_serves(server, model, directory)
            gone = f"http://127.0.0.1:{free_port()}"
            endpoints.write_text(f"{server.url}\n{gone}\n")
            with pytest.raises(Exception, match=re.escape(gone)):
                publisher.push(8)
            endpoints.write_text(server.url)
            nudge(model, 6)
            publisher.push(9)
            assert_serves(server, model, directory)

    def test_weights_that_do_not_fit_are_refused_and_the_server_serves_on(
        self, server: ServedVLLM, directory: Path, shm: Path
    ):
        before = server.greedy_tokens()
        tensors = dict(AutoModelForCausalLM.from_pretrained(directory).named_parameters())
        tensors["model.layers.0.extra.weight"] = torch.ones(3)
        with (
            WeightPublisher(tensors, [server.url]) as publisher,
            pytest.raises(ActivationError, match=r"model\.layers\.0\.extra\.weight"),
        ):
            publisher.push(1)
        assert server.greedy_tokens() == before
        assert arenas_in(shm) == []

    def test_named_tensors_of_another_dtype_are_served_as_they_read_or_refused(
        self, server: ServedVLLM, directory: Path, shm: Path
    ):
        model = AutoModelForCausalLM.from_pretrained(directory)
        nudge(model, 6)
        tensors = {name: tensor.detach() for name, tensor in model.named_parameters()}
        whole = dict(tensors)
        with WeightPublisher(tensors, [server.url]) as publisher:
            for version, dtype in enumerate((torch.float64, torch.bfloat16, torch.float32)):
                tensors.update({name: tensor.to(dtype) for name, tensor in whole.items()})
                publisher.push(version)
                model.load_state_dict(tensors, strict=False)
                assert_serves(server, model, directory)
            tensors["model.norm.weight"] = whole["model.norm.weight"].to(torch.int8)
            with pytest.raises(
                ActivationError, match=r"model\.norm\.weight \[64\] is int8, and its place in .* float32"
            ):
                publisher.push(3)
            assert server.version() == "2"
            assert_serves(server, model, directory)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_the_example_runs_alone_and_with_fsdp2_under_torchrun(
        self, server: ServedVLLM, directory: Path, shm: Path, ranks: int
    ):
        launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port())]
        done = subprocess.run(
            [sys.executable, *(launcher if ranks > 1 else []), EXAMPLE, directory, server.url, "--steps", "2"],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert re.search(r"step 1: loss [\d.]+, served after [\d.]+ s", done.stdout)
        assert server.version() == "1"
        served = server.weights()
        start = AutoModelForCausalLM.from_pretrained(directory)
        assert not torch.equal(served["model.norm.weight"], start.state_dict()["model.norm.weight"])
        assert arenas_in(shm) == []

    def test_a_server_loads_from_the_memory_of_a_process_beside_it(
        self, server: ServedVLLM, directory: Path, shm: Path
    ):
        """As where it is on another host than the loop that trains."""
        model = AutoModelForCausalLM.from_pretrained(directory)
        key, place = shm / "key", f"127.0.0.1:{free_port()}"
        with (
            node_process(key, place) as node,
            WeightPublisher(model, [server.url], nodes=[place], node_key=key, config={"retries": 0}) as publisher,
        ):
            for version in range(2):
                nudge(model, 10 + version)
                report = publisher.push(version)
                assert_serves(server, model, directory)
            assert [link.member for link in report.links] == ["node-1"]
            node.kill()
            node.wait()
            before = server.greedy_tokens()
            nudge(model, 12)
            with pytest.raises(SyncAborted, match=place):
                publisher.push(2)
            assert server.greedy_tokens() == before
            with node_process(key, place):
                publisher.push(3)
                assert_serves(server, model, directory)
        assert soon(lambda: arenas_in(shm) == [])

    def test_a_rank_that_is_gone_ends_the_push_by_name_and_the_server_serves_on(
        self, server: ServedVLLM, directory: Path, shm: Path
    ):
        module = "tests.checkpoint_engine.publisher.dying_rank"
        port, ranks = str(free_port()), []
        for rank in range(2):
            environment = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", module, directory, server.url],
                    env=os.environ | environment | {"OMP_NUM_THREADS": "1"},
                    cwd=ROOT,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        said, _ = ranks[0].communicate(timeout=600)
        ranks[1].communicate(timeout=300)
        assert ranks[1].returncode == 0
        assert re.search(r"(SyncAborted|TransportError) after \d+ s: .*a rank of this job does not answer", said), said
        assert server.version() == "1"
        server.greedy_tokens()
