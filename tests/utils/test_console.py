import io
import logging
import re
import sys
from contextlib import contextmanager

import pytest

from verl.utils.console import StepConsole, log_to_console, print_summary, step_line, validation_rewards

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


def test_a_step_is_one_line_with_everything_that_was_measured():
    assert step_line(METRICS, 12, 60) == (
        "step 12/60 | reward 0.531 | response 7.2 tok | probs diff 0.0013 | kl 0.0004 | grad 0.83 | gen 2.1 s | "
        "update 1.4 s | sync 0.12 s | 800 tok/s | held-out arithmetic 0.620"
    )


def test_what_was_not_measured_is_left_out():
    assert step_line({"val-core/a/b/reward/mean@8": 0.5, "val-aux/a/b/reward/best@8": 0.9}, 0, 60) == (
        "step  0/60 | held-out a/b 0.500"
    )
    assert step_line({}, 3, None) == "step 3"


def test_the_kl_of_the_loss_goes_before_the_kl_of_the_clip():
    assert "kl 0.2000" in step_line(METRICS | {"actor/kl_loss": 0.2}, 1, 2)


def test_validation_rewards_are_found_by_data_source():
    assert validation_rewards(METRICS | {"val-aux/x/acc/mean@1": 1.0}) == {"arithmetic": 0.62}


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
    console.close()
    console.close()
    text = stream.getvalue()
    assert "step 11/60 | reward 0.500" in text
    assert "10/60" in text
    assert "11/60" in text.rpartition("training")[2]
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
        logging.getLogger("verl.checkpoint_engine.manager").info("version 3 committed")
        logging.getLogger("some.library").info("chatter")
        logging.getLogger("some.library").error("trouble")
    assert stream.getvalue().splitlines() == ["starting Ray", "warning: replica-0 died", "error: trouble"]
