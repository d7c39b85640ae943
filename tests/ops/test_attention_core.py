"""The contract of attention cores: the report of a violation describes how the core breaks it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.models.layers import AttentionCore, SinkAttentionCore
from shardtrain.ops import attention_core
from shardtrain.ops.attention_core import CoreCall

SLOPES = (0.5, 0.25, 0.125, 0.0625)
N = 4
K = 2
T = 13
H = 8
GIVEN = CoreCall(((1, T, N, H), (1, T, K, H), (1, T, K, H)), 0, True, False)
HEADS_FIRST = CoreCall(((1, N, T, H), (1, K, T, H), (1, K, T, H)), 0, True, False)


class User(nn.Module):
    """Reference core with optional features. Keyword arguments become the attributes that declare them."""

    def __init__(
        self, by: float = 0.0, cap: float = 0.0, slopes: bool = False, sees: int = 0, **more: Any
    ) -> None:
        super().__init__()
        self._scale = by
        self._cap = cap
        self._slopes = slopes
        self._window = sees
        self._causal = more.pop("causal", True)
        self._drop = more.pop("drop", 0.0)
        self._sink = more.pop("sink", False)
        self._documents = more.pop("documents", True)
        for name, value in more.items():
            setattr(self, name, value)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:
        heads_first = getattr(self, "heads_first", False)
        if not heads_first:
            q = q.transpose(1, 2)
            k = k.transpose(1, 2)
            v = v.transpose(1, 2)
        tokens = q.size(2)
        queries_per_key = q.size(1) // k.size(1)
        k = k.repeat_interleave(queries_per_key, 1)
        v = v.repeat_interleave(queries_per_key, 1)

        scores = q @ k.transpose(-1, -2) * (self._scale or q.size(-1) ** -0.5)
        if self._cap:
            scores = self._cap * (scores / self._cap).tanh()
        position = torch.arange(tokens)
        if self._slopes:
            slopes = torch.tensor(getattr(self, "alibi_slopes", SLOPES))
            scores = scores - slopes[:, None, None] * (position[:, None] - position)

        visible = torch.ones(tokens, tokens, dtype=torch.bool)
        if self._causal:
            visible = visible.tril()
        if self._window:
            visible = visible.triu(1 - self._window)
        if documents_BT is not None and self._documents:
            same_document = documents_BT[:, :, None] == documents_BT[:, None]
            visible = (visible & same_document)[:, None]
        scores = scores.masked_fill(~visible, -1e9)

        if self._sink:
            scores = torch.cat((scores, torch.zeros_like(scores[..., :1])), -1)
        weights = scores.softmax(-1)[..., :tokens]
        out = F.dropout(weights, self._drop, self.training) @ v
        return out if heads_first else out.transpose(1, 2)


class Flat(User):
    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*inputs).flatten(2)


class Weighted(User):
    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(4))


class Chunked(AttentionCore):
    """Core with undeclared chunks."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:  # type: ignore[override]
        chunks_BT = (torch.arange(q.size(1)) // 5).expand(q.size(0), -1)
        if documents_BT is not None:
            chunks_BT = documents_BT * 100 + chunks_BT
        return super().forward(q, k, v, chunks_BT)


KEPT: dict[str, tuple[nn.Module, CoreCall]] = {
    "plain": (User(), GIVEN),
    "scale": (User(0.2, scale=0.2), GIVEN),
    "soft cap": (User(cap=50.0, softcap=50.0), GIVEN),
    "slopes": (User(slopes=True, alibi_slopes=SLOPES), GIVEN),
    "short window": (AttentionCore(5), GIVEN),
    "long window": (AttentionCore(40), GIVEN),
    "all": (AttentionCore(7, 0.3, 4.0, SLOPES), GIVEN),
    "heads first": (User(heads_first=True), HEADS_FIRST),
    "chunks": (AttentionCore(chunk=5), GIVEN),
    "chunks, a window and all other features": (AttentionCore(4, 0.3, 4.0, SLOPES, chunk=6), GIVEN),
    "sinks": (SinkAttentionCore(), GIVEN),
    "sinks and a window": (SinkAttentionCore(5), GIVEN),
    "sinks and a soft cap": (SinkAttentionCore(0, 0.3, 4.0), GIVEN),
}
BROKEN: dict[str, tuple[nn.Module, CoreCall, str]] = {
    "scale": (User(0.2), GIVEN, "scales q k by 0.2 instead of 0.3536"),
    "other scale": (User(0.2, scale=0.3), GIVEN, "scales q k by 0.2 instead of 0.3"),
    "soft cap": (User(cap=50.0), GIVEN, "limits its scores"),
    "slopes": (User(slopes=True), GIVEN, "alibi_slopes is not set"),
    "too few slopes": (
        User(slopes=True, alibi_slopes=SLOPES[:2]),
        GIVEN,
        "has 2 alibi_slopes for 4 query heads",
    ),
    "short window": (
        User(sees=5),
        GIVEN,
        "lets a token attend to 5 tokens, but its attribute window is 0",
    ),
    "long window": (User(sees=40), GIVEN, "lets a token attend to 40 tokens"),
    "later tokens": (User(causal=False), GIVEN, "lets tokens attend to later tokens"),
    "dropout": (User(drop=0.1), GIVEN, "different values in each call, as with dropout"),
    "sink": (User(sink=True), GIVEN, "weights that do not sum to one, as with an attention sink"),
    "chunks": (Chunked(), GIVEN, "attend to its chunk of 5 tokens, but its attribute chunk is 0"),
    "documents": (User(documents=False), GIVEN, "lets tokens attend to other documents"),
    "another shape": (Flat(), GIVEN, r"returns (B, T, N H) for queries (B, T, N, H)"),
    "weights": (Weighted(), GIVEN, "contains parameters"),
    "heads first": (User(), HEADS_FIRST, "receives (B, N, T, H), with heads before tokens"),
    "a mask": (User(), CoreCall(GIVEN.shapes, 0, False, True), "such as a mask or a bias"),
    "more": (User(), CoreCall(GIVEN.shapes, 1, True, False), "such as a mask or a bias"),
    "widths": (
        User(),
        CoreCall((*GIVEN.shapes[:2], (1, T, K, 6)), 0, True, False),
        "different widths [8, 8, 6]",
    ),
}


@pytest.mark.parametrize("name", KEPT)
def test_core_that_follows_its_attributes_is_accepted(name: str) -> None:
    module, call = KEPT[name]
    assert attention_core.broken_when_split(module, call, seq_len=64) is None
    assert attention_core.broken_when_heads_are_dealt(module, call) is None


@pytest.mark.parametrize("name", BROKEN)
def test_undeclared_feature_of_a_core_is_named(name: str) -> None:
    module, call, message = BROKEN[name]
    broken = attention_core.broken_when_split(module, call, seq_len=64)
    assert broken is not None, broken
    assert message in broken.rule, broken
    assert broken.fix, broken


class NanForSomeHeads(AttentionCore):
    """Returns NaN if it does not get all four heads, as an uninitialized buffer may."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:  # type: ignore[override]
        output = super().forward(q, k, v, documents_BT)
        return output if q.size(2) == 4 else output * float("nan")


def test_core_that_returns_nan_for_some_heads_cannot_be_split() -> None:
    broken = attention_core.broken_when_heads_are_dealt(NanForSomeHeads(), GIVEN)
    assert broken is not None
    assert "different values for half of its heads" in broken.rule


class NanForTheFirstToken(AttentionCore):
    """Lets tokens attend only to earlier ones, so the first row of the softmax is empty."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None = None
    ) -> Tensor:  # type: ignore[override]
        output = super().forward(q, k, v, documents_BT)
        output[:, 0] = float("nan")
        return output


