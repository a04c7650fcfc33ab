"""SGLang's own server, and what pushes into it or certifies it."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.free_ports import free_port
from tests.checkpoint_engine.fakes import Fleet, RecordingReplica, arenas_in, soon
from tests.checkpoint_engine.gate import passed_on
from tests.checkpoint_engine.publisher import killed_publisher
from tests.checkpoint_engine.publisher.served_sglang import ServedSGLang, served_sglang
from tests.checkpoint_engine.publisher.sglang_faults import set_fault
from tests.checkpoint_engine.publisher.sglang_wrong_routes import OVER, Unflushed, Unlabelled
from tests.checkpoint_engine.publisher.test_publisher import node_process, nudge
from tests.sglang_on_cpu import NEEDS_SGLANG
from tests.weight_sync.greedy import PROMPTS, hugging_face_tokens
from verl.checkpoint_engine.conformance.command import Options, prompts_of
from verl.checkpoint_engine.conformance.command import run as certified
from verl.checkpoint_engine.conformance.contract import MIXED, STUCK
from verl.checkpoint_engine.conformance.distance import TOLERANCES
from verl.checkpoint_engine.conformance.faults import FaultRun
from verl.checkpoint_engine.conformance.oracle import Oracle, changed_version
from verl.checkpoint_engine.conformance.probes import ProbedSGLang
from verl.checkpoint_engine.conformance.routes import SGLANG_ROUTES, Route
from verl.checkpoint_engine.conformance.sequence import Run
from verl.checkpoint_engine.conformance.sglang_routes import SGLangDiskRoute
from verl.checkpoint_engine.conformance.verdicts import Cell, Finding
from verl.checkpoint_engine.errors import ActivationError, ConfigError, SyncAborted, TransportTimeout
from verl.checkpoint_engine.publisher import WeightPublisher
from verl.checkpoint_engine.publisher.reports import PREFIX
from verl.utils.builtin import make_tiny_model

PAUSES = 3
"""Of a publisher up to its second push: the first one asks beforehand whether the weights fit."""
ROOT = Path(__file__).parents[3]
TOLERANCE = TOLERANCES["float32"]
FOUND = [
    ("loads nothing", "not delivered", ""),
    ("skips model.norm", "partly loaded", "model.norm.weight"),
    ("skips model.layers.0.self_attn.q_norm", "partly loaded", "model.layers.0.self_attn.q_norm.weight"),
    ("skips model.layers.1.", "partly loaded", "model.layers.1.self_attn.q_proj.weight"),
    ("skips model.layers.0.mlp.down_proj", "partly loaded", "model.layers.0.mlp.down_proj.weight"),
    ("exchanges layers.1.mlp.gate_proj with layers.1.mlp.up_proj", "wrongly loaded", "layers.1.mlp.gate_proj"),
    ("zeroes model.layers.1.self_attn.v_proj", "wrongly loaded", ""),
    ("rounds model.layers.0.self_attn.o_proj", "wrongly loaded", ""),
]
"""A fault of `sglang_faults`, its name, and a tensor that is named."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", "qwen3")


@pytest.fixture(scope="module")
def server(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedSGLang]:
    with served_sglang(directory, tmp_path_factory.mktemp("sglang") / "log") as served:
        yield served


