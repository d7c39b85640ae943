"""Where a mesh leaves one process: the first module whose inputs agree and whose output does not, and so backward.

Each rank kept what its modules were given and gave in its first micro-batch. What one process has of the same rows,
positions and features is cut out of what it kept of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtrain.layout import style_of
from shardtrain.tools.verify.evidence import Evidence
from shardtrain.tools.verify.traces import off
from shardtrain.tools.verify.verify_rank import RankRecord

CLOSE = 1e-4
"""Relative error of float32 arithmetic in another order, with room."""


def first_difference(e: Evidence) -> str:
    """The sentence that names the module in whose forward pass a mesh differs; empty where none can be named."""
    calls = e.expected.record.facts["calls"]
    blamed = _first(e, calls, ("trace", "in"), ("trace", "out"))
    if blamed is not None:
        module, rank = blamed
        return f"the forward pass first differs on rank {rank} in {module}: its inputs agree, its output does not"
    moved = _moved(e)
    if moved is not None:
        return moved

    # The model itself is the module whose path is empty, and its output the logits. A rank that knows nothing of them,
    # as the first stages of a pipeline, says None.
    logits_agree = [
        _agree(e, record, f"trace/{record.facts['calls'].index('')}/out", f"trace/{calls.index('')}/out")
        for record in e.records
    ]
    if e.first.loss_differs and True in logits_agree and False not in logits_agree:
        return "the logits agree: look at the targets, at which of them count, and at the loss"
    return ""


def first_backward_difference(e: Evidence) -> str:
    """The same for the backward pass, where gradients of activations say which module is to blame."""
    blamed = _first(e, e.expected.record.facts["calls"][::-1], ("back", "out"), ("back", "in"))
    if blamed is None:
        return ""
    module, rank = blamed
    return (
        f"the backward pass first differs on rank {rank} in {module}: the gradient of its output agrees, that of "
        "its inputs does not"
    )


def _first(
    e: Evidence, order: Sequence[str], cause: tuple[str, str], effect: tuple[str, str]
) -> tuple[str, int] | None:
    """The first module, as a phrase, and the rank, whose ``cause`` agrees and whose ``effect`` does not."""
    theirs = {path: number for number, path in enumerate(e.expected.record.facts["calls"])}
    place = {path: number for number, path in enumerate(order)}
    blamed: list[tuple[int, int, str]] = []  # place in the order, rank, path
    for record in e.records:
        for number, path in enumerate(record.facts["calls"]):
            if path not in theirs:
                continue
            kind, side = cause
            if _agree(e, record, f"{kind}/{number}/{side}", f"{kind}/{theirs[path]}/{side}") is not True:
                continue
            kind, side = effect
            if _agree(e, record, f"{kind}/{number}/{side}", f"{kind}/{theirs[path]}/{side}") is False:
                blamed.append((place[path], record.rank, path))
    if not blamed:
        return None

    # Of a module and one inside it, the inner one is to blame. Every path lies inside the model's own, which is "".
    _, rank, path = min(blamed)
    while inner := [one for one in blamed if one[2] != path and (one[2].startswith(f"{path}.") or not path)]:
        _, rank, path = min(inner)
    where = f"module {path}" if path else "the model's own forward"
    word = style_of(e.layout, path)
    called = f', which LAYOUT.tensor calls "{word}"' if word and e.size("tp") > 1 else ""
    return where + called, rank


def _moved(e: Evidence) -> str | None:
    """A layer that is given what one process gives another layer."""
    theirs = e.expected.record.facts["calls"]
    layers = [path for path in theirs if path.startswith(f"{e.layout.layers}.") and path.count(".") == 1]
    for record in e.records:
        for path in layers:
            if path not in record.facts["calls"]:
                continue
            mine = f"trace/{record.facts['calls'].index(path)}/in"
            if _agree(e, record, mine, f"trace/{theirs.index(path)}/in") is not False:
                continue
            for other in layers:
                if other != path and _agree(e, record, mine, f"trace/{theirs.index(other)}/in") is True:
                    return f"layers in another order: {path} is given what one process gives {other}"
    return None


def _agree(e: Evidence, record: RankRecord, mine: str, theirs: str) -> bool | None:
    """Whether all tensors of a kind agree; None where there is none that can be compared."""
    keys = [key for key in record.parts if key.startswith(f"{mine}/")]
    seen: bool | None = None
    for key in keys:
        same = f"{theirs}/{key.rpartition('/')[2]}"
        whole = e.expected.record.parts.get(same)
        wanted = None if whole is None else _own_part(e, record, whole, record.parts[key].shape)
        if wanted is None:
            continue
        if off(record.parts[key], wanted, e.close(same, CLOSE)):
            return False
        seen = True
    return seen


def _own_part(e: Evidence, record: RankRecord, whole: Tensor, shape: Sequence[int]) -> Tensor | None:
    """What a rank should have of a tensor of the whole batch, by the shape that it has; None if that says nothing."""
    if whole.ndim != len(shape):
        return None
    data_rank = record.place["dp_replicate"] * e.size("dp_shard") + record.place["dp_shard"]
    tp = e.size("tp")
    place = record.place["tp"]
    # By dimension: rows of the first micro-batch; the part of the sequence that cp gives this rank, of which sequence
    # parallelism may leave it one tp-th; heads or features, dealt to the ranks of tp.
    for dim, own in enumerate(shape):
        size = whole.size(dim)
        if dim == 0 and size == e.sequences and own == e.micro_rows:
            whole = whole.index_select(0, torch.as_tensor(e.rows_of_rank(data_rank)[:own]))
        elif dim < len(shape) - 1 and size == e.tokens and own in (size // e.size("cp"), size // e.size("cp") // tp):
            chosen = torch.as_tensor(e.context_part(record.place["cp"]))
            whole = whole.index_select(dim, chosen)
            if own < len(chosen):
                whole = whole.narrow(dim, place * own, own)
        elif size == own * tp and size != own:
            whole = whole.narrow(dim, place * own, own)
        elif size != own:
            return None
    return whole
