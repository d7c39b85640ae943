"""The load-balancing loss of ``transformers`` networks with experts,
over the tokens of all ranks and micro-batches.

The loss is that of Fedus et al. 2022 (Switch Transformers, equations 4 to 6), as ``load_balancing_loss_func``
of ``transformers`` computes it: E sum_e f_e P_e. f_e is the number of choices of expert e and P_e the sum of
its probabilities, each divided by the number of rows.
A row is a token in one layer, and all layers are pooled.

The loss is not a sum over tokens: the gradient of a token depends on the f_e of the entire batch. So a caller
first counts, then sums over ranks, and calls ``set_totals`` before the backward pass. Afterwards each rank
adds the gradients of its own tokens.
Shape suffixes: B batch, T tokens, N = B T, E experts, K experts per token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.ops.accelerator import sum_dtype
from shardtrain.ops.targets import FILLER_DOCUMENT
from shardtrain.utils.errors import ConfigError, Problem

OPTION = "model.overrides.balance_loss_coeff"
_FUNCTION = "load_balancing_loss_func"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""Attributes of networks with the coefficient."""


class BalanceLoss:
    """Counts the choices of a network's routers, and adds the gradient of the loss to their logits.

    Attributes:
        coefficient: weight of the loss.
        num_experts: number of experts of each router.
        top_k: number of experts that count as chosen for each token.
        is_on: True during the passes of a training step. Otherwise the routers are left unchanged.
        is_counting: True if forward passes are counted. False during recomputation, which repeats them.
        own_part: maps the documents (B, T) of full sequences to those of this rank's tokens. Context
            parallelism replaces it.
    """

    def __init__(self, coefficient: float, num_experts: int, top_k: int) -> None:
        self.coefficient = coefficient
        self.num_experts = num_experts
        self.top_k = top_k
        self.is_on = False
        self.is_counting = False
        self.own_part: Callable[[Tensor], Tensor] = _unchanged
        self._is_text_N: Tensor | None = None
        self._sums: list[Tensor] = []
        """Choices and probabilities per expert, (2, E), for each router and micro-batch that was counted."""
        self._slope_E: Tensor | None = None

    def install(self, network: nn.Module) -> None:
        """Register the hooks on the routers of a network, whose outputs ``transformers`` records."""
        for module, index in _routers(network):
            module.register_forward_hook(_RouterHook(self, index))

    def start(self) -> None:
        """Forget the counts of the last step, and count from now on."""
        self._sums = []
        self._slope_E = None
        self.is_on = True
        self.is_counting = True

    def end(self) -> None:
        """Leave the routers unchanged until the next step."""
        self.is_on = False
        self.is_counting = False
        self._is_text_N = None

    def mark_filler(self, documents_BT: Tensor | None) -> None:
        """Set which tokens of the following forward pass are padding, which does not count."""
        # Without documents, no token is padding.
        self._is_text_N = None
        if documents_BT is not None:
            self._is_text_N = (self.own_part(documents_BT) != FILLER_DOCUMENT).flatten()

    def local_sums(self, device: torch.device) -> Tensor:
        """Return choices and probabilities per expert, summed over the counted rows of this rank: (2, E), float64."""
        total_2E = torch.zeros(2, self.num_experts, dtype=sum_dtype(device), device=device)
        for sums_2E in self._sums:
            total_2E += sums_2E
        return total_2E

    def set_totals(self, sums_2E: Tensor, scale: Tensor) -> Tensor:
        """End counting, and set the sums of all ranks before the backward pass.

        Args:
            sums_2E: sums of ``local_sums`` over ranks.
            scale: factor of the gradient: 1 if the main loss is a mean over target tokens.

        Returns:
            The loss times the coefficient, a float64 scalar.
        """
        # From here on, forward passes are recomputations, which would count rows twice.
        self.is_counting = False
        self._sums = []
        choices_E, probabilities_E = sums_2E
        # Each row has top_k choices. The clamp is for a step without rows.
        num_rows = (choices_E.sum() / self.top_k).clamp_min(1)
        load_E = choices_E / num_rows
        factor = self.coefficient * self.num_experts / num_rows
        self._slope_E = scale * factor * load_E
        return factor * (load_E * probabilities_E).sum()

    def attach(self, output: Any, index: int) -> Any:
        """Count the choices of a router, and return its output with the loss attached to its backward pass.

        Args:
            output: the output of a module: logits (..., E), or a tuple that contains them.
            index: the position of the logits in the tuple.
        """
        if not self.is_on:
            # Outside of a training step, such as in validation, there is no loss.
            return output
        values = list(output) if isinstance(output, tuple) else [output]
        position = index if isinstance(output, tuple) else 0
        logits = values[position]
        logits_NE = logits.flatten(0, -2)
        is_text_N = self._is_text_N
        # Recomputation must run the same operations as the first pass, so this always computes the sums.
        sums_2E = self._sums_of(logits_NE.detach(), is_text_N)
        if self.is_counting:
            self._sums.append(sums_2E)
        if not (torch.is_grad_enabled() and logits.requires_grad):
            return output
        # Networks may ignore the logits that a router returns. So the backward pass of another output starts
        # the gradient of the logits.
        carrier = position
        for other, value in enumerate(values):
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            if other != position and is_float and value.requires_grad:
                carrier = other
                break
        values[carrier] = _AddGradient.apply(values[carrier], logits_NE, is_text_N, self)
        return type(output)(values) if isinstance(output, tuple) else values[0]

    def gradient(self, logits_NE: Tensor, is_text_N: Tensor | None) -> Tensor:
        """Return the gradient of the loss with respect to the logits."""
        if self._slope_E is None:
            raise RuntimeError(
                "the balance loss needs the counts of all ranks; call set_totals first"
            )
        # The derivative of the softmax: p_e (s_e - sum_i p_i s_i) for slopes s.
        probabilities_NE = _probabilities(logits_NE)
        slope_E = self._slope_E.to(probabilities_NE.dtype)
        mean_N1 = (probabilities_NE * slope_E).sum(-1, keepdim=True)
        gradient_NE = probabilities_NE * (slope_E - mean_N1)
        if is_text_N is not None:
            gradient_NE = gradient_NE * is_text_N.unsqueeze(-1)
        return gradient_NE.to(logits_NE.dtype)

    def _sums_of(self, logits_NE: Tensor, is_text_N: Tensor | None) -> Tensor:
        """Return choices and probabilities of each expert over the rows without padding, (2, E)."""
        with torch.no_grad():
            probabilities_NE = _probabilities(logits_NE)
            chosen_NK = probabilities_NE.topk(self.top_k, dim=-1).indices
            choices_NE = torch.zeros_like(probabilities_NE).scatter_(-1, chosen_NK, 1.0)
            if is_text_N is not None:
                is_text_N1 = is_text_N.unsqueeze(-1)
                choices_NE = choices_NE * is_text_N1
                probabilities_NE = probabilities_NE * is_text_N1
            wide = sum_dtype(choices_NE.device)
            choices_E = choices_NE.sum(0, dtype=wide)
            probabilities_E = probabilities_NE.sum(0, dtype=wide)
            return torch.stack((choices_E, probabilities_E))


