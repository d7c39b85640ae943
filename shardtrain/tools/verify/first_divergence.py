"""Find the module where a mesh first differs from one process, in the forward pass and in the backward pass.

In forward, this is the first module whose inputs agree and whose output differs. In backward, it is the first
module whose output gradient agrees and whose input gradients differ. Each rank recorded the tensors of its
modules in the first micro-batch. They are compared with the same rows, positions and features in the record
of one process, which has the full batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardtrain.layout import matches, style_of
from shardtrain.tools.verify.evidence import Evidence
from shardtrain.tools.verify.traces import differs
from shardtrain.tools.verify.verify_rank import RankRecord

LOGITS_AGREE = "the logits agree: check the targets, their mask and the loss"
CLOSE = 1e-4
"""Relative tolerance for float32 sums in another order, with a margin."""


def first_difference(e: Evidence) -> str:
    """Describe where the forward pass of the mesh first differs, or return "" if no module can be named."""
    calls = e.expected.record.facts["calls"]
    culprit = _first(e, calls, ("trace", "in"), ("trace", "out"))
    if culprit is not None:
        path, rank = culprit
        module = _described(e, path)
        return f"the forward pass first differs on rank {rank} in {module}: its inputs agree, its output does not"
    moved_layer = _moved_layer(e)
    if moved_layer is not None:
        return moved_layer
    from_integers = _first_from_integers(e)
    if from_integers:
        return from_integers

    # The path of the model itself is empty, and its output is the logits. A rank without logits, such as the
    # first stages of a pipeline, has None.
    logits_agree = []
    for record in e.records:
        mine = f"trace/{record.facts['calls'].index('')}/out"
        theirs = f"trace/{calls.index('')}/out"
        logits_agree.append(_agree(e, record, mine, theirs))
    if e.first.loss_differs and True in logits_agree and False not in logits_agree:
        return LOGITS_AGREE
    return ""


def _first_from_integers(e: Evidence) -> str:
    """Describe the first module whose output differs and whose inputs are integers, such as tokens, or return ""."""
    for number, path in enumerate(e.expected.record.facts["calls"]):
        # Only floating-point inputs are recorded.
        prefix = f"trace/{number}/in/"
        has_recorded_inputs = any(key.startswith(prefix) for key in e.expected.record.parts)
        if not path or has_recorded_inputs:
            continue
        for record in e.records:
            calls = record.facts["calls"]
            if path not in calls:
                continue
            output = f"trace/{calls.index(path)}/out"
            if _agree(e, record, output, f"trace/{number}/out") is False:
                module = _described(e, path)
                return (
                    f"the forward pass first differs on rank {record.rank} in {module}: "
                    "check its input, which is not recorded, and its output"
                )
    return ""


def first_backward_difference(e: Evidence) -> str:
    """Describe where the backward pass of the mesh first differs, from gradients of activations, or
    return "".
    """
    culprit = _first(e, e.expected.record.facts["calls"][::-1], ("back", "out"), ("back", "in"))
    if culprit is None:
        return ""
    path, rank = culprit
    place = (
        f"the backward pass first differs on rank {rank} in {_described(e, path)}: "
        "the gradient of its output agrees, but the gradient of its inputs does not"
    )
    # On a mesh, the attention core differs from the core of one process only by the exchange over cp.
    if path and e.layout.context and matches(path, e.layout.context) and e.size("cp") > 1:
        return f"attention over the parts of cp loses or repeats gradients in its exchange; {place}"
    if e.config.activation_checkpoint.mode != "none":
        changed = _module_with_another_input(e, path)
        if changed:
            return f"recomputation: backward uses another input of {changed} than the forward pass; {place}"
    return place


def _module_with_another_input(e: Evidence, outer: str) -> str:
    """Return a module in ``outer`` whose weight has a wrong gradient from a correct input
    and output gradient, or "".

    The gradient of a weight is computed from these two. So backward has used another input than forward.
    """
    calls = e.expected.record.facts["calls"]
    for number, path in enumerate(calls):
        if not _is_inside(path, outer) or f"{path}.weight" not in e.first.names:
            continue
        agreements = []
        for record in e.records:
            if path not in record.facts["calls"]:
                continue
            call = record.facts["calls"].index(path)
            agreements.append(_agree(e, record, f"trace/{call}/in", f"trace/{number}/in"))
            agreements.append(_agree(e, record, f"back/{call}/out", f"back/{number}/out"))
        if agreements and all(agreements):
            return path
    return ""


def _first(
    e: Evidence, order: Sequence[str], cause: tuple[str, str], effect: tuple[str, str]
) -> tuple[str, int] | None:
    """Find the first module in ``order`` whose ``cause`` agrees on some rank while its ``effect`` differs.

    ``cause`` and ``effect`` are parts of keys of a record, such as ("trace", "in"). Return the path of the
    module, which is "" for the model itself, and the rank, or None.
    """
    number_on_one = {path: number for number, path in enumerate(e.expected.record.facts["calls"])}
    index = {path: number for number, path in enumerate(order)}
    culprits: list[tuple[int, int, str]] = []  # index in the order, rank, path
    for record in e.records:
        for number, path in enumerate(record.facts["calls"]):
            if path not in number_on_one:
                continue
            agreements = []
            for kind, side in (cause, effect):
                mine = f"{kind}/{number}/{side}"
                theirs = f"{kind}/{number_on_one[path]}/{side}"
                agreements.append(_agree(e, record, mine, theirs))
            if agreements == [True, False]:
                culprits.append((index[path], record.rank, path))
    if not culprits:
        return None

    # If modules are nested, the innermost one is the culprit. The path of the model itself, which contains
    # all modules, is "".
    _, rank, path = min(culprits)
    while inner := [other for other in culprits if _is_inside(other[2], path)]:
        _, rank, path = min(inner)
    return path, rank


def _described(e: Evidence, path: str) -> str:
    where = f"module {path}" if path else "the model's own forward"
    style = style_of(e.layout, path)
    if style and e.size("tp") > 1:
        where += f', which LAYOUT.tensor calls "{style}"'
    return where


def _is_inside(path: str, outer: str) -> bool:
    """True if a module is a submodule of another module."""
    if path == outer:
        return False
    return not outer or path.startswith(f"{outer}.")


def _moved_layer(e: Evidence) -> str | None:
    """Describe a layer whose input equals the input of another layer on one process, or return None."""
    expected_calls = e.expected.record.facts["calls"]
    layers = []
    for path in expected_calls:
        if path.startswith(f"{e.layout.layers}.") and path.count(".") == 1:
            layers.append(path)
    for record in e.records:
        calls = record.facts["calls"]
        for path in layers:
            if path not in calls:
                continue
            mine = f"trace/{calls.index(path)}/in"
            if _agree(e, record, mine, f"trace/{expected_calls.index(path)}/in") is not False:
                continue
            # The input of this layer differs. Look for a layer on one process that has the same input.
            for other in layers:
                theirs = f"trace/{expected_calls.index(other)}/in"
                if other != path and _agree(e, record, mine, theirs) is True:
                    return f"layers in another order: {path} has the input that {other} has on one process"
    return None


def _agree(e: Evidence, record: RankRecord, mine: str, theirs: str) -> bool | None:
    """True if all comparable tensors under the key ``mine`` agree with one process's
    tensors under ``theirs``.

    None if no tensor is comparable.
    """
    agree: bool | None = None
    for key in record.parts:
        if not key.startswith(f"{mine}/"):
            continue
        expected_key = f"{theirs}/{key.rpartition('/')[2]}"
        full = e.expected.record.parts.get(expected_key)
        wanted = None
        if full is not None:
            wanted = _part_of_rank(e, record, full, record.parts[key].shape)
        if wanted is None:
            continue
        if differs(record.parts[key], wanted, e.close(expected_key, CLOSE)):
            return False
        agree = True
    return agree


def _part_of_rank(
    e: Evidence, record: RankRecord, full: Tensor, shape: Sequence[int]
) -> Tensor | None:
    """Select the part of a full tensor that a rank should have, given the shape of the rank's tensor.

    Return None if the shape does not result from a known split.
    """
    if full.ndim != len(shape):
        return None
    cp = e.size("cp")
    tp = e.size("tp")
    tp_index = record.place["tp"]
    for dim, part_size in enumerate(shape):
        size = full.size(dim)
        is_last = dim == len(shape) - 1
        if dim == 0 and size == e.sequences and part_size == e.micro_rows:
            # Rows of the first micro-batch.
            rows = e.rows_of_rank(e.data_rank(record))[:part_size]
            full = full.index_select(0, torch.as_tensor(rows))
        elif not is_last and size == e.tokens and part_size in (size // cp, size // cp // tp):
            # This cp rank's part of the sequence. Sequence parallelism splits it over the ranks of tp.
            chosen = torch.as_tensor(e.context_part(record.place["cp"]))
            full = full.index_select(dim, chosen)
            if part_size < len(chosen):
                full = full.narrow(dim, tp_index * part_size, part_size)
        elif size == part_size * tp and size != part_size:
            # Heads or features of this tp rank.
            full = full.narrow(dim, tp_index * part_size, part_size)
        elif size != part_size:
            return None
    return full
