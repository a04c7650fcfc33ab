import io
import logging
import math
import re
import sys
from contextlib import contextmanager

import pytest

from verl.checkpoint_engine.support.console import log_to_console
from verl.utils.console import StepConsole, boxed, print_summary, step_line, validation_rewards

METRICS = {
    "critic/score/mean": 0.53125,
    "response_length/mean": 7.25,
    "training/rollout_probs_diff_mean": 0.00128,
    "actor/kl_loss": 0.0004,
    "actor/grad_norm": 0.831,
    "timing_s/gen": 2.13,
    "timing_s/update_actor": 1.4,
    "timing_s/update_weights": 0.121,
    "perf/total_num_tokens": 4000.0,
    "perf/time_per_step": 5.0,
    "val-core/arithmetic/reward/mean@1": 0.62,
}
CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f\x9b]")


class Terminal(io.StringIO):
    def isatty(self):
        return True


LARGE = {
    "critic/score/mean": 0.53125,
    "response_length/mean": 32768.0,
    "training/rollout_probs_diff_mean": 0.0013,
    "timing_s/gen": 1234.56,
    "timing_s/update_actor": 2345.67,
    "timing_s/update_weights": 12.3456,
    "perf/total_num_tokens": 1e9,
    "perf/time_per_step": 5000.0,
}


def test_where_there_is_room_a_step_is_one_line_with_everything_that_was_measured():
    assert step_line(METRICS, 12, 60, width=150).splitlines() == [
        "step 12/60 | reward 0.531 | response 7.2 tok | probs diff 0.0013 | gen 2.1 s | update 1.4 s | sync 0.12 s | "
        "800 tok/s | kl 0.0004 | grad 0.83",
        "step 12/60 | held-out arithmetic 0.620",
    ]


def test_eighty_columns_show_what_is_needed_most():
    assert step_line(METRICS, 12, 60).splitlines() == [
        "step 12/60 | reward 0.531 | 7.2 tok | diff 0.0013 | 2.1+1.4+0.12 s | 800 tok/s",
        "  kl 0.0004 | grad 0.83",
        "step 12/60 | held-out arithmetic 0.620",
    ]
    assert (
        step_line(LARGE, 12345, 100000)
        == "step  12345/100000 | reward 0.531 | 32768 tok | diff 0.0013 | 1235+2346+12.35 s"
    )


@pytest.mark.parametrize("width", [60, 80, 100, 120, 200])
@pytest.mark.parametrize(
    "metrics", [METRICS, LARGE, dict.fromkeys(METRICS, -1.5e300), dict.fromkeys(METRICS, math.nan)]
)
@pytest.mark.parametrize(("step", "total"), [(1, 3), (12345, 100000), (7, None), (10**9, 10**9)])
def test_a_line_is_never_wider_than_the_terminal_and_shows_the_reward(width, metrics, step, total):
    sources = {f"val-core/{'deep/' * count}set/reward/mean@1": 0.5 for count in range(0, 30, 7)}
    lines = step_line(metrics | sources, step, total, width=width).splitlines()
    name = f"step {step}" if total is None else f"step {step:>{len(str(total))}}/{total}"
    assert all(line.startswith((f"{name} | ", "  ")) for line in lines)
    assert max(map(len, lines)) <= width
    assert "reward " in lines[0]
    assert sum(line.count("held-out ") for line in lines) == len(validation_rewards(metrics | sources))


def test_seconds_of_which_one_was_not_measured_keep_their_labels():
    metrics = {name: value for name, value in METRICS.items() if name != "timing_s/update_actor"}
    assert step_line(metrics, 12, 60, width=75).splitlines()[0] == (
        "step 12/60 | reward 0.531 | 7.2 tok | diff 0.0013 | gen 2.1 s | sync 0.12 s"
    )


def test_what_was_not_measured_is_left_out():
    assert step_line({"val-core/a/b/reward/mean@8": 0.5, "val-aux/a/b/reward/best@8": 0.9}, 0, 60) == (
        "step  0/60 | held-out a/b 0.500"
    )
    assert step_line({}, 3, None) == "step 3"


def test_the_kl_of_the_loss_goes_before_the_kl_of_the_clip():
    assert "kl 0.2000" in step_line(METRICS | {"actor/kl_loss": 0.2}, 1, 2, width=150)


HEALTH = {
    "actor/pg_clipfrac": 0.125,
    "response_length/clip_ratio": 0.5,
    "critic/frac_reward_zero_std": 0.75,
    "actor/lr": 3e-6,
    "perf/cpu_memory_used_gb": 1.25,
}


