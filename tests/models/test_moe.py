"""The mixture-of-experts block against plain loops, in float64 where results are exact."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shardtrain.models.moe import Experts, MoE, Routing, _grouped_swiglu, _looped_swiglu, product
from shardtrain.ops.cpu import expert_mix
from shardtrain.ops.row_order import Choice, Groups, inverse_of, permute, repeat_and_permute
from shardtrain.ops.targets import FILLER_DOCUMENT

DIM = 16
FFN = 12
EXPERTS = 8
ROUTINGS = {
    "softmax": Routing(EXPERTS, 2),
    "softmax, not normalized": Routing(EXPERTS, 3, route_norm=False),
    "top 1": Routing(EXPERTS, 1, route_norm=False),
    "all experts": Routing(EXPERTS, EXPERTS),
    "sigmoid": Routing(EXPERTS, 2, score_func="sigmoid", route_scale=2.5),
    "groups": Routing(EXPERTS, 3, score_func="sigmoid", num_groups=4, top_groups=2),
    "groups by their best expert": Routing(EXPERTS, 2, num_groups=4, top_groups=2, group_top_k=1),
    "weights first": Routing(EXPERTS, 2, score_before_experts=True),
    "biased choice": Routing(EXPERTS, 2, score_func="sigmoid", load_balance_coeff=1e-3),
}


def block(routing: Routing, shared: int = 0, dtype: torch.dtype = torch.float64) -> MoE:
    moe = MoE(DIM, FFN, routing, shared).to(dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in moe.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=dtype) * 0.4)
    return moe


def tokens(batch: int = 2, length: int = 11, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(2), dtype=dtype)


def plain(moe: MoE, x_BTD: Tensor) -> Tensor:
    """Reference: loop over tokens and experts, by the formulas in the papers."""
    r = moe.routing
    out = []
    for x_D in x_BTD.flatten(0, 1):
        # Score each expert. A bias changes only the choice, not the weights.
        logits_E = moe.router.gate.weight @ x_D
        scores_E = 1 / (1 + (-logits_E).exp())
        if r.score_func == "softmax":
            scores_E = logits_E.exp() / logits_E.exp().sum()
        choice_E = scores_E.detach()
        if moe.router.expert_bias is not None:
            choice_E = choice_E + moe.router.expert_bias

        # Choose the best groups, by the sum of their best experts, and then the best experts of these groups.
        size = r.num_experts // r.num_groups
        group_scores = []
        for choice_of_group in choice_E.split(size):
            best_of_group = sorted(choice_of_group.tolist())[-r.group_top_k :]
            group_scores.append(sum(best_of_group))
        best = sorted(range(r.num_groups), key=lambda g: -group_scores[g])[: r.top_groups]
        allowed = [e for e in range(r.num_experts) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -choice_E[e].item())[: r.top_k]

        # Add the weighted outputs of the chosen experts, and the shared expert.
        norm = sum(scores_E[e] for e in chosen) if r.route_norm else 1.0
        y_D = torch.zeros_like(x_D)
        for e in chosen:
            weight = scores_E[e] / norm * r.route_scale
            w1 = moe.experts.w1[e]
            w2 = moe.experts.w2[e]
            w3 = moe.experts.w3[e]
            if r.score_before_experts:
                input_D = x_D * weight
                y_D = y_D + w2 @ (F.silu(w1 @ input_D) * (w3 @ input_D))
            else:
                y_D = y_D + w2 @ (F.silu(w1 @ x_D) * (w3 @ x_D)) * weight
        if moe.shared is not None:
            y_D = y_D + moe.shared.w2(F.silu(moe.shared.w1(x_D)) * moe.shared.w3(x_D))
        out.append(y_D)
    return torch.stack(out).view_as(x_BTD)


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("shared", [0, 20])
@pytest.mark.parametrize("is_fused", [False, True])
def test_block_matches_a_loop_over_tokens_and_experts(
    name: str, shared: int, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The fused function is otherwise used only for many rows.
    monkeypatch.setattr(expert_mix, "_MANY_ROWS", 0 if is_fused else 64)
    moe = block(ROUTINGS[name], shared)
    moe.balance.loss_weight = torch.tensor(1.0)
    parameters = [*moe.parameters()]

    reference_input = tokens().requires_grad_()
    expected = plain(moe, reference_input)
    expected_gradients = torch.autograd.grad((expected**2).sum(), [reference_input, *parameters])

    x = tokens().requires_grad_()
    out = moe(x)
    gradients = torch.autograd.grad((out**2).sum(), [x, *parameters])

    torch.testing.assert_close(out, expected)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient)


SEVERAL_WAYS = {
    # Rows per expert (some zero, some equal), and whether experts are sorted by size.
    "unsorted": ([7, 0, 3, 3, 3, 0, 1, 15], False),
    "sorted": ([7, 0, 3, 3, 3, 0, 1, 15], True),
    "sorted already": ([0, 0, 2, 2, 2, 2, 9, 15], True),
    "one expert": ([0, 0, 0, 0, 32, 0, 0, 0], True),
    "all equal": ([4] * 8, True),
}


def choice_of(counts: list[int], top_k: int) -> Tensor:
    """Return an unsorted choice of experts (S, K) in which each occurs the given number of times."""
    expert_R = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    order_R = torch.randperm(len(expert_R), generator=torch.Generator().manual_seed(4))
    return expert_R[order_R].view(-1, top_k)


def mixed(
    dtype: torch.dtype,
    expert_SK: Tensor,
    mix: Callable[..., Tensor],
    sizes: tuple[int, int] = (DIM, FFN),
) -> list[Tensor]:
    """Return outputs of experts with random weights, and gradients of inputs and weights."""
    generator = torch.Generator().manual_seed(5)
    dim, ffn = sizes
    shapes = (
        (len(expert_SK), dim),
        expert_SK.shape,
        (EXPERTS, ffn, dim),
        (EXPERTS, dim, ffn),
        (EXPERTS, ffn, dim),
    )
    # These numbers are exact in 16 bits, so all dtypes start with equal numbers.
    base = [(torch.randn(shape, generator=generator) * 0.4).bfloat16() for shape in shapes]
    leaves = [tensor.to(dtype).requires_grad_() for tensor in base]
    out = mix(leaves[0], Choice(expert_SK, leaves[1]), *leaves[2:])
    start = torch.randn(out.shape, generator=generator).bfloat16().to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, start)]


def plain_mix(
    x_SD: Tensor, choice: Choice, w1_EFD: Tensor, w2_EDF: Tensor, w3_EFD: Tensor
) -> Tensor:
    """Reference: loop over the experts of each token."""
    sums = []
    for x_D, expert_K, weights_K in zip(x_SD, choice.expert_SK, choice.weights_SK, strict=True):
        w1 = w1_EFD[expert_K]
        w2 = w2_EDF[expert_K]
        w3 = w3_EFD[expert_K]
        hidden_KF = F.silu(w1 @ x_D) * (w3 @ x_D)
        sums.append(weights_K @ torch.einsum("kdf,kf->kd", w2, hidden_KF))
    return torch.stack(sums)


@pytest.mark.parametrize("name", SEVERAL_WAYS)
@pytest.mark.parametrize("roomy", [False, True])
@pytest.mark.parametrize("top_k", [1, 4])
def test_fused_experts_match_a_loop(name: str, roomy: bool, top_k: int) -> None:
    """Compare in float64, with experts sorted or not, with or without padding, and with unused experts."""
    counts, by_size = SEVERAL_WAYS[name]
    expert_SK = choice_of(counts, top_k)

    def mix(x_SD: Tensor, choice: Choice, *weights: Tensor) -> Tensor:
        places = expert_mix.Places(choice.expert_SK, EXPERTS, roomy, by_size)
        return expert_mix._Mix.apply(x_SD, choice.weights_SK, *weights, places)

    fused = mixed(torch.float64, expert_SK, mix)
    reference = mixed(torch.float64, expert_SK, plain_mix)

    for actual, expected in zip(fused, reference, strict=True):
        torch.testing.assert_close(actual, expected)


def test_every_row_has_a_place_and_sizes_are_few() -> None:
    counts = [0, 3, 250, 62, 61, 1000, 3, 17]
    expert_SK = choice_of(counts, 4)
    for by_size in (False, True):
        places = expert_mix.Places(expert_SK, EXPERTS, is_padded=True, by_size=by_size)
        size_of_expert = []
        for batch in places.batches:
            size_of_expert += [batch.size] * batch.experts
        sizes = torch.tensor(size_of_expert)
        order = places.order_E if by_size else torch.arange(EXPERTS)

        # Each size covers the rows of its expert. It is a multiple of a power of two, which is at most an
        # eighth of the mean: 16, or 8 if experts are sorted.
        assert bool((sizes >= torch.tensor(counts)[order]).all())
        assert bool((sizes % (8 if by_size else 16) == 0).all())
        assert places.num_places == int(sizes.sum())

        expected_sizes = [0, 16, 256, 64, 64, 1024, 16, 32]
        if by_size:
            expected_sizes = [24, 24, 24, 24, 64, 64, 256, 1024]
        assert sizes.tolist() == expected_sizes

        # Rows have distinct places within the range of their expert.
        starts = torch.empty(EXPERTS, dtype=torch.int64)
        stops = torch.empty(EXPERTS, dtype=torch.int64)
        starts[order] = sizes.cumsum(0) - sizes
        stops[order] = sizes.cumsum(0)
        expert_R = expert_SK.flatten()

        assert places.place_R.unique().numel() == sum(counts)
        assert bool((places.place_R >= starts[expert_R]).all())
        assert bool((places.place_R < stops[expert_R]).all())

        # Scatter tokens to the rows of their experts, and sum them back. Each token has 4 experts. Padding rows are
        # zero.
        x_SD = torch.arange(1.0, len(expert_SK) + 1).unsqueeze(1)
        rows_PD = places.rows_of(x_SD)
        assert torch.equal(rows_PD[places.place_R], x_SD.repeat_interleave(4, 0))
        assert torch.equal(rows_PD.sum(), 4 * x_SD.sum())
        assert torch.equal(places.sum_of(rows_PD), 4 * x_SD)


def test_batches_have_the_lowest_cost() -> None:
    """Compare with all ways to split sorted experts into batches. The cost is the rows plus a constant per batch."""
    counts = [0, 3, 3, 17, 61, 62, 70, 250, 1000]

    def cost(split: list[tuple[int, int]]) -> int:
        return sum(experts * size + expert_mix._CALL_ROWS for experts, size in split)

    def all_splits(remaining: list[int]) -> list[list[tuple[int, int]]]:
        if not remaining:
            return [[]]
        splits = []
        for num_experts in expert_mix._BATCH_SIZES:
            if num_experts <= len(remaining):
                batch = (num_experts, remaining[num_experts - 1])  # sorted: the last is the largest
                splits += [[batch, *rest] for rest in all_splits(remaining[num_experts:])]
        return splits

    split = expert_mix.batches(counts, 0)
    lowest = min(cost(candidate) for candidate in all_splits(counts))

    assert cost([(batch.experts, batch.size) for batch in split]) == lowest

    # Batches follow each other, without gaps between their experts and rows.
    next_expert = 0
    next_row = 0
    for batch in split:
        assert (batch.first, batch.start) == (next_expert, next_row)
        next_expert += batch.experts
        next_row += batch.experts * batch.size

    assert next_expert == len(counts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(64, 32), (256, 192)])
def test_fused_experts_are_as_accurate_in_16_bits(
    sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Compare errors against float64 with those of separate sorting, products, unsorting and summation.

    Errors of a few thousand numbers with random rounding to 2^-9 agree within a few percent.
    """
    generator = torch.Generator().manual_seed(6)
    expert_SK = torch.rand(256, EXPERTS, generator=generator).argsort(1)[:, :2]
    # Small experts are sorted by size, and large experts are not.
    assert (3 * sizes[0] * sizes[1] <= expert_mix.SMALL_EXPERT_NUMEL) == (sizes == (64, 32))

    def step_by_step(x_SD: Tensor, choice: Choice, *weights: Tensor) -> Tensor:
        moe = MoE(sizes[0], sizes[1], Routing(EXPERTS, 2))
        moe.experts.takes_tokens = lambda x_SD, top_k: False  # type: ignore[method-assign]
        moe.experts._parameters.clear()
        moe.experts.w1_bias = moe.experts.w2_bias = moe.experts.w3_bias = None
        moe.experts.w1, moe.experts.w2, moe.experts.w3 = weights  # type: ignore[assignment]
        return moe._mix(x_SD, choice.weights_SK, choice.expert_SK.flatten())

    exact = mixed(torch.float64, expert_SK, plain_mix, sizes)
    fused = mixed(dtype, expert_SK, expert_mix.mix, sizes)
    separate = mixed(dtype, expert_SK, step_by_step, sizes)

    def error(value: Tensor, exact_value: Tensor) -> float:
        return float((value.double() - exact_value).norm() / exact_value.norm())

    for exact_value, fused_value, separate_value in zip(exact, fused, separate, strict=True):
        fused_error = error(fused_value, exact_value)
        separate_error = error(separate_value, exact_value)
        assert fused_error <= 1.05 * separate_error
        assert separate_error < 0.01


