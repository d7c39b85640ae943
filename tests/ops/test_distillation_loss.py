"""The distillation loss and its gradient match float64 formulas, for full and split vocabularies."""

from __future__ import annotations

import math

import pytest
import torch
from ranks import run_ranks
from torch import Tensor

from shardtrain.distributed import mesh as meshes
from shardtrain.distributed.tensor_parallel.split_vocabulary import SplitVocabulary
from shardtrain.ops.distillation_loss import Mix, distillation_sum
from shardtrain.ops.targets import IGNORE

MIXES = {
    "forward_kl": Mix(0.5, 1.0, "forward_kl", 0.5),
    "forward_kl, warm": Mix(0.9, 2.5, "forward_kl", 0.5),
    "reverse_kl": Mix(0.3, 1.0, "reverse_kl", 0.5),
    "reverse_kl, cold, without cross-entropy": Mix(1.0, 0.7, "reverse_kl", 0.5),
    "jsd": Mix(0.5, 1.0, "jsd", 0.5),
    "jsd, warm, uneven": Mix(0.6, 3.0, "jsd", 0.1),
}


def batch(columns: int = 24, teacher_columns: int = 24) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits of student and teacher, and targets (2, 7), some of which are ignored."""
    generator = torch.Generator().manual_seed(0)
    logits_BTV = 3 * torch.randn(2, 7, columns, generator=generator)
    teacher_BTV = 3 * torch.randn(2, 7, teacher_columns, generator=generator)
    targets_BT = torch.randint(0, min(columns, teacher_columns), (2, 7), generator=generator)
    targets_BT[0, 2:4] = targets_BT[1, -1] = IGNORE
    return logits_BTV, teacher_BTV, targets_BT


def kl(a_V: Tensor, b_V: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of two distributions."""
    return (a_V * (a_V / b_V).log()).sum()


