"""``shardtrain verify --compare RUN_A RUN_B``: compare two recordings of ``shardtrain.record``."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

from shardtrain.tools.verify import recorded_differences, recordings
from shardtrain.tools.verify.recorded_differences import Comparison, Difference
from shardtrain.tools.verify.recordings import Recording

MOST_NAMES = 5


def main(folders: tuple[str, ...], rounding: str | None, as_json: bool) -> int:
    """Print the comparison of two recordings and return the exit status: 0 if they agree, else 4.

    Raises:
        ConfigError: the recordings cannot be compared.
        DataError: a recording is missing or damaged.
    """
    a, b = (recordings.read(Path(folder)) for folder in folders)
    third = None if rounding is None else recordings.read(Path(rounding))
    comparison = recorded_differences.compare(a, b, third)
    is_same = comparison.first is None and not comparison.missing
    status = 0 if is_same else 4
    print(_document(comparison, status) if as_json else "\n".join(lines(a, b, comparison)))
    return status


def lines(a: Recording, b: Recording, comparison: Comparison) -> list[str]:
    """Return the lines for the terminal."""
    ranks = [f"{one.num_ranks} rank{'' if one.num_ranks == 1 else 's'} in {one.precision}" for one in (a, b)]
    texts = [f"{a.folder} ({ranks[0]}) and {b.folder} ({ranks[1]}): {comparison.num_steps} common steps"]
    worst = ", ".join(f"{kind} {error:.1e}" for kind, error in comparison.largest.items())
    texts.append(f"largest relative differences: {worst}")
    texts += comparison.missing
    if comparison.first is not None:
        texts.append(_sentence(comparison.first))
        texts.append(f"  likely cause: {comparison.first.cause or 'not known'}")
    elif not comparison.missing:
        texts.append("same: all differences are within rounding")
    return texts


def _sentence(first: Difference) -> str:
    what = {"samples": "data", "lr": "learning rate", "grad_norm": "gradient norm"}.get(first.what, first.what)
    text = f"differs: the first difference is in the {what} of step {first.step}"
    if first.names:
        others = len(first.names) - MOST_NAMES
        more = f" and {others} more" if others > 0 else ""
        text += f": {', '.join(first.names[:MOST_NAMES])}{more}"
    if math.isfinite(first.error) and first.tolerance:
        text += f" (relative difference {first.error:.2g}, rounding explains {first.tolerance:.1g})"
    return text


def _document(comparison: Comparison, status: int) -> str:
    fields = asdict(comparison)
    if fields["first"] is not None and not math.isfinite(fields["first"]["error"]):
        fields["first"]["error"] = None
    fields["largest"] = {kind: error if math.isfinite(error) else None for kind, error in fields["largest"].items()}
    return json.dumps({**fields, "exit_code": status}, indent=2, allow_nan=False)