@NEEDS_SGLANG
@pytest.mark.sglang
class TestAgainstSGLang:
    def test_every_push_is_what_the_server_then_computes_with(self, server: ServedSGLang, directory: Path, shm: Path):
        """Every value is looked for in the model, and the tokens are those of a forward pass with the same weights."""
        model = AutoModelForCausalLM.from_pretrained(directory)
        with WeightPublisher(model, [server.url], config={"check_engine": "always"}) as publisher:
            said = []
            for version in range(3):
                nudge(model, version)
                assert publisher.push(version).replicas_updated == (server.url,)
                assert server.version() == str(version)
                said.append(server.greedy_tokens())
                assert said[-1] == hugging_face_tokens(model)
            assert said[0] != said[1] != said[2]  # so that a version that stayed would be seen
        assert arenas_in(shm) == []

    def test_requests_that_are_kept_end_with_the_new_weights(self, server: ServedSGLang, directory: Path, shm: Path):
        model = AutoModelForCausalLM.from_pretrained(directory)
        old = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        nudge(model, 3)
        new = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        count, prompt = 400, PROMPTS[0]
        with WeightPublisher(model, [server.url], config={"pause_mode": "keep"}) as publisher:
            publisher.push(1)
            (after,) = server.greedy_tokens([prompt], count)
            model.load_state_dict(old)
            publisher.push(2)
            (before,) = server.greedy_tokens([prompt], count)
            with server.begins_unlike(after, prompt, count) as rest:
                model.load_state_dict(new)
                publisher.push(3)
                kept = rest()
        assert len(kept) == count
        assert kept not in (before, after)

    def test_what_does_not_fit_is_refused_by_name_and_the_server_goes_on(
        self, server: ServedSGLang, directory: Path, shm: Path
    ):
        model = AutoModelForCausalLM.from_pretrained(directory)
        nudge(model, 4)
        whole, down = dict(model.named_parameters()), "model.layers.0.mlp.down_proj.weight"
        with WeightPublisher(model, [server.url]) as publisher:
            publisher.push(1)
        said = server.greedy_tokens()
        lacking = {name: tensor for name, tensor in whole.items() if name != down}
        wide = whole | {down: torch.zeros(whole[down].shape[0], whole[down].shape[1] + 8)}
        narrow = whole | {down: torch.zeros(whole[down].shape[0], whole[down].shape[1] - 8)}
        vocabulary = "model.embed_tokens.weight"
        longer = whole | {vocabulary: torch.cat([whole[vocabulary], whole[vocabulary][:64]])}
        count, prompt = 200, PROMPTS[0]
        (alone,) = server.greedy_tokens([prompt], count)
        with server.begins_unlike([-1] * count, prompt, count) as rest:
            for tensors, why in (
                (lacking, f"no tensor fills {down}"),
                (wide, rf"it takes a part of {down} \[{wide[down].shape[0]}, {wide[down].shape[1]}\]"),
                (narrow, f"no tensor fills {down}"),
                (longer, rf"{vocabulary} \[{len(longer[vocabulary])}, .*\] is refused"),
                (whole | {"model.other": torch.ones(3)}, r"it takes nothing from model.other \[3\]"),
                (whole | {down: whole[down].to(torch.int8)}, f"{down} is int8"),
            ):
                with WeightPublisher(tensors, [server.url]) as publisher, pytest.raises(ActivationError, match=why):
                    publisher.push(2)
            assert rest() == alone
        assert (server.version(), server.greedy_tokens()) == ("1", said)
        with WeightPublisher(whole, [server.url]) as publisher:
            publisher.push(3)
            publisher.push(4)
        assert server.greedy_tokens() == hugging_face_tokens(model)

    def test_a_server_that_sleeps_is_refused_and_one_that_woke_up_takes_weights(
        self, server: ServedSGLang, directory: Path, shm: Path
    ):
        model = AutoModelForCausalLM.from_pretrained(directory)
        with WeightPublisher(model, [server.url]) as publisher:
            server.call("POST", "/release_memory_occupation", {"tags": ["weights"]}, is_json=False)
            try:
                with pytest.raises(ConfigError, match=r"it sleeps \(weights\): wake it up first \(POST /resume_memory"):
                    publisher.push(21)
            finally:
                server.call("POST", "/resume_memory_occupation", {"tags": ["weights"]}, is_json=False)
            publisher.push(22)
        assert (server.version(), server.greedy_tokens()) == ("22", hugging_face_tokens(model))

    async def test_a_server_that_cannot_load_a_version_serves_the_one_before_or_if_others_could_nothing(
        self, server: ServedSGLang, directory: Path, shm: Path
    ):
        """It is handed an arena with a tensor too few: when it finds that out, its model is torn."""
        model = AutoModelForCausalLM.from_pretrained(directory)
        named = dict(model.named_parameters())
        lacking = {name: named[name].detach() for name in [*named][:-1]}
        (shm / "lacking").mkdir()
        other = CheckedReplica("http://127.0.0.1:1")
        async with Fleet(lacking, shm / "lacking", replicas=0) as fleet:
            with MisleadingPublisher(
                model, [server.url, other.name], other=other, config={"check_engine": "always"}
            ) as publisher:
                nudge(model, 11)
                publisher.push(1)
                before = hugging_face_tokens(model)
                assert server.greedy_tokens() == before

                nudge(model, 12)
                await fleet.manager.update_weights(2)
                (publisher.misleads,) = map(str, arenas_in(shm / "lacking"))
                other.fail = fails_at("activate")
                with pytest.raises(SyncAborted, match="the previous version stays in service: .* no tensor fills"):
                    publisher.push(2)
                assert (server.version(), server.greedy_tokens(), other.version) == ("1", before, 1)

                await fleet.manager.update_weights(3)
                with pytest.raises(SyncAborted, match=f"{server.url} could not load it; {other.name} serve it"):
                    publisher.push(3)
                assert (server.version(), other.version) == ("1", 3)
                server.call("POST", "/continue_generation", {})  # as any stranger may
                with pytest.raises(TransportTimeout):  # nothing is generated from weights that are torn
                    server.call("POST", "/generate", {"input_ids": PROMPTS[0]}, timeout_s=2)

                publisher.misleads = ""
                publisher.push(4)
                after = hugging_face_tokens(model)
                assert after != before
                assert (server.version(), server.greedy_tokens(), other.version) == ("4", after, 4)

    def test_a_server_has_one_writer_and_is_named_once(self, server: ServedSGLang, directory: Path, shm: Path):
        model, other = (AutoModelForCausalLM.from_pretrained(directory) for _ in range(2))
        nudge(model, 41)
        with WeightPublisher(model, [server.url]) as publisher, WeightPublisher(other, [server.url]) as second:
            publisher.push(41)
            said = server.greedy_tokens()
            with pytest.raises(ConfigError, match=f"is written by another: the publisher of process {os.getpid()} on"):
                second.push(42)
            assert (server.version(), server.greedy_tokens()) == ("41", said)
            publisher.close()
            second.push(43)
            assert (server.version(), server.greedy_tokens()) == ("43", hugging_face_tokens(other))
        names = [server.url, server.url.replace("127.0.0.1", "localhost")]
        with (
            WeightPublisher(model, names) as publisher,
            pytest.raises(ConfigError, match="are the same server: name it once"),
        ):
            publisher.push(44)
        assert [*shm.iterdir()] == []

    @pytest.mark.parametrize(
        ("step", "serves"),
        [("/pause_generation", {1}), ("/update_weights_from_tensor", {1, 2}), ("/end_weight_update", {2})],
    )
    def test_a_publisher_that_is_killed_leaves_it_serving_what_it_names(
        self, step: str, serves: set[int], server: ServedSGLang, directory: Path, shm: Path
    ):
        with passed_on(server.url) as gate:
            command = [sys.executable, "-m", killed_publisher.__name__, gate.url, directory]
            with subprocess.Popen(command, cwd=ROOT) as process:
                pauses: list[str] = []

                def kill(path: str) -> None:
                    pauses.extend(["pause"] * (path == "/pause_generation"))
                    if path == step and len(pauses) == PAUSES:
                        process.kill()

                gate.before = kill
                assert process.wait() == -signal.SIGKILL
            assert soon(lambda: list(shm.glob("verl-*")) == [])
        version = int(server.version())
        assert version in serves
        model = AutoModelForCausalLM.from_pretrained(directory)
        model.load_state_dict(killed_publisher.weights_of(version, directory), strict=False)
        assert server.greedy_tokens() == hugging_face_tokens(model)
        with WeightPublisher(model, [server.url]) as publisher:
            publisher.push(51)
        assert server.version() == "51"

    def test_a_publisher_that_is_killed_while_it_asks_whether_weights_fit_leaves_all_as_it_was(
        self, server: ServedSGLang, directory: Path, shm: Path
    ):
        before = server.version(), server.greedy_tokens()
        with passed_on(server.url) as gate:
            command = [sys.executable, "-m", killed_publisher.__name__, gate.url, directory]
            with subprocess.Popen(command, cwd=ROOT) as process:
                gate.before = lambda path: process.kill() if path == "/update_weights_from_tensor" else None
                assert process.wait() == -signal.SIGKILL
            assert soon(lambda: list(shm.glob("verl-*")) == [])
        assert (server.version(), server.greedy_tokens()) == before
        model = AutoModelForCausalLM.from_pretrained(directory)
        with WeightPublisher(model, [server.url]) as publisher:
            publisher.push(61)
        assert (server.version(), server.greedy_tokens()) == ("61", hugging_face_tokens(model))

    def test_a_server_loads_from_the_memory_of_a_process_beside_it_and_answers_there(
        self, server: ServedSGLang, directory: Path, shm: Path
    ):
        """As where it is on another host than the loop that trains."""
        model = AutoModelForCausalLM.from_pretrained(directory)
        key, place = shm / "key", f"127.0.0.1:{free_port()}"
        across: dict[str, Any] = {"nodes": [place], "node_key": key}
        across["config"] = {"check_engine": "always", "retries": 0}
        with node_process(key, place) as node, WeightPublisher(model, [server.url], **across) as publisher:
            for version in (31, 32):
                nudge(model, version)
                assert publisher.push(version).replicas_updated == (server.url,)
                before = server.greedy_tokens()
                assert (server.version(), before) == (str(version), hugging_face_tokens(model))
            assert [path.name for path in shm.glob(f"{PREFIX}*/*")] == []
            node.kill()
            node.wait()
            nudge(model, 33)
            with pytest.raises(SyncAborted, match=place):
                publisher.push(33)
            assert (server.version(), server.greedy_tokens()) == ("32", before)
            with node_process(key, place):
                publisher.push(34)
                assert (server.version(), server.greedy_tokens()) == ("34", hugging_face_tokens(model))
                publisher.close()
                lacking = dict([*model.named_parameters()][:-1])
                with (
                    WeightPublisher(lacking, [server.url], **across) as other,
                    pytest.raises(ActivationError, match="no tensor fills"),
                ):
                    other.push(35)
                assert (server.version(), server.greedy_tokens()) == ("34", hugging_face_tokens(model))
                with WeightPublisher(model, [server.url], **across) as other:
                    other.push(36)
        assert soon(lambda: [path.name for path in shm.iterdir()] == [key.name])


