"""What documents and `--help` print runs in a clean directory, as it is printed; what they show as output, it prints.

The commands of a page run one after another in a directory that has the repository's files, `.venv`, and what the page
expects of its reader: a model in DIR, a file of data. Launches of runs, and scripts that launch, get `--check`. What
is not run is in a table below, with the reason; what is in none of its lines is run.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from tests.cli.runs import write_run, write_samples
from tests.docs.printed import FOLDERS, ROOT, SHOWN, Printed, form, helped, outputs, printed, shown
from tests.docs.test_printed_commands import TRAINERS
from verl.cli.main import cli
from verl.trainer import main_ppo
from verl.utils.builtin import make_tiny_model
from verl.utils.device import any_device

NOT_RUN = {
    r"^(git|kubectl|sbatch|docker|ray|pre-commit|mkdocs)\b": "a remote repository, a cluster, a daemon",
    r"^(\S+/)?(pip|uv|pre-commit|mkdocs)\b": "changes an environment; scripts/release.sh installs the wheels",
    r"^make (?!run\b)": "a target of make: .ci/run and a stranger's clone run them",
    r"vllm\.entrypoints|sglang\.launch_server": "a server: tests/docs/test_printed_servers.py",
    r"^torchrun |examples/(any_trainer|parameter_server)": "servers: tests/checkpoint_engine/publisher",
    r"examples/adapters\.py": "a server: tests/tenants/test_tinker_client.py",
    r"\.update --checkpoint-path|--server (http|URL)|^pytest -p": "a server: tests/checkpoint_engine",
    r"(certify|mismatch) --model DIR|mismatch RUN_DIR": "an engine: tests/weight_sync, tests/mismatch",
    r"doctor --address": "a cluster: tests/doctor/test_cluster.py",
    r"-m benchmarks\.|-m tests\.|^scripts/gpu_": "minutes, or devices: tests/benchmarks, tests/scripts",
    r"models_page.py( --run)?$|scripts/generate_config.py$": "long, or changes the repository",
    r"conformance_matrix.py": "installs releases of vLLM, and takes minutes for each",
    r"data\.train_batchsize": "shown for its error: tests/docs/test_printed_commands.py",
    r"(check_commit_message.py FILE|for_index.py FOLDER)": "a placeholder for a file; tests/scripts",
    r"prepare verifiers|data/guess": "packages of its own: tests/experimental/agent_loop/test_verifiers.py",
    r"prepare nemo_gym": "a package of its own: tests/experimental/agent_loop/test_nemo_gym.py",
    r"^scripts/prose.py|prose.py": "make style runs it",
}
"""Patterns of commands that are not run: why, and what runs them instead."""
SERVES = {
    r"verl-sync node|-m verl\.checkpoint_engine\.node": "a rollout node for publishers",
    r"verl-sync watch DIR": "http://127.0.0.1:",
    r"verl-sync serve|-m verl\.tenants\.command": "http://127.0.0.1:",
}
"""Patterns of commands that go on until Ctrl-C, which they get once they have printed this."""
ENDS = {r"verl-sync diff RUN_A": 1}
"""Patterns of commands with an exit code that is not 0, and which."""
ALL = printed()
HELP = "--help"
DOCTOR = "verl-sync doctor --json"


def reason(command: Printed) -> str | None:
    """Why it is not run: a line of the table, or that it is but the name of a program in a sentence."""
    words = command.words
    of_program = 1 if words[0].startswith(FOLDERS) else 3 if words[1] == "-m" else 2
    if command.inline and not [word for word in words[of_program:] if word != "..."]:
        return "a name"
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command.text)), None)


RUN = [one for one in ALL if reason(one) is None]


def test_no_line_of_the_tables_is_superfluous():
    texts = [one.text for one in ALL]
    assert [line for line in (*NOT_RUN, *SERVES, *ENDS) if not any(re.search(line, text) for text in texts)] == []
    assert len({one.page for one in RUN}) > 20


def test_all_that_a_block_has_is_a_command_or_known_output():
    """So a command of a program that nobody has met is red."""
    beginnings = [(page, lines[0]) for page, lines in outputs()]
    assert [(page, line) for page, line in beginnings if not line.startswith(tuple(SHOWN))] == []
    assert [known for known in SHOWN if not any(line.startswith(known) for _, line in beginnings)] == []


def test_a_form_has_no_numbers_and_paths():
    assert form("step  1/30 | lr 2e-06 | 1.1+0.9 s; in runs/a  0.6") == form(
        "step 20/30 | lr 0.0002 | 2+3 s; in /b/c 12"
    )
    assert form("14 ok, 0 slow, 0 wrong") != form("14 ok, 0 slow, 0 failed")


class Stranger:
    """Somebody who has a clone with its environment, and types what a page prints."""

    def __init__(self, directory: Path, texts: str) -> None:
        self.clone = directory / "clone"
        self.clone.mkdir()
        for path in ROOT.iterdir():
            if path.name not in ("checkpoints", "outputs", ".venv") and not path.name.startswith(".git"):
                (self.clone / path.name).symlink_to(path)
        (self.clone / ".venv").symlink_to(sys.prefix)
        kept = {name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ}
        self.environment = kept | {
            "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(directory),
            "COLUMNS": "100",
            "VERL_SHM_DIR": str(directory),
        }
        self._said: dict[str, str] = {}
        self._give(texts)

    def _give(self, texts: str) -> None:
        """What the texts expect to be there."""
        model = make_tiny_model(self.clone.parent / "model")
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
        for name in {"DIR", *re.findall(r"/models/[\w.-]+", texts)}:
            shutil.copytree(model, self.clone / name.lstrip("/"))
        for name in ("DIR", "OTHER", "RUN_A", "RUN_B", "checkpoints/verl_sync/default"):
            write_samples(write_run(self.clone / name) / "samples", 1)
        for name, seed, token in (("RUN_A", 1, 8), ("RUN_B", 2, 9)):
            run = self.clone / name
            settings = f"data: {{seed: {seed}}}\ntrainer: {{rollout_data_dir: {run / 'samples'}}}\n"
            (run / "config.yaml").write_text(settings)
            for file in (run / "samples" / "1.jsonl", run / "metrics.jsonl"):
                text = file.read_text().replace("[5, 6, 7, 8, 9]", f"[5, 6, 7, {token}, 9]")
                file.write_text(
                    text.replace('"training/staleness/mean": 0.25', f'"training/staleness/mean": 0.{token}')
                )
        if "verl-sync plan" in texts:
            (self.clone / "config.json").write_text(json.dumps(EXPERTS))
            (self.clone / "DIR" / "config.json").write_text(json.dumps(EXPERTS))
        if "hosts.json" in texts:
            self._said[DOCTOR] = self.run(DOCTOR)
            (self.clone / "hosts.json").write_text(self._said[DOCTOR])
        raw, made = "utils.data prepare" in texts, re.findall(r"--to (\S+)", texts)
        for name in {*re.findall(r"\b[\w/.-]+\.(?:parquet|jsonl)|/data/[\w/.-]+", texts)} - {*made}:
            self._give_data(self.clone / name.lstrip("/"), raw=raw)
        shutil.copy(ROOT / "examples" / "custom_reward.py", self.clone / "reward.py")
        (self.clone / "my_run.yaml").write_text("trainer: {total_training_steps: 3}\n")

    @staticmethod
    def _give_data(path: Path, *, raw: bool) -> None:
        question = {
            "question": "What is 1 + 1?",
            "answer": "#### 2",
            "problem": "<image>What is 1 + 1?",
            "solution": r"\boxed{2}",
        }
        sample = {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": "1+1="}],
            "reward_model": {"style": "rule", "ground_truth": "2"},
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = pd.DataFrame(
            [{**question, "images": [{"bytes": PNG}]}] * 64 if raw and path.suffix == ".parquet" else [sample] * 1024
        )
        if path.suffix == ".parquet":
            rows.to_parquet(path)
        else:
            path.write_text(json.dumps(question) + "\n")

    def run(self, text: str) -> str:
        """What the command prints, which has to end well."""
        if text in self._said:
            return self._said[text]
        text = self._here(text)
        serves = next((said for pattern, said in SERVES.items() if re.search(pattern, text)), None)
        if serves and "--port" not in text:
            text += " --port 0"  # somebody else on this host may have the default one
        process = subprocess.Popen(
            ["bash", "-c", f"exec {text}" if serves else text],
            cwd=self.clone,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if serves is None else subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            if serves is None:
                said, error = process.communicate()
                expected = next((code for pattern, code in ENDS.items() if re.search(pattern, text)), 0)
                assert process.returncode == expected, f"{text}\n{said}\n{error}"
                return said + error
            lines: list[str] = []
            assert process.stdout is not None
            while not (lines and serves in lines[-1]):
                lines.append(process.stdout.readline())
                assert lines[-1], f"{text} ended:\n{''.join(lines)}"
            process.send_signal(signal.SIGINT)
            lines.append(process.communicate()[0])
            assert "Traceback" not in lines[-1], lines[-1]
            return "".join(lines)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()

    def run_here(self, words: list[str], patch: pytest.MonkeyPatch) -> None:
        """A subcommand that a process of its own has run: its imports take longer than all else."""
        patch.chdir(self.clone)
        done = CliRunner().invoke(cli, [self._here(word) for word in words])
        assert done.exit_code == 0, done.output

    def check(self, words: list[str], patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        """A launch with `--check`, in this process, which has torch loaded."""
        module, *arguments = [self._here(word) for word in words]
        patch.chdir(self.clone)
        patch.setattr("sys.argv", [module, *dict.fromkeys([*arguments, "--check"])])
        patch.setattr(main_ppo, "end_when_told", lambda: None)
        patch.setattr(main_ppo, "end_within", lambda *_: None)
        with any_device():
            importlib.import_module(module).main()
        said = capsys.readouterr()
        assert said.out.endswith("nothing was started\n"), said.err

    def _here(self, text: str) -> str:
        return re.sub(r"(?<![\w.:])/(?=(models|data)/)", f"{self.clone}/", text)


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de0000000c49444154789c63f8ffff3f0005fe02fe0def46b8"
    "0000000049454e44ae426082"
)
"""A picture of one pixel."""
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "vocab_size": 1024,
    "head_dim": 16,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False,
}


def launch(command: Printed) -> list[str] | None:
    """Module and arguments, if it trains."""
    match command.words:
        case ["python", "-m", module, *arguments] if module in TRAINERS:
            return None if {"--help", "--cfg"} & set(arguments) else [module, *arguments]
        case ["verl-sync", "train", *arguments]:
            return ["verl.trainer.main_ppo", *arguments]
        case ["make", "run", *words]:
            return [
                "verl.trainer.main_ppo",
                *(word for each in words for word in shlex.split(each.removeprefix("ARGS="))),
            ]
    return None


@pytest.mark.job  # a second for each launch, some for each other command
@pytest.mark.cells(7)
@pytest.mark.parametrize("page", [*dict.fromkeys(one.page for one in RUN), HELP])
def test_what_a_page_prints_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    elsewhere = {one.text for one in RUN}
    found = [one for one in (helped() if page == HELP else RUN) if page in (one.page, HELP) and reason(one) is None]
    found = [one for one in found if page != HELP or one.text not in elsewhere]
    stranger = Stranger(tmp_path, "\n".join(one.text for one in found))
    begun = set()
    for command in found:
        program = tuple(command.words[:2])
        if words := launch(command):
            stranger.check(words, monkeypatch, capsys)
        elif program in begun and program[0] == "verl-sync" and not re.search(r"[<>|$]", command.text):
            stranger.run_here(command.words[1:], monkeypatch)
        elif re.match(r"examples/\S+\.sh$", command.words[0]):
            assert stranger.run(f"{command.text.removesuffix('--check')} --check").endswith("nothing was started\n")
        else:
            compare(page, command.text, stranger.run(command.text))
        begun.add(program)


def compare(page: str, command: str, said: str) -> None:
    """Every line that the page shows is in what the command printed, in form."""
    forms = {form(line) for line in said.splitlines()}
    lines = [line for where, line in shown(command.partition(" #")[0].strip()) if where == page]
    assert [line for line in lines if form(line) not in forms] == [], said
