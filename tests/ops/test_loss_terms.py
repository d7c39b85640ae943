"""Label smoothing and z-loss equal PyTorch in float64, with any chunks, split or compiled."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from tiny import tiny_config
from torch import Tensor
from torch.nn import functional as F

from shardtrain import distributed
from shardtrain.distributed.process_group import World
from shardtrain.distributed.tensor_parallel.split_vocabulary import SplitVocabulary
from shardtrain.ops import cross_entropy, split_cross_entropy
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.ops.linear_cross_entropy import linear_cross_entropy_sum
from shardtrain.ops.loss_terms import LossTerms
from shardtrain.ops.targets import IGNORE

WEIGHT = 0.5
TERMS = [LossTerms(0.1, 0.0), LossTerms(0.0, 1e-2), LossTerms(0.3, 1e-3)]


def example(vocab: int = 17) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits_BTV = torch.randn(2, 9, vocab, generator=generator) * 3
    targets_BT = torch.randint(0, vocab, (2, 9), generator=generator)
    targets_BT[0, :4] = IGNORE
    return logits_BTV, targets_BT


def of_pytorch(logits_BTV: Tensor, targets_BT: Tensor, terms: LossTerms) -> tuple[float, Tensor]:
    """Return the loss and the gradient in float64."""
    logits_BTV = logits_BTV.double().requires_grad_()
    kept_NV = logits_BTV[targets_BT != IGNORE]
    targets_N = targets_BT[targets_BT != IGNORE]
    loss = F.cross_entropy(
        kept_NV, targets_N, label_smoothing=terms.label_smoothing, reduction="sum"
    )
    loss = WEIGHT * (loss + terms.z_loss_weight * kept_NV.logsumexp(-1).square().sum())
    loss.backward()
    assert logits_BTV.grad is not None
    return loss.item(), logits_BTV.grad


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("chunk_numel", [1, 40, 1 << 24])
def test_loss_and_gradient_match_pytorch(
    terms: LossTerms, chunk_numel: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_NUMEL", chunk_numel)
    logits_BTV, targets_BT = example()
    expected, expected_gradient_BTV = of_pytorch(logits_BTV, targets_BT, terms)
    logits_BTV.requires_grad_()
    loss = cross_entropy_sum(logits_BTV, targets_BT, WEIGHT, chunk=terms.chunk_loss)
    loss.backward()

    # float32 against float64; gradients are at most 1
    assert loss.item() == pytest.approx(expected, rel=2e-6)
    assert logits_BTV.grad is not None
    torch.testing.assert_close(logits_BTV.grad.double(), expected_gradient_BTV, atol=2e-7, rtol=0)


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_the_head_computes_the_same_loss(terms: LossTerms) -> None:
    generator = torch.Generator().manual_seed(1)
    hidden_BTD = torch.randn(2, 9, 8, generator=generator)
    weight_VD = torch.randn(17, 8, generator=generator)
    _, targets_BT = example()
    expected, _ = of_pytorch(hidden_BTD @ weight_VD.t(), targets_BT, terms)
    loss = linear_cross_entropy_sum(
        hidden_BTD, weight_VD, targets_BT, torch.tensor(WEIGHT), terms.chunk_loss
    )

    assert loss.item() == pytest.approx(expected, rel=2e-6)  # float32 rounding


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_ignored_targets_have_no_loss_and_no_gradient(terms: LossTerms) -> None:
    logits_BTV, targets_BT = example()
    logits_BTV.requires_grad_()
    loss = cross_entropy_sum(
        logits_BTV, torch.full_like(targets_BT, IGNORE), WEIGHT, chunk=terms.chunk_loss
    )
    loss.backward()

    assert loss.item() == 0
    assert logits_BTV.grad is not None
    assert not logits_BTV.grad.any()


def _check_split(rank: int, num_ranks: int) -> None:
    mesh = distributed.build(
        tiny_config(parallelism={"tensor_parallel_degree": num_ranks}),
        World(rank, num_ranks, rank, torch.device("cpu")),
    )
    for vocab in (12, 17, 4):  # 4 columns on 3 ranks leave the last rank empty
        vocabulary = SplitVocabulary(mesh, vocab)
        columns = slice(vocabulary.offset, min(vocab, vocabulary.offset + -(-vocab // num_ranks)))
        for chunk_numel, kept_numel in ((12, 0), (31, 1 << 24), (1 << 24, 0)):
            cross_entropy.CPU_CHUNK_NUMEL = chunk_numel
            split_cross_entropy.MOST_KEPT_NUMEL = kept_numel
            for terms in TERMS:
                logits_BTV, targets_BT = example(vocab)
                expected, expected_gradient_BTV = of_pytorch(logits_BTV, targets_BT, terms)
                logits_BTv = logits_BTV[..., columns].clone().requires_grad_()
                loss = cross_entropy_sum(logits_BTv, targets_BT, WEIGHT, vocabulary, terms=terms)
                loss.backward()
                assert loss.item() == pytest.approx(expected, rel=2e-6)
                assert logits_BTv.grad is not None
                expected_gradient_BTv = expected_gradient_BTV[..., columns]
                torch.testing.assert_close(
                    logits_BTv.grad.double(), expected_gradient_BTv, atol=2e-7, rtol=0
                )


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_split_vocabulary_has_the_loss_and_gradient_of_the_full_one(num_ranks: int) -> None:
    run_ranks(num_ranks, _check_split, num_ranks)
