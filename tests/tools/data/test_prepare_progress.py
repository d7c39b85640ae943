"""Progress shows percentage, speed and remaining time. Without a terminal, it prints occasional lines."""

from __future__ import annotations

import re

import pytest

from shardtrain.tools.data.work_progress import WorkProgress
from shardtrain.utils import heartbeat, progress


def test_without_a_terminal_a_line_is_printed_occasionally(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(heartbeat, "_silence", heartbeat._Silence(100.0, 100.0))
    with WorkProgress("preparing web", 10**9, done=0.2) as bar:
        for second in range(1, 13):
            now[0] = 100.0 + second
            bar.advance(0.2 + 0.02 * second, 1_000_000 * second)
    lines = capsys.readouterr().err.splitlines()

    # The work of an earlier run counts in the percentage, but not in the speed: 2 % of 1 GB per second, 28 % after 4 s.
    assert lines == [
        "preparing web: 28.0 %, 20.00 MB/s, 1.00M tokens/s, 36s left",
        "preparing web: 36.0 %, 20.00 MB/s, 1.00M tokens/s, 32s left",
        "preparing web: 44.0 %, 20.00 MB/s, 1.00M tokens/s, 28s left",
    ]


def test_an_input_of_unknown_size_has_no_megabytes() -> None:
    with WorkProgress("preparing hub", None) as bar:
        assert "MB/s" not in " ".join(bar.speeds(0.5, 10))
        assert "tokens/s" in " ".join(bar.speeds(0.5, 10))
        assert "left" not in " ".join(bar.speeds(0.0, 10))
        assert "tokens/s" not in " ".join(bar.speeds(0.5, 0))


def test_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "redraw_allowed", lambda _: True)
    with WorkProgress("preparing web", 1000) as bar:
        bar.advance(0.5, 100)
    assert not re.search(r"preparing web: ", capsys.readouterr().err)
