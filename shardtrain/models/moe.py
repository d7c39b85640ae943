"""Mixture of experts: each token goes to the few feed-forwards that a router picks for it (Shazeer et al. 2017).

Token choice without dropping: no expert has a capacity. The pieces are modules with one duty each, so that parallelism
can replace one: ``router`` picks, ``balance`` adds losses that spread the load, ``dispatch`` brings rows to experts and
holds no weights, ``experts`` computes.
Shape suffixes: B batch, T tokens, S = B T, D model, E experts, K experts per token, R = S K rows, F feed-forward.
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
from shardtrain.ops.accelerator import is_accelerator, read
from shardtrain.ops.device_kernels import has_grouped_matmul
from shardtrain.ops.row_order import Choice, Groups, inverse_of, permute, repeat_and_permute
from shardtrain.ops.targets import FILLER_DOCUMENT


@dataclass(frozen=True)
class Routing:
    """How tokens choose experts, and what keeps the load even; the fields of a model's Config of the same names."""

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
            raise ValueError(f"top_k={self.top_k} is not between 1 and the {self.num_experts} experts")
        if self.num_experts % self.num_groups or not 1 <= self.top_groups <= self.num_groups:
            raise ValueError(
                f"num_groups={self.num_groups} must divide the {self.num_experts} experts, and top_groups="
                f"{self.top_groups} lie between 1 and it"
            )
        if self.top_groups * (self.num_experts // self.num_groups) < self.top_k:
            raise ValueError(f"top_k={self.top_k} is more than the experts of top_groups={self.top_groups} groups")


def routing_of(config: Any) -> Routing:
    """The Routing of a model's Config: its fields of the same names, defaults for those that it lacks."""
    return Routing(**{f.name: getattr(config, f.name) for f in fields(Routing) if hasattr(config, f.name)})


EXPERT_WORDS = {
    "layers.*.moe": "local",
    "layers.*.moe.router.gate": "router",
    "layers.*.moe.experts": "expert",
}
"""The tensor words of a MoE without shared experts, for a model's LAYOUT."""
EXPERT_BIAS = ("layers.*.moe.router.expert_bias",)
"""The buffers of a MoE, for a model's LAYOUT."""


def expert_draws(std: float, depth: Depth) -> dict[str, Draw]:
    """How the parameters of a MoE without shared experts start."""
    return {
        "layers.*.moe.router.gate.weight": Draw("normal", std=std),
        "layers.*.moe.experts.w1": Draw("normal", std=std),
        "layers.*.moe.experts.w[23]": Draw("normal", std=std, depth=depth),
    }


Gating = Callable[[Tensor, Tensor], Tensor]
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


class Gate(nn.Linear):
    """The router's linear layer, computed in float32 whatever the types of its weight and input."""

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Logits (B, T, E), float32 (float64 for float64 input)."""
        dtype = torch.promote_types(x_BTD.dtype, torch.float32)
        return F.linear(x_BTD.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype))


class Router(nn.Module):
    """Scores all experts for each token and picks K of them.

    ``expert_bias`` (E,) takes part in the choice but not in the weights: raised for experts that got too few tokens,
    lowered for others, once per optimizer step, it evens the load without a loss (Wang et al. 2024; DeepSeek-V3,
    section 2.1.2). ``force_balance`` deals experts in turn along each sequence, for benchmarks; ``places`` gives, for a
    number of tokens T, their places (T,) in the sequence, of which a rank may hold a part.
    """

    expert_bias: Tensor | None

    def __init__(self, dim: int, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.gate = Gate(dim, routing.num_experts, bias=routing.router_bias)
        self.register_buffer("expert_bias", torch.zeros(routing.num_experts) if routing.load_balance_coeff else None)
        self.force_balance = False
        self.places: Callable[[int], Tensor] = torch.arange

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and scores (B, T, E), float32, and the indices of the chosen experts (B, T, K)."""
        logits_BTE = self.gate(x_BTD)
        scores_BTE = logits_BTE.softmax(-1) if self.routing.score_func == "softmax" else logits_BTE.sigmoid()
        return logits_BTE, scores_BTE, self._in_turn(scores_BTE) if self.force_balance else self._choose(scores_BTE)

    # The choice has no gradient: the router learns by the weights of those that were chosen
    @torch.no_grad()
    def _choose(self, scores_BTE: Tensor) -> Tensor:
        r = self.routing
        if self.expert_bias is not None:
            scores_BTE = scores_BTE + self.expert_bias
        # Only experts of the best groups may be chosen: fewer machines per token. A group is as good as its group_top_k
        # best experts together
        if r.num_groups > 1:
            scores_BTGe = scores_BTE.unflatten(-1, (r.num_groups, -1))
            best_BTG = scores_BTGe.topk(r.group_top_k, dim=-1).values.sum(-1)
            kept_BTg = best_BTG.topk(r.top_groups, dim=-1).indices
            out_BTG = torch.ones_like(best_BTG, dtype=torch.bool).scatter_(-1, kept_BTg, False)
            scores_BTE = scores_BTGe.masked_fill(out_BTG.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores_BTE.topk(r.top_k, dim=-1).indices

    def _in_turn(self, scores_BTE: Tensor) -> Tensor:
        B, T, _ = scores_BTE.shape
        r = self.routing
        first_T = self.places(T).to(scores_BTE.device) * r.top_k
        expert_TK = first_T.unsqueeze(-1) + torch.arange(r.top_k, device=scores_BTE.device)
        return expert_TK.remainder(r.num_experts).expand(B, T, r.top_k)

    def weights(self, scores_BTE: Tensor, expert_BTK: Tensor) -> Tensor:
        """What each chosen expert's output is multiplied by (B, T, K), float32."""
        weights_BTK = scores_BTE.gather(-1, expert_BTK)
        if self.routing.route_norm:
            # Sigmoid scores may all be zero in float32
            weights_BTK = weights_BTK / (weights_BTK.sum(-1, keepdim=True) + 1e-20)
        return weights_BTK * self.routing.route_scale


class Balance(nn.Module):
    """Counts tokens per expert, and adds the gradients of losses that even the load.

    The losses are sums over tokens, to be divided by the global count of target tokens as the main loss is: set
    ``loss_weight`` to the same weight before each forward pass. Where ranks hold parts of a sequence,
    ``sum_over_sequence`` is replaced by a sum over them. Counts and sums are taken in backward, which runs once per
    token however often recomputation repeats forward, so evaluation counts nothing.
    """

    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing
        self.loss_weight: Tensor | None = None
        self.counts = True
        """False while a batch is computed that is filler as a whole: it has no loss and no load."""
        self.count_E: Tensor | None = None
        self.loss_sum: Tensor | None = None

    def forward(
        self,
        weights_BTK: Tensor,
        logits_BTE: Tensor,
        scores_BTE: Tensor,
        expert_BTK: Tensor,
        documents_BT: Tensor | None = None,
    ) -> Tensor:
        """Give the weights back unchanged, with the losses hung onto their backward pass.

        Tokens whose number in ``documents_BT`` is FILLER_DOCUMENT are filler: they count in no loss and in no load.
        """
        if not (torch.is_grad_enabled() and self.counts):
            return weights_BTK

        # How many tokens of each row chose each expert; filler adds zeros
        expert_BR = expert_BTK.flatten(1)
        is_text_BT1 = None
        ones_BR = torch.ones_like(expert_BR)
        if documents_BT is not None:
            is_text_BT1 = (self.own_part(documents_BT) != FILLER_DOCUMENT).unsqueeze(-1)
            ones_BR = is_text_BT1.expand_as(expert_BTK).flatten(1).to(expert_BR.dtype)
        count_BE = expert_BR.new_zeros(expert_BR.size(0), self.routing.num_experts)
        count_BE.scatter_add_(1, expert_BR, ones_BR)

        # The losses, and a function of autograd that starts their gradients and records the counts in backward
        loss = self._loss(logits_BTE, scores_BTE, count_BE, is_text_BT1)
        weight = self.loss_weight
        if weight is None and loss is not None:
            raise RuntimeError("a balance loss needs its weight: set loss_weight to one over the number of tokens")
        record = partial(self._record, count_BE.sum(0))
        return _Attach.apply(weights_BTK, loss, weight, record)  # type: ignore[no-any-return]

    def sum_over_sequence(self, count_BE: Tensor) -> Tensor:
        """Counts of whole sequences, from those of this rank's part of each."""
        return count_BE

    def own_part(self, documents_BT: Tensor) -> Tensor:
        """The documents of this rank's part of each sequence, from those of whole sequences."""
        return documents_BT

    def reset(self) -> None:
        """Forget what was counted; called before each step."""
        self.count_E = self.loss_sum = None

    def _loss(
        self, logits_BTE: Tensor, scores_BTE: Tensor, count_BE: Tensor, is_text_BT1: Tensor | None
    ) -> Tensor | None:
        """The losses' sum over this rank's tokens, filler left out, or None where no loss is asked for.

        Per sequence, DeepSeek-V3 equations 17-20: f_i = E/(K T) (tokens that chose i), P_i = mean of normalised scores,
        loss = sum of f_i P_i; the mean over T times T tokens leaves the sum of the scores. z-loss: squared
        log-sum-exp of the logits (Zoph et al. 2022, equation 5).
        """
        r = self.routing
        losses = []
        if r.balance_loss_coeff:
            total_BE = self.sum_over_sequence(count_BE)
            share_BE = total_BE * r.num_experts / total_BE.sum(1, keepdim=True).clamp_min(1)  # a row may be all filler
            mean_scores_BTE = scores_BTE / scores_BTE.sum(-1, keepdim=True)
            if is_text_BT1 is not None:
                mean_scores_BTE = mean_scores_BTE * is_text_BT1
            losses.append(r.balance_loss_coeff * (share_BE * mean_scores_BTE.sum(1)).sum())
        if r.z_loss_coeff:
            squares_BT = logits_BTE.logsumexp(-1).square()
            if is_text_BT1 is not None:
                squares_BT = squares_BT * is_text_BT1[..., 0]
            losses.append(r.z_loss_coeff * squares_BT.sum())
        return sum(losses[1:], losses[0]) if losses else None

    def _record(self, count_E: Tensor, loss: Tensor | None) -> None:
        self.count_E = count_E if self.count_E is None else self.count_E + count_E
        if loss is not None:
            loss = loss.double()  # hundreds of micro-batches are added one by one
            self.loss_sum = loss if self.loss_sum is None else self.loss_sum + loss


class _Attach(torch.autograd.Function):
    """Identity on ``x``; in backward, calls ``record`` and starts the loss with the gradient ``weight``."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor | None, weight: Tensor | None, record: Callable[[Tensor | None], None]
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
    """What a SwiGLU makes of its two products."""
    return F.silu(gate_RF) * up_RF


class Experts(nn.Module):
    """E feed-forwards (SwiGLU) of equal size, in three weights whose dim 0 is the expert, and three biases or none.

    ``gate`` makes (R, F) of the products of ``w1`` and of ``w3``; ``product`` may be replaced by one in float8.
    """

    w1_bias: Tensor | None
    w2_bias: Tensor | None
    w3_bias: Tensor | None

    def __init__(self, num_experts: int, dim: int, ffn_dim: int, bias: bool = False, gate: Gating = silu_gate) -> None:
        super().__init__()
        self.gate = gate
        self.product: Product = product
        for name, size in (("w1_bias", ffn_dim), ("w2_bias", dim), ("w3_bias", ffn_dim)):
            self.register_parameter(name, nn.Parameter(torch.empty(num_experts, size)) if bias else None)
        self.w1 = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(num_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(num_experts, ffn_dim, dim))

    def takes_tokens(self, x_SD: Tensor, top_k: int) -> bool:
        """Whether ``forward`` takes tokens with a choice: one function for all of a SwiGLU without biases on a CPU."""
        if x_SD.device.type != "cpu" or not self._is_plain():
            return False
        from shardtrain.ops.cpu import expert_mix  # a run on an accelerator imports no kernel of a CPU

        return expert_mix.takes(x_SD, top_k, self.w1.size(0))

    def forward(self, x_RD: Tensor, count_E: Tensor | None, choice: Choice | None = None) -> Tensor:
        """Map rows (R, D), sorted by expert, to (R, D); ``count_E`` says how many rows each expert has.

        With a ``choice`` instead, map tokens (S, D) to the weighted sum over the experts of each.
        """
        if choice is not None:
            from shardtrain.ops.cpu import expert_mix

            return expert_mix.mix(x_RD, choice, self.w1, self.w2, self.w3)
        assert count_E is not None
        # On a CPU oneDNN generates code for each number of rows in 16 bits: with room, few experts differ in number
        if type(x_RD) is Tensor and x_RD.device.type == "cpu" and x_RD.element_size() < 4:
            groups = Groups(count_E, x_RD.size(0))
            if groups.multiple > 1:
                return groups.collect(self._compute(groups.spread(x_RD), groups.count_E))
        return self._compute(x_RD, count_E)

    def _is_plain(self) -> bool:
        return self.gate is silu_gate and self.w1_bias is None and self.product is product

    def _compute(self, x_RD: Tensor, count_E: Tensor) -> Tensor:
        if not self._is_plain():
            gate_RF, up_RF = (
                add_bias(self.product(x_RD, count_E, w), count_E, b)
                for w, b in ((self.w1, self.w1_bias), (self.w3, self.w3_bias))
            )
            return add_bias(self.product(self.gate(gate_RF, up_RF), count_E, self.w2), count_E, self.w2_bias)
        function = _grouped if _has_grouped_matmul(x_RD, self.w1) else _one_by_one
        return function(x_RD, count_E, self.w1, self.w2, self.w3)


def product(x_RI: Tensor, count_E: Tensor, weight_EOI: Tensor) -> Tensor:
    """Each row (R, I), sorted by expert, times the weight of its expert: (R, O)."""
    if _has_grouped_matmul(x_RI, weight_EOI):
        return F.grouped_mm(x_RI, weight_EOI.transpose(-2, -1), offs=count_E.cumsum(0).to(torch.int32))
    parts = zip(x_RI.split(_rows(count_E)), weight_EOI.unbind(), strict=True)
    return torch.cat([F.linear(x, weight_OI) for x, weight_OI in parts])


_host_counts = WeakTensorKeyDictionary()


def _rows(count_E: Tensor) -> list[int]:
    """The counts as numbers of the host, which waits for an accelerator once for all products of a layer."""
    if not is_accelerator(count_E.device):
        return count_E.tolist()  # type: ignore[no-any-return]
    # Keyed weakly by the tensor: gone when the layer's counts are
    if count_E not in _host_counts:
        _host_counts[count_E] = read(count_E, "rows of each expert")
    return _host_counts[count_E]  # type: ignore[no-any-return]


def add_bias(x_RO: Tensor, count_E: Tensor, bias_EO: Tensor | None) -> Tensor:
    """Each row (R, O), sorted by expert, and the bias of its expert; None is none."""
    if bias_EO is None:
        return x_RO
    return x_RO + bias_EO[torch.repeat_interleave(count_E, output_size=x_RO.size(0))]


def _has_grouped_matmul(x_RD: Tensor, w1_EFD: Tensor) -> bool:
    # On a CPU it took 0.7 to 1.0 of the loop's time, forward and backward (8 to 128 experts, float32 and bfloat16).
    # It takes no empty batch, and rows of whole 16 bytes alone.
    aligned = all(size * x_RD.element_size() % 16 == 0 for size in w1_EFD.shape[1:])
    return has_grouped_matmul(x_RD.device, x_RD.dtype) and x_RD.size(0) > 0 and aligned


def _grouped(x_RD: Tensor, count_E: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    stop_E = count_E.cumsum(0).to(torch.int32)
    gate_RF, up_RF = (F.grouped_mm(x_RD, w.transpose(-2, -1), offs=stop_E) for w in (w1, w3))
    return F.grouped_mm(F.silu(gate_RF) * up_RF, w2.transpose(-2, -1), offs=stop_E)


def _one_by_one(x_RD: Tensor, count_E: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    parts = zip(x_RD.split(_rows(count_E)), w1.unbind(), w2.unbind(), w3.unbind(), strict=True)
    return torch.cat([F.linear(F.silu(F.linear(x, a)) * F.linear(x, c), b) for x, a, b, c in parts])


class Dispatch(nn.Module):
    """Bring rows to their experts and back: here, where all experts are at hand, nothing to do."""

    is_local = True

    def forward(self, experts: nn.Module, x_RD: Tensor, count_E: Tensor) -> Tensor:
        """Outputs (R, D) of rows (R, D) that are sorted by expert, ``count_E`` of each."""
        return experts(x_RD, count_E)  # type: ignore[no-any-return]


def has_experts(model: nn.Module) -> bool:
    """Whether a model has experts, for whom it matters which tokens are filler."""
    return any(isinstance(module, Balance) for module in model.modules())


class MoE(nn.Module):
    """A feed-forward block of many experts, of which each token uses a few, beside optional shared ones."""

    def __init__(
        self,
        dim: int,
        ffn_dim: int,
        routing: Routing,
        shared_ffn_dim: int = 0,
        expert_bias: bool = False,
        gate: Gating = silu_gate,
    ) -> None:
        super().__init__()
        self.routing = routing
        self.router = Router(dim, routing)
        self.balance = Balance(routing)
        self.dispatch = Dispatch()
        self.experts = Experts(routing.num_experts, dim, ffn_dim, expert_bias, gate)
        self.shared = FeedForward(dim, shared_ffn_dim) if shared_ffn_dim else None

    def forward(self, x_BTD: Tensor, documents_BT: Tensor | None = None) -> Tensor:
        """Map (B, T, D) to (B, T, D); ``documents_BT``, of whole rows, tell which tokens are filler (see Balance)."""
        logits_BTE, scores_BTE, expert_BTK = self.router(x_BTD)
        weights_BTK = self.router.weights(scores_BTE, expert_BTK)
        weights_BTK = self.balance(weights_BTK, logits_BTE, scores_BTE, expert_BTK, documents_BT)
        out_BTD = self._mix(x_BTD.flatten(0, 1), weights_BTK.flatten(0, 1), expert_BTK.flatten()).view_as(x_BTD)
        return out_BTD if self.shared is None else out_BTD + self.shared(x_BTD)

    def _mix(self, x_SD: Tensor, weights_SK: Tensor, expert_R: Tensor) -> Tensor:
        """Outputs (S, D) of tokens (S, D), the sum over the experts of each, times their weights."""
        r = self.routing
        if self.dispatch.is_local and not r.score_before_experts and self.experts.takes_tokens(x_SD, r.top_k):
            choice = Choice(expert_R.view_as(weights_SK), weights_SK)
            return self.experts(x_SD, None, choice)  # type: ignore[no-any-return]

        # A row for each token and expert of it, sorted by expert; stable, so that the order is one on every device
        order_R = expert_R.argsort(stable=True)
        inverse_R = inverse_of(order_R)
        rows_RD = repeat_and_permute(x_SD, r.top_k, order_R, inverse_R)
        weights_SK = weights_SK.to(x_SD.dtype)
        if r.score_before_experts:
            rows_RD = rows_RD * permute(weights_SK.view(-1, 1), order_R, inverse_R)

        # To the experts and back, into the order of tokens
        count_E = expert_R.new_zeros(r.num_experts).scatter_add_(0, expert_R, torch.ones_like(expert_R))
        out_RD = permute(self.dispatch(self.experts, rows_RD, count_E), inverse_R, order_R)
        out_SKD = out_RD.unflatten(0, (-1, r.top_k))
        if r.score_before_experts:
            return out_SKD.sum(1)
        return torch.bmm(weights_SK.unsqueeze(1), out_SKD).squeeze(1)
