"""Key-value cache in the attention cores. A pass for a new token then processes only this token.

Models need no change: positions are an argument, and the cache replaces the attention cores that
``LAYOUT.context`` names. A core may compute only the attention that its attributes describe. The cores that
``LAYOUT.recurrence`` names keep their states instead (``cached_recurrence.py``).

All rows of a batch end in the same cache column. The prompt pass pads rows on the right, where causal
attention cannot see the padding. Each row then moves right so that it ends with the longest row. Later passes
write the same column for all rows, and mask the columns before a row's first token.

Shape suffixes: B rows, T tokens of this pass, N heads, K key-value heads, G = N / K, H head dimension, S
columns, P = B K pairs of row and key-value head, R = T G queries per pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.layout import RECURRENCE_METHODS, Layout, matches
from shardtrain.models.layers import AttentionCore, SinkAttentionCore
from shardtrain.ops.attention_core import broken_when_split
from shardtrain.ops.attention_scores import Scores, masked_attention, scores_of
from shardtrain.ops.chosen_kernels import attends_in_blocks
from shardtrain.tools.generate.cached_recurrence import CachedRecurrence
from shardtrain.utils.errors import ConfigError, Problem

BLOCK = 64
"""The number of cache columns is a multiple of this.

Keep it small, because matmuls also read the unused columns.
"""
_SMALLEST_FOR_MATMULS = 1 << 18
"""Minimum number of cached key elements for matrix products.