def test_core_that_returns_nan_is_named_as_such() -> None:
    split = attention_core.broken_when_split(NanForTheFirstToken(), GIVEN, seq_len=64)
    assert split is not None
    assert "NaN or infinity" in split.rule

    dealt = attention_core.broken_when_heads_are_dealt(NanForTheFirstToken(), GIVEN)
    assert dealt is not None
    assert "NaN or infinity" in dealt.rule


def test_window_longer_than_the_rows_is_accepted() -> None:
    assert attention_core.broken_when_split(User(sees=40), GIVEN, seq_len=40) is None


def test_heads_that_differ_by_more_than_their_slopes_cannot_be_split() -> None:
    # slopes that depend on the number of heads, so they change for a part of the heads
    class FromCount(User):
        def forward(
            self, q: Tensor, k: Tensor, v: Tensor, documents_BT: Tensor | None = None
        ) -> Tensor:
            self.alibi_slopes = tuple(2.0 ** -(i + 1) / q.size(2) for i in range(q.size(2)))
            return super().forward(q, k, v, documents_BT)

    broken = attention_core.broken_when_heads_are_dealt(FromCount(slopes=True), GIVEN)
    assert broken is not None
    assert "different values for half of its heads" in broken.rule

    fixed = attention_core.broken_when_heads_are_dealt(User(slopes=True), GIVEN)
    assert fixed is not None
    assert "fails with half of its heads" in fixed.rule


def test_indivisible_key_heads_are_detected_by_shapes() -> None:
    broken = attention_core.broken_number_of_heads(User(), GIVEN, 4)
    assert broken is not None
    assert "2 key-value heads, which 4 ranks cannot divide" in broken.rule
    assert attention_core.broken_number_of_heads(User(), GIVEN, 2) is None
