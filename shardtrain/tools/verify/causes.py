"""Likely causes of a wrong gradient or loss, each found by arithmetic: a hypothesis says what every rank would then
have, and holds only if every rank has exactly that."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from shardtrain.layout import TENSOR_STYLES, matches, style_of
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify.evidence import Evidence, axes_that_differ
from shardtrain.tools.verify.verify_rank import RankRecord


def missing_reduction(e: Evidence) -> str | None:
    """Every rank has the gradient of its own share along an axis, or along two."""
    axes = [axis for axis in e.axes if axis != "pp"]
    for count in (1, 2):
        for chosen in itertools.combinations(axes, count):
            # The arguments with defaults bind this turn of the loop. Ranks at the same place have the same share.
            cache: dict[tuple[int, ...], Tensor | None] = {}

            def of_share(
                record: RankRecord,
                axes: tuple[str, ...] = chosen,
                cache: dict[tuple[int, ...], Tensor | None] = cache,
            ) -> Tensor | None:
                place = tuple(record.place[axis] for axis in axes)
                if place not in cache:
                    cache[place] = e.share(e.suspect, dict(zip(axes, place, strict=True)))
                return cache[place]

            if e.explains(e.suspect, of_share):
                owner = e.suspect.rpartition(".")[0]
                word = style_of(e.layout, owner)
                note = ""
                if word and "tp" in chosen:
                    note = f'; LAYOUT.tensor calls {owner} "{word}" ({TENSOR_STYLES[word]})'
                over = " and ".join(chosen)
                return f"missing reduction over {over}: each rank has only the gradient of its own share{note}"
    return None


def scaled(e: Evidence) -> str | None:
    """All numbers of the gradient are off by one factor."""
    mine = e.mine(e.suspect)
    theirs = e.theirs(e.suspect)
    if mine is None:
        return None
    # the least-squares factor; what it leaves over must be rounding
    factor = float((mine * theirs).sum() / theirs.square().sum().clamp_min(1e-30))
    if float((mine - factor * theirs).norm()) > e.match * abs(factor) * float(theirs.norm()) or factor == 0:
        return None
    if changes_nothing(e, factor):
        return None
    for wanted, text in _factors(e):
        if abs(factor / wanted - 1) < max(1e-3, e.match):
            return text
    return f"scaled by {factor:.6g}, which is not a size of an axis"


def changes_nothing(e: Evidence, factor: float) -> bool:
    """Whether a factor is 1 as far as a gradient tells: it explains no difference."""
    return abs(factor - 1) <= e.match


def _factors(e: Evidence) -> Iterator[tuple[float, str]]:
    """Factors by which a wrong reduction scales a gradient, and what each of them means."""
    axes = [axis for axis in e.axes if axis != "pp"]
    by_size: dict[int, list[str]] = {}
    for count in range(1, len(e.axes) + 1):
        for chosen in itertools.combinations(axes if count == 1 else e.axes, count):
            by_size.setdefault(math.prod(e.sizes[axis] for axis in chosen), []).append(" x ".join(chosen))
    for size, names in by_size.items():
        words = " or ".join(names)
        if size == e.num_micro:
            words += ", or the number of micro-batches"
        yield 1 / size, f"scaled by 1/{size}, the size of axis {words}: averaged where it must be summed"
        yield float(size), f"scaled by {size}, the size of axis {words}: counted {size} times"
    if e.num_micro > 1:
        yield 1 / e.num_micro, f"scaled by 1/{e.num_micro}, the number of micro-batches: averaged over micro-batches"
        yield float(e.num_micro), f"scaled by {e.num_micro}, the number of micro-batches: counted {e.num_micro} times"
    count = e.batch.num_targets
    if count > 1:
        yield 1 / count, f"divided twice by the {count} target tokens"
        yield float(count), f"never divided by the {count} target tokens"


def own_counts(e: Evidence) -> str | None:
    """Each share is divided by its own count of target tokens, and the shares are averaged."""
    splits = {
        "data rank": [e.rows_of_rank(rank) for rank in range(e.data_ranks)],
        "micro-batch": [e.micro_rows_of(index) for index in range(e.num_micro)],
    }
    for unit, shares in splits.items():
        if len(shares) < 2:
            continue
        # the share's gradient is divided by the count of the whole batch, and is to be by its own
        total: Tensor | None = torch.zeros_like(e.theirs(e.suspect))
        for rows in shares:
            part = e.shares.gradient(e.suspect, rows)
            own = int((e.batch.targets_BT[torch.as_tensor(rows)] != IGNORE).sum())
            total = None if part is None or total is None else total + part * e.batch.num_targets / own
        for factor, rest in ((1 / len(shares), "then averaged: a mean of means"), (1.0, "then summed")):
            whole = None if total is None else total * factor
            if e.explains(e.suspect, lambda _, whole=whole: whole):  # type: ignore[misc]
                return f"each {unit} divided by its own count of target tokens and {rest}"
    return None


def micro_batch(e: Evidence) -> str | None:
    """Some micro-batches are dropped or counted twice."""
    if e.num_micro < 2:
        return None
    parts = [e.shares.gradient(e.suspect, e.micro_rows_of(index)) for index in range(e.num_micro)]
    if any(part is None for part in parts):
        return None

    # The gradient of the step without one of them, with one of them twice, and of the first or last alone: as where
    # gradients are zeroed or kept at the wrong micro-batch.
    known = [part for part in parts if part is not None]
    whole = torch.stack(known).sum(0)
    last = e.num_micro
    candidates = [(known[-1], f"micro-batches dropped: only the last of {last} counts")]
    candidates.append((known[0], f"micro-batches dropped: only the first of {last} counts"))
    for index, part in enumerate(known):
        which = "the first" if index == 0 else "the last" if index == last - 1 else f"number {index + 1}"
        candidates.append((whole - part, f"micro-batch dropped: {which} of {last}"))
        candidates.append((whole + part, f"micro-batch counted twice: {which} of {last}"))
    for candidate, text in candidates:
        if e.explains(e.suspect, lambda _, whole=candidate: whole):  # type: ignore[misc]
            return text
    return None


def same_samples(e: Evidence) -> str | None:
    """Ranks that should read different samples read the same."""
    for axis in ("dp_replicate", "dp_shard"):
        if e.size(axis) == 1:
            continue
        part = e.share(e.suspect, {axis: 0})
        own = int((e.batch.targets_BT[torch.as_tensor(e.rows({axis: 0}))] != IGNORE).sum())
        # the count of targets, by which the loss is divided, may have been summed over the ranks or not
        for factor in (e.size(axis), e.batch.num_targets / own):
            whole = None if part is None else part * factor
            if e.explains(e.suspect, lambda _, whole=whole: whole):  # type: ignore[misc]
                return f"same samples on every rank of axis {axis}: all read those of its first rank"
    return None


def swapped_targets(e: Evidence) -> str | None:
    """The logits of a micro-batch meet the targets of another: all swaps of two, rotations and reversal are tried."""
    if e.num_micro < 2 or not e.first.loss_differs:
        return None
    count = e.num_micro
    orders = {tuple(reversed(range(count))): "in reverse"}
    for a, b in itertools.combinations(range(count), 2):
        swapped = list(range(count))
        swapped[a] = b
        swapped[b] = a
        orders[tuple(swapped)] = f"{a + 1} and {b + 1} swapped"
    for shift in range(1, count):
        orders[tuple((i + shift) % count for i in range(count))] = f"shifted by {shift}"

    # table[i][j] is the loss sum of the logits of micro-batch i with the targets of micro-batch j, so that each order
    # is a sum of entries. The count of targets is that of the whole batch, which a permutation does not change.
    table = [[0.0] * count for _ in range(count)]
    for rank in range(e.data_ranks):
        own = e.rows_of_rank(rank)
        rows = [own[i * e.micro_rows : (i + 1) * e.micro_rows] for i in range(count)]
        for i, j in itertools.product(range(count), repeat=2):
            table[i][j] += e.shares.loss_of_rows(rows[i], rows[j])
    for order, text in orders.items():
        loss = sum(table[i][order[i]] for i in range(count)) / e.batch.num_targets
        if e.explains_loss(loss, 1e-6):
            return f"targets of micro-batches out of order ({text}): logits meet the targets of another micro-batch"
    return None


def expert_dropped(e: Evidence) -> str | None:
    """Some experts get no gradient where one process gives them some."""
    if not e.layout.expert:
        return None
    for name in e.first.names:
        modules = [name[:end] for end, letter in enumerate(name) if letter == "."]
        if not any(matches(module, e.layout.expert) for module in modules):
            continue
        mine = e.mine(name)
        theirs = e.theirs(name)
        if mine is None or mine.ndim != 3:
            continue
        # an expert that one process gives no token either is not dropped, and of all experts something else is wrong
        silent = (mine.flatten(1).norm(dim=1) == 0) & (theirs.flatten(1).norm(dim=1) > 0)
        if bool(silent.any()) and not bool(silent.all()):
            chosen = ", ".join(str(i) for i in silent.nonzero().flatten().tolist())
            return f"expert {chosen} of {name} gets no tokens: they are dropped on the way"
    return None


def replicas_differ(e: Evidence) -> str | None:
    """Ranks that hold the same part of a gradient hold different numbers."""
    # copies that agree are off by rounding alone
    least = max(1e-6, e.allowed.gradient / 10) * float(e.theirs(e.suspect).norm())
    for (one, a, where), (other, b, there) in itertools.combinations(e.holders(e.suspect), 2):
        if where == there and a.shape == b.shape and float((a - b).norm()) > least:
            axes = " and ".join(axes_that_differ(one, other))
            return f"unsynchronised: copies of the gradient differ between ranks of axis {axes}"
    return None


def positions(e: Evidence) -> str | None:
    """Under cp each part's positions are wrong, or attention over the parts is."""
    if e.size("cp") == 1 or not e.first.loss_differs:
        return None
    # what one process gives with the positions of a wrong split; else the first attention core itself is compared
    for text, wrong in _wrong_positions(e):
        if e.explains_loss(e.shares.loss(wrong.expand_as(e.batch.positions_BT)), 2e-6):
            return f"wrong positions under cp: {text}"
    return _core(e)


