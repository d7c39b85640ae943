"""One mesh's records against one process's: largest errors, the first difference in words, and its likely cause."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardtrain import models
from shardtrain.config import Config
from shardtrain.tools.verify import dropout
from shardtrain.tools.verify.compare import Expected, First, compare
from shardtrain.tools.verify.diagnose import diagnose
from shardtrain.tools.verify.evidence import Evidence
from shardtrain.tools.verify.forward import CLOSE
from shardtrain.tools.verify.run import Record, read_record
from shardtrain.tools.verify.traces import off


def judge(
    _rank: int, _num: int, config: Config, sizes: dict[str, int], alone: str, together: str, num_ranks: int, steps: int
) -> dict[str, Any]:
    """The fields of a ``report.Row`` that come from comparing; runs in a process of its own, after the ranks."""
    dropout.switch_off()
    layout = models.find(config.model.name).LAYOUT
    expected = Expected(read_record(Path(alone), 0), layout)
    records = [read_record(Path(together), rank) for rank in range(num_ranks)]
    found = compare(expected, records, steps)
    first, cause = "", ""
    if found.first is not None:
        first = _say(found.first, expected, records[0].losses, layout.layers)
        cause = diagnose(Evidence(config, sizes, expected, records, found.first))
    errors = {name: getattr(found, name) for name in ("initial", "loss", "gradient", "norm", "weights")}
    if not first and (alike := dropped_alike(records)):
        first, cause = alike
    return {**errors, "first": first, "cause": cause}


def dropped_alike(records: Sequence[Record]) -> tuple[str, str] | None:
    """Dropout of what several tensor- or context-parallel ranks hold alike, and what to do about it.

    Each rank draws its own numbers, as ranks with different tokens, heads or features must. Of one tensor that several
    hold, one process would drop once what they drop differently, and no exchange makes their results one again. Such
    calls are seen by numbers: at unit gain no two parts of an activation are equal.
    """
    axes = {"tp": "tensor", "cp": "context"}
    for one, other in itertools.combinations(records, 2):
        apart = [axis for axis in one.place if one.place[axis] != other.place[axis]]
        if len(apart) != 1 or apart[0] not in axes:
            continue
        for number, ((path, name), theirs) in enumerate(zip(one.facts["drops"], other.facts["drops"], strict=False)):
            mine, peer = (record.parts[f"dropped/{number}"] for record in (one, other))
            if (path, name) == tuple(theirs) and not off(mine, peer, CLOSE):
                where = f"module {path}" if path else "the model's own forward"
                first = f"{name} in {where} is of activations that every {axes[apart[0]]}-parallel rank holds alike"
                fix = "drop where ranks hold different tokens, heads or features, as behind the rowwise linear"
                return first, f"each rank drops other numbers of the same tensor; {fix}, or set p to 0"
    return None


def _say(first: First, expected: Expected, losses: list[float], layers: str) -> str:
    """The first difference as a sentence: step, tensor with its layer, and by how much."""
    start = first.kind in ("own", "initial")
    when = "before step 1" if start else f"step {first.step + 1}"
    if first.names:
        name = first.names[0]
        top, _, rest = name.partition(".")
        where = f"layer {rest.partition('.')[0]}" if top == layers else f"module {top}"
        others = f" (and {len(first.names) - 1} more tensors)" if len(first.names) > 1 else ""
        size = "" if start or first.kind == "buffers" else f", error {first.error:.2g}"
        kinds = {"own": "initial weight", "initial": "initial weight (at unit gain)"}
        what = (kinds | {"gradient": "gradient", "weights": "weight after the update", "buffers": "buffer"})[first.kind]
        sentence = f"{when}: the first {what} that differs is {name} in {where}{size}{others}"
    else:
        what = "the loss" if first.kind == "loss" else "the gradient norm"
        sentence = f"{when}: {what} differs, error {first.error:.2g}"
    if not start and first.loss_differs:
        sentence += f"; loss {losses[first.step]:.6f} in place of {expected.record.losses[first.step]:.6f}"
    return sentence
