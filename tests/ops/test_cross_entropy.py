"""Cross-entropy: a sum over targets in float32 that matches a float64 reference, with any split or chunks."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import tiny_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardtrain import distributed
from shardtrain.distributed.process_group import World
from shardtrain.distributed.tensor_parallel.split_vocabulary import SplitVocabulary
from shardtrain.ops import cross_entropy, split_cross_entropy
from shardtrain.ops.cross_entropy import IGNORE, cross_entropy_sum

# the loss is summed in float32, to a relative 1e-6; gradients are rounded once to the dtype of the logits
GRADIENT_ATOL = {torch.float32: 1e-7, torch.bfloat16: 2**-9, torch.float16: 2**-12}


def example(
    dtype=torch.float32, batch: int = 2, tokens: int = 9, vocab: int = 17, ignored: bool = True
):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(batch, tokens, vocab, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, vocab, (batch, tokens), generator=generator)
    if ignored:
        targets[0, :4] = IGNORE
        targets[1, -1] = IGNORE
    return logits, targets


def float64_reference(logits: Tensor, targets: Tensor, weight: float = 1.0) -> tuple[float, Tensor]:
    """Return the loss sum and its gradient by the definition, token by token."""
    logits = logits.double()
    total = 0.0
    gradient = torch.zeros_like(logits)
    for place in torch.cartesian_prod(*(torch.arange(size) for size in targets.shape)).tolist():
        row = logits[tuple(place)]
        target = int(targets[tuple(place)])
        if target == IGNORE:
            continue
        exponentials = (row - row.max()).exp()
        probabilities = exponentials / exponentials.sum()
        total -= probabilities[target].log().item()
        probabilities[target] -= 1
        gradient[tuple(place)] = probabilities
    return total * weight, gradient * weight


def value_and_gradient(logits: Tensor, targets: Tensor, *args, **keywords) -> tuple[Tensor, Tensor]:
    logits = logits.clone().requires_grad_()
    loss = cross_entropy_sum(logits, targets, *args, **keywords)
    loss.backward()
    return loss.detach(), logits.grad


@pytest.mark.parametrize("dtype", GRADIENT_ATOL)
@pytest.mark.parametrize("chunk_numel", [1, 17, 40, 17 * 6, 17 * 18, 1 << 24])
def test_loss_and_gradient_match_the_float64_reference(
    dtype, chunk_numel: int, monkeypatch
) -> None:
    # from one token per chunk to all tokens, also uneven
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMEL", chunk_numel)
    logits, targets = example(dtype)
    loss, gradient = value_and_gradient(logits, targets)
    expected, expected_gradient = float64_reference(logits, targets)

    assert loss.dtype == torch.float32
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    assert gradient.dtype == dtype
    torch.testing.assert_close(
        gradient.double(), expected_gradient, atol=GRADIENT_ATOL[dtype], rtol=2**-8
    )


def test_loss_matches_pytorch() -> None:
    logits, targets = example()
    reference = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )
    # float32 rounding of a sum in chunks
    torch.testing.assert_close(cross_entropy_sum(logits, targets), reference, rtol=1e-6, atol=0)


REAL_VOCABULARIES = cases([262_144], nightly=[32_000, 128_256])


def almost_uniform(vocab: int) -> tuple[Tensor, Tensor]:
    """Return logits whose exponentials all round in the same direction, and targets.

    At 262,144 columns the loss of ``log_softmax`` on a CPU has a relative error of 9e-6 for these logits.
    """
    logits = torch.zeros(1, 2, vocab)
    logits[..., 5] = 0.3
    return logits, torch.tensor([[5, vocab - 1]])


def assert_accurate(
    loss: Tensor, gradient: Tensor, expected: float, expected_gradient: Tensor
) -> None:
    """Compare with float64, to a relative 1e-6 for the loss and for each number of the gradient."""
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-6, atol=0)


@pytest.mark.parametrize("vocab", REAL_VOCABULARIES)
def test_a_real_vocabulary_matches_the_float64_reference(vocab: int) -> None:
    logits, targets = almost_uniform(vocab)
    loss, gradient = value_and_gradient(logits, targets)
    assert_accurate(loss, gradient, *float64_reference(logits, targets))


def _check_real_split(rank: int, vocab: int) -> None:
    config = tiny_config(parallelism={"tensor_parallel_degree": 2})
    mesh = distributed.build(config, World(rank, 2, rank, torch.device("cpu")))
    vocabulary = SplitVocabulary(mesh, vocab)
    columns = slice(vocabulary.offset, vocabulary.offset + vocab // 2)
    logits, targets = almost_uniform(vocab)
    expected, expected_gradient = float64_reference(logits, targets)
    loss, gradient = value_and_gradient(logits[..., columns], targets, vocabulary=vocabulary)
    assert_accurate(loss, gradient, expected, expected_gradient[..., columns])


@pytest.mark.parametrize("vocab", REAL_VOCABULARIES)
def test_a_real_vocabulary_that_is_split_matches_the_float64_reference(vocab: int) -> None:
    run_ranks(2, _check_real_split, vocab)


def test_ignored_targets_have_no_loss_and_no_gradient() -> None:
    logits, targets = example()
    loss, gradient = value_and_gradient(logits, targets)
    gradient_of_ignored = gradient[targets == IGNORE]
    assert torch.equal(gradient_of_ignored, torch.zeros_like(gradient_of_ignored))

    # The loss is that of a row without the ignored tokens, up to the order of float32 sums.
    is_target = targets != IGNORE
    expected, _ = value_and_gradient(logits[is_target][None], targets[is_target][None])
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_batch_of_only_ignored_targets_is_zero_and_not_nan(scale: float) -> None:
    logits, targets = example(torch.bfloat16)
    loss, gradient = value_and_gradient(logits * scale, torch.full_like(targets, IGNORE), 1.0)
    assert loss.item() == 0.0
    assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("weight", [0.25, torch.tensor(1 / 4096), 65536.0 / 4096])
def test_weight_scales_loss_and_gradient(weight) -> None:
    logits, targets = example()
    loss, gradient = value_and_gradient(logits, targets, weight)
    expected, expected_gradient = float64_reference(logits, targets, float(weight))

    # float32 against float64; gradients are at most as large as the weight
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    atol = 1e-6 * float(weight)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=1e-5, atol=atol)


def test_gradient_is_weighted_before_rounding() -> None:
    """In float16, a gradient of 1e-6 survives if it is multiplied by the loss scale before rounding."""
    # probabilities are 1.7e-5, imprecise in float16
    logits = torch.zeros(1, 1, 60_000, dtype=torch.float16)
    targets = torch.zeros(1, 1, dtype=torch.int64)
    _, gradient = value_and_gradient(logits, targets, 65536.0 / 2)
    assert gradient[0, 0, 1].item() == pytest.approx(32768 / 60_000, rel=2**-11)


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.tensor([[[3e38, -3e38, 0.0]]])
    loss, gradient = value_and_gradient(logits, torch.tensor([[0]]))
    assert loss.item() == 0.0
    assert torch.isfinite(gradient).all()


def test_target_outside_the_vocabulary_is_an_error() -> None:
    logits, targets = example(ignored=False)
    targets[0, 0] = logits.size(-1)
    with pytest.raises((RuntimeError, IndexError)):
        cross_entropy_sum(logits, targets)


def test_nothing_is_saved_without_gradients() -> None:
    logits, targets = example()
    with torch.no_grad():
        loss = cross_entropy_sum(logits, targets)
    expected, _ = float64_reference(logits, targets)

    assert not loss.requires_grad
    assert loss.item() == pytest.approx(expected, rel=1e-6)


def test_second_backward_is_an_error() -> None:
    logits, targets = example()
    loss = cross_entropy_sum(logits.requires_grad_(), targets, 0.5)
    loss.backward(torch.tensor(3.0), retain_graph=True)
    with pytest.raises(RuntimeError, match=r"in-?place"):
        loss.backward()


def test_custom_chunk_function_is_used() -> None:
    logits, targets = example()
    chunk_sizes = []

    def chunk(logits_nV: Tensor, targets_n: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        chunk_sizes.append(targets_n.numel())
        return torch.ones(()), torch.full(logits_nV.shape, 2.0) * weight

    loss, gradient = value_and_gradient(logits, targets, 0.5, chunk=chunk)

    assert chunk_sizes == [18]
    assert loss.item() == 0.5
    assert torch.equal(gradient, torch.ones_like(logits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_loss_matches_eager(dtype: torch.dtype) -> None:
    logits = (example()[0] * 5).to(dtype)
    targets = example()[1]
    assert (targets == IGNORE).any()

    logits_NV = logits.flatten(0, -2)
    targets_N = targets.flatten()
    weight = torch.tensor(0.3)
    loss, gradient_NV = cross_entropy.chunk_loss(logits_NV, targets_N, weight)
    other_loss, other_NV = cross_entropy.chunk_loss_without_scatter(logits_NV, targets_N, weight)

    assert other_NV.dtype == dtype
    # The sums of exponentials round differently, which may change the last digit of a gradient
    torch.testing.assert_close(other_loss, loss, rtol=1e-6, atol=0)

    rtol = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(other_NV, gradient_NV.to(dtype), rtol=rtol, atol=1e-7)


class LargestFloat32(TorchDispatchMode):
    """Record the size of the largest float32 result of any operation."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_float32_copy_of_all_logits_exists(monkeypatch) -> None:
    monkeypatch.setattr(cross_entropy, "CPU_CHUNK_NUMEL", 17 * 3)
    logits, targets = example(torch.bfloat16, tokens=30)
    kept_bytes = []
    with (
        LargestFloat32() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda t: kept_bytes.append(t) or t, lambda t: t),
    ):
        cross_entropy_sum(logits.requires_grad_(), targets).backward()

    assert 0 < largest.numel <= 17 * 3
    assert [(tensor.dtype, tensor.numel()) for tensor in kept_bytes] == [
        (torch.bfloat16, logits.numel())
    ]


