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
"""Maximum number of tensors in a message."""
NOUNS = {"samples": "data", "lr": "learning rate", "grad_norm": "gradient norm"}
"""Names of ``Difference.what`` in a message, where they differ from it."""


def main(folders: tuple[str, ...], rounding: str | None, as_json: bool) -> int:
    """Print the comparison of two recordings and return the exit status: 0 if they agree, else 4.

    Raises:
        ConfigError: the recordings cannot be compared.
        DataError: a recording is missing or damaged.
    """
    a = recordings.read(Path(folders[0]))
    b = recordings.read(Path(folders[1]))
    third = None
    if rounding is not None:
        third = recordings.read(Path(rounding))
    comparison = recorded_differences.compare(a, b, third)
    # A parameter that only one program has was not compared, so the programs are not the same.
    is_same = comparison.first is None and not comparison.missing
    status = 0 if is_same else 4
    if as_json:
        print(_document(comparison, status))
    else:
        print("\n".join(lines(a, b, comparison)))
    return status


def lines(a: Recording, b: Recording, comparison: Comparison) -> list[str]:
    """Return the lines for the terminal."""
    texts = [f"{_described(a)} and {_described(b)}: {comparison.num_steps} common steps"]
    # A difference may be in a step that only one program recorded, so list these steps.
    for mine, other in ((a, b), (b, a)):
        numbers = {step.number for step in other.steps}
        extra = [step.number for step in mine.steps if step.number not in numbers]
        if extra:
            plural = "s" if len(extra) > 1 else ""
            texts.append(
                f"not compared: {len(extra)} step{plural} that only {mine.folder} has, from step {extra[0]} on"
            )
    worst = [f"{kind} {error:.1e}" for kind, error in comparison.largest.items()]
    texts.append(f"largest relative differences: {', '.join(worst)}")
    texts += comparison.missing
    if comparison.first is not None:
        texts.append(_sentence(comparison.first))
        texts.append(f"  likely cause: {comparison.first.cause or 'not known'}")
    elif not comparison.missing:
        texts.append("same: all differences are within rounding")
    return texts


def _described(recording: Recording) -> str:
    """Return ``FOLDER (2 ranks in float32)``."""
    plural = "s"
    if recording.num_ranks == 1:
        plural = ""
    return f"{recording.folder} ({recording.num_ranks} rank{plural} in {recording.precision})"


def _sentence(first: Difference) -> str:
    what = NOUNS.get(first.what, first.what)
    text = f"differs: the first difference is in the {what} of step {first.step}"
    if first.names:
        text += f": {', '.join(first.names[:MOST_NAMES])}"
        others = len(first.names) - MOST_NAMES
        if others > 0:
            text += f" and {others} more"
    # Other samples have no meaningful difference and no tolerance.
    if math.isfinite(first.error) and first.tolerance:
        text += f" (relative difference {first.error:.2g}, rounding explains {first.tolerance:.1g})"
    return text


def _document(comparison: Comparison, status: int) -> str:
    """Return the JSON document. Errors that are not finite are null, because JSON has no infinity."""
    fields = asdict(comparison)
    first = fields["first"]
    if first is not None and not math.isfinite(first["error"]):
        first["error"] = None
    for kind, error in comparison.largest.items():
        if not math.isfinite(error):
            fields["largest"][kind] = None
    fields["exit_code"] = status
    return json.dumps(fields, indent=2, allow_nan=False)
