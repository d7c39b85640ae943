"""Mixed precision where no data-parallel ranks are: a pass computes with copies of the parameters in the compute type.

FSDP2 can do that too, but what it does for many ranks costs one process, or tensor-parallel peers alone, a copy of all
weights and gradients through its buffers, hooks at each layer, and with several micro-batches a second set of
gradients. The numbers are the same to the bit, but for tensors that several layers read, such as an encoder's output:
FSDP's hooks change the order in which autograd adds up their gradients. And gradients of which tensor-parallel ranks
have addends FSDP adds up in the compute type, where one micro-batch is all (partial_gradients.py).
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_copies_of: weakref.WeakKeyDictionary[nn.Module, ComputeCopies] = weakref.WeakKeyDictionary()


def use(model: nn.Module, dtype: torch.dtype) -> None:
    """Let each forward pass of ``model``, and the backward pass that follows, compute with parameters in ``dtype``."""
    _copies_of[model] = copies = ComputeCopies(dtype)
    model.register_forward_pre_hook(copies.before_forward, prepend=True)


def drop(model: nn.Module) -> None:
    """Show the parameters themselves again, after a backward pass or after forward passes that have none."""
    if model in _copies_of:
        _copies_of[model].drop()


def held_bytes(model: nn.Module, part: nn.Module) -> int:
    """Bytes of the copies that the modules of ``part`` see now, which is a part of ``model``."""
    return _copies_of[model].held_bytes(part) if model in _copies_of else 0


def _local(tensor: Tensor) -> Tensor:
    """This rank's part: the tensor that a DTensor holds, not a view of it as ``to_local`` gives."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _placed_as(tensor: Tensor, local: Tensor) -> Tensor:
    """A rank's part of a tensor that is placed as ``tensor`` is, and made as FSDP makes its DTensors."""
    return DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local


class ComputeCopies:
    """Copies of a model's parameters, which its modules see in their place from a forward pass on.

    In backward, as soon as the gradient of a copy is whole, it is added to that of the parameter, in the parameter's
    type, the module sees the parameter again, and the copy's memory is free. What has no gradient stays until ``drop``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        """Parameters of which there are copies now, and where modules hold them: several places for tied ones."""
        self._versions: list[int] = []
        """How often each of those had been written when it was copied, by PyTorch's count."""

    def before_forward(self, model: nn.Module, _: Any) -> None:
        """Make the copies, unless those of an earlier pass are still there: its backward is to come, or it has none."""
        if self._places and self._versions == [_local(parameter)._version for parameter in self._places]:
            return  # a second pass of a loss that needs two, or validation: one gradient of each copy, one cast
        self.drop()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_floating_point() and parameter.dtype != self._dtype:
                    self._places.setdefault(parameter, []).append((module, name))

        stored = [_local(parameter) for parameter in self._places]
        self._versions = [tensor._version for tensor in stored]
        casts = [torch.empty_like(tensor, dtype=self._dtype, requires_grad=False) for tensor in stored]
        if casts:
            with torch.no_grad():
                torch._foreach_copy_(casts, stored)  # on an accelerator a few kernels for all
        for (parameter, places), cast in zip(self._places.items(), casts, strict=True):
            # a leaf of its own: autograd adds up the gradients of all its uses in the compute type, as with FSDP
            copy = nn.Parameter(_placed_as(parameter, cast), parameter.requires_grad)
            if parameter.requires_grad:
                copy.register_post_accumulate_grad_hook(partial(self._add_gradient, parameter))
            for module, name in places:
                module._parameters[name] = copy

    def _add_gradient(self, parameter: nn.Parameter, copy: Tensor) -> None:
        gradient = copy.grad
        copy.grad = None
        assert gradient is not None
        if parameter.grad is None:
            parameter.grad = _placed_as(gradient, _local(gradient).to(parameter.dtype))
        elif isinstance(gradient, DTensor) and gradient.placements != parameter.grad.placements:  # type: ignore[attr-defined]
            parameter.grad = parameter.grad + gradient.to(parameter.dtype)  # an addend and a sum over ranks
        else:
            _local(parameter.grad).add_(_local(gradient))
        del gradient  # before the hooks, which may update the parameter
        # All uses have had their backward. The graph holds the copy itself until the loss is gone, but not its memory;
        # an operation that did need it would fail, since it has no size now.
        held = _local(copy)
        held.data = held.new_empty(0)
        module, name = self._places.get(parameter, [(None, "")])[0]
        if module is not None and module._parameters[name] is copy:  # else they were dropped, or copied once more
            self._show(parameter, self._places.pop(parameter))
        hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(parameter)

    def held_bytes(self, part: nn.Module) -> int:
        """Bytes of the copies that the modules of a part of the model see now."""
        modules = set(part.modules())
        held = [places[0] for places in self._places.values() if places[0][0] in modules]
        return sum(_local(module.get_parameter(name)).nbytes for module, name in held)

    def drop(self) -> None:
        """Show all parameters again."""
        for parameter, places in self._places.items():
            self._show(parameter, places)
        self._places.clear()

    def _show(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> None:
        for module, name in places:
            module._parameters[name] = parameter
