"""One mesh's records against one process's: largest errors, the first difference in words, and its likely cause."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardtrain import models
from shardtrain.config import Config
from shardtrain.tools.verify import dropout
from shardtrain.tools.verify.compare import NONE, ROUNDING, Expected, First, compare, moved_by, tolerances
from shardtrain.tools.verify.diagnose import diagnose
from shardtrain.tools.verify.evidence import Evidence
from shardtrain.tools.verify.first_divergence import CLOSE
from shardtrain.tools.verify.traces import off
from shardtrain.tools.verify.verify_rank import RankRecord, read_record
from shardtrain.tools.verify.verify_report import BLIND


def judge(
    _rank: int,
    _num: int,
    config: Config,
    sizes: dict[str, int],
    alone: str,
    together: str,
    num_ranks: int,
    steps: int,
    moved: str = "",
) -> dict[str, Any] | None:
    """The fields of a ``report.Row`` that come from comparing; runs in a process of its own, after the ranks.

    ``moved`` has the record of a shaken run of one process. None where there is a difference, and it takes that run to
    tell what of it is rounding.
    """
    dropout.switch_off()

    # The records of one process, of the mesh's ranks and, once it was asked for, of the shaken run.
    layout = models.find(config.model.name).LAYOUT
    expected = Expected(read_record(Path(alone), 0), layout)
    records = [read_record(Path(together), rank) for rank in range(num_ranks)]
    shaken = read_record(Path(moved), 0) if moved else None
    moved_at = moved_by(expected, shaken, steps) if shaken else [NONE] * steps
    allowed = tolerances(moved_at)
    found = compare(expected, records, steps, allowed)

    first = ""
    cause = ""
    rounding = ""
    if found.first is not None:
        if shaken is None:
            return None
        first = _say(found.first, expected, records[0].losses, layout.layers)
        step = found.first.step
        # A difference beyond MOST counts, and rounding may be all of it nevertheless. Initial weights and buffers have
        # no measure of rounding: -1 is never met.
        moved_by_unit = getattr(moved_at[step], found.first.kind, -1.0)
        if found.first.error <= ROUNDING * moved_by_unit:
            cause = (
                f"{BLIND}, and a fault of this size could not be told from it: on one process, moving weights by one "
                f"unit in the last place changes as much ({moved_by_unit:.1e}); compare with fewer "
                "steps, layers or tokens"
            )
        else:
            cause = diagnose(Evidence(config, sizes, expected, records, found.first, shaken, allowed[step]))
    elif shaken is not None:
        most = allowed[-1]
        rounding = (
            f"this model amplifies rounding: {ROUNDING} times what moving its weights by one unit in the last place "
            f"changes on one process counts as such, up to {most.loss:.1e} of the loss and {most.gradient:.1e} of a "
            "gradient"
        )

    # Dropout is off in the comparison, so that the numbers agree where it would make ranks differ in training.
    alike = None if first else dropped_alike(records)
    if alike is not None:
        first, cause = alike
    errors = {name: getattr(found, name) for name in ("initial", "loss", "gradient", "norm", "weights")}
    return {**errors, "first": first, "cause": cause, "rounding": rounding}


def dropped_alike(records: Sequence[RankRecord]) -> tuple[str, str] | None:
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