class _RouterHook:
    """Forward hook of a router. An object, because a copied network must refer to the copied loss."""

    def __init__(self, balance: BalanceLoss, index: int) -> None:
        self._balance = balance
        self._index = index

    def __call__(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        return self._balance.attach(output, self._index)


class _AddGradient(torch.autograd.Function):
    """Identity on ``carrier``. Its backward also starts the gradient of the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        carrier: Tensor,
        logits_NE: Tensor,
        is_text_N: Tensor | None,
        balance: BalanceLoss,
    ) -> Tensor:
        ctx.save_for_backward(logits_NE)
        # Keep the mask of this micro-batch in an attribute.
        # A recomputed mask could belong to another micro-batch.
        ctx.is_text_N = is_text_N
        ctx.balance = balance
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (logits_NE,) = ctx.saved_tensors
        return gradients[0], ctx.balance.gradient(logits_NE, ctx.is_text_N), None, None


def _probabilities(logits_NE: Tensor) -> Tensor:
    """Return the softmax in float32, or in float64 for float64 logits."""
    dtype = torch.promote_types(logits_NE.dtype, torch.float32)
    return logits_NE.to(dtype).softmax(-1)


def _unchanged(documents_BT: Tensor) -> Tensor:
    return documents_BT


def find(
    network: Any, folder: str, is_asked_for: bool, coefficient: float | None
) -> BalanceLoss | None:
    """Return the balance loss of a network, or None if it trains without one.

    Args:
        network: an instance of a class of ``transformers``.
        folder: the folder of its config.json, for messages.
        is_asked_for: True if config.json has ``output_router_logits``.
        coefficient: replaces the coefficient of the config. None keeps it, if the loss is enabled.

    Raises:
        ConfigError: the loss is enabled, and the class has no such loss, or another one.
    """
    if coefficient is None and not is_asked_for:
        return None
    # A coefficient that the user has set must have an effect. A coefficient in config.json comes from another
    # program.
    reason = _unsupported(network)
    if reason and coefficient is not None:
        rule = f"is not supported: {type(network).__name__} {reason}"
        raise ConfigError(Problem(OPTION, coefficient, rule, "remove it"))
    if reason:
        rule = (
            f"has output_router_logits=true in config.json, and {type(network).__name__} {reason}"
        )
        raise ConfigError(Problem("model.overrides.path", folder, rule, "set it to false there"))
    if coefficient is None:
        coefficient = _own_coefficient(network)
    if coefficient < 0:
        raise ConfigError(Problem(OPTION, coefficient, "is negative", "set it to 0 or above"))
    if coefficient == 0:
        return None
    return BalanceLoss(coefficient, network.num_experts, network.num_experts_per_tok)


def _own_coefficient(network: Any) -> float:
    for name in _COEFFICIENTS:
        if hasattr(network, name):
            return float(getattr(network, name))
    raise AssertionError("_unsupported rejects a network without a coefficient")


def _unsupported(network: Any) -> str:
    """Return the reason why this package cannot compute the balance loss of a network, or ""."""
    function = getattr(sys.modules[type(network).__module__], _FUNCTION, None)
    has_coefficient = any(hasattr(network, name) for name in _COEFFICIENTS)
    if function is None or not has_coefficient:
        return "has no balance loss"
    num_experts = getattr(network, "num_experts", None)
    top_k = getattr(network, "num_experts_per_tok", None)
    if not isinstance(num_experts, int) or not isinstance(top_k, int):
        return "has a balance loss without num_experts and num_experts_per_tok"
    if not _routers(network):
        return "does not record the outputs of its routers, or has none"
    if not _is_same_loss(function, num_experts, top_k):
        return "has a balance loss with another formula"
    return ""


def _is_same_loss(function: Callable[..., Any], num_experts: int, top_k: int) -> bool:
    """True if a function of ``transformers`` returns the value of ``BalanceLoss`` for random logits."""
    # Compare values instead of source code, which differs between versions of the library.
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        layers = tuple(torch.randn(6, num_experts, generator=generator) for _ in range(2))
        documents_BT = torch.zeros(2, 3, dtype=torch.int64)
        documents_BT[1, 2] = FILLER_DOCUMENT
        reference = BalanceLoss(1.0, num_experts, top_k)
        reference.start()
        reference.mark_filler(documents_BT)
        for logits_NE in layers:
            reference.attach(logits_NE, 0)
        value = reference.set_totals(reference.local_sums(documents_BT.device), torch.ones(()))
        mask_BT = (documents_BT != FILLER_DOCUMENT).long()
        try:
            expected = function(layers, num_experts, top_k, mask_BT)
        except Exception:  # a function with other arguments may raise any exception
            return False
        return bool(torch.isclose(value.float(), torch.as_tensor(expected).float()))


def _routers(network: nn.Module) -> list[tuple[nn.Module, int]]:
    """Return the modules of a network whose outputs ``transformers`` records as router logits,
    and their positions.

    Networks declare them as ``_can_record_outputs``: a class, or a recorder with the class, the position of
    the logits in its output, and a part of the module's path.
    """
    routers = []
    # Collect the declarations first, because a module may be a part of a declared one.
    recorders: list[Any] = []
    for module in network.modules():
        declared = getattr(type(module), "_can_record_outputs", None) or {}
        entry = declared.get("router_logits", [])
        recorders += entry if isinstance(entry, list) else [entry]
    for path, module in network.named_modules():
        for recorder in recorders:
            target = getattr(recorder, "target_class", recorder)
            layer = getattr(recorder, "layer_name", None)
            is_in_layer = not layer or f".{layer.strip('.')}." in f".{path}."
            if isinstance(target, type) and isinstance(module, target) and is_in_layer:
                # The position of a plain class is 1, as in transformers
                routers.append((module, getattr(recorder, "index", 1)))
                break
    return routers
