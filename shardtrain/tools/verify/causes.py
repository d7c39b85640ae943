"""Hypotheses about the cause of a wrong gradient or loss.

Each function takes the numbers of one process and computes the value that every rank would have with its
fault. It returns a message if every rank has exactly that value, up to rounding, or else None.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from shardtrain.layout import TENSOR_STYLES, matches, style_of
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify.evidence import Evidence, axes_that_differ
from shardtrain.tools.verify.verify_rank import RankRecord


def missing_reduction(e: Evidence) -> str | None:
    """Each rank has only the gradient of its own share along one axis, or along two."""
    axes = [axis for axis in e.axes if axis != "pp"]
    for count in (1, 2):
        for chosen in itertools.combinations(axes, count):
            if not _has_shares(e, chosen):
                continue
            # Under tp, the style of a module decides how its gradient is reduced, so name the style.
            owner = e.suspect.rpartition(".")[0]
            style = style_of(e.layout, owner)
            note = ""
            if style and "tp" in chosen:
                note = f'; LAYOUT.tensor calls {owner} "{style}" ({TENSOR_STYLES[style]})'
            over = " and ".join(chosen)
            return f"missing reduction over {over}: each rank has only the gradient of its own share{note}"
    return None


def _has_shares(e: Evidence, axes: Sequence[str]) -> bool:
    """True if each rank's gradient comes only from its share of the batch along these axes."""
    # Ranks at the same place have the same share, which is computed once.
    cache: dict[tuple[int, ...], Tensor | None] = {}

    def share_of(record: RankRecord) -> Tensor | None:
        place = tuple(record.place[axis] for axis in axes)
        if place not in cache:
            fixed = dict(zip(axes, place, strict=True))
            cache[place] = e.share(e.suspect, fixed)
        return cache[place]

    return e.explains(e.suspect, share_of)


def scaled(e: Evidence) -> str | None:
    """The gradient is wrong by a constant factor."""
    mine = e.mine(e.suspect)
    theirs = e.theirs(e.suspect)
    if mine is None:
        return None
    # Fit the factor by least squares. The residual must be rounding.
    square = theirs.square().sum().clamp_min(1e-30)
    factor = float((mine * theirs).sum() / square)
    residual = float((mine - factor * theirs).norm())
    if factor == 0 or residual > e.match * abs(factor) * float(theirs.norm()):
        return None
    if changes_nothing(e, factor):
        return None
    for wanted, text in _factors(e):
        if abs(factor / wanted - 1) < max(1e-3, e.match):
            return text
    return f"scaled by {factor:.6g}, which is not a size of an axis"


def changes_nothing(e: Evidence, factor: float) -> bool:
    """True if a factor is too close to 1 to explain a difference."""
    return abs(factor - 1) <= e.match


def _factors(e: Evidence) -> Iterator[tuple[float, str]]:
    """Yield factors by which a wrong reduction scales a gradient, each with its message."""
    # Axes of the same size cannot be told apart by the factor, so name all of them.
    axes = [axis for axis in e.axes if axis != "pp"]
    by_size: dict[int, list[str]] = {}
    for count in range(1, len(e.axes) + 1):
        # The pipeline axis scales a gradient only together with another axis.
        candidates = axes if count == 1 else e.axes
        for chosen in itertools.combinations(candidates, count):
            size = math.prod(e.sizes[axis] for axis in chosen)
            by_size.setdefault(size, []).append(" x ".join(chosen))
    for size, names in by_size.items():
        sources = " or ".join(names)
        if size == e.num_micro:
            sources += ", or the number of micro-batches"
        yield (
            1 / size,
            f"scaled by 1/{size}, the size of axis {sources}: averaged where it must be summed",
        )
        yield float(size), f"scaled by {size}, the size of axis {sources}: counted {size} times"
    # Gradients of micro-batches are added, and divided by the number of targets of the global batch.
    num_micro = e.num_micro
    if num_micro > 1:
        unit = f"{num_micro}, the number of micro-batches"
        yield 1 / num_micro, f"scaled by 1/{unit}: averaged over micro-batches"
        yield float(num_micro), f"scaled by {unit}: counted {num_micro} times"
    num_targets = e.batch.num_targets
    if num_targets > 1:
        yield 1 / num_targets, f"divided twice by the {num_targets} target tokens"
        yield float(num_targets), f"never divided by the {num_targets} target tokens"


