"""Adapters for stacks of expert weights, one adapter per expert, like PEFT's ``target_parameters``.

Shape suffixes: E experts, I inputs, O outputs, R rank. A layer has two stacks, named as in transformers:
``gate_up_proj`` (``w1`` and ``w3`` of our models) and ``down_proj`` (``w2``).

In our models, the factors are multiplied with the rows of each expert. The forward of a transformers network
is unknown, so the product of the factors is added to the weight at each use, like in PEFT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shardtrain.models import moe
from shardtrain.ops.row_order import Choice

# Name of a stack in transformers -> names of our parameters that it contains.
OURS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


@dataclass(frozen=True)
class Stack:
    """Weights of all experts of a layer that share one adapter.

    Attributes:
        path: Path of the stack in the model. Its last component is the name in transformers.
        weights: Names of the owner's parameters that the stack consists of, concatenated along the outputs.
        transposed: True if the weights have shape (E, I, O).
    """

    path: str
    weights: tuple[str, ...]
    experts: int
    inputs: int
    outputs: int
    transposed: bool = False

    @property
    def owner(self) -> str:
        """Path of the module that contains the weights."""
        return self.path.rpartition(".")[0]


def find(model: nn.Module) -> dict[str, Stack]:
    """Return the stacks of a model that can be adapted, by path."""
    is_transformers = hasattr(model, "hf")
    stacks = []
    # Native models have their own class of experts. Networks of transformers own the stacks directly.
    for path, module in model.named_modules():
        if isinstance(module, moe.Experts):
            for name, weights in OURS.items():
                num_experts, _, inputs = getattr(module, weights[0]).shape
                outputs = 0
                for weight in weights:
                    outputs += getattr(module, weight).shape[1]
                stacks.append(Stack(f"{path}.{name}", weights, num_experts, inputs, outputs))
        elif is_transformers:
            stacks += _transformers_stacks(path, module)
    return {stack.path: stack for stack in stacks}


def _transformers_stacks(path: str, module: nn.Module) -> list[Stack]:
    """Return the stacks that a module of a transformers network owns: its parameters of three dimensions."""
    is_transposed = bool(getattr(module, "is_transposed", False))
    stacks = []
    for name, parameter in module.named_parameters(recurse=False):
        # Other parameters are not stacks. Factors of an adapter also have three dimensions.
        if parameter.ndim != 3 or "_lora_" in name:
            continue
        num_experts, outputs, inputs = parameter.shape
        if is_transposed:
            num_experts, inputs, outputs = parameter.shape
        stack = Stack(f"{path}.{name}", (name,), num_experts, inputs, outputs, is_transposed)
        stacks.append(stack)
    return stacks


def apply(model: nn.Module, stacks: list[Stack], rank: int, scale: float) -> None:
    """Add the LoRA factors A and B to each module that owns a stack of expert weights, in place.

    All other parameters must already be frozen.
    """
    for stack in stacks:
        owner = model.get_submodule(stack.owner)
        # Native experts are replaced once, even if both of their stacks are adapted.
        weight = getattr(owner, stack.weights[0])
        if isinstance(owner, moe.Experts) and not isinstance(owner, LoraExperts):
            above, _, leaf = stack.owner.rpartition(".")
            owner = LoraExperts(owner, scale)
            setattr(model.get_submodule(above), leaf, owner)
        name = stack.path.rpartition(".")[2]
        a_ERI = weight.new_empty(stack.experts, rank, stack.inputs)
        b_EOR = weight.new_empty(stack.experts, stack.outputs, rank)
        owner.register_parameter(f"{name}_lora_a", nn.Parameter(a_ERI))
        owner.register_parameter(f"{name}_lora_b", nn.Parameter(b_EOR))
        # The class of a transformers network stays as it is, so its weights must change during each call.
        if not isinstance(owner, LoraExperts):
            _add_at_each_use(owner, name, scale, stack.transposed)


def adapted(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the path and factor A of each adapted stack."""
    for name, parameter in model.named_parameters():
        if name.endswith("_lora_a"):
            yield name.removesuffix("_lora_a"), parameter