Below it, the call overhead of oneDNN exceeds the gain.
"""


class Cache:
    """Position state shared by all cores of a model.

    Attributes:
        lengths: Prompt length of each row during the prompt pass, empty afterwards.
        filled: Number of filled columns.
        limit: Maximum number of columns that this batch needs.
    """

    def __init__(self, cores: Sequence[CachedCore | CachedRecurrence]) -> None:
        self._cores = cores
        self.lengths: list[int] = []
        self.filled = 0
        self.limit = 0
        self._first_B = torch.zeros(0, dtype=torch.int64)
        self._padded = False
        self._masks: dict[tuple[int, int], Tensor | None] = {}

    def begin(self, lengths: Sequence[int], limit: int, device: torch.device) -> None:
        """Clear the cache and prepare for the prompt pass.

        ``lengths`` are those of the right-padded prompts.
        """
        self.lengths = list(lengths)
        self.filled = 0
        self.limit = limit
        self._first_B = max(lengths) - torch.tensor(self.lengths, device=device)
        self._padded = len(set(lengths)) > 1
        for core in self._cores:
            core.clear()

    def prompts_read(self) -> None:
        """End the prompt pass. Later passes append to the cache."""
        self.filled = max(self.lengths)
        self.lengths = []
        self._masks = {}

    def advance(self) -> None:
        """Count one more column as filled. The next pass overwrites the columns to its right."""
        self.filled += 1
        self._masks = {}

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        index = torch.tensor(rows, device=self._first_B.device)
        self._first_B = self._first_B[index]
        # A row begins after padding unless its first column is 0.
        self._padded = bool(self._first_B.any())
        self._masks = {}
        for core in self._cores:
            core.keep(index)

    def mask(self, tokens: int, window: int, chunk: int = 0) -> Tensor | None:
        """Return the attention mask (B or 1, 1, T, S) of the tokens after ``filled``.

        None if nothing is masked.
        """
        if (window, chunk) not in self._masks:
            self._masks[window, chunk] = self._mask(tokens, window, chunk)
        return self._masks[window, chunk]

    def _mask(self, tokens: int, window: int, chunk: int) -> Tensor | None:
        columns = self.filled + tokens
        # PyTorch has faster kernels for attention without a mask.
        is_limited = 0 < window < columns or 0 < chunk < columns
        if tokens == 1 and not self._padded and not is_limited:
            return None
        column_S = torch.arange(columns, device=self._first_B.device)
        query_T1 = column_S[self.filled :, None]
        seen_TS = column_S <= query_T1
        if window:
            seen_TS &= column_S > query_T1 - window
        if not self._padded:
            if chunk:
                seen_TS &= column_S // chunk == query_T1 // chunk
            return seen_TS[None, None]

        # Each row has its own first column, so the mask differs between rows.
        first_B11 = self._first_B[:, None, None]
        seen_BTS = seen_TS & (column_S >= first_B11)
        if chunk:  # counted from each row's first token
            chunk_of_column = (column_S - first_B11) // chunk
            chunk_of_query = (query_T1 - first_B11) // chunk
            seen_BTS &= chunk_of_column == chunk_of_query
        return seen_BTS[:, None]


class CachedCore(nn.Module):
    """Attention core with a key-value cache. Prompts go through the original core."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core
        self.window = int(getattr(core, "window", 0) or 0)
        self.chunk = int(getattr(core, "chunk", 0) or 0)
        self.heads_first = bool(getattr(core, "heads_first", False))
        self._scores = scores_of(core)
        self.cache = Cache([self])
        self.keys_BKSH: Tensor | None = None
        self.values_BKSH: Tensor | None = None
        self._uses_matmuls = False

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Return the attention of new queries (B, T, N, H) to the cached and the new keys and values.

        Arguments and result are (B, N, T, H) if the original core has ``heads_first``.
        """
        # The cache stores heads before tokens.
        k_BKTH = k_BTKH if self.heads_first else k_BTKH.transpose(1, 2)
        v_BKTH = v_BTKH if self.heads_first else v_BTKH.transpose(1, 2)

        # Prompt pass: store aligned keys and values, then call the original core.
        if self.cache.lengths:
            numel_per_column = k_BKTH.numel() // k_BKTH.size(2)
            full_numel = numel_per_column * self.cache.limit
            is_plain = self._scores.has_kernel and sinks_N is None
            self._uses_matmuls = is_plain and _has_fast_matmuls(q_BTNH, full_numel)
            self.keys_BKSH = self._aligned(k_BKTH, self._uses_matmuls)
            self.values_BKSH = self._aligned(v_BKTH)
            # Pass optional arguments only if set, because a user's core may accept neither of them.
            if sinks_N is not None:
                return self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT, sinks_N)  # type: ignore[no-any-return]
            if documents_BT is not None:
                return self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT)  # type: ignore[no-any-return]
            return self.core(q_BTNH, k_BTKH, v_BTKH)  # type: ignore[no-any-return]

        # Append new tokens. Under tensor parallelism some of them are padding. The next pass
        # overwrites their columns.
        if self.heads_first:
            q_BTNH = q_BTNH.transpose(1, 2)
        start = self.cache.filled
        stop = self.cache.filled + q_BTNH.size(1)
        keys_BKSH, values_BKSH = self._room(stop)
        keys_BKSH[:, :, start:stop] = k_BKTH
        values_BKSH[:, :, start:stop] = v_BKTH
        mask = self.cache.mask(q_BTNH.size(1), self.window, self.chunk)
        if self._uses_matmuls:
            out_BTNH = _attend_with_matmuls(
                q_BTNH, keys_BKSH, values_BKSH, stop, mask, self._scores.scale
            )
        else:
            out_BTNH = _attend(
                q_BTNH,
                keys_BKSH[:, :, :stop],
                values_BKSH[:, :, :stop],
                mask,
                self._scores,
                sinks_N,
            )
        return out_BTNH.transpose(1, 2) if self.heads_first else out_BTNH

    def clear(self) -> None:
        """Forget all rows."""
        self.keys_BKSH = self.values_BKSH = None

    def keep(self, index: Tensor) -> None:
        """Keep only the keys and values of these rows."""
        if self.keys_BKSH is None or self.values_BKSH is None:
            return
        if self._uses_matmuls:
            # Index the transposed keys to keep their memory layout.
            self.keys_BKSH = self.keys_BKSH.mT[index].mT
        else:
            self.keys_BKSH = self.keys_BKSH[index]
        self.values_BKSH = self.values_BKSH[index]

    def _aligned(self, x_BKTH: Tensor, turned: bool = False) -> Tensor:
        """Return a cache with room to grow whose rows end in the same column.

        Columns before a row are zero.
        """
        lengths = self.cache.lengths
        longest = max(self.cache.lengths)
        cached_BKSH = _zeros(x_BKTH, min(self.cache.limit, longest + BLOCK), turned)
        if len(set(lengths)) == 1:
            cached_BKSH[:, :, :longest] = x_BKTH[:, :, :longest]
        else:
            for row, length in enumerate(lengths):
                cached_BKSH[row, :, longest - length : longest] = x_BKTH[row, :, :length]
        return cached_BKSH

    def _room(self, columns: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values, grown to at least ``columns`` columns."""
        keys = self.keys_BKSH
        values = self.values_BKSH
        assert keys is not None and values is not None, "prompts come first"
        size = keys.size(2)
        # Grow by an eighth. A copy costs two passes over the cache, and each new token one.
        if columns > size:
            larger = max(columns, min(self.cache.limit, size + size // 8))
            keys = self.keys_BKSH = _grown(keys, larger, self._uses_matmuls)
            values = self.values_BKSH = _grown(values, larger, False)
        return keys, values


def _grown(old_BKSH: Tensor, columns: int, turned: bool) -> Tensor:
    new_BKSH = _zeros(old_BKSH, columns, turned)
    new_BKSH[:, :, : old_BKSH.size(2)] = old_BKSH
    return new_BKSH


def _zeros(like_BKSH: Tensor, columns: int, turned: bool) -> Tensor:
    """Return a zero cache with ``columns`` rounded up to BLOCK.

    If ``turned``, its memory layout is (B, K, H, S).
    """
    B, K, _, H = like_BKSH.shape
    room = -(-columns // BLOCK) * BLOCK
    # Uninitialized memory may contain NaN, and an attention weight of 0 times NaN is NaN.
    if turned:
        return like_BKSH.new_zeros(B, K, H, room).mT
    return like_BKSH.new_zeros(B, K, room, H)


def _attend(
    q_BTNH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    mask: Tensor | None,
    scores: Scores,
    sinks_N: Tensor | None,
) -> Tensor:
    """Return the attention of new queries.

    Query heads are grouped by key-value head, so keys are not repeated.
    """
    if not scores.has_kernel or sinks_N is not None:
        return masked_attention(
            q_BTNH, k_BKSH.transpose(1, 2), v_BKSH.transpose(1, 2), mask, scores, sinks_N
        )
    q_BKRH, rows = _grouped(q_BTNH, k_BKSH.size(1), mask)
    out_BKRH = F.scaled_dot_product_attention(
        q_BKRH, k_BKSH, v_BKSH, attn_mask=rows, scale=scores.scale
    )
    return _ungrouped(out_BKRH, q_BTNH)


def _attend_with_matmuls(
    q_BTNH: Tensor,
    k_BKSH: Tensor,
    v_BKSH: Tensor,
    columns: int,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Return the attention to the first ``columns`` columns, with two batched matrix products.

    The products read the full cache, including unused columns. PyTorch would copy a slice, and oneDNN
    generates code for each new size. Keys have the memory layout (B, K, H, S).
    """
    if scale is None:
        scale = q_BTNH.size(-1) ** -0.5
    q_BKRH, rows = _grouped(q_BTNH, k_BKSH.size(1), mask)
    q_BKRH = q_BKRH * scale
    scores_PRS = torch.bmm(q_BKRH.flatten(0, 1), k_BKSH.mT.flatten(0, 1))
    # The weight of unused and of masked columns is exactly 0.
    scores_PRS[..., columns:] = -torch.inf
    if rows is not None:
        scores_BKRS = scores_PRS.unflatten(0, k_BKSH.shape[:2])
        scores_BKRS[..., :columns].masked_fill_(~rows, -torch.inf)
    out_PRH = torch.bmm(scores_PRS.softmax(-1), v_BKSH.flatten(0, 1))
    return _ungrouped(out_PRH.unflatten(0, k_BKSH.shape[:2]), q_BTNH)


def _has_fast_matmuls(q_BTNH: Tensor, numel: int) -> bool:
    """True if matrix products are faster than the flash kernel for ``numel`` cached key elements.

    Speedup in bfloat16 with 1,088 columns: 1.4 for four query heads per key head of size 64, and 3.5 for one
    query head per key head of size 128. In float32 it is 0.7 to 1.3.
    """
    if q_BTNH.dtype != torch.bfloat16 or numel < _SMALLEST_FOR_MATMULS:
        return False
    return attends_in_blocks(q_BTNH)


def _grouped(q_BTNH: Tensor, K: int, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return queries (B, K, R, H) and their mask (B or 1, 1, R, S).

    Heads with the same keys become extra tokens.
    """
    B, T, N, H = q_BTNH.shape
    G = N // K
    if T == 1:
        return q_BTNH.reshape(B, K, G, H), mask
    q_BKRH = q_BTNH.reshape(B, T, K, G, H).permute(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    return q_BKRH, None if mask is None else mask.repeat_interleave(G, dim=2)


def _ungrouped(out_BKRH: Tensor, q_BTNH: Tensor) -> Tensor:
    """Return the output in the shape of the queries, (B, T, N, H)."""
    B, T, N, H = q_BTNH.shape
    if T == 1:
        return out_BKRH.reshape(B, 1, N, H)
    return out_BKRH.unflatten(2, (T, -1)).permute(0, 2, 1, 3, 4).reshape(B, T, N, H)


@contextmanager
def installed(model: nn.Module, layout: Layout) -> Iterator[Cache]:
    """Replace the cores of a model with cached ones inside the block, and restore them afterwards.

    Raises:
        ConfigError: the layout names no core, or an attention core computes more than its attributes
            describe.
    """
    attentions = _matching(model, layout.context)
    recurrences = _matching(model, layout.recurrence)
    if not attentions and not recurrences:
        raise ConfigError(
            Problem(
                "LAYOUT.context",
                None,
                rule="names no attention core, so keys and values cannot be cached",
                fix="add --no_cache, or name the core",
            )
        )
    for path, core in attentions.items():
        _check_core(path, core)
    for path, core in recurrences.items():
        missing = [name for name in RECURRENCE_METHODS if not hasattr(core, name)]
        if missing:
            rule = f"has no method {missing[0]}, so its state cannot be kept"
            raise ConfigError(
                Problem("LAYOUT.recurrence", path, rule, "add --no_cache, or add the method")
            )
    # All cores share one cache object, which knows the lengths of the rows.
    cached_attentions = {path: CachedCore(core) for path, core in attentions.items()}
    cached_recurrences = {path: CachedRecurrence(core) for path, core in recurrences.items()}
    cache = Cache([*cached_attentions.values(), *cached_recurrences.values()])
    for attention in cached_attentions.values():
        attention.cache = cache
    for recurrence in cached_recurrences.values():
        recurrence.lengths = lambda: cache.lengths

    for path, cached in {**cached_attentions, **cached_recurrences}.items():
        model.set_submodule(path, cached)
    try:
        yield cache
    finally:
        for path, core in {**attentions, **recurrences}.items():
            model.set_submodule(path, core)


def _matching(model: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """Return the modules that a pattern of the layout matches, by path. None for an empty pattern."""
    if not pattern:
        return {}
    return {path: module for path, module in model.named_modules() if matches(path, pattern)}


def _check_core(path: str, core: nn.Module) -> None:
    """Raise ConfigError for a user-defined core that ``CachedCore`` cannot replace."""
    if type(core) in (AttentionCore, SinkAttentionCore):
        return
    # Caching has the same requirements as splitting a sequence.
    broken = broken_when_split(core, None, seq_len=0)
    if broken:
        raise ConfigError(
            Problem(
                "LAYOUT.context",
                path,
                rule=f"{broken.rule}, so its keys and values cannot be cached",
                fix=f"add --no_cache, or {broken.fix}",
            )
        )
