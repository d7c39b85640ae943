"""The fused head and loss match separate ones on every mesh, and full logits never exist."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import Result, reference, tiny_config, train_steps
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardtrain.distributed import loss_at_head, runner
from shardtrain.ops import cross_entropy, linear_cross_entropy
from shardtrain.ops.cross_entropy import IGNORE, cross_entropy_sum
from shardtrain.ops.linear_cross_entropy import linear_cross_entropy_sum, saved_bytes

TOKENS = 30
DIM = 24
VOCABULARY = 50


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_NUMEL", 1)  # an eighth of the tokens per chunk


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, TOKENS // 2, DIM, generator=generator).to(dtype)
    head = torch.randn(VOCABULARY, DIM, generator=generator).mul(DIM**-0.5).to(dtype)
    targets = torch.randint(0, VOCABULARY, (2, TOKENS // 2), generator=generator)
    targets[0, :4] = IGNORE
    return hidden, head, targets


def computed(
    hidden: Tensor, head: Tensor, targets: Tensor, together: bool, weight: float = 0.25
) -> list[Tensor]:
    hidden = hidden.clone().requires_grad_()
    head = head.clone().requires_grad_()
    factor = torch.tensor(weight)
    if together:
        loss = linear_cross_entropy_sum(hidden, head, targets, factor)
    else:
        loss = cross_entropy_sum(hidden @ head.t(), targets, factor)
    loss.backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return [loss.detach(), hidden.grad, head.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_against_float64_is_that_of_separate_head_and_loss(dtype: torch.dtype) -> None:
    hidden, head, targets = drawn(dtype)
    exact_hidden = hidden.double().requires_grad_()
    exact_head = head.double().requires_grad_()
    logits = (exact_hidden @ exact_head.t()).flatten(0, 1)
    loss_sum = torch.nn.functional.cross_entropy(
        logits, targets.flatten(), ignore_index=IGNORE, reduction="sum"
    )
    exact_loss = loss_sum / 4
    exact_loss.backward()
    exact = [exact_loss.detach(), exact_hidden.grad, exact_head.grad]

    ours = computed(hidden, head, targets, together=True)
    usual = computed(hidden, head, targets, together=False)
    for fused, separate, expected in zip(ours, usual, exact, strict=True):
        assert expected is not None
        assert fused.dtype == separate.dtype
        error = float((fused.double() - expected).norm())
        usual_error = float((separate.double() - expected).norm())
        # the product of each chunk is rounded once, and the sum once more
        last_rounding = torch.finfo(dtype).eps * float(expected.norm())
        assert error <= 1.5 * usual_error + last_rounding


def test_frozen_head_and_evaluation_compute_no_gradient_of_the_head() -> None:
    hidden, head, targets = drawn(torch.float32)
    hidden.requires_grad_()
    linear_cross_entropy_sum(hidden, head, targets, torch.ones(())).backward()

    assert head.grad is None
    assert hidden.grad is not None

    with torch.no_grad():
        one = linear_cross_entropy_sum(hidden, head, targets, torch.ones(()))
    torch.testing.assert_close(one, cross_entropy_sum(hidden @ head.t(), targets).detach())


class Largest(TorchDispatchMode):
    """Record the largest result of any operation, in rows of the vocabulary."""

    rows = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            is_weight = isinstance(tensor, Tensor) and DIM in tensor.shape
            if isinstance(tensor, Tensor) and tensor.shape[-1:] == (VOCABULARY,) and not is_weight:
                self.rows = max(self.rows, tensor.numel() // VOCABULARY)
        return result


def test_logits_of_more_than_one_chunk_never_exist() -> None:
    hidden, head, targets = drawn(torch.float32)
    with Largest() as largest:
        computed(hidden, head, targets, together=True)
    assert 0 < largest.rows <= -(-TOKENS // linear_cross_entropy.CHUNKS)


@pytest.mark.parametrize("tokens", [1, 4096, 8192])
@pytest.mark.parametrize("dim", [256, 4096])
@pytest.mark.parametrize("vocabulary", [2048, 128256])
def test_fusion_is_used_for_large_logits(
    tokens: int, dim: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    saved = saved_bytes(tokens, dim, vocabulary, 2)
    # with a large vocabulary, logits take more memory than the head if there are more tokens than dim
    assert (saved >= linear_cross_entropy.WORTH_IT_BYTES) == (vocabulary > 2048 and tokens > dim)


def at_head(rank: int, config: Any) -> tuple[Result, int]:
    """Train with the fused head and loss. Return the result and the number of fused losses."""
    calls = []
    compute = runner.linear_cross_entropy_sum

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return compute(*arguments)

    runner.linear_cross_entropy_sum = counted  # type: ignore[assignment]
    loss_at_head.WORTH_IT_BYTES = -(1 << 62)
    cross_entropy.CHUNK_NUMEL = 1
    return train_steps(rank, config, 4), len(calls)


MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp": {},
    "cp": {"context_parallel_degree": 2},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    },
}


@pytest.mark.parametrize("mesh", MESHES)
def test_fusion_changes_no_number_of_a_run(mesh: str) -> None:
    training = {"local_batch_size": 4 if mesh == "fsdp" else 8}
    config = tiny_config(parallelism=MESHES[mesh], training=training)
    expected = reference(4)
    num_ranks = 1 if mesh == "one" else 2

    for result, calls in run_ranks(num_ranks, at_head, config):
        # with tp, logits are split; with pp, they cross the end of a stage
        assert (calls > 0) == (mesh not in ("tp", "pp"))
        # float32 sums in a different order
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
        assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


def test_fusion_with_a_tied_head_changes_no_number() -> None:
    config = tiny_config(
        model={"overrides": {"tied_embeddings": True}}, training={"local_batch_size": 4}
    )
    tied = run_ranks(2, at_head, config)
    separate = run_ranks(2, train_steps, config, 4)

    for (result, calls), expected in zip(tied, separate, strict=True):
        assert calls
        # float32 sums in a different order
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
        assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
