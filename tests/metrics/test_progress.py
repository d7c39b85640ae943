import io
import re
import sys

import pytest
import torch

from shardtrain.metrics import Metrics
from shardtrain.metrics.progress import progress_allowed
from shardtrain.utils import log


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Puts a terminal into the place of stderr; called by the test, since pytest sets stderr anew for its body."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")

    def make():
        stream = Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        return stream

    yield make
    log.reset()


def train(folder, kit, steps=3, **options):
    log.setup(0, 1, folder, "log.txt")
    with Metrics(kit.config(**options), folder, kit.facts(total_steps=steps), kit.OneRank()) as metrics:
        for step in range(1, steps + 1):
            log.logger.info("whole line %d", step)
            metrics.update(step, torch.tensor(1.5), 1, 1, 1.0, 1.0, 0.0)


def test_a_live_line_shows_step_loss_speed_and_time_left_and_leaves_log_lines_whole(tmp_path, terminal, kit):
    stream = terminal()
    train(tmp_path, kit)
    # "Back to the start and erase the line" is what takes the live line away before a log line.
    erased = stream.getvalue().replace("\r\x1b[2K", "\n")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", erased)
    assert "step 1/3" in text and "loss 1.5000" in text and "tokens/s" in text and "left" in text
    for step in (1, 2, 3):
        assert re.search(rf"^\S+ \S+ INFO whole line {step} *$", text, re.MULTILINE)
    assert sys.stderr is stream


@pytest.mark.parametrize("reason", ["SLURM_JOB_ID", "NO_COLOR", "option"])
def test_there_is_no_live_line_where_colours_are_off(tmp_path, terminal, kit, monkeypatch, reason):
    stream = terminal()
    options = {"disable_color_printing": True} if reason == "option" else {}
    if reason != "option":
        monkeypatch.setenv(reason, "1")
    log.setup(0, 1, tmp_path, "log.txt", color=reason != "option")
    log.logger.info("before")
    with Metrics(kit.config(**options), tmp_path, kit.facts(), kit.OneRank()) as metrics:
        assert metrics._progress is None
        metrics.update(1, torch.tensor(1.5), 1, 1, 1.0, 1.0, 0.0)
    assert "\x1b" not in stream.getvalue()
    assert "step:  1" in stream.getvalue()


def test_a_pipe_has_no_live_line():
    assert not progress_allowed(True, io.StringIO())


def test_a_rank_that_does_not_write_has_no_live_line(tmp_path, terminal, kit):
    terminal()
    metrics = Metrics(kit.config(), tmp_path, kit.facts(is_writer=False), kit.OneRank())
    assert metrics._progress is None
    metrics.close()


def test_the_terminal_is_given_back_when_a_run_fails(tmp_path, terminal, kit):
    stream = terminal()
    with pytest.raises(KeyError), Metrics(kit.config(), tmp_path, kit.facts(), kit.OneRank()):
        raise KeyError("stop")
    assert sys.stderr is stream
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is shown again