@pytest.mark.parametrize("by_size", [False, True])
def test_frozen_weight_has_no_gradient_and_others_are_unchanged(by_size: bool) -> None:
    expert_SK = choice_of([7, 0, 3, 3, 3, 0, 1, 15], 4)
    places = expert_mix.Places(expert_SK, EXPERTS, is_padded=False, by_size=by_size)
    generator = torch.Generator().manual_seed(7)
    shapes = ((8, DIM), (8, 4), (EXPERTS, FFN, DIM), (EXPERTS, DIM, FFN), (EXPERTS, FFN, DIM))
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]

    def gradients(frozen: int | None) -> list[Tensor | None]:
        leaves = []
        for number, tensor in enumerate(tensors):
            leaves.append(tensor.clone().requires_grad_(number != frozen))
        expert_mix._Mix.apply(*leaves, places).square().sum().backward()
        return [leaf.grad for leaf in leaves]

    all_gradients = gradients(None)
    for frozen in range(len(tensors)):
        unfrozen_gradients = gradients(frozen)
        assert unfrozen_gradients[frozen] is None
        for number, gradient in enumerate(unfrozen_gradients):
            assert number == frozen or torch.equal(gradient, all_gradients[number])


def test_cases_that_the_fused_function_does_not_support_run_step_by_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Covers few rows, biases, another gate or product, score_before_experts, and dispatch to other ranks."""
    calls: list[int] = []
    mix = expert_mix.mix

    def counted_mix(*arguments: Any) -> Tensor:
        calls.append(1)
        return mix(*arguments)

    monkeypatch.setattr(expert_mix, "mix", counted_mix)
    x = tokens(dtype=torch.float32)

    def calls_of(moe: MoE) -> int:
        calls.clear()
        assert moe(x).shape == x.shape
        return len(calls)

    def of(**changes: object) -> MoE:
        moe = MoE(DIM, FFN, ROUTINGS["softmax"], **changes)  # type: ignore[arg-type]
        for parameter in moe.parameters():
            nn.init.normal_(parameter, std=0.1)
        return moe

    assert calls_of(of()) == 0

    monkeypatch.setattr(expert_mix, "_MANY_ROWS", 1)
    assert calls_of(of()) == 1
    assert calls_of(of(expert_bias=True)) == 0
    assert calls_of(of(gate=lambda gate_RF, up_RF: gate_RF * up_RF)) == 0
    assert calls_of(block(ROUTINGS["weights first"], dtype=torch.float32)) == 0

    changed = of()
    changed.experts.product = lambda *arguments: product(*arguments)
    assert calls_of(changed) == 0

    distant = of()
    distant.dispatch.is_local = False
    assert calls_of(distant) == 0


def test_tokens_are_independent() -> None:
    moe = block(ROUTINGS["groups"], 20)
    x = tokens()
    changed = x.clone()
    changed[1, 3] += 1.0

    torch.testing.assert_close(moe(changed)[0], moe(x)[0])
    assert not torch.equal(moe(changed)[1, 3], moe(x)[1, 3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmuls_match_a_loop_over_experts(dtype: torch.dtype) -> None:
    """Covers experts without rows. bfloat16 results differ by one rounding: 2^-8 for values of about 1."""
    if not hasattr(F, "grouped_mm"):
        pytest.skip("this PyTorch has no grouped matmul")
    generator = torch.Generator().manual_seed(3)
    count_E = torch.tensor([3, 0, 7, 1, 0, 0, 4, 1])
    shapes = ((16, DIM), (EXPERTS, 24, DIM), (EXPERTS, DIM, 24), (EXPERTS, 24, DIM))
    results = []
    base = [torch.randn(shape, generator=generator) * 0.4 for shape in shapes]
    for function in (_grouped_swiglu, _looped_swiglu):
        inputs = [tensor.to(dtype).requires_grad_() for tensor in base]
        out = function(inputs[0], count_E, *inputs[1:])
        gradients = torch.autograd.grad(out, inputs, torch.ones_like(out))
        results.append([out, *gradients])
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2

    for grouped, looped in zip(*results, strict=True):
        torch.testing.assert_close(grouped, looped, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [0, 5])
def test_experts_support_any_size(dtype: torch.dtype, rows: int) -> None:
    """Covers zero rows, and feed-forward sizes of 12, which bfloat16 grouped matmuls do not support."""
    moe = block(ROUTINGS["softmax"], dtype=dtype)
    count_E = torch.tensor([rows] + [0] * (EXPERTS - 1))
    out = moe.experts(torch.ones(rows, DIM, dtype=dtype, requires_grad=True), count_E)

    assert out.shape == (rows, DIM)

    out.square().sum().backward()
    assert all(parameter.grad is not None for parameter in moe.experts.parameters())


def test_router_computes_in_float32_for_any_input_dtype() -> None:
    moe = block(ROUTINGS["sigmoid"], dtype=torch.bfloat16)
    x = tokens(dtype=torch.bfloat16)
    logits, scores, _ = moe.router(x)

    assert logits.dtype == scores.dtype == torch.float32
    assert torch.equal(logits, x.float() @ moe.router.gate.weight.float().T)
    assert moe(x).dtype == torch.bfloat16


def test_bias_changes_the_choice_and_not_the_weights() -> None:
    moe = block(ROUTINGS["biased choice"])
    x = tokens()
    moe.router.expert_bias.zero_()
    moe.router.expert_bias[5] = 10.0
    logits, scores, chosen = moe.router(x)

    assert (chosen == 5).any(-1).all()

    weights = moe.router.weights(scores, chosen)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    picked = logits.sigmoid().gather(-1, chosen)
    torch.testing.assert_close(weights, picked / picked.sum(-1, keepdim=True))


def test_only_experts_of_the_best_groups_are_chosen_even_with_negative_biased_scores() -> None:
    moe = block(dataclasses.replace(ROUTINGS["groups"], load_balance_coeff=1e-3))
    x = tokens()
    moe.router.expert_bias.fill_(-5.0)
    _, _, chosen = moe.router(x)
    for experts in chosen.flatten(0, 1).tolist():
        groups = {expert // 2 for expert in experts}
        assert len(groups) <= 2


def test_forced_balance_assigns_experts_in_turn() -> None:
    moe = block(ROUTINGS["softmax"])
    moe.router.force_balance = True
    _, _, chosen = moe.router(tokens(2, 12))
    assert torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist() == [6] * EXPERTS
    assert moe(tokens(2, 12)).isfinite().all()


def expected_balance_loss(moe: MoE, x_BTD: Tensor) -> Tensor:
    """DeepSeek-V3 equations 17 to 20 per sequence, times its tokens, plus the z-loss of each token."""
    r = moe.routing
    total = torch.zeros((), dtype=x_BTD.dtype)
    for x_TD in x_BTD:
        logits_TE = x_TD @ moe.router.gate.weight.T
        scores_TE = logits_TE.softmax(-1) if r.score_func == "softmax" else logits_TE.sigmoid()
        T = x_TD.size(0)
        chosen_TK = scores_TE.topk(r.top_k).indices
        for i in range(r.num_experts):
            # f and P as in the paper: the load of an expert, and its mean normalized score
            f = r.num_experts / (r.top_k * T) * (chosen_TK == i).sum()
            P = (scores_TE[:, i] / scores_TE.sum(-1)).sum() / T
            total = total + T * r.balance_loss_coeff * f * P
        log_sums_T = logits_TE.exp().sum(-1).log()
        total = total + r.z_loss_coeff * log_sums_T.square().sum()
    return total


@pytest.mark.parametrize("score_func", ["softmax", "sigmoid"])
@pytest.mark.parametrize("coefficients", [(0.3, 0.0), (0.0, 0.2), (0.3, 0.2)])
def test_balance_losses_add_their_weighted_gradients(
    score_func: str, coefficients: tuple[float, float]
) -> None:
    balance, z = coefficients
    moe = block(
        Routing(EXPERTS, 2, score_func=score_func, balance_loss_coeff=balance, z_loss_coeff=z)
    )
    x = tokens().requires_grad_()
    moe.balance.loss_weight = torch.tensor(0.25)
    leaves = [x, moe.router.gate.weight, moe.experts.w1]
    gradients = torch.autograd.grad((moe(x) ** 2).sum(), leaves)
    loss = expected_balance_loss(moe, x)
    total_loss = (plain(moe, x) ** 2).sum() + 0.25 * loss
    expected_gradients = torch.autograd.grad(total_loss, leaves)

    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(moe.balance.loss_sum, loss.detach())


def test_balance_losses_do_not_depend_on_batching() -> None:
    moe = block(Routing(EXPERTS, 2, balance_loss_coeff=0.3, z_loss_coeff=0.1))
    x = tokens(4)
    moe.balance.loss_weight = torch.tensor(0.1)
    gradients_of_batchings = []
    for size in (4, 1):
        moe.zero_grad()
        moe.balance.reset()
        for rows in x.split(size):
            (moe(rows) ** 2).sum().backward()
        gradients_of_batchings.append(
            (moe.router.gate.weight.grad.clone(), moe.balance.loss_sum, moe.balance.count_E)
        )

    torch.testing.assert_close(gradients_of_batchings[0], gradients_of_batchings[1])


@pytest.mark.parametrize("shared", [0, 12])
def test_padding_after_a_text_changes_no_gradient_and_no_load(shared: int) -> None:
    routing = Routing(EXPERTS, 2, balance_loss_coeff=0.3, z_loss_coeff=0.1, load_balance_coeff=1e-3)
    x_BTD = tokens(3)
    lengths = (11, 6, 1)
    results = []
    for padded in (True, False):
        moe = block(routing, shared)
        moe.balance.loss_weight = torch.tensor(0.1, dtype=torch.float64)
        x = x_BTD.clone().requires_grad_()
        if padded:
            documents_BT = torch.full((3, 11), FILLER_DOCUMENT)
            for row, length in enumerate(lengths):
                # A row has several documents of 4 tokens.
                documents_BT[row, :length] = torch.arange(length) // 4
            is_text_BT1 = (documents_BT != FILLER_DOCUMENT).unsqueeze(-1)
            (moe(x, documents_BT) ** 2 * is_text_BT1).sum().backward()
        else:
            for row, length in enumerate(lengths):
                (moe(x[row : row + 1, :length]) ** 2).sum().backward()
        gradients = {name: p.grad for name, p in moe.named_parameters()}
        results.append((gradients, x.grad, moe.balance.loss_sum, moe.balance.count_E))

    torch.testing.assert_close(results[0], results[1])
    assert int(results[0][3].sum()) == 2 * sum(lengths)


def test_row_of_only_padding_has_no_balance_loss() -> None:
    moe = block(Routing(EXPERTS, 2, balance_loss_coeff=0.3, z_loss_coeff=0.1))
    moe.balance.loss_weight = torch.tensor(1.0)
    (moe(tokens(), torch.full((2, 11), FILLER_DOCUMENT)) * 0.0).sum().backward()

    assert float(moe.balance.loss_sum) == 0.0
    assert int(moe.balance.count_E.sum()) == 0
    assert all(bool((p.grad == 0).all()) for p in moe.parameters())


def test_balance_loss_without_its_weight_is_an_error() -> None:
    moe = block(Routing(EXPERTS, 2, balance_loss_coeff=0.3))
    with pytest.raises(RuntimeError, match="set loss_weight"):
        moe(tokens())
    with torch.no_grad():
        moe(tokens())


@pytest.mark.parametrize("at_once", [False, True])
def test_tokens_are_counted_once_with_recomputation_and_never_in_evaluation(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_mix, "_MANY_ROWS", 0 if at_once else 64)
    moe = block(Routing(EXPERTS, 2, balance_loss_coeff=0.3))
    x = tokens()
    moe.balance.loss_weight = torch.tensor(1.0)
    with torch.no_grad():
        moe(x)

    assert moe.balance.count_E is None

    expected = torch.bincount(moe.router(x)[2].flatten(), minlength=EXPERTS)
    for times in (1, 2):
        # A checkpoint runs the block again in backward.
        out = checkpoint(nn.Module.__call__, moe, x.requires_grad_(), use_reentrant=False)
        out.sum().backward()
        assert torch.equal(moe.balance.count_E, expected * times)
    moe.balance.reset()

    assert moe.balance.count_E is None
    assert moe.balance.loss_sum is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"score_func": "tanh"}, "score_func='tanh'"),
        ({"top_k": 9}, "top_k=9"),
        ({"top_k": 0}, "top_k=0"),
        ({"num_groups": 3}, "num_groups=3"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups=3"),
        ({"num_groups": 4, "top_groups": 1, "top_k": 3}, "top_k=3"),
    ],
)
def test_invalid_routing_is_rejected(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Routing(**{"num_experts": EXPERTS, "top_k": 2, **fields})


@pytest.mark.parametrize("copies", [1, 3])
def test_rows_are_sorted_and_unsorted(copies: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, dtype=torch.float64, generator=generator, requires_grad=True)
    order = torch.randperm(5 * copies, generator=torch.Generator().manual_seed(1))
    inverse = inverse_of(order)
    rows = repeat_and_permute(x, copies, order, inverse)

    assert torch.equal(rows, x.repeat_interleave(copies, 0)[order])
    assert torch.equal(permute(rows, inverse, order), x.repeat_interleave(copies, 0))
    assert torch.autograd.gradcheck(lambda x: repeat_and_permute(x, copies, order, inverse), x)


@pytest.mark.parametrize("counts", [[0, 40, 7, 33], [64, 0, 0, 0], [1, 0, 2, 1], [16, 16, 16, 16]])
@pytest.mark.parametrize("bias", [False, True])
def test_padding_between_the_rows_of_experts_changes_no_number(
    counts: list[int], bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(4, DIM, 16, bias)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    rows = torch.randn(sum(counts), DIM, generator=generator)
    gradient = torch.randn(sum(counts), DIM, generator=generator)
    count_E = torch.tensor(counts)
    groups = Groups(count_E, sum(counts))

    assert (groups.multiple > 1) == (sum(counts) >= 64)
    assert bool((groups.count_E % groups.multiple == 0).all())

    def outputs_and_gradients(has_padding: bool) -> list[torch.Tensor | None]:
        leaf = rows.clone().requires_grad_()
        if has_padding:
            out = groups.collect(experts._compute(groups.spread(leaf), groups.count_E))
        else:
            out = experts._compute(leaf, count_E)
        experts.zero_grad()
        out.backward(gradient)
        return [out.detach(), leaf.grad, *(parameter.grad for parameter in experts.parameters())]

    expected = outputs_and_gradients(has_padding=False)
    results = outputs_and_gradients(has_padding=True)

    for actual, expected_value in zip(results, expected, strict=True):
        # float32 sums over different numbers of rows
        torch.testing.assert_close(actual, expected_value, rtol=1e-5, atol=1e-5)


def test_only_16_bit_rows_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    compute = Experts._compute

    def noted_compute(experts: Experts, rows: Tensor, count_E: Tensor) -> Tensor:
        sizes.append(count_E.tolist())
        return compute(experts, rows, count_E)

    monkeypatch.setattr(Experts, "_compute", noted_compute)
    counts = torch.tensor([30, 10, 20, 4])
    for dtype in (torch.float32, torch.bfloat16):
        experts = Experts(4, DIM, 16).to(dtype)
        with torch.no_grad():
            for parameter in experts.parameters():
                parameter.fill_(0.01)
        assert experts(torch.ones(64, DIM, dtype=dtype), counts).shape == (64, DIM)

    # Sizes are rounded up to multiples of 2, which is an eighth of the mean of 16 rows.
    assert sizes == [[30, 10, 20, 4], [30, 10, 20, 4]]

    experts(torch.ones(512, DIM, dtype=torch.bfloat16), torch.tensor([101, 200, 11, 200]))
    assert sizes[-1] == [112, 208, 16, 208]