def by_formula(
    logits_BTV: Tensor, teacher_BTV: Tensor, targets_BT: Tensor, mix: Mix
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the total loss, the cross-entropy and the divergence in float64, by their formulas."""
    loss = divergence = torch.zeros((), dtype=torch.float64)
    shared_columns = min(logits_BTV.size(-1), teacher_BTV.size(-1))
    students = logits_BTV.flatten(0, 1)
    teachers = teacher_BTV.flatten(0, 1)
    for s_V, t_V, target in zip(students, teachers, targets_BT.flatten(), strict=True):
        if target == IGNORE:
            continue
        loss = loss - s_V.softmax(0)[target].log()
        # The probabilities of student and teacher, over the columns that both have.
        q_V = (s_V[:shared_columns] / mix.temperature).softmax(0)
        p_V = (t_V[:shared_columns] / mix.temperature).softmax(0)
        if mix.divergence == "forward_kl":
            divergence = divergence + kl(p_V, q_V)
        elif mix.divergence == "reverse_kl":
            divergence = divergence + kl(q_V, p_V)
        else:
            m_V = mix.jsd_beta * p_V + (1 - mix.jsd_beta) * q_V
            jsd = mix.jsd_beta * kl(p_V, m_V) + (1 - mix.jsd_beta) * kl(q_V, m_V)
            divergence = divergence + jsd
    total = (1 - mix.ratio) * loss + mix.ratio * mix.temperature**2 * divergence
    return total, loss.detach(), divergence.detach()


def assert_by_formula(mix: Mix, columns: int, teacher_columns: int, weight: float = 0.125) -> None:
    logits_BTV, teacher_BTV, targets_BT = batch(columns, teacher_columns)
    leaf_BTV = logits_BTV.clone().requires_grad_()
    total, sums_2 = distillation_sum(leaf_BTV, teacher_BTV, targets_BT, mix, weight)
    total.backward()
    exact_BTV = logits_BTV.double().requires_grad_()
    expected, loss, divergence = by_formula(exact_BTV, teacher_BTV.double(), targets_BT, mix)
    (weight * expected).backward()

    # The loss of a token is computed in float32, with terms up to 10.
    torch.testing.assert_close(total.double(), (weight * expected).detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(sums_2, torch.stack((loss, divergence)), rtol=2e-6, atol=1e-6)
    torch.testing.assert_close(leaf_BTV.grad.double(), exact_BTV.grad, rtol=0, atol=1e-6)
    assert not leaf_BTV.grad[targets_BT == IGNORE].any(), "ignored targets must have no gradient"


@pytest.mark.parametrize("name", MIXES)
def test_loss_and_gradient_match_the_formulas(name: str) -> None:
    assert_by_formula(MIXES[name], 24, 24)


@pytest.mark.parametrize("columns", [(24, 30), (30, 24)])
def test_vocabulary_rows_missing_in_one_model_are_excluded(columns: tuple[int, int]) -> None:
    for mix in MIXES.values():
        assert_by_formula(mix, *columns)


def test_identical_teacher_has_no_divergence() -> None:
    logits_BTV, _, targets_BT = batch()
    for name in ("forward_kl", "reverse_kl", "jsd"):
        leaf_BTV = logits_BTV.clone().requires_grad_()
        total, _ = distillation_sum(leaf_BTV, logits_BTV, targets_BT, Mix(1.0, 2.0, name, 0.3))
        total.backward()

        # rounding of float32 probabilities, summed over 14 tokens
        assert abs(total.item()) < 1e-5
        assert float(leaf_BTV.grad.abs().max()) < 1e-6


def test_tokens_with_teacher_probability_0_keep_the_loss_finite() -> None:
    logits_BTV, teacher_BTV, targets_BT = batch()
    teacher_BTV[..., 20:] = -math.inf
    for name in ("forward_kl", "jsd"):
        leaf_BTV = logits_BTV.clone().requires_grad_()
        total, _ = distillation_sum(leaf_BTV, teacher_BTV, targets_BT, Mix(0.5, 1.0, name, 0.3))
        total.backward()
        assert math.isfinite(total.item())
        assert bool(leaf_BTV.grad.isfinite().all())


def test_chunks_change_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    mix = MIXES["jsd, warm, uneven"]
    logits_BTV, teacher_BTV, targets_BT = batch()
    expected, sums_2 = distillation_sum(logits_BTV, teacher_BTV, targets_BT, mix)
    monkeypatch.setattr("shardtrain.ops.distillation_loss.CHUNK_NUMEL", 24 * 3)
    parts, chunked_2 = distillation_sum(logits_BTV, teacher_BTV, targets_BT, mix)

    # float32 sums in a different order
    torch.testing.assert_close(parts, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(chunked_2, sums_2, rtol=1e-6, atol=0)


def split(rank: int) -> list[tuple[float, Tensor, Tensor]]:
    """Compute the loss of each mix from this rank's columns. Two ranks split 25 columns unevenly."""
    from shardtrain.config.schema import Config, Parallelism
    from shardtrain.distributed.process_group import World

    config = Config(parallelism=Parallelism(tensor_parallel_degree=2))
    mesh = meshes.build(config, World(rank, 2, rank, torch.device("cpu")))
    results = []
    vocabulary = SplitVocabulary(mesh, 25)
    for mix in MIXES.values():
        logits_BTV, teacher_BTV, targets_BT = batch(25, 25)
        columns_of_rank = slice(vocabulary.offset, vocabulary.offset + vocabulary.columns)
        leaf_BTv = logits_BTV[..., columns_of_rank].clone().requires_grad_()
        loss, sums_2 = distillation_sum(
            leaf_BTv, teacher_BTV[..., columns_of_rank], targets_BT, mix, 0.125, vocabulary
        )
        loss.backward()
        results.append((float(loss), sums_2, leaf_BTv.grad))
    return results


def test_split_columns_change_no_number() -> None:
    ranks = run_ranks(2, split)
    for mix, *parts in zip(MIXES.values(), *ranks, strict=True):
        logits_BTV, teacher_BTV, targets_BT = batch(25, 25)
        logits_BTV.requires_grad_()
        expected, sums_2 = distillation_sum(logits_BTV, teacher_BTV, targets_BT, mix, 0.125)
        expected.backward()

        # float32 sums of two parts
        for loss, sums, _ in parts:
            assert loss == pytest.approx(float(expected), rel=2e-6)
            torch.testing.assert_close(sums, sums_2, rtol=2e-6, atol=1e-6)

        gradient_BTV = torch.cat([gradient for _, _, gradient in parts], -1)
        torch.testing.assert_close(gradient_BTV, logits_BTV.grad, rtol=0, atol=1e-6)
