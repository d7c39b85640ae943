"""The precision that the engine promises for parts of a model, whatever dtype their results have.

Tolerances come from this table. If they came from the dtype of a result, a result in too short a dtype would have a
larger tolerance. All other results of a module have the compute dtype of the configuration.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardtrain.config.model_file import NATIVE_MODELS
from shardtrain.models import gpt_oss, layers, moe, neox
from shardtrain.tools.verify.rounding_noise import unit_roundoff

OWN_CODE_ROUNDINGS = 4
"""Roundings of the code between two submodules of a user's model: residual sums, rotary angles, activations."""
NATIVE_ROUNDINGS = 2
"""Roundings of that code in a model of this package, such as an activation and a product."""
CORE_ROUNDINGS = 4
"""Roundings of the attention core of a user's model: scores, probabilities and output."""
NATIVE_CORE_ROUNDINGS = 2
"""Roundings of an attention core of this package: probabilities and output. Scores and sums are float32."""
ROUNDED_ONCE = 0.01
"""Allowed fraction of elements that are not the exact result, rounded once. Near ties may be rounded either way."""


@dataclass(frozen=True)
class Promise:
    """A part of a model that is computed in float32, and rounded to the compute dtype at most once.

    Attributes:
        part: Name for messages.
        modules: Classes of the modules that compute it.
        is_result: True if the outputs of the module are float32, too.
        is_input: True if its inputs are float32.
    """

    part: str
    modules: tuple[type[nn.Module], ...]
    is_result: bool
    is_input: bool = False


ROUTER_LOGITS = Promise("router logits", (moe.Gate,), is_result=True)
ROUTER_SCORES = Promise("router scores", (moe.Router,), is_result=True)
BALANCE_LOSS = Promise(
    "weights of experts and the balance loss", (moe.Balance,), is_result=True, is_input=True
)
ROTARY_ANGLES = Promise("rotary angles", (layers.RotaryAngles,), is_result=True)
ROTATION = Promise(
    "rotation of queries and keys",
    (
        layers.Attention,
        gpt_oss.GptOssAttention,
        neox.NeoxAttention,
    ),
    is_result=False,
)
NORM = Promise("mean and scale of a norm", (nn.RMSNorm, nn.LayerNorm), is_result=False)
LOG_SUM_EXP = Promise("log-sum-exp of attention", (layers.AttentionCore,), is_result=False)
EMBEDDING_GRADIENT = Promise("gradient of embeddings", (nn.Embedding,), is_result=False)
PROMISES = (
    ROUTER_LOGITS,
    ROUTER_SCORES,
    BALANCE_LOSS,
    ROTARY_ANGLES,
    ROTATION,
    NORM,
    LOG_SUM_EXP,
    EMBEDDING_GRADIENT,
)
"""All promises. The loss is also computed in float32: see ``module_rounding``."""


ON_EACH_TOKEN = (*ROUTER_LOGITS.modules, *NORM.modules)
"""Classes of modules that compute each token separately, so any rank can be compared on its own tokens."""


def promises_of(module: nn.Module) -> Iterator[Promise]:
    """Yield the promises for a module."""
    for promise in PROMISES:
        if isinstance(module, promise.modules):
            yield promise


def dtype_of_outputs(module: nn.Module, compute: torch.dtype) -> torch.dtype:
    """Return the promised dtype of a module's outputs."""
    if any(promise.is_result for promise in promises_of(module)):
        return torch.float32
    return compute


def dtype_of_inputs(module: nn.Module, compute: torch.dtype) -> torch.dtype:
    """Return the promised dtype of a module's inputs."""
    if any(promise.is_input for promise in promises_of(module)):
        return torch.float32
    return compute


def cause_of(module: nn.Module, actual: Tensor) -> str:
    """Return the cause if a promised float32 value is in a shorter dtype, or ""."""
    if unit_roundoff(actual.dtype) <= unit_roundoff(torch.float32):
        return ""
    for promise in promises_of(module):
        if promise.is_result or promise.is_input:
            name = str(actual.dtype).removeprefix("torch.")
            return f"promised in float32, but computed in {name}: {promise.part}"
    return ""


def own_code_roundings(module: nn.Module) -> int:
    """Return how often the code between two submodules of a module may round."""
    if type(module).__module__.startswith(NATIVE_MODELS):
        return NATIVE_ROUNDINGS
    return OWN_CODE_ROUNDINGS


def core_roundings(core: nn.Module) -> int:
    """Return how often an attention core may round."""
    if isinstance(core, LOG_SUM_EXP.modules):
        return NATIVE_CORE_ROUNDINGS
    return CORE_ROUNDINGS


def is_rotated_once(module: nn.Module) -> bool:
    """True if the queries and keys of an attention module are rotated in float32, and then rounded once."""
    return isinstance(module, ROTATION.modules)


def fraction_not_rounded_once(actual: Tensor, exact: Tensor) -> float:
    """Return the fraction of elements of a 16-bit result that are not the exact result, rounded to nearest.

    Float32 arithmetic may lose digits by cancellation, so errors of 2^-20 of the largest element of a row are accepted.
    """
    exact = exact.double()
    nearest = torch.empty_like(exact, dtype=actual.dtype).copy_(exact).double()
    difference = (actual.double() - nearest).abs()
    # Half a unit in the last place: the neighbor of a tie has the same distance.
    excess = (actual.double() - exact).abs() - (nearest - exact).abs()
    largest = exact.abs().amax(-1, keepdim=True) if exact.ndim else exact.abs()
    is_wrong = (difference > 0) & (excess > 2.0**-20 * largest)
    return float(is_wrong.double().mean())
