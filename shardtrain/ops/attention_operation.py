"""Attention kernels as custom operations of PyTorch, with a backward pass and shapes for the compiler.

Separate from ``document_mask.py`` because kernels that it dispatches to register themselves here.
Shape suffixes: B batch, T tokens, N heads, K key-value heads, H head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from shardtrain.ops import attention_scores


class _Operation(Protocol):
    """A custom operation. It has the same arguments as the registered function."""

    def __call__(self, *arguments: Any) -> Any: ...


def register_attention(
    name: str,
    forward: Callable[..., tuple[Tensor, Tensor]],
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    keeps_output: bool,
) -> _Operation:
    """Register attention and its backward pass as the custom operations
    ``shardtrain::NAME`` and ``NAME_backward``.

    A compiler then treats attention as one operation, selective recomputation can save its result, and it
    supports tensors on the meta device.

    Args:
        name: Name of the operation.
        forward: Maps (q, k, v, documents, [sinks,] window, scale) to the output and its log-sum-exp.
        backward: Maps (gradient, q, k, v, [output,] log-sum-exp, documents, window, scale) to the
            gradients of q, k, v.
        keeps_output: True if ``backward`` takes the output. Gradients of sinks need it too.
    """
    operation = torch.library.custom_op(f"shardtrain::{name}", forward, mutates_args=())
    backward_operation = torch.library.custom_op(
        f"shardtrain::{name}_backward", backward, mutates_args=()
    )
    operation.register_fake(lambda q_BTNH, *_: empty_results(q_BTNH))

    def empty_gradients(gradient_BTNH: Tensor, *inputs: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])

    backward_operation.register_fake(empty_gradients)

    def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q_BTNH, k_BTKH, v_BTKH, documents_BT, *sinks, ctx.window, ctx.scale = inputs
        results = output if keeps_output else output[1:]
        ctx.save_for_backward(q_BTNH, k_BTKH, v_BTKH, *results, documents_BT, *sinks)
        ctx.num_sinks = len(sinks)
        # No gradient reaches the log-sum-exp. Do not allocate zeros for it.
        ctx.set_materialize_grads(False)

    def differentiate(
        ctx: Any, gradient_BTNH: Tensor, _: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        # The sinks are the last saved tensors, if there are any. No kernel computes their gradient. Read
        # the saved tensors only once, because recomputation (activation checkpointing) then drops them.
        tensors = ctx.saved_tensors
        num_others = len(tensors) - ctx.num_sinks
        saved = tensors[:num_others]
        sinks = tensors[num_others:]
        gradients = backward_operation(gradient_BTNH, *saved, ctx.window, ctx.scale)
        sinks_gradients: list[Tensor | None] = []
        for sinks_N in sinks:
            if sinks_N is None:
                sinks_gradients.append(None)
                continue
            out_BTNH, log_sum_BNT = saved[3:5]
            sinks_gradients.append(
                attention_scores.sinks_gradient(gradient_BTNH, out_BTNH, log_sum_BNT, sinks_N)
            )
        return (*gradients, None, *sinks_gradients, None, None)

    operation.register_autograd(differentiate, setup_context=save)
    return operation


def empty_results(q_BTNH: Tensor) -> tuple[Tensor, Tensor]:
    """Return an empty output (B, T, N, H) and log-sum-exp (B, N, T) for these queries."""
    B, T, N, _ = q_BTNH.shape
    out_BTNH = torch.empty_like(q_BTNH, memory_format=torch.contiguous_format)
    return out_BTNH, q_BTNH.new_empty(
        (B, N, T), dtype=torch.promote_types(q_BTNH.dtype, torch.float32)
    )
