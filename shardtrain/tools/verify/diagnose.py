"""From the first difference of a mesh to one sentence: which tensor, by how much, and the likely cause."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch

from shardtrain.tools.verify import causes, first_divergence
from shardtrain.tools.verify.compare import same_bits
from shardtrain.tools.verify.evidence import Evidence, axes_that_differ
from shardtrain.tools.verify.verify_rank import RankRecord

HYPOTHESES: tuple[Callable[[Evidence], str | None], ...] = (
    causes.clipped_otherwise,
    causes.expert_dropped,
    causes.missing_reduction,
    causes.scaled,
    causes.own_counts,
    causes.micro_batch,
    causes.same_samples,
    causes.swapped_targets,
    causes.positions,
    causes.stale_weights,
    causes.balance_loss,
    causes.unscaled_loss,
    causes.short_type,
    causes.replicas_differ,
)
"""In this order: the first that every rank's numbers fit is named."""


def diagnose(e: Evidence) -> str:
    """The likely cause of the first difference."""
    # What differs first has everything after it as its consequence, so only its own causes are looked for.
    if e.first.kind in ("own", "initial"):
        name = e.first.names[0]
        key = f"{e.first.kind}/{name}"
        whole = e.expected.whole(e.first.kind, name)
        holders = [record for record in e.records if key in record.parts]
        wrong = [record for record in holders if not same_bits(record.parts[key], whole[record.slices[key]])]
        ranks = ", ".join(str(record.rank) for record in wrong)
        if len(wrong) < len(holders):
            return f"initial weights depend on the rank: those of rank {ranks} are of another seed or stream"
        return "initial weights depend on the mesh: no rank has those of one process"
    if e.first.kind == "norm":
        return _norm(e)
    if e.first.kind == "buffers":
        return _buffers(e)
    if e.first.kind == "weights":
        return _weights(e)
    if e.first.kind == "loss":
        return _loss(e)

    # A gradient. Activations were kept in the first step alone, and tell where the forward pass leaves one process.
    absent = [name for name in e.first.names if not e.holders(name)]
    if absent:
        return f"no gradient: {absent[0]} takes no part in the loss on this mesh"
    place = first_divergence.first_difference(e) if e.first.loss_differs and e.first.step == 0 else ""

    # Each hypothesis computes what its fault would give, from one process's numbers, and is named only where that fits
    # all ranks.
    for hypothesis in HYPOTHESES:
        cause = hypothesis(e)
        if cause:
            return f"{cause}; {place}" if place else cause
    if place == "" and e.first.step == 0:
        place = first_divergence.first_backward_difference(e)
    if place:
        return place

    # Nothing fits: what the numbers look like.
    mine = e.mine(e.suspect)
    theirs = e.theirs(e.suspect)
    if mine is None:
        return "no simple cause fits; the ranks' parts do not make up the whole tensor"
    ratio = float(mine.norm() / theirs.norm().clamp_min(1e-30))
    cosine = float((mine * theirs).sum() / (mine.norm() * theirs.norm()).clamp_min(1e-30))
    where = "the forward pass differs" if e.first.loss_differs else "the loss agrees: look at the backward pass"
    return f"no simple cause fits: ratio of norms {ratio:.4g}, cosine {cosine:.4f}; {where}"


def _loss(e: Evidence) -> str:
    mine = e.records[0].losses[e.first.step]
    theirs = e.expected.record.losses[e.first.step]
    for axis in e.axes:
        for factor in (e.sizes[axis], 1 / e.sizes[axis]):
            if e.explains_loss(factor * theirs, 1e-5):
                return f"the reported loss is scaled by {factor:g}, by the size of axis {axis}; the gradients agree"
    return f"the reported loss alone differs: {mine:.7g} in place of {theirs:.7g}; the gradients agree"


def _weights(e: Evidence) -> str:
    name = e.first.names[0]
    step = e.first.step
    after = f"weights/{step}/{name}"
    before = f"initial/{name}" if step == 0 else f"weights/{step - 1}/{name}"
    holders = [record for record in e.records if after in record.parts]
    if all(torch.equal(record.parts[after], record.parts[before]) for record in holders):
        return "not updated: the parameter is what it was before the step, though its gradient agrees"
    for one, other in itertools.combinations(holders, 2):
        same_part = one.slices[after] == other.slices[after]
        if same_part and not torch.equal(one.parts[after], other.parts[after]):
            axes = " and ".join(axes_that_differ(one, other))
            return f"unsynchronised parameter: its copies differ between ranks of axis {axes} after the update"
    return "the update differs, though the gradient agrees: look at the optimizer and its state"


def _buffers(e: Evidence) -> str:
    key = f"buffers/{e.first.step}/{e.first.names[0]}"
    holders = [record for record in e.records if key in record.parts]
    for one, other in itertools.combinations(holders, 2):
        if not torch.equal(one.parts[key], other.parts[key]):
            axes = " and ".join(axes_that_differ(one, other))
            return f"unsynchronised buffer: its copies differ between ranks of axis {axes}"
    return "all ranks have the same, and one process another: what it counts is not summed, or counted more than once"


def _norm(e: Evidence) -> str:
    """Which reduction the norm lacks, or what it counts more than once."""
    step = e.first.step
    prefix = f"gradient/{step}/"
    for axis in e.axes:
        lacking = [
            _norm_of([other for other in e.records if other.place[axis] == record.place[axis]], prefix)
            for record in e.records
        ]
        if _explains(e, lacking):
            return f"norm not reduced over {axis}: each rank counts only its own parts; the gradients agree"
    for axis in e.axes:
        # what an all-reduce gives that adds up tensors which are whole along the axis, or all tensors
        by_place = [
            _norm_of([record for record in e.records if record.place[axis] == place], prefix) ** 2
            for place in range(e.sizes[axis])
        ]
        all_tensors = e.sizes[axis] * _norm_of(e.records, prefix) ** 2
        for squares in (sum(by_place), all_tensors):
            if _explains(e, [math.sqrt(squares)] * len(e.records)):
                return f"norm counts whole tensors once for each rank of axis {axis}; the gradients agree"
    mine = e.records[0].norms[step]
    theirs = e.expected.total(step)
    return f"the gradient norm alone differs: {mine:.7g} in place of {theirs:.7g}; the gradients agree"


def _norm_of(records: Sequence[RankRecord], prefix: str) -> float:
    """Norm of the distinct parts that some ranks hold."""
    squares = {
        (key, tuple((s.start, s.stop) for s in record.slices[key])): float(part.double().square().sum())
        for record in records
        for key, part in record.parts.items()
        if key.startswith(prefix)
    }
    return math.sqrt(sum(squares.values()))


def _explains(e: Evidence, norms: Sequence[float]) -> bool:
    """Whether each rank has the norm that a hypothesis gives for it, and not one process's as well."""
    step = e.first.step
    theirs = e.expected.total(step)
    fits = all(_close(norm, record.norms[step]) for norm, record in zip(norms, e.records, strict=True))
    return fits and not all(_close(norm, theirs) for norm in norms)


def _close(norm: float, other: float) -> bool:
    return abs(norm - other) < 1e-5 * max(norm, 1e-30)
