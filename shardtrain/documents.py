"""Packed documents: attention in which no document sees another, and which parts of two stretches of a row share one.

``documents_BT`` numbers the documents of each row, ascending along it. A token attends to earlier tokens of its own
number alone. Shape suffixes: B batch, T tokens, l queries, s keys, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from shardtrain import flash

_QUERIES_AT_ONCE = 1024
"""Queries that share a mask where a device has no kernel for documents: it is (B, 1, this, T), not (B, 1, T, T)."""


class Shared(NamedTuple):
    """A document that occurs in a stretch of queries and in one of keys: its row, and its tokens in either."""

    row: slice
    queries: slice
    keys: slice


def attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor) -> Tensor:
    """Causal attention within each document: (B, T, N, H).

    On a CPU the flash kernel runs once per document, which costs no more than the documents do (20 documents in 2,048
    tokens: an eighth of the time of a mask); on CUDA its form for ragged sequences runs once. Other types and devices
    mask a part of the queries at a time.

    Raises:
        ValueError: when the numbers of a row do not ascend.
    """
    if q_BTNH.device.type in ("cpu", "meta") or (q_BTNH.is_cuda and flash.has_flash(q_BTNH)):
        return _attention(q_BTNH, k_BTKH, v_BTKH, documents_BT)[0]  # type: ignore[no-any-return]
    return masked_attention(q_BTNH, k_BTKH, v_BTKH, documents_BT)


def masked_attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor) -> Tensor:
    """The same by boolean masks: works on any device and type, and does the work of all that it masks."""
    # heads are repeated: with grouped heads and a mask PyTorch falls back to (B, N, T, T) numbers
    k_BTNH, v_BTNH = flash.repeat_heads(q_BTNH, k_BTKH, v_BTKH)
    q_BNTH, k_BNTH, v_BNTH = (x.transpose(1, 2) for x in (q_BTNH, k_BTNH, v_BTNH))
    tokens, outputs = q_BTNH.size(1), []
    for start in range(0, tokens, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, tokens)
        same_Bls = documents_BT[:, start:stop, None] == documents_BT[:, None, :stop]
        mask_Bls = same_Bls & same_Bls.new_ones(stop - start, stop).tril(start)
        parts = (q_BNTH[:, :, start:stop], k_BNTH[:, :, :stop], v_BNTH[:, :, :stop])
        outputs.append(F.scaled_dot_product_attention(*parts, attn_mask=mask_Bls[:, None]))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def shared(queries_Bl: Tensor, keys_Bs: Tensor) -> list[Shared]:
    """The documents that occur both in a stretch of queries and in one of keys, given the numbers of their tokens.

    Raises:
        ValueError: when the numbers of a row do not ascend.

    >>> shared(torch.tensor([[3, 3, 4]]), torch.tensor([[2, 3]]))
    [Shared(row=slice(0, 1, None), queries=slice(0, 2, None), keys=slice(1, 2, None))]
    """
    of_queries = _places(queries_Bl)
    of_keys = of_queries if keys_Bs is queries_Bl else _places(keys_Bs)
    return [
        Shared(slice(row, row + 1), places, keys[number])
        for row, (queries, keys) in enumerate(zip(of_queries, of_keys, strict=True))
        for number, places in queries.items()
        if number in keys
    ]


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
    """The numbers in host memory; copied from the device once per tensor, not once per layer."""
    if documents_BT.device.type == "cpu":
        return documents_BT
    if documents_BT not in _host_copies:
        _host_copies[documents_BT] = documents_BT.cpu()
    return _host_copies[documents_BT]  # type: ignore[no-any-return]


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


def _ragged_on_device(documents_BT: Tensor) -> tuple[Tensor, int]:
    """``ragged`` with the starts on the documents' device; made once per tensor, without waiting for the device."""
    if documents_BT not in _ragged_copies:
        starts, longest = ragged(on_host(documents_BT))
        # from page-locked memory: any other copy would first wait for all work that the device was given
        _ragged_copies[documents_BT] = starts.pin_memory().to(documents_BT.device, non_blocking=True), longest
    return _ragged_copies[documents_BT]  # type: ignore[no-any-return]


# One operation, so that a compiler does not look inside, selective recomputation can keep its result, and tensors
# without data pass through. Its backward is another.
@torch.library.custom_op("shardtrain::document_attention", mutates_args=())
def _attention(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    if q_BTNH.is_cuda:
        starts, longest = _ragged_on_device(documents_BT)
        q_SNH, k_SKH, v_SKH = (x.flatten(0, 1) for x in (q_BTNH, k_BTKH, v_BTKH))
        out_SNH, lse_NS = flash.attend_ragged(q_SNH, k_SKH, v_SKH, starts, longest)
        return out_SNH.view_as(q_BTNH), lse_NS.unflatten(1, q_BTNH.shape[:2]).transpose(0, 1).contiguous()
    out_BTNH, lse_BNT = _like_attention(q_BTNH)
    for row, tokens, _ in shared(documents_BT, documents_BT):
        q, k, v = (x[row, tokens] for x in (q_BTNH, k_BTKH, v_BTKH))
        out_BTNH[row, tokens], lse_BNT[row, :, tokens] = flash.attend(q, k, v, causal=True)
    return out_BTNH, lse_BNT


@_attention.register_fake
def _(q_BTNH: Tensor, k_BTKH: Tensor, v_BTKH: Tensor, documents_BT: Tensor) -> tuple[Tensor, Tensor]:
    return _like_attention(q_BTNH)


def _like_attention(q_BTNH: Tensor) -> tuple[Tensor, Tensor]:
    B, T, N, _ = q_BTNH.shape
    out_BTNH = torch.empty_like(q_BTNH, memory_format=torch.contiguous_format)
    return out_BTNH, q_BTNH.new_empty((B, N, T), dtype=torch.float32)


@torch.library.custom_op("shardtrain::document_attention_backward", mutates_args=())
def _attention_backward(
    gradient_BTNH: Tensor,
    q_BTNH: Tensor,
    k_BTKH: Tensor,
    v_BTKH: Tensor,
    out_BTNH: Tensor,
    lse_BNT: Tensor,
    documents_BT: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs = (q_BTNH, k_BTKH, v_BTKH)
    if q_BTNH.is_cuda:
        starts, longest = _ragged_on_device(documents_BT)
        gradient, q, k, v, out = (x.flatten(0, 1) for x in (gradient_BTNH, *inputs, out_BTNH))
        lse_NS = lse_BNT.transpose(0, 1).flatten(1)
        grads = flash.attend_ragged_backward(gradient, q, k, v, out, lse_NS, starts, longest)
        dq, dk, dv = (grad.view_as(x) for grad, x in zip(grads, inputs, strict=True))
        return dq, dk, dv
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs)
    for row, tokens, _ in shared(documents_BT, documents_BT):
        q, k, v, out, gradient = (x[row, tokens] for x in (*inputs, out_BTNH, gradient_BTNH))
        part = flash.attend_backward(gradient, q, k, v, out, lse_BNT[row, :, tokens], causal=True)
        dq[row, tokens], dk[row, tokens], dv[row, tokens] = part
    return dq, dk, dv


@_attention_backward.register_fake
def _(gradient_BTNH: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[:3])
    return dq, dk, dv


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, gradient_BTNH: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_attention_backward(gradient_BTNH, *ctx.saved_tensors), None


_attention.register_autograd(_differentiate, setup_context=_save)