def _wrong_positions(e: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Positions that a wrong split over cp gives the tokens of a sequence, and how to say so."""
    parts = [torch.as_tensor(e.context_part(part)) for part in range(e.size("cp"))]
    length = e.tokens // e.size("cp")
    counted = torch.arange(e.tokens)
    in_a_row = torch.arange(e.tokens)
    offset = torch.arange(e.tokens)
    for index, part in enumerate(parts):
        counted[part] = torch.arange(length)
        in_a_row[part] = torch.arange(index * length, (index + 1) * length)
        offset[part] = parts[(index + 1) % len(parts)]
    yield "each part counts from 0", counted
    yield "each part counts on from the one before, though the sequence is dealt head and tail", in_a_row
    yield "each rank has the positions of the next", offset


def _core(e: Evidence) -> str | None:
    """Compare what the first attention core is given and gives with one process's."""
    step = e.first.step
    ours = e.expected.record.parts

    # Of the first micro-batch: this rank's rows, its part of the sequence and its heads.
    outcome: dict[str, float] = {}
    for record in e.records:
        for name in ("q", "k", "v", "out"):
            part = record.parts.get(f"core/{step}/{name}")
            whole = ours.get(f"core/{step}/{name}")
            if part is None or whole is None:
                continue
            data_rank = record.place["dp_replicate"] * e.size("dp_shard") + record.place["dp_shard"]
            rows = e.rows_of_rank(data_rank)[: part.size(0)]
            heads = part.size(2)
            wanted = whole[torch.as_tensor(rows)][:, torch.as_tensor(e.context_part(record.place["cp"]))]
            wanted = wanted[:, :, record.place["tp"] * heads : (record.place["tp"] + 1) * heads]
            if wanted.shape != part.shape:
                continue
            error = float((wanted - part).norm() / wanted.norm().clamp_min(1e-30))
            outcome[name] = max(outcome.get(name, 0.0), error)
    given = max((outcome.get(name, 0.0) for name in ("q", "k", "v")), default=0.0)
    if given > 1e-4:
        return f"wrong positions or tokens under cp: queries and keys are off by {given:.2g} before attention"
    if outcome.get("out", 0.0) > 1e-4:
        return (
            f"attention over the parts of cp is wrong (causal mask or exchange): queries, keys and values agree, "
            f"its output is off by {outcome['out']:.2g}"
        )
    return None


def stale_weights(e: Evidence) -> str | None:
    """A step is computed with the weights that an earlier one began with."""
    if e.first.step == 0 or not e.first.loss_differs:
        return None
    for step in range(e.first.step - 1, -1, -1):
        if e.explains_loss(e.shares_with(step=step).loss(), 1e-6):
            return f"stale weights: step {e.first.step + 1} is computed with those that step {step + 1} began with"
    return None


def balance_loss(e: Evidence) -> str | None:
    """The gradient of the balance losses of experts counts another number of times."""
    if not e.layout.expert or e.first.loss_differs:
        return None
    rows = list(range(e.sequences))
    whole = e.shares_with(balance=1.0).gradient(e.suspect, rows)
    without = e.shares_with(balance=0.0).gradient(e.suspect, rows)
    if whole is None or without is None or float((whole - without).norm()) < 1e-6 * float(whole.norm()):
        return None
    factor = _times(e, without, whole - without)
    if factor is None:
        return None
    return f"the balance loss of experts counts {factor:.4g} times; the gradient of the loss itself agrees"


def _times(e: Evidence, base: Tensor, part: Tensor) -> float | None:
    """Return the factor other than 1 for which all ranks have ``base + factor * part``, by least squares."""
    mine = e.mine(e.suspect)
    if mine is None:
        return None
    factor = float(((mine - base) * part).sum() / part.square().sum())
    fits = e.explains(e.suspect, lambda _: base + factor * part)
    return factor if fits and not changes_nothing(e, factor) else None


def unscaled_loss(e: Evidence) -> str | None:
    """The model adds a gradient in backward that does not grow with the loss, as scalers of auxiliary losses do.

    On one process, doubling the loss shows that gradient; the ranks must have a multiple of it.
    """
    rows = list(range(e.sequences))
    once = e.shares.gradient(e.suspect, rows)
    twice = e.shares_with(factor=2.0).gradient(e.suspect, rows)
    if once is None or twice is None or float((2 * once - twice).norm()) < 1e-4 * float(once.norm()):
        return None
    own = 2 * once - twice
    factor = _times(e, once - own, own)
    if factor is None:
        return None
    return (
        f"forward adds a loss of its own in backward, which is not divided by the step's tokens as the loss is, and "
        f"counts {factor:.4g} times; the gradient of the loss itself agrees"
    )


def clipped_otherwise(e: Evidence) -> str | None:
    """Gradients agree but for what clipping multiplied them by: their norm, which is taken before, agrees."""
    norm = e.expected.total(e.first.step)
    if e.first.loss_differs or any(abs(r.norms[e.first.step] - norm) > 1e-4 * norm for r in e.records):
        return None
    # each rank's part is one factor times one process's, and the factors may differ between ranks
    factors = {}
    for record, part, slices in e.holders(e.suspect):
        theirs = e.theirs(e.suspect)[slices]
        if not part.numel() or float(theirs.norm()) == 0:
            continue
        factor = float((part * theirs).sum() / theirs.square().sum())
        if float((part - factor * theirs).norm()) > e.match * float(part.norm()):
            return None
        factors[record.rank] = factor
    if all(changes_nothing(e, factor) for factor in factors.values()):
        return None
    factors_text = ", ".join(f"rank {rank}: {factor:.4g}" for rank, factor in factors.items())
    return f"clipped by another factor than on one process, times {factors_text}; up to there gradients agree"


def short_type(e: Evidence) -> str | None:
    """Every number is one of a shorter type: what was added up or cast in it lost its last digits."""
    mine = e.mine(e.suspect)
    theirs = e.theirs(e.suspect)
    if mine is None or float((mine - theirs).norm()) > 0.1 * float(theirs.norm()):
        return None
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(mine.to(dtype).float(), mine) and not torch.equal(theirs.to(dtype).float(), theirs):
            return f"each number of the gradient is a {str(dtype).removeprefix('torch.')}: reduced or cast in that type"
    return None
