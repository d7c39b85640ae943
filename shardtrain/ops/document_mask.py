"""Packed documents: attention in which no document sees another, and which parts of two stretches of a row share one.

``documents_BT`` numbers the documents of each row, ascending along it. A token attends to earlier tokens of its own
number alone; with a window, to the nearest of them (``sliding_window.py``).
Shape suffixes: B batch, T tokens, l queries, s keys, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from shardtrain.ops import attention_scores, flash_attention
from shardtrain.ops.accelerator import is_accelerator, to_device
from shardtrain.ops.attention_scores import Scores
from shardtrain.ops.cpu import blocked_attention, chosen_kernels
from shardtrain.ops.sliding_window import Band, blocks, queries_at_once

_QUERIES_AT_ONCE = 1024
"""Queries that share a mask where a device has no kernel for documents: it is (B, 1, this, T), not (B, 1, T, T)."""


class Shared(NamedTuple):
    """A document that occurs in a stretch of queries and in one of keys: its row, and its tokens in either."""

    row: slice
    queries: slice
    keys: slice


def attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    documents_BT: Tensor | None,
    window: int = 0,
    scale: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Causal attention within each document and window: (B, T, N, H). Without ``documents_BT`` a row is one document.

    ``window`` counts the tokens that a token sees, itself among them; 0 means no window. ``scale`` is 1 / sqrt(H)
    unless given. ``sinks_N`` are the scores of a sink per head: see ``scores.with_sinks``. On a CPU the flash kernel
    runs once per document, which costs no more than the documents do (20 documents in 2,048 tokens: an eighth of the
    time of a mask), or once per block of queries where the window is shorter; on CUDA its form for ragged sequences
    runs once. Other types and devices mask a part of the queries at a time.

    Raises:
        ValueError: when the numbers of a row do not ascend.
    """
    is_long = documents_BT is None and not window and q_BTNH.size(1) > chosen_kernels.LONG_ROW
    if sinks_N is None and not is_long and in_blocks(q_BTNH):
        return _blocked(q_BTNH, k_BTKH, v_BTKH, documents_BT, window, scale)[0]  # type: ignore[no-any-return]
    if not is_accelerator(q_BTNH.device) or flash_attention.has_flash(q_BTNH):
        return _attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, sinks_N, window, scale)[0]  # type: ignore[no-any-return]
    if sinks_N is not None:
        return attention_scores.attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, window, Scores(scale), sinks_N)
    return masked_attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, window, scale)


def in_blocks(q_BTNH: Tensor) -> bool:
    """Whether attention is computed by ``blocked_attention``, which this machine has found to be faster."""
    if q_BTNH.device.type != "cpu":
        return False
    if q_BTNH.dtype == torch.float32:
        narrow = q_BTNH.size(-1) <= chosen_kernels.NARROW_HEAD
        return chosen_kernels.chosen().uses("blocked_attention_float32" if narrow else "blocked_attention_float32_wide")
    return q_BTNH.dtype == torch.bfloat16 and chosen_kernels.chosen().uses("blocked_attention")


def masked_attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    documents_BT: Tensor | None,
    window: int = 0,
    scale: float | None = None,
) -> Tensor:
    """The same by boolean masks: works on any device and type, and does the work of all that it masks."""
    # Heads are repeated: with grouped heads and a mask PyTorch falls back to (B, N, T, T) numbers
    k_BTNH, v_BTNH = flash_attention.repeat_heads(q_BTNH, k_BTKH, v_BTKH)
    q_BNTH, k_BNTH, v_BNTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTNH, v_BTNH))
    tokens = q_BTNH.size(1)
    outputs = []
    # A stretch of queries at a time, each with the keys that it may see: those before it, from the window's begin on
    for start in range(0, tokens, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, tokens)
        low = max(0, start - window + 1) if window else 0
        mask_Bls = torch.ones(1, stop - start, stop - low, dtype=torch.bool, device=q_BTNH.device).tril(start - low)
        if window:
            mask_Bls = mask_Bls.triu(start - low - window + 1)
        if documents_BT is not None:
            mask_Bls = mask_Bls & (documents_BT[:, start:stop, None] == documents_BT[:, None, low:stop])
        parts = (q_BNTH[:, :, start:stop], k_BNTH[:, :, low:stop], v_BNTH[:, :, low:stop])
        outputs.append(F.scaled_dot_product_attention(*parts, attn_mask=mask_Bls[:, None], scale=scale))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def chunked(documents_BT: Tensor | None, chunk: int, shape: tuple[int, int], device: torch.device) -> Tensor | None:
    """Documents cut into chunks of so many tokens, each of which then sees itself alone (Llama 4); 0 cuts nothing.

    A document is cut from its own beginning, as if it were alone. Without ``documents_BT`` the rows of ``shape`` (B, T)
    are cut. None where all of a row sees itself.

    >>> chunked(torch.tensor([[0, 0, 0, 4, 4]]), 2, (1, 5), torch.device("cpu"))
    tensor([[0, 0, 1, 2, 2]])
    """
    if not 0 < chunk < shape[1]:
        return documents_BT
    # A compiler cannot trace a dictionary keyed by tensors, and numbers on the meta device do not exist: cut in place
    if torch.compiler.is_compiling() or device.type == "meta":
        whole_BT = torch.zeros(shape, dtype=torch.int64, device=device) if documents_BT is None else documents_BT
        return _cut(whole_BT, chunk)
    if documents_BT is None:
        return _on_device(_cut(torch.zeros(shape, dtype=torch.int64), chunk), device)
    # Once for all layers, on the host, where kernels of ragged rows will ask for the numbers
    known = _chunks.setdefault(documents_BT, {})
    if chunk not in known:
        known[chunk] = _on_device(_cut(on_host(documents_BT), chunk), device)
    return known[chunk]


