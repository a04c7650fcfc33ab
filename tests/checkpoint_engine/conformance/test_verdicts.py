"""What a conformance run says of an engine whose fault is known."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from tests import forked
from tests.checkpoint_engine.conformance.slow_engine import Loader, SlowEngine, State, slow_engine
from tests.checkpoint_engine.stand_in_vllm import stand_in
from verl.checkpoint_engine.certify import main
from verl.checkpoint_engine.conformance.command import Options, prompts_of
from verl.checkpoint_engine.conformance.distance import TOLERANCES, Tolerance
from verl.checkpoint_engine.conformance.oracle import MARGIN, Oracle, changed_version, load_model
from verl.checkpoint_engine.conformance.probes import ProbedVLLM
from verl.checkpoint_engine.conformance.routes import DiskRoute, route_of
from verl.checkpoint_engine.conformance.sequence import Run
from verl.checkpoint_engine.conformance.verdicts import FAULTS, Finding
from verl.checkpoint_engine.errors import ConfigError
from verl.utils.builtin import make_tiny_model

PLUGIN = "verl.checkpoint_engine.conformance.pytest_plugin"
TOLERANCE = TOLERANCES["float32"]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Q, K = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.k_proj.weight"
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


class Bench:
    """A slow engine, and versions A and B of its model."""

    def __init__(self, directory: Path, architecture: str) -> None:
        self.directory = make_tiny_model(directory / "A", architecture)
        self.other = directory / "B"
        prompts = prompts_of(250, 40)
        self.oracle, _ = changed_version(self.directory, self.other, prompts, "float32", TOLERANCE, lambda _: None)

    @property
    def directories(self) -> tuple[Path, Path]:
        return self.directory, self.other

    def found(self, engine: SlowEngine, url: str, timeout_s: float = 60.0, *, in_flight: bool = False) -> list[Finding]:
        """The faults after an update from A to B."""
        label = engine._label
        engine.heal, heal = lambda: None, engine.heal
        try:
            run = Run(
                server=ProbedVLLM(url, timeout_s=timeout_s),
                route=DiskRoute(url, timeout_s=timeout_s, pause_mode="wait"),
                oracle=self.oracle,
                directories=self.directories,
                tolerance=TOLERANCE,
                timeout_s=timeout_s,
                flight_tokens=48,
                version=int(label) if label.isdigit() else 0,
            )
            return run.warm("B", in_flight=in_flight).findings
        finally:
            engine.heal = heal


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("moe"), "qwen3_moe")


@pytest.fixture(scope="module")
def served(bench: Bench) -> Iterator[tuple[SlowEngine, str]]:
    with slow_engine(bench.directory) as found:
        yield found


@pytest.fixture
def engine(served: tuple[SlowEngine, str], bench: Bench) -> Iterator[SlowEngine]:
    """It computes with A, and has no fault."""
    engine, _ = served
    engine.heal()
    engine.load(bench.directory)
    engine._cache.clear()
    yield engine
    engine.heal()


def without(*names: str) -> Loader:
    return lambda _, new: {name: tensor for name, tensor in new.items() if not name.startswith(names)}


def without_slice(name: str, index: int) -> Loader:
    def load(old: State, new: State) -> State:
        new[name][index] = old[name][index]
        return new

    return load


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Loader:
    return lambda _, new: new | {name: change(new[name])}


def exchanged(first: str, second: str) -> Loader:
    return lambda _, new: new | {first: new[second], second: new[first]}


LOADERS: dict[str, tuple[Loader, str, set[str]]] = {
    "nothing": (lambda old, _: old, "not delivered", set()),
    "no expert 2": (without_slice(GATE_UP, 2), "partly loaded", {f"{GATE_UP}[2]"}),
    "no second matrix of expert 0": (
        without_slice("model.layers.1.mlp.experts.down_proj", 0),
        "partly loaded",
        {"model.layers.1.mlp.experts.down_proj[0]"},
    ),
    "no router": (without("model.layers.0.mlp.gate"), "partly loaded", {"model.layers.0.mlp.gate.weight"}),
    "no norm of queries": (
        without("model.layers.0.self_attn.q_norm"),
        "partly loaded",
        {"model.layers.0.self_attn.q_norm.weight"},
    ),
    "no last norm": (without("model.norm"), "partly loaded", {"model.norm.weight"}),
    "no embedding": (without(EMBEDDING), "partly loaded", {EMBEDDING}),
    "no head": (without(HEAD), "partly loaded", {HEAD}),
    "no layer": (without("model.layers.1."), "partly loaded", {Q, K}),
    "neither queries nor the head": (without(Q, HEAD), "partly loaded", {Q, HEAD}),
    "q and k exchanged": (exchanged(Q, K), "wrongly loaded", {Q, K}),
    "the head in the place of the embedding": (lambda _, new: new | {EMBEDDING: new[HEAD]}, "wrongly loaded", set()),
    "gate and up exchanged": (changed(GATE_UP, lambda w: w.roll(64, dims=1)), "wrongly loaded", {GATE_UP}),
    "experts in places of others": (changed(GATE_UP, lambda w: w.roll(1, dims=0)), "wrongly loaded", {GATE_UP}),
    "a matrix transposed": (changed(Q, lambda w: w.T.contiguous()), "wrongly loaded", set()),
    "half of a matrix": (changed(Q, lambda w: torch.cat([w[:32], w[:32]])), "wrongly loaded", set()),
    "zeros": (changed(K, torch.zeros_like), "wrongly loaded", set()),
    "rounded twice": (changed(HEAD, lambda w: w.to(torch.float8_e4m3fn).float()), "wrongly loaded", set()),
    "one element": (
        changed(HEAD, lambda w: w.index_put((torch.tensor(7), torch.tensor(3)), w.max())),
        "wrongly loaded",
        set(),
    ),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_with_a_fault_is_found_and_its_tensors_are_named(name, bench, engine, served):
    engine.loader, fault, tensors = LOADERS[name]
    (finding,) = bench.found(engine, served[1])
    assert finding.fault == fault
    assert tensors <= set(finding.tensors)
    assert len(finding.tensors) == len(tensors) or name == "no layer"
    assert finding.prompt


def test_an_update_without_a_fault_has_no_finding(bench, engine, served):
    assert bench.found(engine, served[1], in_flight=True) == []


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ({"keeps_cache": True}, "stale cache"),
        ({"after_answer_s": 3.0}, "not delivered"),
        ({"named": lambda label: f"{label}0"}, "wrong label"),
        ({"ignores_pause": True, "step_s": 0.02}, "mixed versions"),
        ({"drops_running": True, "step_s": 0.02}, "lost request"),
        ({"ignores_resume": True}, "hung"),
        ({"hangs_s": 4.0}, "hung"),
    ],
    ids=lambda given: "-".join(given) if isinstance(given, dict) else given,
)
def test_a_server_that_does_not_keep_its_word_is_found(broken, fault, bench, engine, served):
    for name, value in broken.items():
        setattr(engine, name, value)
    slow = fault != "hung"
    found = bench.found(engine, served[1], 60.0 if slow else 2.0, in_flight=fault in ("mixed versions", "lost request"))
    assert found[0].fault == fault


def test_a_copy_that_only_decoding_uses_is_derived_state(bench, engine, served):
    engine.decodes_with = copy.deepcopy(engine.model)
    (finding,) = bench.found(engine, served[1])
    assert finding.fault == "stale derived state"


def test_a_tied_head_that_is_a_copy_is_derived_state(tmp_path):
    model = make_tiny_model(tmp_path / "A", "qwen2", tie_word_embeddings=True)
    oracle, _ = changed_version(model, tmp_path / "B", prompts_of(250, 30), "float32", TOLERANCE, lambda _: None)
    untied = load_model(tmp_path / "B", "float32")
    untied.lm_head.weight = torch.nn.Parameter(load_model(model, "float32").lm_head.weight.data)
    found = Oracle(untied, untied, oracle.prompts).of_new
    assert oracle.explain(found, TOLERANCE).fault == "stale derived state"


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "qwen3"])
def test_every_tensor_shows_in_the_probes_of_its_version(architecture, tmp_path):
    model = make_tiny_model(tmp_path / "A", architecture)
    oracle, amounts = changed_version(model, tmp_path / "B", prompts_of(250, 48), "float32", TOLERANCE, lambda _: None)
    unseen = [name for name, effect in oracle.power(TOLERANCE).items() if effect <= MARGIN * TOLERANCE.nats]
    assert unseen == [], amounts


def test_the_command_writes_its_reports_and_exits_with_0_1_2_or_3(bench, engine, served, tmp_path, capsys):
    url = served[1]
    arguments = ["--model", str(bench.directory), "--server", url, "--route", "disk", "--dtype", "float32"]
    files = [f"--{kind}={tmp_path / kind}" for kind in ("junit", "html", "json")]
    assert main([*arguments, *files]) == 0, capsys.readouterr()
    written = capsys.readouterr().out
    assert "certified: the server computes with every version" in written
    assert "37 of 37 tensors" in written
    suite = ElementTree.parse(tmp_path / "junit").getroot()
    assert [case.get("name") for case in suite] == ["cold A", "warm B", "warm A", "warm B again", "warm A again"]
    engine.loader = without(HEAD)
    assert main([*arguments, *files]) == 1
    assert f"partly loaded (or stale derived state): {HEAD}" in capsys.readouterr().out
    failures = ElementTree.parse(tmp_path / "junit").getroot().findall("testcase/failure")
    assert failures[0].get("message") == "partly loaded"
    assert main([*arguments[:-1], "bfloat16"]) == 2
    assert "has experts, and in bfloat16 a rounding chooses others" in capsys.readouterr().err
    assert main([*arguments[:-4], "--route", "nccl"]) == 3
    assert "NCCL engine needs CUDA devices" in capsys.readouterr().err


def test_a_server_of_short_answers_is_tried_or_refused_by_name(bench, engine, served, capsys):
    arguments = ["--model", str(bench.directory), "--server", served[1], "--route", "disk", "--dtype", "float32"]
    engine.longest = 13
    assert main(arguments) == 2
    assert "takes 13 tokens of a prompt and its answer: at least 32 show an update" in capsys.readouterr().err
    engine.longest = 32
    assert main(arguments) == 0, capsys.readouterr()


def run_pytest(*arguments: str) -> None:
    sys.exit(pytest.main(["-p", PLUGIN, "-p", "no:cacheprovider", "-rs", *arguments]))


def _of_routes(routes: str, url: str, directory: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    given = {"server": url, "model": directory, "routes": routes, "timeout": 60}
    return forked.run(run_pytest, *(f"--weight-update-{name}={value}" for name, value in given.items()), cwd=cwd)


@pytest.mark.job
def test_a_test_of_pytest_fails_with_the_report_and_is_skipped_where_a_route_needs_a_device(
    bench, engine, served, tmp_path
):
    engine.loader = without(HEAD)
    (tmp_path / "test_of_the_user.py").write_text("raise SystemExit('collected')")
    result = _of_routes("disk,nccl", served[1], bench.directory, tmp_path)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result
    assert f"partly loaded (or stale derived state): {HEAD}" in result.stdout
    assert "NCCL engine needs CUDA devices" in result.stdout
    assert "1 failed, 1 skipped" in result.stdout


def test_pytest_says_in_a_line_why_a_server_cannot_be_tried(bench, tmp_path):
    result = _of_routes("disk", "http://127.0.0.1:9", bench.directory, tmp_path)
    assert result.returncode == pytest.ExitCode.TESTS_FAILED
    assert "error: [http://127.0.0.1:9] Connection refused" in result.stdout
    assert "Traceback" not in result.stdout
    result = forked.run(run_pytest, "--weight-update-server=http://127.0.0.1:9", cwd=tmp_path)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "belong together: server alone is given" in result.stderr


@pytest.mark.parametrize("started", ["with A", "with dummies"])
def test_a_server_that_computes_otherwise_than_transformers_is_no_fault_of_an_update(started, bench, capsys):
    """Before any update it does so with the same weights. With dummies nobody can know that."""
    with slow_engine(bench.directory) as (engine, url):
        engine.model.model.rotary_emb.inv_freq.mul_(1.5)
        if started == "with dummies":
            engine.model.lm_head.weight.data.zero_()
        code = main(["--server", url, "--model", str(bench.directory), "--route", "disk", "--dtype", "float32"])
        assert engine.model.state_dict()[Q].equal(bench.oracle.old.state_dict()[Q])
    said = capsys.readouterr()
    if started == "with A":
        assert code == 2
        assert "the server computes otherwise than transformers" in said.err
    else:
        assert code == 1
        assert "wrongly loaded" in said.out


def test_a_server_that_rounds_nearly_as_much_as_is_let_pass_is_refused(bench):
    with slow_engine(bench.directory) as (engine, url):
        engine.model.model.rotary_emb.inv_freq.mul_(1.01)
        run = Run(
            server=ProbedVLLM(url, timeout_s=60.0),
            route=DiskRoute(url, timeout_s=60.0, pause_mode="wait"),
            oracle=bench.oracle,
            directories=bench.directories,
            tolerance=Tolerance(1.0),
            timeout_s=60.0,
            flight_tokens=48,
        )
        away = run.cold().deviation
        run.tolerance = Tolerance(1.4 * away)
        run.cold()
        assert run.is_cold_a
        run.tolerance = Tolerance(1.2 * away)
        with pytest.raises(ConfigError, match=f"computes otherwise than transformers: {away:.3g} nats away before any"):
            run.cold()
        run.tolerance = Tolerance(1.0)
        away = run.warm("B", in_flight=False).deviation
        run.require_agreement()
        run.tolerance = Tolerance(1.2 * away)
        run.warm("B", in_flight=False)
        with pytest.raises(ConfigError, match=f"{away:.3g} nats away with the version that it was brought"):
            run.require_agreement()


def test_a_run_that_breaks_off_leaves_the_server_with_its_own_version(bench, engine, served, monkeypatch, capsys):
    def interrupted(*_):
        assert engine._label == "1"  # B
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "_compare", interrupted)
    arguments = ["--model", str(bench.directory), "--server", served[1], "--route", "disk", "--dtype", "float32"]
    assert main(arguments) == 130
    assert "bringing the server's own version back" in capsys.readouterr().err
    server = ProbedVLLM(served[1], timeout_s=60)
    found = torch.tensor([value for prompt in bench.oracle.prompts for value in server.log_probs(prompt)])
    assert float((found - bench.oracle.of_old).abs().max()) < TOLERANCE.nats


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--server", "http://127.0.0.1:9"], "--server needs --route"),
        (["--server", "http://127.0.0.1:9", "--route", "dsik"], "--route dsik is unknown"),
        (["--server", "http://127.0.0.1:9", "--route", "disk", "--timeout-seconds", "0"], "more than 0"),
        (["--server", "http://127.0.0.1:9", "--route", "disk"], "refused"),
        (["--server", "nowhere", "--route", "disk"], "not a URL"),
        (["--route", "disk"], "--server URL"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(arguments, text, bench, capsys):
    assert main(["--model", str(bench.directory), *arguments]) == 2
    captured = capsys.readouterr().err
    assert text in captured
    assert captured.count("\n") == 1


def test_every_class_of_fault_has_a_meaning_and_a_thread():
    assert all(
        meaning.endswith(".") and thread.startswith("https://github.com/") for meaning, thread in FAULTS.values()
    )
    assert Options(server="", model=Path(), route="disk").pause_mode == "wait"


@pytest.mark.parametrize("route", ["update", "checkpoint_engine"])
def test_a_route_that_serves_one_worker_refuses_an_engine_of_two(route):
    with stand_in(2) as (vllm, url):
        with pytest.raises(ConfigError, match="has 2 workers, and this route brings versions to one"):
            route_of(route, url, timeout_s=60, pause_mode="wait").check()
        assert not vllm.paused
