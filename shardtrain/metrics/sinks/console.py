"""Console output of logged steps: a table row on a terminal, otherwise a line with torchtitan's field names."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping

from shardtrain.metrics.step_record import Record
from shardtrain.utils.log import color_allowed, logger
from shardtrain.utils.units import format_seconds

_COUNTS = ("skipped_updates", "spikes", "rewinds", "goodput")
"""Metrics that are shown only if they are not 0."""
_COLUMNS = (
    "step", "loss", "grad_norm", "tps", "left", "lr", "mfu", "memory", "step_seconds", "data_seconds",
)  # fmt: skip
"""Columns of the table on a terminal, most important first."""
_TITLES = {"memory": "GiB", "step_seconds": "step", "data_seconds": "data"}
_CYAN, _GREEN, _YELLOW, _BLUE, _MAGENTA, _RED, _RESET = (
    f"\x1b[{code}m" for code in (36, 32, 33, 34, 35, 31, 0)
)


def line(record: Record) -> str:
    """Return ``step:  N  loss:  x  grad_norm:  y  lr: ...  memory: G GiB  tps: n  tflops: f  mfu:
    m%  data: s  left: t``.

    MFU is ``-`` if the peak of the device is unknown.
    """
    return "  ".join(text for _, text in _parts(record))


def colored_line(record: Record) -> str:
    """Return the text of ``line`` with ANSI colors."""
    return "  ".join(_painted(text, color) for color, text in _parts(record))


def _painted(text: str, color: str) -> str:
    if not color:
        return text
    return f"{color}{text}{_RESET}"


class StepTable:
    """Table of logged steps with the width of the terminal, at most 96 columns.

    Columns that do not fit are omitted, starting with the last of ``_COLUMNS``. Other metrics follow if there
    is room. The header is printed above the first row, every 40 rows, and when the columns change.
    """

    MOST_COLUMNS = 96
    ROWS = 40

    def __init__(self, total_steps: int) -> None:
        self._step_width = max(4, 2 * len(str(total_steps)) + 1)
        self._total_steps = total_steps
        self._names: list[str] = []
        self._rows = 0

    def row(self, record: Record, columns: int, color: bool) -> str:
        """Return the row of a record, after a header if one is due.

        ``columns`` is the width of the terminal.
        """
        cells = self._cells(record)

        # Select the columns that fit by importance. They are printed in the order of the cells.
        by_importance = [name for name in _COLUMNS if name in cells]
        by_importance += [name for name in cells if name not in _COLUMNS]
        room = min(columns, self.MOST_COLUMNS) + 1
        kept: set[str] = set()
        for name in by_importance:
            width = cells[name][0] + 1
            if width <= room:
                kept.add(name)
                room -= width
        names = [name for name in cells if name in kept]

        titles = []
        texts = []
        for name in names:
            width, text, code = cells[name]
            titles.append(f"{_TITLES.get(name, name):>{width}}")
            texts.append(_painted(f"{text:>{width}}", code if color else ""))
        row = " ".join(texts)
        # A long run scrolls, so the header is repeated.
        if names != self._names or self._rows % self.ROWS == 0:
            self._names = names
            self._rows = 0
            row = " ".join(titles) + "\n" + row
        self._rows += 1
        return row

    def _cells(self, record: Record) -> dict[str, tuple[int, str, str]]:
        """Return column name -> width, text and color, from left to right."""
        # A step without targets has no loss, and a device with an unknown peak no MFU.
        loss = "-"
        if record.has_targets:
            loss = _number(record.loss, 5)
        mfu = "-"
        if record.mfu is not None:
            mfu = f"{100 * record.mfu:.1f}%"
        cells = {
            "step": (self._step_width, f"{record.step}/{self._total_steps}", _RED),
            "loss": (8, loss, _GREEN),
            "grad_norm": (9, _number(record.grad_norm, 4), _YELLOW),
            "lr": (9, f"{record.lr:.3e}", ""),
            "memory": (6, f"{record.memory.peak_gib:.2f}", _CYAN),
            "tps": (7, f"{record.tps:,.0f}", _BLUE),
            "mfu": (6, mfu, _MAGENTA),
            "step_seconds": (7, _seconds(record.step_seconds), ""),
            "data_seconds": (6, _seconds(record.data_seconds), ""),
            "left": (7, format_seconds(record.eta_seconds), ""),
        }
        for key, value in record.extra.items():
            # The log and the summary contain the goodput.
            if key != "goodput" and _is_shown(key, value):
                cells[key] = (max(len(key), 8), f"{value:.4g}", "")
        return cells


class Console:
    """Sink that writes to the log of each rank.

    On a terminal it prints a table row. The log file gets a line that is easy to grep.
    """

    def __init__(self, total_steps: int = 0) -> None:
        self._table = StepTable(total_steps)

    def write(self, record: Record) -> None:
        """Log the record of a step."""
        row = None
        if sys.stderr.isatty():
            row = self._table.row(
                record, shutil.get_terminal_size().columns, color_allowed(sys.stderr)
            )
        logger.info(line(record), extra={"colored": colored_line(record), "terminal": row})

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Log results on held-out data."""
        words = "  ".join(f"{key}: {value:.5f}" for key, value in values.items())
        logger.info(f"validation step: {step:>2}  {words}")

    def close(self) -> None:
        """Do nothing, because the log stays open."""


def _number(value: float, digits: int) -> str:
    """Format a number for a narrow column. A diverging run has large ones."""
    # Fewer digits keep the column's width.
    if abs(value) < 100:
        return f"{value:.{digits}f}"
    return f"{value:.3g}"


def _seconds(value: float) -> str:
    """Format seconds with at most four digits, to keep the width of the column."""
    for limit, decimals in ((1, 3), (10, 2), (100, 1)):
        if value < limit:
            return f"{value:.{decimals}f}s"
    return f"{value:.0f}s"


def _is_shown(key: str, value: float) -> bool:
    """True for metrics that the console shows. Parts of the goodput and counts of 0 are only in the files."""
    if key.startswith(("goodput_", "rows_of/", "loss_of/", "targets_of/")):
        return False
    return bool(value) or key not in _COUNTS


def _parts(record: Record) -> list[tuple[str, str]]:
    """Return the color and text of each part of the line."""
    # Every line has the same parts in the same order, so it can be parsed.
    loss = "no targets"
    if record.has_targets:
        loss = f"{record.loss:8.5f}"
    memory = f"{record.memory.peak_gib:5.2f} GiB"
    if record.memory.fraction is not None:
        memory += f"({100 * record.memory.fraction:.1f}%)"
    mfu = "-"
    if record.mfu is not None:
        mfu = f"{100 * record.mfu:.2f}%"
    parts = [
        (_RED, f"step: {record.step:>2}"),
        (_GREEN, f"loss: {loss}"),
        (_YELLOW, f"grad_norm: {record.grad_norm:7.4f}"),
        ("", f"lr: {record.lr:.3e}"),
        (_CYAN, f"memory: {memory}"),
        (_BLUE, f"tps: {record.tps:,.0f}"),
        (_CYAN, f"tflops: {record.tflops:,.2f}"),
        (_MAGENTA, f"mfu: {mfu}"),
        ("", f"data: {record.data_seconds:.3f}s"),
    ]
    for key, value in record.extra.items():
        if _is_shown(key, value):
            parts.append(("", f"{key}: {value:.4g}"))
    parts.append(("", f"left: {format_seconds(record.eta_seconds)}"))
    return parts