_chunks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _on_device(on_host_BT: Tensor, device: torch.device) -> Tensor:
    """A copy that is read without waiting for the device."""
    copy_BT = to_device(on_host_BT, device)
    remember(copy_BT, on_host_BT)
    return copy_BT


def _cut(documents_BT: Tensor, chunk: int) -> Tensor:
    place_T = torch.arange(documents_BT.size(1), device=documents_BT.device)
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    # Where the document of each token begins: the last place so far at which one did
    first_BT = torch.where(begins_BT, place_T, 0).cummax(1).values
    return (begins_BT | ((place_T - first_BT) % chunk == 0)).cumsum(1) - 1


def shared(queries_Bl: Tensor, keys_Bs: Tensor) -> list[Shared]:
    """The documents that occur both in a stretch of queries and in one of keys, given the numbers of their tokens.

    Raises:
        ValueError: when the numbers of a row do not ascend.

    >>> shared(torch.tensor([[3, 3, 4]]), torch.tensor([[2, 3]]))
    [Shared(row=slice(0, 1, None), queries=slice(0, 2, None), keys=slice(1, 2, None))]
    """
    of_queries = _places(queries_Bl)
    of_keys = of_queries if keys_Bs is queries_Bl else _places(keys_Bs)
    found = []
    for row, (queries, keys) in enumerate(zip(of_queries, of_keys, strict=True)):
        for number, places in queries.items():
            if number in keys:
                found.append(Shared(slice(row, row + 1), places, keys[number]))
    return found


def _places(documents_Bl: Tensor) -> list[dict[int, slice]]:
    """Where each document of each row lies: its number -> its tokens."""
    rows = []
    for documents_l in documents_Bl:
        numbers, lengths = torch.unique_consecutive(documents_l, return_counts=True)
        if bool((numbers[1:] <= numbers[:-1]).any()):
            raise ValueError("documents_BT must ascend along each row: a number came back, or a smaller one followed")
        stops = lengths.cumsum(0)
        starts = stops - lengths
        ranges = zip(numbers.tolist(), starts.tolist(), stops.tolist(), strict=True)
        rows.append({number: slice(start, stop) for number, start, stop in ranges})
    return rows


_host_copies = WeakTensorKeyDictionary()


def remember(documents_BT: Tensor, on_host_BT: Tensor) -> None:
    """Note what a tensor on a device holds, so that reading it need not wait for the device."""
    if documents_BT.device.type != "cpu" and on_host_BT.device.type == "cpu":
        _host_copies[documents_BT] = on_host_BT


