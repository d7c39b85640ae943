"""Packed documents: attention in which no document sees another.

``documents_BT`` numbers the documents of each row, ascending along it. A token attends to earlier tokens of its own
number alone; with a window, to the nearest of them (``sliding_window.py``).
Shape suffixes: B batch, T tokens, l queries, s keys, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from shardtrain.ops import attention_scores, chosen_kernels, flash_attention
from shardtrain.ops.accelerator import is_accelerator, to_device
from shardtrain.ops.attention_operation import empty_results, register_attention
from shardtrain.ops.attention_scores import Scores
from shardtrain.ops.shared_documents import Shared, shared, shifted
from shardtrain.ops.sliding_window import blocks, queries_at_once

_QUERIES_AT_ONCE = 1024
"""Queries that share a mask where a device has no kernel for documents: it is (B, 1, this, T), not (B, 1, T, T)."""


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

    ``window`` is the number of tokens that a token sees, including itself; 0 means no window. ``scale`` defaults to
    1 / sqrt(H). ``sinks_N`` are the scores of a sink per head: see ``attention_scores.with_sinks``.

    On a CPU the flash kernel runs once per document, which saves the work between documents (20 documents in 2,048
    tokens take an eighth of the time of a mask), or once per block of queries if the window is shorter. On CUDA its
    form for ragged sequences runs once. Other dtypes and devices mask a part of the queries at a time.

    Raises:
        ValueError: when the numbers of a row do not ascend.
    """
    is_long = documents_BT is None and not window and q_BTNH.size(1) > chosen_kernels.LONG_ROW
    if sinks_N is None and not is_long and chosen_kernels.attends_in_blocks(q_BTNH):
        from shardtrain.ops.cpu import document_blocks  # a run on an accelerator imports no kernel of a CPU

        return document_blocks.attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, window, scale)
    if not is_accelerator(q_BTNH.device) or flash_attention.has_flash(q_BTNH):
        return _attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, sinks_N, window, scale)[0]  # type: ignore[no-any-return]
    if sinks_N is not None:
        return attention_scores.attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, window, Scores(scale), sinks_N)
    return masked_attention(q_BTNH, k_BTKH, v_BTKH, documents_BT, window, scale)


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


_host_copies = WeakTensorKeyDictionary()


def remember(documents_BT: Tensor, on_host_BT: Tensor) -> None:
    """Note what a tensor on a device holds, so that reading it need not wait for the device."""
    if documents_BT.device.type != "cpu" and on_host_BT.device.type == "cpu":
        _host_copies[documents_BT] = on_host_BT


def on_host(documents_BT: Tensor) -> Tensor:
    """Return the numbers in host memory, copied from the device once per tensor instead of once per layer.

    Consecutive rows of a remembered tensor, such as a pipeline's micro-batches, are taken from its host copy.
    """
    if documents_BT.device.type == "cpu":
        return documents_BT
    # Keyed weakly by the tensor: the copy is freed with the batch
    if documents_BT not in _host_copies:
        whole_BT = documents_BT._base
        if whole_BT is not None and whole_BT in _host_copies and _are_consecutive_rows(documents_BT, whole_BT):
            first = (documents_BT.storage_offset() - whole_BT.storage_offset()) // max(1, whole_BT.stride(0))
            _host_copies[documents_BT] = _host_copies[whole_BT][first : first + documents_BT.size(0)]
        else:
            _host_copies[documents_BT] = documents_BT.cpu()
    return _host_copies[documents_BT]  # type: ignore[no-any-return]


def _are_consecutive_rows(part_BT: Tensor, whole_BT: Tensor) -> bool:
    """True for a view of entire rows without gaps between them. Every second row, for example, has another stride."""
    return part_BT.shape[1:] == whole_BT.shape[1:] and part_BT.stride() == whole_BT.stride()


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


def _ragged_rows(q_BTNH: Tensor, documents_BT: Tensor | None) -> tuple[Tensor, int]:
    if documents_BT is not None:
        # `ragged` with the starts on the documents' device; made once per tensor, without waiting for the device
        if documents_BT not in _ragged_copies:
            starts, longest = ragged(on_host(documents_BT))
            _ragged_copies[documents_BT] = to_device(starts, documents_BT.device), longest
        return _ragged_copies[documents_BT]  # type: ignore[no-any-return]
    rows, tokens = q_BTNH.shape[:2]
    return torch.arange(0, (rows + 1) * tokens, tokens, dtype=torch.int32, device=q_BTNH.device), tokens


def _forward(
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
        out_BTNH, lse_BNT = empty_results(q_BTNH)
        for row, queries, keys, sight in _pieces(q_BTNH, documents_BT, window):
            q = q_BTNH[row, queries]
            k = k_BTKH[row, keys]
            v = v_BTKH[row, keys]
            out_BlNH, lse_BNl = flash_attention.attend(q, k, v, **sight, scores=Scores(scale))
            out_BTNH[row, queries] = out_BlNH
            lse_BNT[row, :, queries] = lse_BNl
    # Sinks take part in the sum of the softmax alone, so that they can be added to what any kernel gives
    return (out_BTNH, lse_BNT) if sinks_N is None else attention_scores.with_sinks(out_BTNH, lse_BNT, sinks_N)


def _backward(
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


_attention = register_attention("document_attention", _forward, _backward, keeps_output=True)
