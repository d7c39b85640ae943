"""The user's training metrics: functions of logits and targets, averaged over a step's target tokens.

Shape suffixes: N tokens, n target tokens of a chunk, V vocabulary, v this rank's columns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from shardtrain.distributed.mesh import LOSS_AXES, Mesh
from shardtrain.ops import cross_entropy
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.cross_entropy import ChunkFunction, chunk_loss
from shardtrain.ops.split_cross_entropy import Vocabulary
from shardtrain.ops.targets import IGNORE
from shardtrain.utils import own_file
from shardtrain.utils.errors import ConfigError, Problem

OPTION = "metrics.token_metrics"
Measure = Callable[[Tensor, Tensor], Tensor]


def find(path: str) -> Measure:
    """Load the function ``measure`` from a file, and try it with random logits of three tokens.

    Raises:
        ConfigError: the file does not exist, has no such function, or returns something other than a
            value per token. Exceptions of the function itself are not caught.
    """
    measure = own_file.load_function(path, own_file.TOKEN_METRIC, OPTION)
    logits_nV = torch.randn((3, 8), generator=torch.Generator().manual_seed(0))
    _values(path, measure, logits_nV, torch.arange(3))
    return measure


def _values(path: str, measure: Measure, logits_nV: Tensor, targets_n: Tensor) -> Tensor:
    values_n = measure(logits_nV, targets_n)
    shape = tuple(values_n.shape) if isinstance(values_n, Tensor) else type(values_n).__name__
    if shape != (len(targets_n),):
        rule = f"returns {shape} for {len(targets_n)} tokens"
        raise ConfigError(
            Problem(OPTION, path, rule, "return a tensor (n,) with one value for each token")
        )
    return values_n


class TokenMetrics:
    """Sums of the metrics over this rank's target tokens in a step.

    Attributes:
        is_on: True if logits are measured. Set it to False for steps that are not logged, to save time.
    """

    def __init__(self, paths: Sequence[str], mesh: Mesh) -> None:
        self._measures = {path: find(path) for path in paths}
        self._mesh = mesh
        self.is_on = True
        self.start()

    def start(self) -> None:
        """Reset the sums, before a step."""
        # the last element counts the target tokens
        size = len(self._measures) + 1
        device = self._mesh.device
        self._sums = torch.zeros(size, dtype=sum_dtype(device), device=device)

    def add(self, logits_BTV: Tensor, targets_BT: Tensor, vocabulary: Vocabulary | None) -> None:
        """Measure logits. With a split vocabulary, this gathers all columns (a collective)."""
        if not self.is_on:
            return
        logits_NV = logits_BTV.detach().flatten(0, -2)
        targets_N = targets_BT.flatten()
        num_columns = vocabulary.size if vocabulary else logits_NV.size(-1)
        # Process chunks of rows, because float32 copies of all logits would be large.
        rows = max(1, cross_entropy.CHUNK_NUMEL // num_columns)
        for logits_nV, targets_n in zip(logits_NV.split(rows), targets_N.split(rows), strict=True):
            # The user's function needs all columns, so gather them from the tensor-parallel ranks.
            if vocabulary is not None:
                padded_nv = F.pad(logits_nV, (0, vocabulary.columns - logits_nV.size(-1)))
                by_rank = vocabulary.gather(padded_nv.contiguous())
                logits_nV = by_rank.movedim(0, 1).flatten(1)[:, : vocabulary.size]
            self._add_rows(logits_nV, targets_n)

    def measuring(self, chunk: ChunkFunction | None) -> ChunkFunction | None:
        """Return a function that measures the logits of a chunk and computes its loss with ``chunk``."""
        if not self.is_on:
            return chunk

        def measured(logits_nV: Tensor, targets_n: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            self._add_rows(logits_nV.detach(), targets_n)
            return (chunk or chunk_loss)(logits_nV, targets_n, weight)

        return measured

    def means(self) -> dict[str, float]:
        """Return the mean of each metric over the target tokens of all ranks (a collective)."""
        *sums, count = self._mesh.sum(self._sums, over=("pp", *LOSS_AXES)).tolist()
        means = {}
        for path, value in zip(self._measures, sums, strict=True):
            means[f"token_metrics/{Path(path).stem}"] = value / max(count, 1)
        return means

    def _add_rows(self, logits_nV: Tensor, targets_n: Tensor) -> None:
        # Positions without a target, such as padding, do not count.
        is_target_n = targets_n != IGNORE
        targets_n = targets_n[is_target_n]
        if not len(targets_n):
            return
        with torch.no_grad():
            for index, (path, measure) in enumerate(self._measures.items()):
                # Pass copies. Otherwise a function that writes to them could change the loss or other
                # metrics.
                values_n = _values(path, measure, logits_nV[is_target_n].float(), targets_n.clone())
                self._sums[index] += values_n.sum(dtype=self._sums.dtype)
        self._sums[-1] += len(targets_n)
