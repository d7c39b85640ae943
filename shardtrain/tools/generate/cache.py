"""Keys and values of earlier tokens, kept by the attention cores, so that a new token costs one token's work.

The models know nothing of it: positions are an argument, and the core named by ``LAYOUT.context`` computes what its
attributes say and nothing else, so replacing it is all that is needed. Rows of a batch end in the same column of the
cache: prompts are read with padding to the right, where causal attention cannot see it, and each row is then moved to
end where the longest does. From there on all rows write the same column, and the columns left of a row's first token
are masked.

Shape suffixes: B rows, T tokens of this pass, N heads, K key-value heads, G = N / K, H head, S columns, P = B K pairs
of a row and a key-value head, R = T G queries of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.layout import Layout, matches
from shardtrain.models.layers import AttentionCore, SinkAttentionCore
from shardtrain.ops.attention_core import broken_when_split
from shardtrain.ops.attention_scores import Scores, masked_attention, scores_of
from shardtrain.ops.chosen_kernels import attends_in_blocks
from shardtrain.utils.errors import ConfigError, Problem

BLOCK = 64
"""A cache has a multiple of so many columns, and grows by an eighth: products read those that are not filled, too."""
_SMALLEST_BY_PRODUCTS = 1 << 18
"""Numbers of cached keys below which calling oneDNN takes longer than its products save."""


class Cache:
    """The position of all cores of a model: columns that are filled, and where each row begins."""

    def __init__(self, cores: Sequence[CachedCore]) -> None:
        self._cores = cores
        self.lengths: list[int] = []
        """Tokens of each row's prompt, while prompts are read; empty afterwards."""
        self.filled = 0
        """Columns that hold what will be attended to."""
        self.limit = 0
        """Columns that will ever be needed."""
        self._first_B = torch.zeros(0, dtype=torch.int64)
        self._padded = False
        self._masks: dict[tuple[int, int], Tensor | None] = {}

    def begin(self, lengths: Sequence[int], limit: int, device: torch.device) -> None:
        """Forget all, and expect one pass over prompts of these lengths, padded to the right."""
        self.lengths = list(lengths)
        self.filled = 0
        self.limit = limit
        self._first_B = max(lengths) - torch.tensor(self.lengths, device=device)
        self._padded = len(set(lengths)) > 1
        for core in self._cores:
            core.keys_BKSH = core.values_BKSH = None

    def prompts_read(self) -> None:
        """The pass over the prompts is done: what follows is appended."""
        self.filled = max(self.lengths)
        self.lengths = []
        self._masks = {}

    def advance(self) -> None:
        """One more column counts; what a pass wrote right of it is written over by the next."""
        self.filled += 1
        self._masks = {}

    def keep(self, rows: Sequence[int]) -> None:
        """Continue with some of the rows."""
        index = torch.tensor(rows, device=self._first_B.device)
        self._first_B = self._first_B[index]
        self._padded = bool((self._first_B != self._first_B[:1]).any() or self._first_B[:1].any())
        self._masks = {}
        for core in self._cores:
            core.keep(index)

    def mask(self, tokens: int, window: int, chunk: int = 0) -> Tensor | None:
        """What each of the tokens after ``filled`` may attend to, (B or 1, 1, T, S); None where it is everything."""
        if (window, chunk) not in self._masks:
            self._masks[window, chunk] = self._mask(tokens, window, chunk)
        return self._masks[window, chunk]

    def _mask(self, tokens: int, window: int, chunk: int) -> Tensor | None:
        columns = self.filled + tokens
        # without a mask PyTorch has faster kernels
        is_limited = 0 < window < columns or 0 < chunk < columns
        if tokens == 1 and not self._padded and not is_limited:
            return None
        column_S = torch.arange(columns, device=self._first_B.device)
        own_T1 = column_S[self.filled :, None]
        seen_TS = column_S <= own_T1
        if window:
            seen_TS &= column_S > own_T1 - window
        if not self._padded:
            if chunk:
                seen_TS &= column_S // chunk == own_T1 // chunk
            return seen_TS[None, None]
        first_B11 = self._first_B[:, None, None]
        seen_BTS = seen_TS & (column_S >= first_B11)
        if chunk:  # counted from each row's first token
            seen_BTS &= (column_S - first_B11) // chunk == (own_T1 - first_B11) // chunk
        return seen_BTS[:, None]


