"""Mixture of experts: a router sends each token to a few of many feed-forwards (Shazeer et al. 2017).

Routing is token choice without dropping: no expert has a capacity. Each submodule has one duty, and
parallelism can replace any of them. ``router`` picks experts. ``balance`` adds the losses that even the
load. ``dispatch`` moves rows to their experts, and has no weights. ``experts`` computes.
Shape suffixes: B batch, T tokens, S = B T, D model, E experts, K experts per token, R = S K rows, F
feed-forward, G groups of experts, e experts of a group, g selected groups, I and O input and output
features of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.weak import WeakTensorKeyDictionary

from shardtrain.layout import Depth, Draw
from shardtrain.models.layers import FeedForward
from shardtrain.ops.accelerator import is_accelerator, read, sum_dtype
from shardtrain.ops.device_kernels import has_grouped_matmul
from shardtrain.ops.row_order import Choice, Groups, inverse_of, permute, repeat_and_permute
from shardtrain.ops.targets import FILLER_DOCUMENT


@dataclass(frozen=True)
class Routing:
    """Options of routing and load balancing. A model's Config has fields of the same names.

    ``score_func`` maps the router's logits to scores. ``route_norm`` divides the scores of the
    chosen experts by their sum, and ``route_scale`` multiplies them. ``score_before_experts``
    applies them to the input of the experts instead of the output. With ``num_groups`` above 1, a
    token only chooses experts of its ``top_groups`` best groups; the score of a group is the sum of
    its ``group_top_k`` best experts. ``load_balance_coeff`` is the step of the expert bias per
    optimizer step (0: no bias). ``balance_loss_coeff`` and ``z_loss_coeff`` weight the two
    auxiliary losses.

    Raises ValueError for values that contradict each other.
    """

    num_experts: int
    top_k: int
    score_func: Literal["softmax", "sigmoid"] = "softmax"
    route_norm: bool = True
    route_scale: float = 1.0
    score_before_experts: bool = False
    router_bias: bool = False
    num_groups: int = 1
    top_groups: int = 1
    group_top_k: int = 2
    load_balance_coeff: float = 0.0
    balance_loss_coeff: float = 0.0
    z_loss_coeff: float = 0.0

    def __post_init__(self) -> None:
        if self.score_func not in ("softmax", "sigmoid"):
            raise ValueError(f"score_func={self.score_func!r} is unknown; use softmax or sigmoid")
        if not 1 <= self.top_k <= self.num_experts:
            raise ValueError(
                f"top_k={self.top_k} is not between 1 and the {self.num_experts} experts"
            )
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide the {self.num_experts} experts, and top_groups="
                f"{self.top_groups} must be between 1 and num_groups"
            )
        if self.top_groups * (self.num_experts // self.num_groups) < self.top_k:
            raise ValueError(
                f"top_k={self.top_k} exceeds the number of experts in top_groups={self.top_groups} groups"
            )


def routing_of(config: Any) -> Routing:
    """Return the Routing with a Config's fields of the same names. Fields that the Config lacks
    have their default.
    """
    values = {}
    for field in fields(Routing):
        if hasattr(config, field.name):
            values[field.name] = getattr(config, field.name)
    return Routing(**values)


EXPERT_STYLES = {
    "layers.*.moe": "local",
    "layers.*.moe.router.gate": "router",
    "layers.*.moe.experts": "expert",
}
"""Tensor-parallel styles of a MoE without shared experts, for a model's LAYOUT."""
EXPERT_BIAS = ("layers.*.moe.router.expert_bias",)
"""The buffers of a MoE, for a model's LAYOUT."""


def expert_draws(std: float, depth: Depth) -> dict[str, Draw]:
    """Return the initial distributions of a MoE without shared experts."""
    return {
        "layers.*.moe.router.gate.weight": Draw("normal", std=std),
        "layers.*.moe.experts.w1": Draw("normal", std=std),
        "layers.*.moe.experts.w[23]": Draw("normal", std=std, depth=depth),
    }