def test_health_follows_on_the_line_or_has_its_own():
    signs = "kl 0.0004 | clip 0.12 | cut off 0.50 | no signal 0.75 | lr 3e-06 | 1.2 GiB"
    assert step_line(METRICS | HEALTH, 12, 60, width=250).splitlines()[0].endswith(f"800 tok/s | {signs} | grad 0.83")
    assert step_line(METRICS | HEALTH, 12, 60, width=120).splitlines()[1] == f"  {signs} | grad 0.83"
    assert step_line(METRICS | HEALTH, 12, 60).splitlines()[1] == f"  {signs}"


def test_memory_has_its_place_on_the_line_whatever_the_sign_of_the_kl_and_the_digits_of_the_rate():
    longest = {"actor/ppo_kl": -0.0018, "actor/lr": 1.5e-6, "perf/cpu_memory_used_gb": 120.25}
    assert step_line(METRICS | HEALTH | longest, 12, 60).splitlines()[1].endswith("| lr 1.5e-06 | 120 GiB")


def test_validation_rewards_are_found_by_data_source():
    assert validation_rewards(METRICS | {"val-aux/x/acc/mean@1": 1.0, "val-core/y/acc/best@2/mean": 1.0}) == {
        "arithmetic": 0.62
    }


def test_a_box_fits_its_width_and_keeps_beginning_and_end_of_what_is_long():
    lines = boxed("a title", {"prompt": "[bold]1+1[/]", "answer": "begin" + "\x1b[2J x" * 999 + "end"}, 60).splitlines()
    assert {len(line) for line in lines} == {60}
    assert "[bold]1+1[/]" in lines[1]
    text = "".join(line.strip("| ") for line in lines)
    assert re.search("begin.* \\.\\.\\. .*end", text)
    assert not CONTROL.search(text)


@pytest.mark.parametrize("force_color", ["", "1"])
def test_without_a_terminal_there_are_plain_lines_only(monkeypatch, force_color):
    if force_color:
        monkeypatch.setenv("FORCE_COLOR", force_color)
    stream = io.StringIO()
    console = StepConsole(total_steps=60, stream=stream)
    console.log(METRICS, 1)
    console.log(METRICS, 2)
    console.close()
    print_summary({"arithmetic": 0.3}, {"arithmetic": 0.9}, {"metrics": "out/metrics.jsonl"}, stream=stream)
    assert stream.getvalue().startswith(step_line(METRICS, 1, 60) + "\n" + step_line(METRICS, 2, 60) + "\n")
    assert not CONTROL.search(stream.getvalue())


def test_a_dumb_terminal_is_no_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    console = StepConsole(total_steps=60, stream=stream)
    console.log({}, 1)
    console.close()
    assert stream.getvalue() == "step  1/60\n"


def test_a_terminal_shows_a_bar_with_the_steps_done_and_gets_its_cursor_back(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    stream = Terminal()
    console = StepConsole(total_steps=60, first_step=10, stream=stream)
    console.log({"critic/score/mean": 0.5}, 11)
    console.show_phase("gen 120/512 answers, 3.1k tok/s")
    console.close()
    console.close()
    text = stream.getvalue()
    assert "step 11/60 | reward 0.500" in text
    assert "10/60" in text
    assert "11/60" in text
    assert "left; gen 120/512 answers, 3.1k tok/s" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_the_summary_has_reward_before_and_after_and_paths_uncut():
    stream = io.StringIO()
    path = "/very/long/" + "x" * 150 + "/reward.png"
    artefacts = {"reward curve": path, "model": "[out]/hf"}
    print_summary({"arithmetic": 0.25}, {"arithmetic": 0.75, "new": 0.5}, artefacts, stream=stream)
    lines = stream.getvalue().splitlines()
    row = next(line for line in lines if "arithmetic" in line)
    assert re.findall(r"[+-]?[\d.]+", row) == ["0.250", "0.750", "+0.500"]
    assert "0.500" in next(line for line in lines if "new" in line)
    assert f"reward curve  {path}" in lines
    assert "model         [out]/hf" in lines


@contextmanager
def unconfigured_logging():
    """As in a program that has just started."""
    loggers = [logging.getLogger(name) for name in (None, "verl", "verl.checkpoint_engine")]
    saved = [(logger, logger.level, logger.handlers[:]) for logger in loggers]
    logging.getLogger().handlers.clear()
    yield
    for logger, level, handlers in saved:
        logger.setLevel(level)
        logger.handlers[:] = handlers


def test_the_log_is_plain_lines_on_the_stderr_of_the_moment(monkeypatch):
    stream = io.StringIO()
    with unconfigured_logging():
        log_to_console()
        monkeypatch.setattr(sys, "stderr", stream)  # as a progress bar does
        logging.getLogger("verl.trainer").info("starting Ray")
        logging.getLogger("verl.trainer").warning("replica-0 died")
        logging.getLogger("verl.checkpoint_engine.sync.manager").info("version 3 committed")
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").error("trouble")
    assert stream.getvalue().splitlines() == ["starting Ray", "warning: replica-0 died", "error: trouble"]
