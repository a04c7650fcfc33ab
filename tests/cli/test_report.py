"""`verl-sync report`: what the page says, and that it says it in a real browser, wide and narrow, light and dark."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from PIL import Image

from tests.cli.chromium import browse, needs_chromium, screenshot
from tests.cli.runs import PHASE_S, sync_report, write_run, write_samples
from verl.checkpoint_engine.plan.member_report import MemberTime, PhaseReport
from verl.cli.incidents import incidents
from verl.cli.main import cli
from verl.cli.report import page
from verl.cli.report_data import comparison_data, report_data
from verl.cli.run_files import RunFiles, read_run
from verl.cli.watch import Watched
from verl.trainer.config.loader import load_config
from verl.trainer.config.record import record_run
from verl.utils.builtin import make_tiny_model

WIDE, NARROW = 1360, 400


def report(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["report", *map(str, arguments)])


def data_of(file: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="run">(.*?)</script>', file.read_text(), re.DOTALL)
    assert found
    return json.loads(found[1])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    directory = write_run(tmp_path / "project" / "experiment")
    write_samples(directory / "rollouts", 11)
    write_samples(directory / "rollouts", 12)
    return directory


def test_the_page_has_everything_that_the_run_wrote(run: Path):
    done = report(run)
    assert done.output == f"{run / 'report.html'}: 13 steps, 14 syncs, 6 samples\n"
    data = data_of(run / "report.html")
    assert data["name"] == "project/experiment"
    assert data["metrics"]["steps"] == list(range(13))
    assert data["metrics"]["series"]["critic/score/mean"][:3] == [None, 0.34, 0.38]
    assert [track["name"] for track in data["tracks"]] == [
        *("trainer", "sync", "replica-0", "replica-1", "node-0", "node-1", "node-2")
    ]
    assert data["syncs"][4]["slowest"] == "node-1 (stage)"
    assert len(data["syncs"]) == 14
    assert {sample["step"] for sample in data["samples"]} == {11, 12}


def test_the_parts_of_a_step_add_up_to_it(run: Path):
    breakdown = report_data(read_run(run), [])["breakdown"]
    assert breakdown["steps"] == list(range(1, 13))
    for index in range(12):
        assert sum(part["seconds"][index] for part in breakdown["parts"]) == pytest.approx(9.9)
    assert breakdown["parts"][-1] == {
        "name": "anything else",
        "colour": "--rest",
        "seconds": pytest.approx([0.07] * 12),
    }


def test_failures_come_with_what_came_after_them(run: Path):
    found = [(one["step"], one["what"]) for one in report_data(read_run(run), [])["incidents"]]
    assert found == [
        (3, "sync aborted"),
        (3, "tried again"),
        (3, "synced again"),
        (5, "quarantined"),
        (6, "back in service"),
        (6, "restarts"),
    ]


def test_a_count_since_the_run_began_is_told_when_it_grows():
    metrics = [{"step": step, "rollout/restarts": total} for step, total in ((1, 1), (2, 1), (3, 4))]
    assert [(one.step, one.text) for one in incidents([], metrics)] == [
        (1, "engines restarted: 1"),
        (3, "engines restarted: 3"),
    ]
    metrics = [{"step": step, "training/attempt": total} for step, total in ((1, 0), (2, 1), (3, 1))]
    assert [(one.step, one.text) for one in incidents([], metrics)] == [(2, "trainer ranks started again: 1")]


def test_replicas_that_leave_and_come_back_are_told():
    metrics = [{"step": step, "rollout/replicas": count} for step, count in ((1, 4), (2, 3), (3, 3), (4, 4))]
    assert [(one.step, one.level, one.text) for one in incidents([], metrics)] == [
        (2, "bad", "4 before, 3 now"),
        (4, "good", "3 before, 4 now"),
    ]


def test_a_run_without_a_failure_has_none():
    assert (
        incidents([sync_report(version, version) for version in range(5)], [{"step": 1, "rollout/restarts": 0}]) == []
    )


def test_a_sync_that_took_much_longer_is_told_as_the_console_does():
    slow = replace(sync_report(9, 9.0), phase_s={**PHASE_S, "activate": 9.0})
    (told,) = incidents([*(sync_report(version, version) for version in range(9)), slow], [])
    assert (told.step, told.what) == (9, "slow sync")
    assert "8.5 s more in activate" in told.text


def test_memory_has_a_chart_for_every_role_with_a_line_for_every_phase(run: Path):
    names = ("driver/host_peak_gb", "trainer/publish/host_peak_gb", "trainer/update_actor/host_peak_gb")
    metrics = [{"step": 1, **dict.fromkeys((f"memory/{name}" for name in (*names, "driver/host_gb")), 1.5)}]
    charts = report_data(replace(read_run(run), metrics=metrics), [])["memory"]
    assert [(chart["role"], [line["name"] for line in chart["lines"]]) for chart in charts] == [
        ("driver", ["since it began"]),
        ("trainer", ["publish", "update_actor"]),
    ]


def test_a_token_s_version_is_shown_where_it_was_recorded(run: Path):
    report(run)
    pieces = data_of(run / "report.html")["samples"][0]["pieces"]
    assert [(piece["version"], piece["count"]) for piece in pieces] == [(10, 2), (-1, 1), (11, 2)]
    assert pieces[0]["text"].split() == ["5", "6"]


def test_tokens_are_text_with_the_tokenizer_of_the_model_or_of_the_newest_checkpoint(run: Path, tmp_path: Path):
    model = make_tiny_model(tmp_path / "model", "qwen3", seed=1)
    place = run / "global_step_12" / "actor" / "huggingface"
    place.mkdir(parents=True)
    shutil.copy(model / "tokenizer.json", place)
    report(run)
    texts = [piece["text"] for piece in data_of(run / "report.html")["samples"][0]["pieces"]]
    assert data_of(run / "report.html")["decoded"]
    assert not any(text.split() == ["5", "6"] for text in texts)
    assert report(run, "--tokenizer", run).exit_code == 2
    shutil.rmtree(run / "global_step_12")
    record_run(run, load_config(), tokenizer=model)
    report(run)
    assert texts == [piece["text"] for piece in data_of(run / "report.html")["samples"][0]["pieces"]]


def test_what_was_run_and_what_it_came_to_are_first(run: Path):
    config = load_config(["actor_rollout_ref.actor.optim.lr=3e-6"])
    record_run(run, config, overview=["model: /models/a", "learning: lr 3e-06, constant"])
    metrics = [{"step": step, "val-core/gsm8k/acc/mean@1": score} for step, score in ((0, 0.25), (5, None), (10, 0.5))]
    data = report_data(replace(read_run(run), metrics=metrics), [])
    about = dict(data["about"])
    assert list(about)[:2] == ["model", "learning"]
    assert about["learning"] == "lr 3e-06, constant"
    assert "verl-sync " in about["versions"]
    assert about["command"]
    assert data["tiles"][0] == ("0.25 → 0.5", "held-out gsm8k", None)
    assert data["metrics"]["large"] == ["val-core/gsm8k/acc/mean@1"]


def test_a_held_out_score_that_was_measured_once_is_not_shown_as_a_course(run: Path):
    metrics = [{"step": 1}, {"step": 2, "val-core/gsm8k/acc/mean@1": 0.5}]
    data = report_data(replace(read_run(run), metrics=metrics), [])
    assert data["tiles"][0] == ("0.5", "held-out gsm8k", None)


def test_runs_side_by_side_show_in_what_they_differ_and_what_they_answered(run: Path, tmp_path: Path):
    other = write_run(tmp_path / "project" / "other", steps=14)
    write_samples(other / "rollouts", 14)
    for directory, rate in ((run, "1e-6"), (other, "2e-6")):
        record_run(directory, load_config([f"actor_rollout_ref.actor.optim.lr={rate}"]), overview=["model: a"])
    done = report(run, other)
    assert done.output == (f"{run / 'comparison.html'}: 13 steps, 14 syncs, 6 samples; 15 steps, 16 syncs, 3 samples\n")
    data = data_of(run / "comparison.html")
    assert data["settings"] == [["actor_rollout_ref.actor.optim.lr", ["1e-06", "2e-06"]]]
    assert ["model", ["a", "a"]] in data["about"]
    assert data["metrics"]["steps"] == list(range(15))
    first, second = (each["series"]["critic/score/mean"] for each in data["runs"])
    assert first[1:13] == second[1:13]
    assert (first[13:], second[13:]) == ([None, None], [0.82, 0.86])
    assert {answer["run"] for answer in data["samples"][0]["answers"]} == {"project/experiment", "project/other"}
    assert report(run, other, "--samples", run / "rollouts").exit_code == 2


def test_two_runs_of_one_name_are_told_apart(run: Path):
    assert [each["name"] for each in comparison_data([read_run(run)] * 2, [[], []])["runs"]] == [
        "project/experiment (1)",
        "project/experiment (2)",
    ]


def test_a_configuration_that_is_no_yaml_is_named(run: Path):
    (run / "config.yaml").write_text("a: [")
    assert "config.yaml is no YAML" in report(run).output


def test_the_newest_files_and_their_first_samples_are_shown(run: Path):
    report(run, "--steps", 1, "--per-step", 2)
    shown = data_of(run / "report.html")["samples"]
    assert [sample["step"] for sample in shown] == [12, 12]
    assert report(run, "--samples", run).output.startswith("Error")


def test_samples_are_shown_from_where_the_configuration_has_them_written(run: Path, tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    write_samples(elsewhere, 40, count=1)
    (run / "config.yaml").write_text(f"trainer: {{rollout_data_dir: {elsewhere}}}")
    report(run)
    assert data_of(run / "report.html")["samples"][-1]["step"] == 40
    watched = Watched(run)
    assert json.loads(watched.data())["samples"][-1]["step"] == 40
    write_samples(elsewhere, 41, count=1)
    assert json.loads(watched.data())["samples"][-1]["step"] == 41


def test_what_a_run_says_cannot_become_part_of_the_page(run: Path):
    evil = "</script><script>document.title='owned'</script>"
    data = report_data(read_run(run), [{"prompt": evil}]) | {"name": evil, "decoded": False}
    text = page(data)
    assert evil not in text
    assert html.escape("<script>", quote=False) not in text.split("</title>")[1]
    assert text.count("<script") == 2
    assert "/*data*/" not in text


def test_the_page_refers_to_nothing_outside_of_it(run: Path):
    report(run)
    text = (run / "report.html").read_text()
    assert re.findall(r"(?:src|href)=\"(?!#)[^\"]*\"|url\(|@import|fetch\(|XMLHttpRequest|import\(", text) == []
    assert "default-src 'none'" in text
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}


def test_of_hundreds_of_nodes_those_that_were_busy_longest_are_drawn(run: Path):
    times = [MemberTime(member=f"node-{n}", began_s=0.0, seconds=float(n)) for n in range(500)]
    reports = [
        sync_report(version, 0.0, members={"stage": PhaseReport.of(times[first : first + 4])})
        for version, first in enumerate(range(0, 500, 4))
    ]
    data = report_data(replace(read_run(run), reports=reports), [])
    nodes = [track["name"] for track in data["tracks"] if track["group"] == "members"]
    assert nodes == [f"node-{number}" for number in range(468, 500)]
    assert data["tracks_left_out"] == 468


def test_the_page_of_a_long_run_stays_small(tmp_path: Path):
    report(write_run(tmp_path, steps=1000))
    assert (tmp_path / "report.html").stat().st_size < 3_000_000


def test_of_thousands_of_syncs_the_newest_the_slowest_and_those_with_trouble_are_told_whole(tmp_path: Path):
    reports = [sync_report(version, float(version), replicas_updated=["replica-0"]) for version in range(2000)]
    reports[3] = sync_report(3, 3.0, outcome="aborted", error="a node was lost")
    reports[4] = replace(reports[4], total_s=1e6)
    syncs = report_data(RunFiles(directory=tmp_path, metrics=[], reports=reports, spans=[]), [])["syncs"]
    assert ["serve it" in dict(syncs[version]["facts"]) for version in (4, 1999)] == [True, True]
    assert dict(syncs[3]["facts"])["error"] == "a node was lost"
    assert syncs[5]["facts"] == [("all there is to say", "line 6 of sync_reports.jsonl")]
    assert len(syncs) == 2000


def test_a_run_of_which_only_reports_are_left_is_shown(tmp_path: Path):
    run = RunFiles(directory=tmp_path, metrics=[], reports=[sync_report(1, 5.0)], spans=[])
    data = report_data(run, [])
    assert data["syncs"][0]["phase_s"] == PHASE_S
    assert data["breakdown"]["steps"] == []


# --- in a browser ---------------------------------------------------------------------------------------------------

PROBE = """
<script>
const told = {};
const use = () => {
  const root = document.documentElement;
  told.overflow = root.scrollWidth - window.innerWidth;
  const sticksOut = (node) => node.getBoundingClientRect().right > window.innerWidth;
  told.clipped = [...document.querySelectorAll("main > * , .card")].filter(sticksOut).length;
  told.curves = document.querySelectorAll("path.curve").length;
  told.bars = document.querySelectorAll("#steps rect[style]").length;
  told.sections = [...document.querySelectorAll("main > section")].map((node) => node.id);
  told.links = [...document.querySelectorAll("#contents a")].map((link) => Boolean(document.querySelector(link.hash)));
  const row = document.querySelector("tr.row");
  row.click();
  told.details = row.nextElementSibling.textContent;
  told.constants = document.querySelector("#constants").textContent;
  const before = [view.from, view.to];
  row.nextElementSibling.querySelector("button").click();
  told.zoomed = (view.to - view.from) / (before[1] - before[0]);
  const canvas = document.querySelector("canvas");
  const box = canvas.getBoundingClientRect();
  const sync = view.tracks.find((track) => track.name === "sync");
  const middle = box.left + view.labels + (box.width - view.labels) * 0.5;
  const place = { clientX: middle, clientY: box.top + sync.top + 24, bubbles: true };
  canvas.dispatchEvent(new PointerEvent("pointermove", place));
  told.tip = document.getElementById("tip").innerText;
  document.querySelector("details").open = true;
  setTimeout(() => {
    told.more = document.querySelectorAll("details .card").length;
    document.querySelector("#failures") && (told.failures = document.querySelector("#failures").innerText);
    told.ready = root.dataset.ready === "true";
    told.error = root.dataset.error || null;
    const out = document.createElement("pre");
    out.id = "told";
    out.textContent = JSON.stringify(told);
    document.body.append(out);
  }, 300);
};
addEventListener("load", use);
</script>
"""


@pytest.fixture
def told(run: Path, tmp_path: Path) -> Callable[[int], dict[str, Any]]:
    """What a browser of so many columns makes of the page, when somebody uses it."""

    def look(width: int) -> dict[str, Any]:
        report(run)
        probed = tmp_path / "probed.html"
        probed.write_text((run / "report.html").read_text().replace("</body>", PROBE + "</body>"))
        dom = browse(probed, tmp_path / f"profile-{width}", "--dump-dom", width=width)
        found = re.search(r'<pre id="told">(.*?)</pre>', dom, re.DOTALL)
        assert found, dom[:2000]
        return json.loads(html.unescape(found[1]))

    return look


@needs_chromium
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_browser_shows_every_part_and_nothing_sticks_out(told: Callable[[int], dict[str, Any]], width: int):
    seen = told(width)
    assert seen["ready"]
    assert seen["error"] is None
    assert (seen["overflow"], seen["clipped"]) == (0, 0)
    assert seen["sections"] == ["metrics", "steps", "timeline", "failures", "memory", "syncs", "samples"]
    assert all(seen["links"])
    assert seen["curves"] >= 6 + 3
    assert seen["bars"] >= 12 * 5
    assert "node-1 <gone>" in seen["failures"]


@needs_chromium
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_a_browser_shows_runs_side_by_side(run: Path, tmp_path: Path, width: int):
    other = write_run(tmp_path / "project" / "other", steps=14)
    write_samples(other / "rollouts", 14)
    record_run(other, load_config())
    report(run, other)
    dom = browse(run / "comparison.html", tmp_path / f"profile-{width}", "--dump-dom", width=width)
    shown = re.findall(r'<section id="(\w+)"', dom)
    assert shown == ["settings", "about", "metrics", "samples"]
    assert 'data-ready="true"' in dom
    assert "data-error" not in dom
    assert dom.count('class="curve"') >= 2 * 6


@needs_chromium
def test_a_sync_opens_zooms_the_timeline_and_is_told_in_words(told: Callable[[int], dict[str, Any]]):
    seen = told(WIDE)
    assert "stage 1 s" in seen["details"]
    assert "750 MB in 900 ms: 6.67 Gbit/s" in seen["details"]
    assert 0 < seen["zoomed"] < 0.1
    assert "version 12" in seen["tip"]
    assert "stage" in seen["tip"]
    assert "checkpoint_engine/retries" in seen["constants"]
    assert seen["more"] == 5  # metrics that are not among the first, and that change


@needs_chromium
@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_timeline_is_drawn_in_light_and_in_dark(run: Path, tmp_path: Path, width: int):
    report(run)
    backgrounds = []
    for dark in (False, True):
        name = tmp_path / f"{width}-{dark}"
        with Image.open(screenshot(run / "report.html", name, width=width, height=3600, dark=dark)) as picture:
            assert picture.size == (width, 3600)
            colours = {colour: count for count, colour in picture.convert("RGB").getcolors(1 << 24)}
        generates = (0x39, 0x87, 0xE5) if dark else (0x2A, 0x78, 0xD6)
        assert colours[generates] > 1000  # bars of the steps, slices of the timeline
        backgrounds.append(max(colours, key=colours.__getitem__))
    assert sum(backgrounds[0]) > 700
    assert sum(backgrounds[1]) < 100