def _num_targets(e: Evidence, rows: Sequence[int]) -> int:
    """Return the number of target tokens in some rows of the batch."""
    targets_RT = e.batch.targets_BT[torch.as_tensor(rows)]
    return int((targets_RT != IGNORE).sum())


def own_counts(e: Evidence) -> str | None:
    """Each share is divided by its own number of target tokens instead of the global number."""
    rows_of_ranks = [e.rows_of_rank(rank) for rank in range(e.data_ranks)]
    rows_of_micro_batches = [e.micro_rows_of(index) for index in range(e.num_micro)]
    splits = {"data rank": rows_of_ranks, "micro-batch": rows_of_micro_batches}
    for unit, shares in splits.items():
        if len(shares) < 2:
            continue
        # ``e.shares`` divides by the number of targets of the batch. Replace that number by the
        # number of each share.
        total = torch.zeros_like(e.theirs(e.suspect))
        is_known = True
        for rows in shares:
            part = e.shares.gradient(e.suspect, rows)
            if part is None:
                is_known = False
                break
            num_targets = _num_targets(e, rows)
            total = total + part * e.batch.num_targets / num_targets
        if not is_known:
            continue
        cause = f"each {unit} divided by its own count of target tokens and"
        if e.explains_on_all_ranks(e.suspect, total / len(shares)):
            return f"{cause} then averaged: a mean of means"
        if e.explains_on_all_ranks(e.suspect, total):
            return f"{cause} then summed"
    return None


def micro_batch(e: Evidence) -> str | None:
    """Some micro-batches are dropped, or counted twice."""
    if e.num_micro < 2:
        return None
    parts = []
    for index in range(e.num_micro):
        part = e.shares.gradient(e.suspect, e.micro_rows_of(index))
        if part is None:
            return None
        parts.append(part)

    # If gradients are zeroed or kept at the wrong micro-batch, only the first or the last micro-batch counts.
    total = torch.stack(parts).sum(0)
    last = e.num_micro
    candidates = [(parts[-1], f"micro-batches dropped: only the last of {last} counts")]
    candidates.append((parts[0], f"micro-batches dropped: only the first of {last} counts"))
    for index, part in enumerate(parts):
        name = f"number {index + 1}"
        if index == 0:
            name = "the first"
        elif index == last - 1:
            name = "the last"
        candidates.append((total - part, f"micro-batch dropped: {name} of {last}"))
        candidates.append((total + part, f"micro-batch counted twice: {name} of {last}"))
    for candidate, text in candidates:
        if e.explains_on_all_ranks(e.suspect, candidate):
            return text
    return None


def same_samples(e: Evidence) -> str | None:
    """Ranks that should read different samples read the same samples."""
    for axis in ("dp_replicate", "dp_shard"):
        if e.size(axis) == 1:
            continue
        part = e.share(e.suspect, {axis: 0})
        if part is None:
            continue
        num_targets = _num_targets(e, e.rows({axis: 0}))
        # The number of targets, which divides the loss, may or may not have been summed over the ranks.
        for factor in (e.size(axis), e.batch.num_targets / num_targets):
            if e.explains_on_all_ranks(e.suspect, part * factor):
                return f"same samples on every rank of axis {axis}: all read the samples of its first rank"
    return None