Gating = Callable[[Tensor, Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gate(nn.Linear):
    """The router's linear layer. It computes in float32 or above, because rounding can change the
    chosen experts.
    """

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return logits (B, T, E), float32 (float64 for float64 input)."""
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        bias_E = None if self.bias is None else self.bias.to(dtype)
        return F.linear(x_BTD.to(dtype), self.weight.to(dtype), bias_E)


class Router(nn.Module):
    """Score all experts for each token and pick K of them.

    ``expert_bias`` (E,) is added to the scores for the choice, but not for the weights. Once per
    optimizer step it is raised for experts with too few tokens and lowered for the others, which
    evens the load without a loss (Wang et al. 2024; DeepSeek-V3, section 2.1.2).

    ``force_balance`` assigns experts round-robin along each sequence, for benchmarks. ``places``
    maps a number of tokens T to their positions (T,) in the sequence. Context parallelism replaces
    it, because a rank has a part of a sequence.
    """

    expert_bias: Tensor | None

    def __init__(self, dim: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.gate = Gate(dim, routing.num_experts, bias=routing.router_bias)
        expert_bias = torch.zeros(routing.num_experts) if routing.load_balance_coeff else None
        self.register_buffer("expert_bias", expert_bias)
        self.force_balance = False
        self.places: Callable[[int], Tensor] = torch.arange

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return logits and scores (B, T, E), float32, and the indices of the chosen experts (B, T, K)."""
        logits_BTE = self.gate(x_BTD)
        is_softmax = self.routing.score_func == "softmax"
        scores_BTE = logits_BTE.softmax(-1) if is_softmax else logits_BTE.sigmoid()
        choose = self._round_robin if self.force_balance else self._choose
        return logits_BTE, scores_BTE, choose(scores_BTE)

    # The choice has no gradient. The router learns through the weights of the chosen experts
    @torch.no_grad()
    def _choose(self, scores_BTE: Tensor) -> Tensor:
        r = self.routing
        if self.expert_bias is not None:
            scores_BTE = scores_BTE + self.expert_bias
        # Exclude the experts of all but the best groups, so a token goes to fewer machines. The
        # score of a group is the sum of its group_top_k best experts
        if r.num_groups > 1:
            scores_BTGe = scores_BTE.unflatten(-1, (r.num_groups, -1))
            best_BTG = scores_BTGe.topk(r.group_top_k, dim=-1).values.sum(-1)
            selected_BTg = best_BTG.topk(r.top_groups, dim=-1).indices
            is_excluded_BTG = torch.ones_like(best_BTG, dtype=torch.bool).scatter_(
                -1, selected_BTg, False
            )
            scores_BTE = scores_BTGe.masked_fill(is_excluded_BTG.unsqueeze(-1), -torch.inf).flatten(
                -2
            )
        return scores_BTE.topk(r.top_k, dim=-1).indices

    def _round_robin(self, scores_BTE: Tensor) -> Tensor:
        B, T, _ = scores_BTE.shape
        r = self.routing
        first_T = self.places(T).to(scores_BTE.device) * r.top_k
        expert_TK = first_T.unsqueeze(-1) + torch.arange(r.top_k, device=scores_BTE.device)
        return expert_TK.remainder(r.num_experts).expand(B, T, r.top_k)

    def weights(self, scores_BTE: Tensor, expert_BTK: Tensor) -> Tensor:
        """Return the weight of each chosen expert's output (B, T, K), float32."""
        weights_BTK = scores_BTE.gather(-1, expert_BTK)
        if self.routing.route_norm:
            # 1e-20 prevents a division by zero: sigmoid scores may all underflow
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        return weights_BTK * self.routing.route_scale


class Balance(nn.Module):
    """Count tokens per expert, and add the gradients of the auxiliary losses that even the load.

    The losses are sums over tokens. Like the main loss they are divided by the global number of
    target tokens: set ``loss_weight`` to the reciprocal of that number before each forward pass.
    Context parallelism replaces ``sum_over_sequence`` by a sum over the ranks that hold parts of a
    sequence.

    Counts and loss sums are recorded in backward, because recomputation may repeat forward but
    backward runs once per token. Evaluation therefore records nothing.
    """

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.loss_weight: Tensor | None = None
        self.counts = True
        """False during a batch that consists of padding only, which has no loss and no load."""
        self.count_E: Tensor | None = None
        """Tokens per expert since the last ``reset``."""
        self.loss_sum: Tensor | None = None
        """Sum of the auxiliary losses since the last ``reset``, float64."""

    def forward(
        self,
        weights_BTK: Tensor,
        logits_BTE: Tensor,
        scores_BTE: Tensor,
        expert_BTK: Tensor,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Return the weights unchanged, and attach the losses to their backward pass.

        Tokens whose number in ``documents_BT`` is FILLER_DOCUMENT are padding. They count neither
        in the losses nor in the load.

        Raises:
            RuntimeError: a loss is enabled and ``loss_weight`` is not set.
        """
        if not (torch.is_grad_enabled() and self.counts):
            return weights_BTK

        # Count, for each row of the batch, the tokens that chose each expert. Padding adds zeros
        expert_BR = expert_BTK.flatten(1)
        is_text_BT1 = None
        ones_BR = torch.ones_like(expert_BR)
        if documents_BT is not None:
            is_text_BT1 = (self.own_part(documents_BT) != FILLER_DOCUMENT).unsqueeze(-1)
            ones_BR = is_text_BT1.expand_as(expert_BTK).flatten(1).to(expert_BR.dtype)
        count_BE = expert_BR.new_zeros(expert_BR.size(0), self.routing.num_experts)
        count_BE.scatter_add_(1, expert_BR, ones_BR)

        # Attach the losses: the autograd function starts their gradients and records the counts in backward
        loss = self._loss(logits_BTE, scores_BTE, count_BE, is_text_BT1)
        weight = self.loss_weight
        if weight is None and loss is not None:
            raise RuntimeError(
                "a balance loss requires a weight; set loss_weight to 1 / number of target tokens"
            )
        record = partial(self._record, count_BE.sum(0))
        return _Attach.apply(weights_BTK, loss, weight, record)  # type: ignore[no-any-return]

    def sum_over_sequence(self, count_BE: Tensor) -> Tensor:
        """Return the counts of full sequences, given the counts of this rank's part of each sequence."""
        return count_BE

    def own_part(self, documents_BT: Tensor) -> Tensor:
        """Return the columns of this rank's part of each sequence, given the document numbers of
        full sequences.
        """
        return documents_BT

    def reset(self) -> None:
        """Clear the counts and loss sums. Called before each step."""
        self.count_E = self.loss_sum = None

    def _loss(
        self, logits_BTE: Tensor, scores_BTE: Tensor, count_BE: Tensor, is_text_BT1: Tensor | None
    ) -> Tensor | None:
        """Return the sum of the enabled losses over this rank's tokens without padding, or None if
        none is enabled.

        Balance loss of a sequence, DeepSeek-V3 equations 17-20: f_i = E/(K T) (number of tokens
        that chose i), P_i = mean over tokens of the normalized scores, loss = sum over i of f_i
        P_i. The loss of a sequence is multiplied by its T tokens, which turns the mean P_i into a
        sum. z-loss: squared log-sum-exp of the logits (Zoph et al. 2022, equation 5).
        """
        r = self.routing
        losses = []
        if r.balance_loss_coeff:
            total_BE = self.sum_over_sequence(count_BE)
            # A row that is all padding has 0 choices
            num_choices_B1 = total_BE.sum(1, keepdim=True).clamp_min(1)
            load_BE = total_BE * r.num_experts / num_choices_B1
            normalized_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
            if is_text_BT1 is not None:
                normalized_BTE = normalized_BTE * is_text_BT1
            losses.append(r.balance_loss_coeff * (load_BE * normalized_BTE.sum(1)).sum())
        if r.z_loss_coeff:
            squares_BT = logits_BTE.logsumexp(-1).square()
            if is_text_BT1 is not None:
                squares_BT = squares_BT * is_text_BT1[..., 0]
            losses.append(r.z_loss_coeff * squares_BT.sum())
        return sum(losses[1:], losses[0]) if losses else None

    def _record(self, count_E: Tensor, loss: Tensor | None) -> None:
        self.count_E = count_E if self.count_E is None else self.count_E + count_E
        if loss is not None:
            # float64, because hundreds of micro-batches are accumulated
            loss = loss.to(sum_dtype(loss.device))
            self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss


class _Attach(torch.autograd.Function):
    """Identity on ``x``. Its backward calls ``record`` and starts the gradient of ``loss`` with the
    value ``weight``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        loss: Tensor | None,
        weight: Tensor | None,
        record: Callable[[Tensor | None], None],
    ) -> Tensor:
        ctx.loss = None if loss is None else loss.detach()
        ctx.weight = weight
        ctx.record = record
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        ctx.record(ctx.loss)
        start = None if ctx.loss is None else torch.as_tensor(ctx.weight).to(ctx.loss)
        return gradients[0], start, None, None


def silu_gate(gate_RF: Tensor, up_RF: Tensor) -> Tensor:
    """Return silu(gate) * up, the gating of a SwiGLU (R, F)."""
    return F.silu(gate_RF) * up_RF


class Experts(nn.Module):
    """E feed-forwards of equal size: three weights, and optionally three biases, whose dim 0 is the expert.

    ``gate`` combines the products of ``w1`` and ``w3``, both (R, F), into (R, F). The attribute
    ``product`` multiplies rows by their experts' weights; float8 training replaces it.
    """

    w1_bias: Tensor | None
    w2_bias: Tensor | None
    w3_bias: Tensor | None

    def __init__(
        self, num_experts: int, dim: int, ffn_dim: int, bias: bool = False, gate: Gating = silu_gate
    ) -> None:
        super().__init__()
        self.gate = gate
        self.product: Product = product
        for name, size in (("w1_bias", ffn_dim), ("w2_bias", dim), ("w3_bias", ffn_dim)):
            parameter = nn.Parameter(torch.empty(num_experts, size)) if bias else None
            self.register_parameter(name, parameter)
        self.w1 = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))

    def takes_tokens(self, x_SD: Tensor, top_k: int) -> bool:
        """True if ``forward`` supports tokens with a ``choice``: a CPU kernel for SwiGLU experts
        without biases.
        """
        if x_SD.device.type != "cpu" or not self._is_plain():
            return False
        # Imported here, because a run on an accelerator needs no CPU kernels
        from shardtrain.ops.cpu import expert_mix

        return expert_mix.takes(x_SD, top_k, self.w1.size(0))

    def forward(self, x_RD: Tensor, count_E: Tensor | None, choice: Choice | None = None) -> Tensor:
        """Map rows (R, D), sorted by expert, to (R, D). ``count_E`` is the number of rows per expert.

        With a ``choice`` instead of counts, map tokens (S, D) to the weighted sum of their experts'
        outputs (S, D).
        """
        if choice is not None:
            from shardtrain.ops.cpu import expert_mix

            return expert_mix.mix(x_RD, choice, self.w1, self.w2, self.w3)
        assert count_E is not None
        # For 16-bit dtypes on a CPU, oneDNN generates code for each distinct number of rows.
        # Padding each expert's rows to a multiple of ``Groups.multiple`` leaves few distinct numbers.
        if type(x_RD) is Tensor and x_RD.device.type == "cpu" and x_RD.element_size() < 4:
            groups = Groups(count_E, x_RD.size(0))
            if groups.multiple > 1:
                return groups.collect(self._compute(groups.spread(x_RD), groups.count_E))
        return self._compute(x_RD, count_E)

    def _is_plain(self) -> bool:
        return self.gate is silu_gate and self.w1_bias is None and self.product is product

    def _compute(self, x_RD: Tensor, count_E: Tensor) -> Tensor:
        if self._is_plain():
            swiglu = _grouped_swiglu if _has_grouped_matmul(x_RD, self.w1) else _looped_swiglu
            return swiglu(x_RD, count_E, self.w1, self.w2, self.w3)
        gate_RF = self.product(x_RD, count_E, self.w1)
        gate_RF = add_bias(gate_RF, count_E, self.w1_bias)
        up_RF = self.product(x_RD, count_E, self.w3)
        up_RF = add_bias(up_RF, count_E, self.w3_bias)
        hidden_RF = self.gate(gate_RF, up_RF)
        out_RD = self.product(hidden_RF, count_E, self.w2)
        return add_bias(out_RD, count_E, self.w2_bias)


def product(x_RI: Tensor, count_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Multiply each row (R, I), sorted by expert, by the weight of its expert. Return (R, O)."""
    if _has_grouped_matmul(x_RI, weight_EOI):
        stops_E = count_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=stops_E)
    rows_of_experts = x_RI.split(_rows(count_E))
    parts = zip(rows_of_experts, weight_EOI.unbind(), strict=True)
    return torch.cat([F.linear(x, weight_OI) for x, weight_OI in parts])


_host_counts = WeakTensorKeyDictionary()


def _rows(count_E: Tensor) -> list[int]:
    """Return the counts as Python integers. On an accelerator the host waits once for all products
    of a layer.
    """
    if not is_accelerator(count_E.device):
        return count_E.tolist()  # type: ignore[no-any-return]
    # The cache has weak keys, so an entry is dropped with the layer's tensor
    if count_E not in _host_counts:
        _host_counts[count_E] = read(count_E, "rows of each expert")
    return _host_counts[count_E]  # type: ignore[no-any-return]


def add_bias(x_RO: Tensor, count_E: Tensor, bias_EO: Tensor | None) -> Tensor:
    """Add to each row (R, O), sorted by expert, the bias of its expert. With None, return the rows
    unchanged.
    """
    if bias_EO is None:
        return x_RO
    return x_RO + bias_EO[torch.repeat_interleave(count_E, output_size=x_RO.size(0))]


def _has_grouped_matmul(x_RD: Tensor, w1_EFD: Tensor) -> bool:
    # On a CPU, grouped_mm took 0.7 to 1.0 of the loop's time, forward and backward (8 to 128
    # experts, float32 and bfloat16). It requires at least one row, and rows whose size is a
    # multiple of 16 bytes
    is_aligned = all(size * x_RD.element_size() % 16 == 0 for size in w1_EFD.shape[1:])
    return has_grouped_matmul(x_RD.device, x_RD.dtype) and x_RD.size(0) > 0 and is_aligned


def _grouped_swiglu(x_RD: Tensor, count_E: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    stop_E = count_E.cumsum(0).to(torch.int32)
    gate_RF = F.grouped_mm(x_RD, w1.transpose(-2, -1), offs=stop_E)
    up_RF = F.grouped_mm(x_RD, w3.transpose(-2, -1), offs=stop_E)
    return F.grouped_mm(F.silu(gate_RF) * up_RF, w2.transpose(-2, -1), offs=stop_E)


def _looped_swiglu(x_RD: Tensor, count_E: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    outputs = []
    experts = zip(x_RD.split(_rows(count_E)), w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    for x, w1_FD, w2_DF, w3_FD in experts:
        hidden = F.silu(F.linear(x, w1_FD)) * F.linear(x, w3_FD)
        outputs.append(F.linear(hidden, w2_DF))
    return torch.cat(outputs)


class Dispatch(nn.Module):
    """Move rows to their experts and back. If all experts are on this rank, no row moves."""

    is_local = True

    def forward(self, experts: nn.Module, x_RD: Tensor, count_E: Tensor) -> Tensor:
        """Return the experts' outputs (R, D) for rows (R, D) sorted by expert; ``count_E`` is the
        rows per expert.
        """
        return experts(x_RD, count_E)  # type: ignore[no-any-return]


def has_experts(model: nn.Module) -> bool:
    """True if a model has experts, which need to know which tokens are padding."""
    return any(isinstance(module, Balance) for module in model.modules())


class MoE(nn.Module):
    """A feed-forward block of many experts and optional shared experts. Each token uses a few of the experts.

    With ``shared_gate``, a sigmoid of a linear function of the token multiplies the
    output of the shared experts.
    """

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        routing: Routing,
        shared_ffn_dim: int = 0,
        expert_bias: bool = False,
        gate: Gating = silu_gate,
        shared_gate: bool = False,
    ) -> None:
        super().__init__()
        self.routing = routing
        self.router = Router(dim, routing)
        self.balance = Balance(routing)
        self.dispatch = Dispatch()
        self.experts = Experts(routing.num_experts, dim, ffn_dim, expert_bias, gate)
        self.shared = FeedForward(dim, shared_ffn_dim) if shared_ffn_dim else None
        self.shared_gate = nn.Linear(dim, 1, bias=False) if shared_gate else None

    def forward(self, x_BTD: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D). ``documents_BT``, of full sequences, marks padding tokens
        (see Balance).
        """
        logits_BTE, scores_BTE, expert_BTK = self.router(x_BTD)
        weights_BTK = self.router.weights(scores_BTE, expert_BTK)
        weights_BTK = self.balance(weights_BTK, logits_BTE, scores_BTE, expert_BTK, documents_BT)
        x_RD = x_BTD.flatten(0, 1)
        weights_RK = weights_BTK.flatten(0, 1)
        out_BTD = self._mix(x_RD, weights_RK, expert_BTK.flatten()).view_as(x_BTD)
        if self.shared is None:
            return out_BTD
        shared_BTD = self.shared(x_BTD)
        if self.shared_gate is not None:
            shared_BTD = shared_BTD * self.shared_gate(x_BTD).sigmoid()
        return out_BTD + shared_BTD

    def _mix(self, x_SD: Tensor, weights_SK: Tensor, expert_R: Tensor) -> Tensor:
        """Return, for tokens (S, D), the weighted sums of their experts' outputs (S, D)."""
        r = self.routing
        # One CPU kernel does everything below, if it supports these experts
        if (
            self.dispatch.is_local
            and not r.score_before_experts
            and self.experts.takes_tokens(x_SD, r.top_k)
        ):
            choice = Choice(expert_R.view_as(weights_SK), weights_SK)
            return self.experts(x_SD, None, choice)  # type: ignore[no-any-return]

        # Build one row per token and chosen expert, sorted by expert. A stable sort has the same
        # order on every device
        order_R = expert_R.argsort(stable=True)
        inverse_R = inverse_of(order_R)
        rows_RD = repeat_and_permute(x_SD, r.top_k, order_R, inverse_R)
        weights_SK = weights_SK.to(x_SD.dtype)
        if r.score_before_experts:
            rows_RD = rows_RD * permute(weights_SK.view(-1, 1), order_R, inverse_R)

        # Run the experts, and restore the order of tokens
        count_E = expert_R.new_zeros(r.num_experts).scatter_add_(
            0, expert_R, torch.ones_like(expert_R)
        )
        out_RD = permute(self.dispatch(self.experts, rows_RD, count_E), inverse_R, order_R)
        out_SKD = out_RD.unflatten(0, (-1, r.top_k))
        if r.score_before_experts:
            return out_SKD.sum(1)
        return torch.bmm(weights_SK.unsqueeze(1), out_SKD).squeeze(1)
