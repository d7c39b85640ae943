"""The log line of a step, in the words that torchtitan's users search for."""

from __future__ import annotations

from collections.abc import Mapping

from shardtrain.metrics.record import Record
from shardtrain.utils.log import logger
from shardtrain.utils.units import format_seconds

_COUNTS = ("skipped_updates", "spikes", "rewinds", "goodput")
"""Shown where they are not 0."""
_CYAN, _GREEN, _YELLOW, _BLUE, _MAGENTA, _RED, _RESET = (f"\x1b[{code}m" for code in (36, 32, 33, 34, 35, 31, 0))


def line(record: Record) -> str:
    """``step:  N  loss:  x  grad_norm:  y  lr: ...  memory: G GiB  tps: n  tflops: f  mfu: m%  data: s  left: t``.

    ``mfu: -`` where the peak of the device is not known.
    """
    return "  ".join(text for _, text in _parts(record))


def colored_line(record: Record) -> str:
    """The same line with ANSI colours."""
    return "  ".join(f"{color}{text}{_RESET}" if color else text for color, text in _parts(record))


class Console:
    """The log of each rank; the console's handler takes the coloured form where colours are allowed."""

    def write(self, record: Record) -> None:
        """Log the line."""
        logger.info(line(record), extra={"colored": colored_line(record)})

    def validation(self, step: int, values: Mapping[str, float]) -> None:
        """Log results on held-out data."""
        words = "  ".join(f"{key}: {value:.5f}" for key, value in values.items())
        logger.info(f"validation step: {step:>2}  {words}")

    def close(self) -> None:
        """Do nothing: the log goes on."""


def _parts(record: Record) -> list[tuple[str, str]]:
    """Colour and text of each part."""
    share = "" if record.memory.fraction is None else f"({100 * record.memory.fraction:.1f}%)"
    mfu = "-" if record.mfu is None else f"{100 * record.mfu:.2f}%"
    parts = [
        (_RED, f"step: {record.step:>2}"),
        (_GREEN, f"loss: {record.loss:8.5f}"),
        (_YELLOW, f"grad_norm: {record.grad_norm:7.4f}"),
        ("", f"lr: {record.lr:.3e}"),
        (_CYAN, f"memory: {record.memory.peak_gib:5.2f} GiB{share}"),
        (_BLUE, f"tps: {record.tps:,.0f}"),
        (_CYAN, f"tflops: {record.tflops:,.2f}"),
        (_MAGENTA, f"mfu: {mfu}"),
        ("", f"data: {record.data_seconds:.3f}s"),
    ]
    # the bins of the goodput are for the files, and so are counts of what has not happened: they would fill the line
    extra = {key: value for key, value in record.extra.items() if not key.startswith("goodput_")}
    parts += [("", f"{key}: {value:.4g}") for key, value in extra.items() if value or key not in _COUNTS]
    return [*parts, ("", f"left: {format_seconds(record.eta_seconds)}")]