def swapped_targets(e: Evidence) -> str | None:
    """Logits of a micro-batch are compared with the targets of another: two are swapped, or all
    rotated or reversed.
    """
    if e.num_micro < 2 or not e.first.loss_differs:
        return None
    # Try reversals, swaps and rotations, because there are too many orders to try all.
    count = e.num_micro
    orders = {tuple(reversed(range(count))): "in reverse"}
    for a, b in itertools.combinations(range(count), 2):
        swapped = list(range(count))
        swapped[a] = b
        swapped[b] = a
        orders[tuple(swapped)] = f"{a + 1} and {b + 1} swapped"
    for shift in range(1, count):
        rotated = tuple((i + shift) % count for i in range(count))
        orders[rotated] = f"shifted by {shift}"

    # table[i][j] is the loss sum of the logits of micro-batch i with the targets of micro-batch j, so the
    # loss of each order is a sum of entries. The number of targets does not depend on the order.
    table = [[0.0] * count for _ in range(count)]
    for rank in range(e.data_ranks):
        rows_of_rank = e.rows_of_rank(rank)
        rows = []
        for index in range(count):
            first = index * e.micro_rows
            rows.append(rows_of_rank[first : first + e.micro_rows])
        for i, j in itertools.product(range(count), repeat=2):
            table[i][j] += e.shares.loss_of_rows(rows[i], rows[j])
    for order, text in orders.items():
        loss_sum = sum(table[i][j] for i, j in enumerate(order))
        if e.explains_loss(loss_sum / e.batch.num_targets, 1e-6):
            return f"targets of micro-batches out of order ({text}): logits meet the targets of another micro-batch"
    return None


def expert_dropped(e: Evidence) -> str | None:
    """Some experts have no gradient on the mesh but have one on one process."""
    if not e.layout.expert:
        return None
    for name in e.first.names:
        # The layout names the module that contains the experts, which is a parent of their weights.
        parents = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if not any(matches(parent, e.layout.expert) for parent in parents):
            continue
        mine = e.mine(name)
        theirs = e.theirs(name)
        if mine is None or mine.ndim != 3:
            continue
        # If one process has no gradient for an expert either, the expert is unused. If no expert has a
        # gradient, another fault is the cause.
        has_none = mine.flatten(1).norm(dim=1) == 0
        is_used = theirs.flatten(1).norm(dim=1) > 0
        is_dropped = has_none & is_used
        if bool(is_dropped.any()) and not bool(is_dropped.all()):
            numbers = is_dropped.nonzero().flatten().tolist()
            experts = ", ".join(str(number) for number in numbers)
            return (
                f"expert {experts} of {name} gets no tokens: they are dropped before they reach it"
            )
    return None


def replicas_differ(e: Evidence) -> str | None:
    """Ranks that hold the same part of a gradient have different values of it."""
    # Correct replicas differ only by rounding.
    tolerance = max(1e-6, e.allowed.gradient / 10) * float(e.theirs(e.suspect).norm())
    pairs = itertools.combinations(e.holders(e.suspect), 2)
    for (one, a, place_a), (other, b, place_b) in pairs:
        # Ranks with other slices have other parts, which need not agree.
        if place_a != place_b or a.shape != b.shape:
            continue
        if float((a - b).norm()) > tolerance:
            axes = " and ".join(axes_that_differ(one, other))
            return f"unsynchronised: copies of the gradient differ between ranks of axis {axes}"
    return None


def part_without_gradient(e: Evidence) -> str | None:
    """The loss does not reach some ranks' parts of a sharded tensor."""
    for name in e.first.names:
        theirs = e.theirs(name)
        # A part may be zero by chance, for example rows of unused tokens. It counts only if its exact
        # gradient is not small.
        least = 1e-3 * float(theirs.norm())
        missing = set()
        holders = e.holders(name)
        for record, part, slices in holders:
            if float(part.norm()) == 0 and float(theirs[slices].norm()) > least:
                missing.add(record.rank)
        if missing and len(missing) < len(holders):
            ranks = ", ".join(str(rank) for rank in sorted(missing))
            return f"no gradient for the part of {name} on rank {ranks}: the loss does not depend on it in backward"
    return None