class CachedCore(nn.Module):
    """An attention core that remembers keys and values; prompts go through the core that it stands for."""

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
        self._by_products = False

    def forward(
        self,
        q_BTNH: Tensor,
        k_BTKH: Tensor,
        v_BTKH: Tensor,
        documents_BT: Tensor | None = None,
        sinks_N: Tensor | None = None,
    ) -> Tensor:
        """Attention of new queries (B, T, N, H) to all that is remembered and to the new keys and values.

        All are (B, N, T, H) where the core that it stands for says ``heads_first``.
        """
        # Prompts go through the model's own core; what is remembered of them is moved to end in one column.
        if self.cache.lengths:
            k_BKTH = k_BTKH if self.heads_first else k_BTKH.transpose(1, 2)
            v_BKTH = v_BTKH if self.heads_first else v_BTKH.transpose(1, 2)
            numel = k_BKTH.numel() // k_BKTH.size(2) * self.cache.limit
            self._by_products = self._scores.has_kernel and sinks_N is None and _has_fast_products(q_BTNH, numel)
            self.keys_BKSH = self._aligned(k_BKTH, self._by_products)
            self.values_BKSH = self._aligned(v_BKTH)
            # a core of a user's may take neither of the last two arguments, and is given those that there are
            if sinks_N is not None:
                return self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT, sinks_N)  # type: ignore[no-any-return]
            if documents_BT is not None:
                return self.core(q_BTNH, k_BTKH, v_BTKH, documents_BT)  # type: ignore[no-any-return]
            return self.core(q_BTNH, k_BTKH, v_BTKH)  # type: ignore[no-any-return]

        # New tokens are appended. Under tensor parallelism some of them are padding, whose columns are written over by
        # the next pass.
        if self.heads_first:
            q_BTNH, k_BTKH, v_BTKH = (x.transpose(1, 2) for x in (q_BTNH, k_BTKH, v_BTKH))
        k_BKTH = k_BTKH.transpose(1, 2)
        v_BKTH = v_BTKH.transpose(1, 2)
        start = self.cache.filled
        stop = self.cache.filled + q_BTNH.size(1)
        keys_BKSH, values_BKSH = self._room(stop)
        keys_BKSH[:, :, start:stop] = k_BKTH
        values_BKSH[:, :, start:stop] = v_BKTH
        mask = self.cache.mask(q_BTNH.size(1), self.window, self.chunk)
        if self._by_products:
            out_BTNH = _attend_by_products(q_BTNH, keys_BKSH, values_BKSH, stop, mask, self._scores.scale)
        else:
            out_BTNH = _attend(q_BTNH, keys_BKSH[:, :, :stop], values_BKSH[:, :, :stop], mask, self._scores, sinks_N)
        return out_BTNH.transpose(1, 2) if self.heads_first else out_BTNH

    def keep(self, index: Tensor) -> None:
        """Continue with some of the rows."""
        if self.keys_BKSH is not None and self.values_BKSH is not None:
            # The features of keys stay where they lie
            self.keys_BKSH = self.keys_BKSH.mT[index].mT if self._by_products else self.keys_BKSH[index]
            self.values_BKSH = self.values_BKSH[index]

    def _aligned(self, x_BKTH: Tensor, turned: bool = False) -> Tensor:
        """A cache whose rows end in the same column, with room to grow; what is left of a row is zero."""
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
        """Keys and values with at least so many columns, copied into larger ones where they have fewer."""
        keys = self.keys_BKSH
        values = self.values_BKSH
        assert keys is not None and values is not None, "prompts come first"
        size = keys.size(2)
        # Larger by an eighth: a copy costs two passes over what is cached, which an eighth more tokens read each
        if columns > size:
            larger = max(columns, min(self.cache.limit, size + size // 8))
            keys = self.keys_BKSH = _grown(keys, larger, self._by_products)
            values = self.values_BKSH = _grown(values, larger, False)
        return keys, values


def _grown(old_BKSH: Tensor, columns: int, turned: bool) -> Tensor:
    new_BKSH = _zeros(old_BKSH, columns, turned)
    new_BKSH[:, :, : old_BKSH.size(2)] = old_BKSH
    return new_BKSH


def _zeros(like_BKSH: Tensor, columns: int, turned: bool) -> Tensor:
    """A cache with a multiple of BLOCK columns, at least so many; ``turned`` ones lie as (B, K, H, S) in memory."""
    B, K, _, H = like_BKSH.shape
    room = -(-columns // BLOCK) * BLOCK
    # never uninitialised: a weight of 0 times NaN is NaN
    return like_BKSH.new_zeros(B, K, H, room).mT if turned else like_BKSH.new_zeros(B, K, room, H)


def _attend(
    q_BTNH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, mask: Tensor | None, scores: Scores, sinks_N: Tensor | None
) -> Tensor:
    """Attention of few queries to many keys; heads that share keys are queries of one, so nothing is repeated."""
    if not scores.has_kernel or sinks_N is not None:
        return masked_attention(q_BTNH, k_BKSH.transpose(1, 2), v_BKSH.transpose(1, 2), mask, scores, sinks_N)
    q_BKRH, rows = _grouped(q_BTNH, k_BKSH.size(1), mask)
    out_BKRH = F.scaled_dot_product_attention(q_BKRH, k_BKSH, v_BKSH, attn_mask=rows, scale=scores.scale)
    return _ungrouped(out_BKRH, q_BTNH)


def _attend_by_products(
    q_BTNH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, columns: int, mask: Tensor | None, scale: float | None
) -> Tensor:
    """The same of the first ``columns`` of a whole cache, whose keys lie as (B, K, H, S), by two products.

    Products take the cache with its columns that are not filled: of a part of it PyTorch would make a copy, and oneDNN
    generates code for each size that it meets.
    """
    q_BKRH, rows = _grouped(q_BTNH, k_BKSH.size(1), mask)
    q_BKRH = q_BKRH * (q_BTNH.size(-1) ** -0.5 if scale is None else scale)
    scores_PRS = torch.bmm(q_BKRH.flatten(0, 1), k_BKSH.mT.flatten(0, 1))
    scores_PRS[..., columns:] = -torch.inf
    if rows is not None:
        scores_PRS.unflatten(0, k_BKSH.shape[:2])[..., :columns].masked_fill_(~rows, -torch.inf)
    out_PRH = torch.bmm(scores_PRS.softmax(-1), v_BKSH.flatten(0, 1))
    return _ungrouped(out_PRH.unflatten(0, k_BKSH.shape[:2]), q_BTNH)


def _has_fast_products(q_BTNH: Tensor, numel: int) -> bool:
    """Whether products are faster than the flash kernel for as many keys as will be cached.

    In bfloat16, where attention by blocks of products is: 1.4 times as fast with four query heads to a key head of 64,
    3.5 times with one to one of 128 (1,088 columns). In float32 0.7 to 1.3 times.
    """
    return q_BTNH.dtype == torch.bfloat16 and numel >= _SMALLEST_BY_PRODUCTS and attends_in_blocks(q_BTNH)


def _grouped(q_BTNH: Tensor, K: int, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Queries (B, K, R, H) and their mask (B or 1, 1, R, S): heads that share keys stand as tokens would."""
    B, T, N, H = q_BTNH.shape
    G = N // K
    if T == 1:
        return q_BTNH.reshape(B, K, G, H), mask
    q_BKRH = q_BTNH.reshape(B, T, K, G, H).permute(0, 2, 1, 3, 4).reshape(B, K, T * G, H)
    return q_BKRH, None if mask is None else mask.repeat_interleave(G, dim=2)


def _ungrouped(out_BKRH: Tensor, q_BTNH: Tensor) -> Tensor:
    """As the queries were given, (B, T, N, H)."""
    B, T, N, H = q_BTNH.shape
    if T == 1:
        return out_BKRH.reshape(B, 1, N, H)
    return out_BKRH.unflatten(2, (T, -1)).permute(0, 2, 1, 3, 4).reshape(B, T, N, H)


@contextmanager
def installed(model: nn.Module, layout: Layout) -> Iterator[Cache]:
    """Let a model remember keys and values within the block; afterwards its own cores are back.

    Raises:
        ConfigError: when the layout names no attention core, or a core does more than its attributes say.
    """
    paths = [path for path, _ in model.named_modules() if layout.context and matches(path, layout.context)]
    if not paths:
        rule = "names no attention core, so its keys and values cannot be kept"
        raise ConfigError(Problem("LAYOUT.context", None, rule, "add --no_cache, or name the core"))
    owned = [model.get_submodule(path) for path in paths]
    for path, core in zip(paths, owned, strict=True):
        _check_core(path, core)
    cores = [CachedCore(core) for core in owned]
    cache = Cache(cores)
    for path, cached in zip(paths, cores, strict=True):
        cached.cache = cache
        model.set_submodule(path, cached)
    try:
        yield cache
    finally:
        for path, core in zip(paths, owned, strict=True):
            model.set_submodule(path, core)


def _check_core(path: str, core: nn.Module) -> None:
    """Refuse a core of a user's file that does something else than what is done here in its place."""
    if type(core) in (AttentionCore, SinkAttentionCore):
        return
    broken = broken_when_split(core, None, seq_len=0)  # to keep keys and values asks of a core what splitting does
    if broken:
        rule = f"{broken.rule}, so its keys and values cannot be kept"
        raise ConfigError(Problem("LAYOUT.context", path, rule, f"add --no_cache, or {broken.fix}"))