class CountCollectives(TorchDispatchMode):
    """Count collectives."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace == "c10d"
        return func(*args, **(kwargs or {}))


def _count_collectives(rank: int) -> list[int]:
    config = tiny_config(parallelism={"tensor_parallel_degree": 2})
    vocabulary = SplitVocabulary(
        distributed.build(config, World(rank, 2, rank, torch.device("cpu"))), 16
    )
    cross_entropy.CPU_CHUNK_NUMEL = 8 * 2
    counts = []
    for tokens in (1, 50):
        logits, targets = example(vocab=16, tokens=tokens, ignored=False)
        with CountCollectives() as collectives:
            value_and_gradient(logits[..., 8 * rank : 8 * rank + 8], targets, vocabulary=vocabulary)
        counts.append(collectives.count)
    return counts


def test_split_loss_takes_one_collective_for_any_number_of_chunks() -> None:
    assert run_ranks(2, _count_collectives) == [[1, 1]] * 2


def _check_split(rank: int, num_ranks: int) -> None:
    config = tiny_config(parallelism={"tensor_parallel_degree": num_ranks})
    mesh = distributed.build(config, World(rank, num_ranks, rank, torch.device("cpu")))
    for vocab in (12, 7, 17, 3, 4):  # 4 columns on 3 ranks leave the last rank empty
        vocabulary = SplitVocabulary(mesh, vocab)
        columns = slice(vocabulary.offset, min(vocab, vocabulary.offset + -(-vocab // num_ranks)))
        # ranks with fewer columns process more tokens per chunk; exponentials are saved for backward, or recomputed
        for chunk_numel, kept_numel in ((12, 0), (31, 1 << 24), (1 << 24, 0)):
            cross_entropy.CPU_CHUNK_NUMEL = chunk_numel
            split_cross_entropy.MOST_KEPT_NUMEL = kept_numel
            for dtype, atol in GRADIENT_ATOL.items():
                logits, targets = example(dtype, vocab=vocab)
                expected, expected_gradient = float64_reference(logits, targets, 0.5)
                loss, gradient = value_and_gradient(
                    logits[..., columns], targets, 0.5, vocabulary=vocabulary
                )
                assert loss.item() == pytest.approx(expected, rel=2e-6)
                torch.testing.assert_close(
                    gradient.double(), expected_gradient[..., columns], atol=atol, rtol=2**-8
                )
            nothing = torch.full_like(targets, IGNORE)
            loss, gradient = value_and_gradient(
                logits[..., columns], nothing, vocabulary=vocabulary
            )
            assert loss.item() == 0.0
            assert not gradient.any()


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_split_vocabulary_has_the_loss_and_gradient_of_the_full_one(num_ranks: int) -> None:
    run_ranks(num_ranks, _check_split, num_ranks)