def positions(e: Evidence) -> str | None:
    """Under cp, the positions of a part, or the attention between parts, are wrong."""
    if e.size("cp") == 1 or not e.first.loss_differs:
        return None
    # Try the losses of known wrong positions. If none fits, compare the first attention core.
    for text, wrong_T in _wrong_positions(e):
        wrong_BT = wrong_T.expand_as(e.batch.positions_BT)
        if e.explains_loss(e.shares.loss(wrong_BT), 2e-6):
            return f"wrong positions under cp: {text}"
    return _core(e)


def _wrong_positions(e: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Yield positions (T,) that a wrong split over cp assigns to the tokens of a sequence, with a description."""
    num_parts = e.size("cp")
    parts = []
    for number in range(num_parts):
        parts.append(torch.as_tensor(e.context_part(number)))
    length = e.tokens // num_parts
    from_zero = torch.arange(e.tokens)
    consecutive = torch.arange(e.tokens)
    of_next_rank = torch.arange(e.tokens)
    for index, part in enumerate(parts):
        start = index * length
        next_index = (index + 1) % len(parts)
        from_zero[part] = torch.arange(length)
        consecutive[part] = torch.arange(start, start + length)
        of_next_rank[part] = parts[next_index]
    yield "each part counts from 0", from_zero
    consecutive_parts = "each part continues the part before it, but ranks have one part of each half of the sequence"
    yield consecutive_parts, consecutive
    yield "each rank has the positions of the next rank", of_next_rank


def _core(e: Evidence) -> str | None:
    """Compare inputs and output of the first attention core with one process, in the first micro-batch."""
    step = e.first.step
    expected_parts = e.expected.record.parts
    largest_errors: dict[str, float] = {}
    for record, name in itertools.product(e.records, ("q", "k", "v", "out")):
        part = record.parts.get(f"core/{step}/{name}")
        full = expected_parts.get(f"core/{step}/{name}")
        if part is None or full is None:
            continue
        # Select this rank's rows, its part of the sequence and its heads.
        rows_of_rank = e.rows_of_rank(e.data_rank(record))
        rows = torch.as_tensor(rows_of_rank[: part.size(0)])
        tokens = torch.as_tensor(e.context_part(record.place["cp"]))
        num_heads = part.size(2)
        first_head = record.place["tp"] * num_heads
        expected = full[rows][:, tokens][:, :, first_head : first_head + num_heads]
        if expected.shape != part.shape:
            continue
        size = expected.norm().clamp_min(1e-30)
        error = float((expected - part).norm() / size)
        largest_errors[name] = max(largest_errors.get(name, 0.0), error)

    # Wrong inputs point to positions or tokens. If only the output is wrong, the attention is.
    input_error = max(largest_errors.get(name, 0.0) for name in ("q", "k", "v"))
    if input_error > 1e-4:
        return f"wrong positions or tokens under cp: queries and keys are off by {input_error:.2g} before attention"
    output_error = largest_errors.get("out", 0.0)
    if output_error > 1e-4:
        return (
            "attention over the parts of cp is wrong (causal mask or exchange): queries, "
            f"keys and values agree, its output is off by {output_error:.2g}"
        )
    return None


def stale_weights(e: Evidence) -> str | None:
    """A step is computed with the weights from before an earlier step."""
    if e.first.step == 0 or not e.first.loss_differs:
        return None
    for step in range(e.first.step - 1, -1, -1):
        loss = e.shares_with(step=step).loss()
        if e.explains_loss(loss, 1e-6):
            return f"stale weights: step {e.first.step + 1} uses the weights from the start of step {step + 1}"
    return None


def balance_loss(e: Evidence) -> str | None:
    """The gradient of the experts' balance loss has a wrong factor."""
    if not e.layout.expert or e.first.loss_differs:
        return None
    rows = list(range(e.sequences))
    with_balance = e.shares_with(balance=1.0).gradient(e.suspect, rows)
    without = e.shares_with(balance=0.0).gradient(e.suspect, rows)
    if with_balance is None or without is None:
        return None
    balance_gradient = with_balance - without
    if float(balance_gradient.norm()) < 1e-6 * float(with_balance.norm()):
        return None
    factor = _times(e, without, balance_gradient)
    if factor is None:
        return None
    return f"the balance loss of experts counts {factor:.4g} times; the gradient of the loss itself agrees"


def _times(e: Evidence, base: Tensor, part: Tensor) -> float | None:
    """Return a factor other than 1 with which all ranks have ``base + factor * part`` (least
    squares), or None.
    """
    mine = e.mine(e.suspect)
    if mine is None:
        return None
    factor = float(((mine - base) * part).sum() / part.square().sum())
    if changes_nothing(e, factor) or not e.explains_on_all_ranks(e.suspect, base + factor * part):
        return None
    return factor


def unscaled_loss(e: Evidence) -> str | None:
    """The model adds a gradient in backward that does not grow with the loss, as scalers of
    auxiliary losses do.

    On one process, doubling the loss isolates that gradient. Each rank must then have a multiple of it.
    """
    rows = list(range(e.sequences))
    once = e.shares.gradient(e.suspect, rows)
    twice = e.shares_with(factor=2.0).gradient(e.suspect, rows)
    if once is None or twice is None:
        return None
    added_gradient = 2 * once - twice
    if float(added_gradient.norm()) < 1e-4 * float(once.norm()):
        return None
    factor = _times(e, once - added_gradient, added_gradient)
    if factor is None:
        return None
    return (
        "forward adds its own loss in backward, which is not divided by the number of tokens of "
        f"the step, so it counts {factor:.4g} times; the gradient of the loss itself agrees"
    )


def clipped_otherwise(e: Evidence) -> str | None:
    """Only the factor of gradient clipping is wrong. The norm before clipping agrees."""
    if e.first.loss_differs:
        return None
    norm = e.expected.total(e.first.step)
    for record in e.records:
        if abs(record.norms[e.first.step] - norm) > 1e-4 * norm:
            return None
    # Each rank's part is a multiple of the part of one process. The factor may differ between ranks.
    factors = {}
    for record, part, slices in e.holders(e.suspect):
        theirs = e.theirs(e.suspect)[slices]
        if not part.numel() or float(theirs.norm()) == 0:
            continue
        factor = float((part * theirs).sum() / theirs.square().sum())
        residual = float((part - factor * theirs).norm())
        if residual > e.match * float(part.norm()):
            return None
        factors[record.rank] = factor
    if all(changes_nothing(e, factor) for factor in factors.values()):
        return None
    texts = [f"rank {rank}: {factor:.4g}" for rank, factor in factors.items()]
    factors_text = ", ".join(texts)
    return f"gradients are clipped by another factor than on one process, times {factors_text}; before, they agree"


def short_type(e: Evidence) -> str | None:
    """Every element is representable in bfloat16 or float16, so a sum or cast in that dtype lost
    the last digits.
    """
    mine = e.mine(e.suspect)
    theirs = e.theirs(e.suspect)
    if mine is None or float((mine - theirs).norm()) > 0.1 * float(theirs.norm()):
        return None
    for dtype in (torch.bfloat16, torch.float16):
        is_mine_short = torch.equal(mine.to(dtype).float(), mine)
        is_theirs_short = torch.equal(theirs.to(dtype).float(), theirs)
        if is_mine_short and not is_theirs_short:
            name = str(dtype).removeprefix("torch.")
            return f"each number of the gradient is a {name}: reduced or cast in that dtype"
    return None
