import io
import re
import sys

import pytest
import torch

from shardtrain.metrics import Metrics
from shardtrain.metrics.peak_memory import HostMemory
from shardtrain.metrics.sinks.console import StepTable
from shardtrain.metrics.step_record import Record
from shardtrain.utils import log


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    """Function that replaces stderr with a terminal. The test calls it, because pytest replaces stderr for its body."""
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
    with Metrics(
        kit.config(**options), folder, kit.facts(total_steps=steps), kit.OneRank()
    ) as metrics:
        for step in range(1, steps + 1):
            log.logger.info("complete line %d", step)
            metrics.update(step, torch.tensor(1.5), 1, 1, 1.0, 1.0, 0.0)


def test_live_line_shows_progress_and_does_not_mix_with_log_lines(tmp_path, terminal, kit):
    stream = terminal()
    train(tmp_path, kit)
    # before a log line, "return to the start and erase the line" removes the live line
    erased = stream.getvalue().replace("\r\x1b[2K", "\n")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", erased)

    assert "step 1/3" in text
    assert "loss 1.5000" in text
    assert "tokens/s" in text
    assert "left" in text
    for step in (1, 2, 3):
        assert re.search(rf"^complete line {step} *$", text, re.MULTILINE)
    assert sys.stderr is stream


def test_slurm_job_has_no_live_line(tmp_path, terminal, kit, monkeypatch):
    stream = terminal()
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    log.setup(0, 1, tmp_path, "log.txt")
    with Metrics(kit.config(), tmp_path, kit.facts(), kit.OneRank()) as metrics:
        assert metrics._progress is None
        metrics.update(1, torch.tensor(1.5), 1, 1, 1.0, 1.0, 0.0)

    assert "\x1b" not in stream.getvalue()


@pytest.mark.parametrize("reason", ["NO_COLOR", "option"])
def test_live_line_works_without_colors(tmp_path, terminal, kit, monkeypatch, reason):
    stream = terminal()
    if reason == "NO_COLOR":
        monkeypatch.setenv("NO_COLOR", "1")
    train(tmp_path, kit, **({"disable_color_printing": True} if reason == "option" else {}))

    assert "step 1/3" in stream.getvalue()

    if reason == "NO_COLOR":
        colours = re.findall(r"\x1b\[([0-9;]*)m", stream.getvalue())
        assert not [code for code in colours if re.search(r"(^|;)[349][0-7]", code)], colours


@pytest.mark.parametrize("columns", [20, 40, 60, 80, 96, 120])
def test_rows_and_live_line_fit_the_terminal(tmp_path, terminal, kit, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    log.setup(0, 1, tmp_path, "log.txt", color=False)
    facts = kit.facts(total_steps=12_000)
    with Metrics(kit.config(log_freq=10), tmp_path, facts, kit.OneRank()) as metrics:
        for step in range(9980, 10_001):
            extra = {"accuracy": 0.5, "spikes": 0, "goodput_data_seconds": 3.0}
            metrics.update(step, torch.tensor(1.5), 1, 1, 1.0, 1.0, 0.0, extra)
    drawn = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue().replace("\x1b[2K", "\n"))
    rows = [line.rstrip() for line in re.split(r"[\r\n]+", drawn)]

    # a path or another token is never split
    assert all(len(row) <= min(columns, 96) or " " not in row.strip() for row in rows)
    assert any(row.lstrip().startswith("9990/12000") for row in rows)

    named = [row for row in rows if row.lstrip().startswith("step  ")]
    assert len(named) == 1
    assert ("accuracy" in named[0]) == (columns >= 96)
    assert "goodput" not in named[0]
    assert "loss" in named[0]

    text = (tmp_path / "log.txt").read_text()  # the log file has the complete line
    assert "step: 9990  loss:" in text
    assert "accuracy: 0.5" in text


def test_a_pipe_has_no_live_line():
    assert not log.redraw_allowed(io.StringIO())


def test_a_rank_that_does_not_write_has_no_live_line(tmp_path, terminal, kit):
    terminal()
    metrics = Metrics(kit.config(), tmp_path, kit.facts(is_writer=False), kit.OneRank())
    assert metrics._progress is None
    metrics.close()


def test_terminal_is_restored_when_a_run_fails(tmp_path, terminal, kit):
    stream = terminal()
    with pytest.raises(KeyError), Metrics(kit.config(), tmp_path, kit.facts(), kit.OneRank()):
        raise KeyError("stop")
    assert sys.stderr is stream
    assert "\x1b[?25h" in stream.getvalue()  # show the cursor


def test_header_precedes_the_first_row_every_fortieth_row_and_changed_columns():
    def row(step, **extra):
        record = Record(
            step=step, loss=2.0, max_loss=2.0, grad_norm=1.0, lr=1e-3, tokens_seen=1, tokens_per_second=1.0, tps=1.0,
            tflops=0.1, mfu=None, step_seconds=0.5, data_seconds=0.0, memory=HostMemory(1.0), eta_seconds=9.0,
            extra=extra,
        )  # fmt: skip
        return table.row(record, 96, color=False).split("\n")

    table = StepTable(200)
    with_names = [step for step in range(1, 101) if len(row(step)) == 2]

    assert with_names == [1, 41, 81]

    names, text = row(101, accuracy=0.25)
    assert names.endswith("accuracy")
    assert text.endswith("0.25")
    assert len(names) == len(text)
