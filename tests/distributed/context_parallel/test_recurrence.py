"""A recurrence whose tokens are split over ranks equals the recurrence of the full sequence, in float64.

The gradients pass through the states and the convolution that ranks exchange.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiers import cases
from torch import Tensor, nn

from shardtrain.distributed.context_parallel.cores import _require_methods
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.context_parallel.recurrence import SplitRecurrenceCore
from shardtrain.layout import Layout
from shardtrain.models.qwen3_next import GatedDeltaCore
from shardtrain.tools.generate.cache import installed
from shardtrain.utils.errors import ConfigError

ROWS = 2
KEY_HEADS = 2
HEADS = 4
KEY_DIM = 5
VALUE_DIM = 3
WIDTH = 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
# tokens and the first token of each document; the second row has its borders one token later
CASES: dict[str, tuple[int, list[int] | None]] = {
    "one document": (40, None),
    "documents end at the borders of ranks": (40, [10, 20, 30]),
    "documents across the borders": (40, [3, 17, 33]),
    "one-token documents": (40, [9, 10, 11, 12, 20, 21]),
    "fewer tokens per chunk than the convolution looks back": (8, [5]),
    "one token per chunk": (4, None),
    "several blocks of tokens per chunk": (560, [200]),
}


def tensors(tokens: int) -> list[Tensor]:
    """Return the inputs, the filters, and weights of the outputs."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    decay = -random(ROWS, tokens, HEADS).abs() * torch.linspace(0.01, 2.0, HEADS)
    inputs = [random(ROWS, tokens, CHANNELS), decay, random(ROWS, tokens, HEADS).sigmoid()]
    return [*inputs, random(CHANNELS, 1, WIDTH), random(ROWS, tokens, HEADS, VALUE_DIM)]


def documents_of(tokens: int, starts: list[int] | None) -> Tensor | None:
    if starts is None:
        return None
    is_start = torch.zeros(ROWS, tokens, dtype=torch.long)
    for row in range(ROWS):
        for start in starts:
            is_start[row, min(start + row, tokens - 1)] = 1
    return is_start.cumsum(1)


def outputs_and_gradients(core, values: list[Tensor], documents: Tensor | None) -> list[Tensor]:
    *leaves, weights = values
    leaves = [x.contiguous().requires_grad_() for x in leaves]
    out = core(tuple(leaves[:3]), (leaves[3],), documents)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


def split(rank: int, names: list[str], balanced: bool) -> dict[str, list[Tensor]]:
    """Return the outputs and gradients of this rank's tokens; the gradient of the filters is summed over ranks."""
    core = SplitRecurrenceCore(GatedDeltaCore(KEY_DIM, VALUE_DIM), dist.group.WORLD, balanced)
    results = {}
    for name in names:
        tokens, starts = CASES[name]
        *inputs, filters, weights = tensors(tokens)
        size = dist.get_world_size()
        parts = [sequence_part(x, rank, size, balanced) for x in (*inputs, weights)]
        result = outputs_and_gradients(
            core, [*parts[:3], filters, parts[3]], documents_of(tokens, starts)
        )
        dist.all_reduce(result[-1])
        results[name] = result
    return results


@pytest.mark.parametrize(
    ("num_ranks", "balanced"),
    cases([(2, True), (4, False)], nightly=[(2, False), (1, True), (4, True)]),
)
def test_split_recurrence_equals_the_full_one(num_ranks: int, balanced: bool) -> None:
    parts = num_ranks * (2 if balanced else 1)
    names = [name for name, (tokens, _) in CASES.items() if tokens % parts == 0]
    assert len(names) >= 5

    for rank, results in enumerate(run_ranks(num_ranks, split, names, balanced)):
        for name in names:
            tokens, starts = CASES[name]
            core = GatedDeltaCore(KEY_DIM, VALUE_DIM)
            *full, filters = outputs_and_gradients(
                core, tensors(tokens), documents_of(tokens, starts)
            )
            expected_of_rank = [sequence_part(x, rank, num_ranks, balanced) for x in full]
            expected_of_rank.append(filters)
            for actual, expected in zip(results[name], expected_of_rank, strict=True):
                error = (actual - expected).norm()
                # float64 rounding of sums over all tokens; 1e-13 is for gradients that are zero
                assert error <= 1e-12 * expected.norm() + 1e-13, (
                    f"{name}, rank {rank}: off by {error:.1e}"
                )


def test_a_core_without_the_methods_is_rejected() -> None:
    class Sizes:
        def size(self, axis: str) -> int:
            return 2

    with pytest.raises(ConfigError, match="requires the method look_back of layers.0.core"):
        _require_methods("layers.0.core", nn.Identity(), Sizes())

    model = nn.ModuleDict({"core": nn.Identity()})
    layout = Layout(first=(), layers="layers", last=(), recurrence="core")
    with pytest.raises(ConfigError, match="has no method look_back"), installed(model, layout):
        pass
