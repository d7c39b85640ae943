"""Record the loss of each micro-batch of one rank, with the logits that it was computed from."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardtrain.distributed import runner

PREFIX = "loss"
"""Keys are "loss/MICRO-BATCH/logits", ".../targets", ".../weight", ".../sum" and ".../gradient"."""
COLUMNS = "columns"
"""Replaces "logits" in a key if the rank has only some columns of the logits."""


@contextlib.contextmanager
def recorded(tensors: dict[str, Tensor]) -> Iterator[None]:
    """Add the losses that are computed inside the block to ``tensors``."""
    original = runner.cross_entropy_sum
    count = 0

    def record(
        logits: Tensor,
        targets: Tensor,
        weight: Any,
        vocabulary: Any = None,
        *rest: Any,
        **named: Any,
    ) -> Tensor:
        nonlocal count
        key = f"{PREFIX}/{count}"
        count += 1
        tensors[f"{key}/{'logits' if vocabulary is None else COLUMNS}"] = _copy(logits)
        tensors[f"{key}/targets"] = _copy(targets)
        tensors[f"{key}/weight"] = _copy(torch.as_tensor(weight))
        if logits.requires_grad:
            logits.register_hook(partial(_keep, tensors, f"{key}/gradient"))
        loss = original(logits, targets, weight, vocabulary, *rest, **named)
        tensors[f"{key}/sum"] = _copy(loss)
        return loss

    runner.cross_entropy_sum = record  # type: ignore[assignment]
    try:
        yield
    finally:
        runner.cross_entropy_sum = original


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _keep(tensors: dict[str, Tensor], key: str, gradient: Tensor) -> None:
    tensors[key] = _copy(gradient)
