"""Where a mesh's forward pass leaves that of one process: the first module whose inputs agree and whose output does not.

Each rank kept what its modules were given and gave in its first micro-batch. What one process has of the same rows,
positions and features is cut out of what it kept of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtrain.layout import word_of
from shardtrain.verify.evidence import Evidence
from shardtrain.verify.run import Record
from shardtrain.verify.traces import off

CLOSE = 1e-4
"""Relative error of float32 arithmetic in another order, with room."""


def first_difference(e: Evidence) -> str:
    """The sentence that names the module; empty where none can be named."""
    theirs = e.expected.record
    order = {path: number for number, path in enumerate(theirs.facts["calls"])}
    found: list[tuple[int, str, int]] = []
    for record in e.records:
        for number, path in enumerate(record.facts["calls"]):
            if path in order and _is_to_blame(e, record, number, order[path]):
                found.append((order[path], path, record.rank))
                break
    if not found:
        return ""
    _, path, rank = min(found)
    where = f"module {path}" if path else "the model's own forward"
    word = word_of(e.layout, path)
    called = f', which LAYOUT.tensor calls "{word}"' if word and e.size("tp") > 1 else ""
    return f"the forward pass first differs on rank {rank} in {where}{called}: its inputs agree, its output does not"


def _is_to_blame(e: Evidence, record: Record, number: int, theirs: int) -> bool:
    given = _agree(e, record, f"trace/{number}/in", f"trace/{theirs}/in")
    return given is True and _agree(e, record, f"trace/{number}/out", f"trace/{theirs}/out") is False


def _agree(e: Evidence, record: Record, mine: str, theirs: str) -> bool | None:
    """Whether all tensors of a kind agree; None where there is none that can be compared."""
    keys = [key for key in record.parts if key.startswith(f"{mine}/")]
    seen: bool | None = None
    for key in keys:
        whole = e.expected.record.parts.get(f"{theirs}/{key.rpartition('/')[2]}")
        wanted = None if whole is None else _own_part(e, record, whole, record.parts[key].shape)
        if wanted is None:
            continue
        if off(record.parts[key], wanted, CLOSE):
            return False
        seen = True
    return seen


def _own_part(e: Evidence, record: Record, whole: Tensor, shape: Sequence[int]) -> Tensor | None:
    """What a rank should have of a tensor of the whole batch, by the shape of what it has; None if that says nothing."""
    if whole.ndim != len(shape):
        return None
    data_rank = record.place["dp_replicate"] * e.size("dp_shard") + record.place["dp_shard"]
    tp, place = e.size("tp"), record.place["tp"]
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
