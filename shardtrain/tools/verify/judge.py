"""Judge the records of one mesh: the largest errors, the first difference, and its likely cause."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardtrain import models
from shardtrain.config import Config
from shardtrain.tools.verify import dropout
from shardtrain.tools.verify.compare import NONE, Expected, First, compare, moved_by, tolerances
from shardtrain.tools.verify.diagnose import diagnose
from shardtrain.tools.verify.evidence import Evidence, axes_that_differ
from shardtrain.tools.verify.first_divergence import CLOSE
from shardtrain.tools.verify.traces import differs
from shardtrain.tools.verify.verify_rank import RankRecord, read_record
from shardtrain.tools.verify.verify_report import BLIND, ROUNDING


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
    """Compare the records of a mesh with one process. Runs in a separate process after the ranks.

    Args:
        config: Configuration of the mesh.
        sizes: Ranks along each mesh axis.
        alone: Folder of the record of one process.
        together: Folder of the records of the mesh's ranks.
        num_ranks: Number of ranks of the mesh.
        steps: Number of recorded steps.
        moved: Folder of the record of a shaken run of one process, if it exists.

    Returns:
        Fields of ``verify_report.MeshResult``. None if there is a difference but ``moved`` is missing,
        because only the shaken run shows whether the difference is rounding.
    """
    dropout.switch_off()
    layout = models.find(config.model.name).LAYOUT
    expected = Expected(read_record(Path(alone), 0), layout)
    records = [read_record(Path(together), rank) for rank in range(num_ranks)]
    # Without the shaken run, use the usual tolerances.
    shaken = None
    moved_at = [NONE] * steps
    if moved:
        shaken = read_record(Path(moved), 0)
        moved_at = moved_by(expected, shaken, steps)
    allowed = tolerances(moved_at)
    differences = compare(expected, records, steps, allowed)

    first = ""
    cause = ""
    rounding = ""
    if differences.first is not None:
        if shaken is None:
            return None
        first = describe(differences.first, expected, records[0].losses, layout.layers)
        step = differences.first.step
        # Even an error above the largest tolerance may be rounding, if changing weights by one unit in the
        # last place has an effect of that size. For initial weights and buffers there is no such effect. It
        # is then -1, which never excuses an error.
        effect = getattr(moved_at[step], differences.first.kind, -1.0)
        if differences.first.error <= ROUNDING * effect:
            cause = (
                f"{BLIND}, which could hide an error of this size: on one process, "
                f"changing weights by one unit in the last place has as much effect ({effect:.1e}); "
                "compare with fewer steps, layers or tokens"
            )
        else:
            evidence = Evidence(
                config, sizes, expected, records, differences.first, shaken, allowed[step]
            )
            cause = diagnose(evidence)
    elif shaken is not None:
        most = allowed[-1]
        rounding = (
            f"this model amplifies rounding: differences are accepted up to {ROUNDING} times the "
            "effect of changing its weights by one unit in the last place on one process, "
            f"which is {most.loss:.1e} of the loss and {most.gradient:.1e} of a gradient"
        )

    # Dropout is off in the comparison, so equal numbers do not reveal a dropout that makes ranks
    # diverge in training.
    if not first:
        first, cause = same_dropout_input(records) or ("", "")
    return {
        "initial": differences.initial,
        "loss": differences.loss,
        "gradient": differences.gradient,
        "norm": differences.norm,
        "weights": differences.weights,
        "first": first,
        "cause": cause,
        "rounding": rounding,
    }


def same_dropout_input(records: Sequence[RankRecord]) -> tuple[str, str] | None:
    """Find dropout of a tensor that several tensor- or context-parallel ranks hold in full.

    Each rank drops different elements, which is required for different tokens, heads or features. On replicas
    of one tensor, the results of the ranks then diverge. Equal numbers identify replicas, because at unit
    gain no two parts of an activation are equal.

    Returns:
        The first difference and its cause, as sentences, or None.
    """
    names = {"tp": "tensor", "cp": "context"}
    for one, other in itertools.combinations(records, 2):
        axes = axes_that_differ(one, other)
        if len(axes) != 1 or axes[0] not in names:
            continue
        drops = zip(one.facts["drops"], other.facts["drops"], strict=False)
        for number, (mine, theirs) in enumerate(drops):
            if tuple(mine) != tuple(theirs):
                continue
            key = f"dropped/{number}"
            if differs(one.parts[key], other.parts[key], CLOSE):
                continue
            path, name = mine
            where = f"module {path}" if path else "the model's own forward"
            first = f"{name} in {where} drops activations that are equal on all {names[axes[0]]}-parallel ranks"
            fix = "use dropout where ranks have different tokens, heads or features, as after the rowwise linear"
            return first, f"each rank drops other elements of the same tensor; {fix}, or set p to 0"
    return None


_KIND_NAMES = {
    "own": "initial weight",
    "initial": "initial weight (at unit gain)",
    "gradient": "gradient",
    "weights": "weight after the update",
    "buffers": "buffer",
    "loss": "the loss",
    "norm": "the gradient norm",
}


def describe(first: First, expected: Expected, losses: list[float], layers: str) -> str:
    """Describe the first difference: step, tensor with its layer, and error."""
    is_initial = first.kind in ("own", "initial")
    when = "before step 1" if is_initial else f"step {first.step + 1}"
    kind = _KIND_NAMES[first.kind]
    if first.names:
        name = first.names[0]
        # "layers.3.attention.weight" is in layer 3. A tensor outside of the layers is in a module.
        top, _, rest = name.partition(".")
        place = f"module {top}"
        if top == layers:
            place = f"layer {rest.partition('.')[0]}"
        sentence = f"{when}: the first {kind} that differs is {name} in {place}"
        if not is_initial and first.kind != "buffers":
            sentence += f", error {first.error:.2g}"
        if len(first.names) > 1:
            sentence += f" (and {len(first.names) - 1} more tensors)"
    else:
        sentence = f"{when}: {kind} differs, error {first.error:.2g}"
    if not is_initial and first.loss_differs:
        mine = losses[first.step]
        theirs = expected.record.losses[first.step]
        sentence += f"; loss {mine:.6f} instead of {theirs:.6f}"
    return sentence