class LoraExperts(moe.Experts):
    """Experts with frozen weights and adapters for one or both stacks."""

    def __init__(self, base: moe.Experts, scale: float) -> None:
        # Skip the constructor of Experts, which would allocate new weights.
        nn.Module.__init__(self)
        self.w1 = base.w1
        self.w2 = base.w2
        self.w3 = base.w3
        self.scale = scale
        self.gate = base.gate
        for name in ("w1_bias", "w2_bias", "w3_bias"):
            self.register_parameter(name, getattr(base, name))

    def takes_tokens(self, x_SD: Tensor, top_k: int) -> bool:
        """Return False: the adapters require rows sorted by expert."""
        return False

    def forward(self, x_RD: Tensor, count_E: Tensor | None, choice: Choice | None = None) -> Tensor:
        """Map rows (R, D), sorted by expert, to (R, D). ``count_E`` is the number of rows per expert."""
        assert count_E is not None
        gate_RF = moe.product(x_RD, count_E, self.w1)
        gate_RF = moe.add_bias(gate_RF, count_E, self.w1_bias)
        up_RF = moe.product(x_RD, count_E, self.w3)
        up_RF = moe.add_bias(up_RF, count_E, self.w3_bias)
        # The gate and up projection are one stack, so one adapter returns both.
        added = self._added("gate_up_proj", x_RD, count_E)
        if added is not None:
            added_gate_RF, added_up_RF = added.chunk(2, dim=-1)
            gate_RF = gate_RF + added_gate_RF
            up_RF = up_RF + added_up_RF
        hidden_RF = self.gate(gate_RF, up_RF)
        out_RD = moe.product(hidden_RF, count_E, self.w2)
        out_RD = moe.add_bias(out_RD, count_E, self.w2_bias)
        added = self._added("down_proj", hidden_RF, count_E)
        if added is None:
            return out_RD
        return out_RD + added

    def _added(self, name: str, x_RI: Tensor, count_E: Tensor) -> Tensor | None:
        """Return the output of the adapter of a stack, or None if the stack has no adapter."""
        a_ERI = getattr(self, f"{name}_lora_a", None)
        b_EOR = getattr(self, f"{name}_lora_b", None)
        if a_ERI is None or b_EOR is None:
            return None
        low_rank = moe.product(x_RI, count_E, a_ERI)
        return moe.product(low_rank, count_E, b_EOR) * self.scale


def _add_at_each_use(owner: nn.Module, name: str, scale: float, transposed: bool) -> None:
    """Replace the forward of a module by one that adds the adapter to the weight ``name`` during the call."""
    forward_of_class: Callable[..., Any] = owner.forward

    def forward(*inputs: Any, **keywords: Any) -> Any:
        # During forward, an instance attribute hides the parameter with the same name. With tensor parallelism,
        # plain tensors of this rank already hide the parameters.
        weight = getattr(owner, name)
        assert not isinstance(weight, DTensor)
        a_ERI = getattr(owner, f"{name}_lora_a")
        b_EOR = getattr(owner, f"{name}_lora_b")
        left, right = _factors(a_ERI, b_EOR, transposed)
        was_hidden = name in owner.__dict__
        owner.__dict__[name] = torch.baddbmm(weight, left, right, alpha=scale)
        try:
            return forward_of_class(*inputs, **keywords)
        finally:
            del owner.__dict__[name]
            if was_hidden:
                owner.__dict__[name] = weight

    owner.forward = forward  # type: ignore[method-assign]


def _factors(a_ERI: Tensor, b_EOR: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Return the two factors in the order in which their product has the orientation of the weight."""
    if transposed:
        return a_ERI.transpose(1, 2), b_EOR.transpose(1, 2)
    return b_EOR, a_ERI


@torch.no_grad()
def merged(
    weight: Tensor, stack: Stack, a_ERI: Tensor, b_EOR: Tensor, part: int, scale: float
) -> Tensor:
    """Return one weight of a stack with its adapter added, in float32. ``part`` is its index in the stack."""
    # The outputs of a stack are those of its weights, one after the other.
    rows = slice(None)
    if len(stack.weights) > 1:
        size = stack.outputs // len(stack.weights)
        rows = slice(part * size, (part + 1) * size)
    left, right = _factors(a_ERI.float(), b_EOR.float()[:, rows], stack.transposed)
    return torch.baddbmm(weight.float(), left, right, alpha=scale)


def to_peft(name: str, factor: Tensor) -> Tensor:
    """Convert a factor to PEFT's layout: A (E, R, I) to (E * R, I), and B (E, R, O) to (O, R * E).

    In A all rows of an expert are adjacent; in B all columns of a rank are.
    """
    if name.endswith("lora_a"):
        return factor.flatten(0, 1)
    return factor.permute(1, 2, 0).flatten(1, 2)


def from_peft(name: str, tensor: Tensor, experts: int) -> Tensor:
    """Convert a factor from PEFT's layout: the inverse of ``to_peft``."""
    if name.endswith("lora_a"):
        return tensor.unflatten(0, (experts, -1))
    return tensor.unflatten(1, (-1, experts)).permute(2, 0, 1)
