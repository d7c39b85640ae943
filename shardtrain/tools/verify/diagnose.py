"""Name the likely cause of the first difference between a mesh and one process, in one sentence."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence

import torch

from shardtrain.tools.verify import causes, first_divergence, loss_causes
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
    causes.part_without_gradient,
)
"""Possible causes of a wrong gradient, in the order of the tests.

The first cause that explains all ranks is reported.
"""
OF_LOSS: tuple[Callable[[Evidence], str | None], ...] = (
    loss_causes.counted_columns,
    loss_causes.columns_from_zero,
    loss_causes.counts_of_parts,
    loss_causes.targets_of_other_parts,
)
"""Possible causes of a wrong loss for logits that agree."""


def diagnose(e: Evidence) -> str:
    """Return the likely cause of the first difference.

    Later differences are its consequences, so they are ignored.
    """
    if e.first.kind in ("own", "initial"):
        return _explain_initial_weights(e)
    if e.first.kind == "norm":
        return _explain_norm(e)
    if e.first.kind == "buffers":
        return _explain_buffers(e)
    if e.first.kind == "weights":
        return _explain_weights(e)
    if e.first.kind == "loss":
        return _explain_loss(e)
    return _explain_gradient(e)


def _explain_initial_weights(e: Evidence) -> str:
    name = e.first.names[0]
    key = f"{e.first.kind}/{name}"
    full = e.expected.whole(e.first.kind, name)
    holders = [record for record in e.records if key in record.parts]
    wrong = []
    for record in holders:
        if not same_bits(record.parts[key], full[record.slices[key]]):
            wrong.append(record)
    # If some ranks are right, the drawing cannot depend on the mesh, which is the same for all ranks.
    if len(wrong) < len(holders):
        ranks = ", ".join(str(record.rank) for record in wrong)
        return (
            f"initial weights depend on the rank: rank {ranks} uses another seed or random stream"
        )
    return "initial weights depend on the mesh: no rank has the weights of one process"


def _explain_gradient(e: Evidence) -> str:
    absent = [name for name in e.first.names if not e.holders(name)]
    if absent:
        return f"no gradient: the loss on this mesh does not depend on {absent[0]}"
    # Activations are recorded only in the first step. They show where the forward pass differs.
    place = ""
    if e.first.loss_differs and e.first.step == 0:
        place = first_divergence.first_difference(e)
    for hypothesis in HYPOTHESES:
        cause = hypothesis(e)
        if cause and place:
            return f"{cause}; {place}"
        if cause:
            return cause

    # The logits agree, so the fault is in the loss itself.
    if place == first_divergence.LOGITS_AGREE:
        for hypothesis in OF_LOSS:
            cause = hypothesis(e)
            if cause:
                return f"{cause}; {place}"
    if place == "" and e.first.step == 0:
        place = first_divergence.first_backward_difference(e)
    if place:
        return place

    # No hypothesis fits, so only describe the numbers.
    mine = e.mine(e.suspect)
    theirs = e.theirs(e.suspect)
    if mine is None:
        return "no simple cause fits; the ranks' parts do not make up the full tensor"
    ratio = float(mine.norm() / theirs.norm().clamp_min(1e-30))
    product = (mine * theirs).sum()
    norms = mine.norm() * theirs.norm()
    cosine = float(product / norms.clamp_min(1e-30))
    where = "the loss agrees: check the backward pass"
    if e.first.loss_differs:
        where = "the forward pass differs"
    return f"no simple cause fits: ratio of norms {ratio:.4g}, cosine {cosine:.4f}; {where}"


def _explain_loss(e: Evidence) -> str:
    mine = e.records[0].losses[e.first.step]
    theirs = e.expected.record.losses[e.first.step]
    # The gradients agree, so only the sum that is reported can be wrong: added where it is averaged, or the
    # reverse.
    for axis in e.axes:
        size = e.sizes[axis]
        for factor in (size, 1 / size):
            if e.explains_loss(factor * theirs, 1e-5):
                return f"the reported loss is scaled by {factor:g}, by the size of axis {axis}; the gradients agree"
    return (
        f"only the reported loss differs: {mine:.7g} instead of {theirs:.7g}; the gradients agree"
    )


def _explain_weights(e: Evidence) -> str:
    name = e.first.names[0]
    step = e.first.step
    after = f"weights/{step}/{name}"
    before = f"initial/{name}"
    if step > 0:
        before = f"weights/{step - 1}/{name}"
    holders = [record for record in e.records if after in record.parts]
    is_updated = False
    for record in holders:
        if not torch.equal(record.parts[after], record.parts[before]):
            is_updated = True
    if not is_updated:
        return "not updated: the step did not change the parameter, although its gradient agrees"

    # Copies of a part must stay equal. If they do, all ranks made the same wrong update.
    for one, other in itertools.combinations(holders, 2):
        is_same_part = one.slices[after] == other.slices[after]
        if is_same_part and not torch.equal(one.parts[after], other.parts[after]):
            axes = " and ".join(axes_that_differ(one, other))
            return f"unsynchronised parameter: its copies differ between ranks of axis {axes} after the update"
    return "the update differs, although the gradient agrees: check the optimizer and its state"


def _explain_buffers(e: Evidence) -> str:
    # All ranks with a buffer must have the same values, also if they have different tokens.
    key = f"buffers/{e.first.step}/{e.first.names[0]}"
    holders = [record for record in e.records if key in record.parts]
    for one, other in itertools.combinations(holders, 2):
        if not torch.equal(one.parts[key], other.parts[key]):
            axes = " and ".join(axes_that_differ(one, other))
            return f"unsynchronised buffer: its copies differ between ranks of axis {axes}"
    return "all ranks agree, but not with one process: the buffer is not summed over ranks, or counts them repeatedly"


def _explain_norm(e: Evidence) -> str:
    """Name the reduction that is missing in the gradient norm, or the tensors that it counts more
    than once.
    """
    step = e.first.step
    prefix = f"gradient/{step}/"
    # Without the reduction over an axis, a rank has the norm of the ranks with the same index on that axis.
    vectors = _vectors_of(e.records, prefix)
    for axis in e.axes:
        # The same fault may affect all tensors, or only tensors of one dimension.
        unreduced_norms = []
        vector_norms = []
        for record in e.records:
            peers = _with_place(e.records, axis, record.place[axis])
            norm_of_peers = _norm_of(peers, prefix)
            unreduced_norms.append(norm_of_peers)
            # Here, matrices are reduced over all ranks, and vectors only over the peers.
            squares_of_matrices = _norm_of(e.records, prefix, without=vectors) ** 2
            peers_without_vectors = _norm_of(peers, prefix, without=vectors)
            squares_of_vectors = norm_of_peers**2 - peers_without_vectors**2
            vector_norms.append(math.sqrt(squares_of_matrices + squares_of_vectors))
        if _explains_norms(e, unreduced_norms):
            return f"norm not reduced over {axis}: each rank counts only its own parts; the gradients agree"
        if _explains_norms(e, vector_norms):
            return (
                f"norm not reduced over {axis} for tensors of one dimension, such as biases and attention sinks: "
                "each rank counts only its own parts; the gradients agree"
            )

    # A superfluous all-reduce over an axis counts replicas along the axis several times, or all tensors.
    for axis in e.axes:
        squares_of_places = 0.0
        for place in range(e.sizes[axis]):
            records = _with_place(e.records, axis, place)
            squares_of_places += _norm_of(records, prefix) ** 2
        squares_of_all = e.sizes[axis] * _norm_of(e.records, prefix) ** 2
        for squares in (squares_of_places, squares_of_all):
            # After an all-reduce, every rank has the same norm.
            norms = [math.sqrt(squares)] * len(e.records)
            if _explains_norms(e, norms):
                return f"norm counts replicated tensors once for each rank of axis {axis}; the gradients agree"
    mine = e.records[0].norms[step]
    theirs = e.expected.total(step)
    return (
        f"only the gradient norm differs: {mine:.7g} instead of {theirs:.7g}; the gradients agree"
    )


def _with_place(records: Sequence[RankRecord], axis: str, place: int) -> list[RankRecord]:
    """Return the records of the ranks with this place on an axis."""
    return [record for record in records if record.place[axis] == place]


def _vectors_of(records: Sequence[RankRecord], prefix: str) -> set[str]:
    """Return the keys of tensors of one dimension that start with ``prefix``."""
    vectors = set()
    for record in records:
        for key, part in record.parts.items():
            if key.startswith(prefix) and part.ndim == 1:
                vectors.add(key)
    return vectors


def _norm_of(records: Sequence[RankRecord], prefix: str, without: Collection[str] = ()) -> float:
    """Return the norm of all distinct parts of some ranks whose key starts with ``prefix``."""
    squares: dict[tuple[str, tuple[tuple[int, int], ...]], float] = {}
    for record in records:
        for key, part in record.parts.items():
            if not key.startswith(prefix) or key in without:
                continue
            # Copies of a part have the same place, so they count once.
            place = tuple((s.start, s.stop) for s in record.slices[key])
            squares[key, place] = float(part.double().square().sum())
    return math.sqrt(sum(squares.values()))


def _explains_norms(e: Evidence, norms: Sequence[float]) -> bool:
    """True if each rank has the predicted norm, and at least one predicted norm differs from one process's."""
    step = e.first.step
    for norm, record in zip(norms, e.records, strict=True):
        if not _is_close(norm, record.norms[step]):
            return False
    norm_of_one_process = e.expected.total(step)
    return not all(_is_close(norm, norm_of_one_process) for norm in norms)


def _is_close(norm: float, other: float) -> bool:
    return abs(norm - other) < 1e-5 * max(norm, 1e-30)