def on_host(documents_BT: Tensor) -> Tensor:
    """The numbers in host memory; copied from the device once per tensor, not once per layer.

    Of rows that were cut out of a tensor that is remembered nothing is copied: a pipeline's micro-batches are such.
    """
    if documents_BT.device.type == "cpu":
        return documents_BT
    # Keyed weakly by the tensor: a copy is gone when the batch is
    if documents_BT not in _host_copies:
        whole_BT = documents_BT._base
        if whole_BT is not None and whole_BT in _host_copies and documents_BT.shape[1:] == whole_BT.shape[1:]:
            first = documents_BT.storage_offset() // max(1, whole_BT.stride(0))
            _host_copies[documents_BT] = _host_copies[whole_BT][first : first + documents_BT.size(0)]
        else:
            _host_copies[documents_BT] = documents_BT.cpu()
    return _host_copies[documents_BT]  # type: ignore[no-any-return]


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of several tensors of documents as one, of which the host remembers what it does of the parts."""
    if len(parts) == 1:
        return parts[0]
    rows_BT = torch.cat(list(parts))
    if rows_BT.device.type != "cpu":
        remember(rows_BT, torch.cat([on_host(part) for part in parts]))
    return rows_BT


def ragged(documents_BT: Tensor) -> tuple[Tensor, int]:
    """Where each document begins with all rows laid end to end, and their end, int32; and the tokens of the longest.

    >>> ragged(torch.tensor([[0, 0, 1], [0, 0, 0]]))
    (tensor([0, 2, 3, 6], dtype=torch.int32), 3)
    """
    begins_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    begins_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    end = torch.tensor([documents_BT.numel()])
    starts = torch.cat((begins_BT.flatten().nonzero().flatten(), end))
    return starts.to(torch.int32), int(starts.diff().max())


_ragged_copies = WeakTensorKeyDictionary()


def _pieces(q_BTNH: Tensor, documents_BT: Tensor | None, window: int) -> Iterator[tuple[slice, slice, slice, Any]]:
    """What the kernel of a CPU is given at a time: rows, queries, keys, and the mask."""
    tokens = slice(0, q_BTNH.size(1))
    at_once = queries_at_once(window, q_BTNH.device)
    rows = [Shared(slice(None), tokens, tokens)] if documents_BT is None else shared(documents_BT, documents_BT)
    for row, document, _ in rows:
        length = document.stop - document.start
        if not window or length <= window:
            yield row, document, document, {"causal": True}
            continue
        for queries, keys, band in blocks(length, length, 0, window, at_once):
            yield row, shifted(queries, document.start), shifted(keys, document.start), {"causal": False, "band": band}


def _pieces_in_blocks(q_BTNH: Tensor, documents_BT: Tensor | None, window: int) -> Iterator[blocked_attention.Piece]:
    """The same for ``blocked_attention``, which cuts windows itself."""
    tokens = slice(0, q_BTNH.size(1))
    band = Band(1 - window, 0) if window else blocked_attention.CAUSAL
    rows = [Shared(slice(None), tokens, tokens)] if documents_BT is None else shared(documents_BT, documents_BT)
    return (blocked_attention.Piece(row, document, document, band) for row, document, _ in rows)


def shifted(places: slice, by: int) -> slice:
    """The places of a stretch in what the stretch is a part of, where it begins at ``by``."""
    return slice(places.start + by, places.stop + by)


def _ragged_rows(q_BTNH: Tensor, documents_BT: Tensor | None) -> tuple[Tensor, int]:
    if documents_BT is not None:
        # `ragged` with the starts on the documents' device; made once per tensor, without waiting for the device
        if documents_BT not in _ragged_copies:
            starts, longest = ragged(on_host(documents_BT))
            _ragged_copies[documents_BT] = to_device(starts, documents_BT.device), longest
        return _ragged_copies[documents_BT]  # type: ignore[no-any-return]
    rows, tokens = q_BTNH.shape[:2]
    return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=q_BTNH.device), tokens


# One operation, so that a compiler does not look inside, selective recomputation can keep its result, and tensors
# without data pass through. Its backward is another.
@torch.library.custom_op("shardtrain::document_attention", mutates_args=())
def _attention(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    documents_BT: Tensor | None,
    sinks_N: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    if is_accelerator(q_BTNH.device):
        # All documents of all rows laid end to end, in one call
        starts, longest = _ragged_rows(q_BTNH, documents_BT)
        q_SNH, k_SKH, v_SKH = (x.flatten(0, 1) for x in (q_BTNH, k_BTKH, v_BTKH))
        out_SNH, lse_NS = flash_attention.attend_ragged(q_SNH, k_SKH, v_SKH, starts, longest, window, scale)
        out_BTNH = out_SNH.view_as(q_BTNH)
        lse_BNT = lse_NS.unflatten(1, q_BTNH.shape[:2]).transpose(0, 1).contiguous()
    else:
        # The kernel of a CPU knows no documents, and is called for each
        out_BTNH, lse_BNT = _like_attention(q_BTNH)
        for row, queries, keys, sight in _pieces(q_BTNH, documents_BT, window):
            q = q_BTNH[row, queries]
            k = k_BTKH[row, keys]
            v = v_BTKH[row, keys]
            out_BlNH, lse_BNl = flash_attention.attend(q, k, v, **sight, scores=Scores(scale))
            out_BTNH[row, queries] = out_BlNH
            lse_BNT[row, :, queries] = lse_BNl
    # Sinks take part in the sum of the softmax alone, so that they can be added to what any kernel gives
    return (out_BTNH, lse_BNT) if sinks_N is None else attention_scores.with_sinks(out_BTNH, lse_BNT, sinks_N)


@_attention.register_fake
def _(
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    documents_BT: Tensor | None,
    sinks_N: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor]:
    return _like_attention(q_BTNH)


def _like_attention(q_BTNH: Tensor) -> tuple[Tensor, Tensor]:
    B, T, N, _ = q_BTNH.shape
    out_BTNH = torch.empty_like(q_BTNH, memory_format=torch.contiguous_format)
    return out_BTNH, q_BTNH.new_empty((B, N, T), dtype=torch.promote_types(q_BTNH.dtype, torch.float32))


@torch.library.custom_op("shardtrain::document_attention_backward", mutates_args=())
def _attention_backward(
    gradient_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    out_BTNH: Tensor,
    lse_BNT: Tensor,
    documents_BT: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (q_BTNH, k_BTKH, v_BTKH)
    if is_accelerator(q_BTNH.device):
        starts, longest = _ragged_rows(q_BTNH, documents_BT)
        gradient, q, k, v, out = (x.flatten(0, 1) for x in (gradient_BTNH, *inputs, out_BTNH))
        lse_NS = lse_BNT.transpose(0, 1).flatten(1)
        grads = flash_attention.attend_ragged_backward(gradient, q, k, v, out, lse_NS, starts, longest, window, scale)
        dq, dk, dv = (grad.view_as(x) for grad, x in zip(grads, inputs, strict=True))
        return dq, dk, dv
    # With a window, blocks of queries share keys, whose gradients are then summed in float32
    exact = torch.promote_types(q_BTNH.dtype, torch.float32) if window else q_BTNH.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=exact, device=x.device) for x in inputs)
    for row, queries, keys, sight in _pieces(q_BTNH, documents_BT, window):
        gradient, q, out = (x[row, queries] for x in (gradient_BTNH, q_BTNH, out_BTNH))
        k = k_BTKH[row, keys]
        v = v_BTKH[row, keys]
        lse = lse_BNT[row, :, queries]
        part = flash_attention.attend_backward(gradient, q, k, v, out, lse, **sight, scores=Scores(scale))
        dq[row, queries] = part[0]
        dk[row, keys] += part[1]
        dv[row, keys] += part[2]
    return dq.to(q_BTNH.dtype), dk.to(q_BTNH.dtype), dv.to(q_BTNH.dtype)


@_attention_backward.register_fake
def _(gradient_BTNH: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3], inputs[4])
    ctx.window, ctx.scale = inputs[5:]
    # Nothing is differentiated by the log-sum-exp, and no zeros need to be made for its gradient
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, gradient_BTNH: Tensor, _: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None, None, None]:
    *saved, sinks_N = ctx.saved_tensors
    out_BTNH, lse_BNT = saved[3:5]
    dsinks_N = None if sinks_N is None else attention_scores.sinks_gradient(gradient_BTNH, out_BTNH, lse_BNT, sinks_N)
    return *_attention_backward(gradient_BTNH, *saved, ctx.window, ctx.scale), None, dsinks_N, None, None


_attention.register_autograd(_differentiate, setup_context=_save)


@torch.library.custom_op("shardtrain::blocked_attention", mutates_args=())
def _blocked(
    q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor | None, window: int, scale: float | None
) -> tuple[Tensor, Tensor]:
    keys_values_2BKTH = blocked_attention.heads_first(k_BTKH, v_BTKH)
    pieces = _pieces_in_blocks(q_BTNH, documents_BT, window)
    return blocked_attention.attend_in_pieces(q_BTNH, keys_values_2BKTH, pieces, scale)


@_blocked.register_fake
def _(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q_BTNH, memory_format=torch.contiguous_format), blocked_attention.empty_lse(q_BTNH)


@torch.library.custom_op("shardtrain::blocked_attention_backward", mutates_args=())
def _blocked_backward(
    gradient_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    lse_BNT: Tensor,
    documents_BT: Tensor | None,
    window: int,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    keys_values_2BKTH = blocked_attention.heads_first(k_BTKH, v_BTKH)
    inputs = (gradient_BTNH, q_BTNH, keys_values_2BKTH, lse_BNT)
    pieces = _pieces_in_blocks(q_BTNH, documents_BT, window)
    dq_BTNH, dkeys_values_2BKTH = blocked_attention.attend_in_pieces_backward(*inputs, pieces, scale)
    dk_BTKH, dv_BTKH = (blocked_attention.tokens_first(x_BKTH, q_BTNH.dtype) for x_BKTH in dkeys_values_2BKTH)
    return dq_BTNH, dk_BTKH, dv_BTKH


@_blocked_backward.register_fake
def _(gradient_BTNH: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


def _save_blocked(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1], inputs[3])
    ctx.window, ctx.scale = inputs[4:]
    ctx.set_materialize_grads(False)


def _differentiate_blocked(
    ctx: Any, gradient_BTNH: Tensor, _: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
    return *_blocked_backward(gradient_BTNH, *ctx.saved_tensors, ctx.window, ctx.scale), None, None, None


_blocked.register_autograd(_differentiate_blocked, setup_context=_save_blocked)