class CheckedReplica(RecordingReplica):
    answers = True

    async def check(self, tensors: Any) -> dict[str, str]:
        return {}

    async def claim(self) -> str:
        return self.name

    async def release(self) -> None: ...

    async def go_on(self, version: int) -> None: ...


class MisleadingPublisher(WeightPublisher):
    """Has servers load their next versions from the arena `misleads`, and `other` in this process in place of one."""

    def __init__(self, *arguments: Any, other: CheckedReplica, **named: Any) -> None:
        self._other, self.misleads = other, ""
        super().__init__(*arguments, **named)

    def _replica(self, name: str) -> Any:
        if name == self._other.name:
            return self._other
        replica = super()._replica(name)
        activate = replica.activate
        replica.activate = lambda path, version: activate((version > 1 and self.misleads) or path, version)
        return replica


@NEEDS_SGLANG
@pytest.mark.sglang
class TestCertified:
    VERSIONS = itertools.count(100, 2)
    """Of one server: prompts that are asked after an update depend on its number."""

    @pytest.fixture(scope="class")
    def versions(self, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
        other = tmp_path_factory.mktemp("versions") / "B"
        oracle, _ = changed_version(directory, other, prompts_of(250, 40), "float32", TOLERANCE, lambda _: None)
        return oracle, other

    @pytest.fixture
    def found(
        self, server: ServedSGLang, directory: Path, versions: tuple[Oracle, Path]
    ) -> Iterator[Callable[..., list[Finding]]]:
        """The faults of an update from A to B with a fault in SGLang's ranks, or over another route."""
        oracle, other = versions

        def update(fault: str = "", over: Callable[..., Route] = SGLangDiskRoute) -> list[Finding]:
            run = Run(
                version=next(self.VERSIONS),
                server=ProbedSGLang(server.url, timeout_s=300),
                route=SGLangDiskRoute(server.url, timeout_s=300, pause_mode="abort"),
                oracle=oracle,
                directories=(directory, other),
                tolerance=TOLERANCE,
                timeout_s=300,
            )
            assert run.warm("A", in_flight=False).findings == []
            run.route = over(server.url, timeout_s=300, pause_mode="abort")
            set_fault(server, fault)
            return run.warm("B").findings

        yield update
        set_fault(server, "")

    @pytest.fixture
    def hit(
        self, server: ServedSGLang, directory: Path, versions: tuple[Oracle, Path], tmp_path: Path
    ) -> Iterator[Callable[[str, str, float], tuple[Cell, set[str]]]]:
        """What comes of a fault in an update of a server that serves A, and which promises it breaks."""
        oracle, other = versions
        with ExitStack() as stack:

            def hit(route: str, name: str, deadline_s: float) -> tuple[Cell, set[str]]:
                run = FaultRun(
                    version=10 * next(self.VERSIONS),
                    server=ProbedSGLang(server.url, timeout_s=300),
                    route=SGLANG_ROUTES[route](server.url, timeout_s=300, pause_mode="abort"),
                    oracle=oracle,
                    directories=(directory, other),
                    tolerance=TOLERANCE,
                    timeout_s=300,
                    pause_mode="abort",
                    route_name=route,
                    sglang=True,
                    scratch=tmp_path,
                    deadline_s=deadline_s,
                )
                stack.callback(run.close)
                assert run.warm("A", in_flight=False).findings == []
                fault, _, phase = name.partition(", ")
                cell = Cell(name=name, fault=fault, phase=phase)
                run.hit(cell)
                return cell, {finding.fault for finding in cell.findings}

            yield hit

    def test_a_pusher_that_is_killed_leaves_it_paused_and_a_later_one_resumes_it(
        self, hit: Callable[[str, str, float], tuple[Cell, set[str]]]
    ):
        cell, broken = hit("disk", "pusher killed, paused", 2)
        assert (cell.state, broken, cell.next_update) == (STUCK, {"paused for ever"}, "yes")

    def test_a_load_in_parts_that_breaks_off_leaves_it_with_mixed_weights(
        self, hit: Callable[[str, str, float], tuple[Cell, set[str]]]
    ):
        cell, broken = hit("tensor", "connection lost, loading", 60)
        assert (cell.state, cell.ended, cell.next_update) == (MIXED, "failed", "yes")
        assert "mixed weights" in broken

    @pytest.mark.parametrize("route", SGLANG_ROUTES)
    def test_a_sound_server_is_certified(self, route: str, server: ServedSGLang, directory: Path, tmp_path: Path):
        options = Options(server=server.url, model=directory, route=route, dtype="float32", pause_mode="abort")
        report = certified(options, tmp_path, tell=lambda _: None)
        assert (report.findings, report.unseen, report.cache) == ([], [], "hit")

    @pytest.mark.parametrize(("fault", "name", "tensor"), FOUND)
    def test_a_fault_of_its_loader_is_named(
        self, fault: str, name: str, tensor: str, found: Callable[..., list[Finding]]
    ):
        (finding, *_) = found(fault)
        assert (finding.fault, tensor in "".join(finding.tensors)) == (name, True)

    def test_a_version_under_another_label_and_a_cache_that_stays_are_named(self, found: Callable[..., list[Finding]]):
        assert [finding.fault for finding in found(over=Unlabelled)] == ["wrong label"]
        assert [finding.fault for finding in found(over=Unflushed)] == ["stale cache"]

    @pytest.mark.parametrize(("over", "fault", "name"), OVER)
    def test_a_fault_of_a_load_in_chunks_is_named(
        self, over: Callable[..., Route], fault: str, name: str, found: Callable[..., list[Finding]]
    ):
        assert [finding.fault for finding in found(fault, over)] == [name]


def fails_at(step: str) -> Callable[[str], None]:
    """Once."""
    steps = [step]

    def fail(at: str) -> None:
        if at in steps:
            steps.remove(at)
            raise ActivationError("told to fail")

    return fail
