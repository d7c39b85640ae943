"""Mixed precision without data parallelism: forward and backward use copies of the parameters in
the compute dtype.

FSDP2 supports this too, but with one data-parallel rank it would cost:

- a copy of all weights and gradients through its buffers
- hooks at each layer
- a second set of gradients if there are several micro-batches

The results are bitwise equal to those of FSDP2, with two exceptions:

- Gradients of tensors that several layers read, such as an encoder's output: FSDP's hooks change the order in which
  autograd adds them up.
- Gradients that are partial sums on each tensor-parallel rank (partial_gradients.py): with a single micro-batch, FSDP
  adds them up in the compute dtype.
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
    """Make each forward pass of ``model``, and the backward pass that follows, use copies in ``dtype``."""
    _copies_of[model] = copies = ComputeCopies(dtype)
    model.register_forward_pre_hook(copies.before_forward, prepend=True)


def are_used(model: nn.Module) -> bool:
    """True after ``use(model, ...)``."""
    return model in _copies_of


def drop(model: nn.Module) -> None:
    """Put the parameters back into the modules, after a backward pass or after forward passes without one."""
    if model in _copies_of:
        _copies_of[model].drop()


def held_bytes(model: nn.Module, part: nn.Module) -> int:
    """Bytes of the copies that modules of ``part``, a submodule of ``model``, use now."""
    return _copies_of[model].held_bytes(part) if model in _copies_of else 0


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard: the local tensor itself, while ``DTensor.to_local`` returns a view of it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _placed_as(tensor: Tensor, local: Tensor) -> Tensor:
    """Wrap a shard as a DTensor with the spec of ``tensor``, as FSDP does; plain tensors are
    returned as they are.
    """
    return (
        DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
    )


class ComputeCopies:
    """Copies of a model's parameters, which replace them in its modules from a forward pass on.

    In backward, as soon as the gradient of a copy is complete, it is added to the parameter's
    gradient in the parameter's dtype. The parameter then returns to its modules, and the memory of
    the copy is freed. Copies without a gradient stay until ``drop``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        """Parameters that have a copy now, and their (module, name) pairs: several for tied parameters."""
        self._versions: list[int] = []
        """PyTorch's version counter of each of these parameters when it was copied."""

    def before_forward(self, model: nn.Module, _: Any) -> None:
        """Make the copies, unless those of an earlier forward pass are still valid.

        They are valid until ``drop`` is called or a parameter changes: the backward of that pass has not
        run yet, or it has none.
        """
        if self._places and self._versions == [
            _local(parameter)._version for parameter in self._places
        ]:
            return  # a second pass of a loss that needs two, or validation: one gradient of each copy, one cast
        self.drop()
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if (
                    parameter is not None
                    and parameter.is_floating_point()
                    and parameter.dtype != self._dtype
                ):
                    self._places.setdefault(parameter, []).append((module, name))

        stored = [_local(parameter) for parameter in self._places]
        self._versions = [tensor._version for tensor in stored]
        casts = [
            torch.empty_like(tensor, dtype=self._dtype, requires_grad=False) for tensor in stored
        ]
        if casts:
            with torch.no_grad():
                torch._foreach_copy_(casts, stored)  # on an accelerator a few kernels for all
        for (parameter, places), cast in zip(self._places.items(), casts, strict=True):
            # A separate leaf: autograd adds up the gradients of all its uses in the compute dtype,
            # as with FSDP
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
            # placements differ if one is a partial sum
            parameter.grad = parameter.grad + gradient.to(parameter.dtype)
        else:
            _local(parameter.grad).add_(_local(gradient))
        del gradient  # before the hooks, which may update the parameter
        # The backward of all uses is done. The graph keeps the copy alive until the loss is freed,
        # so free its memory here. An operation that still needed it would fail, because its size is
        # 0 now.
        held = _local(copy)
        held.data = held.new_empty(0)
        module, name = self._places.get(parameter, [(None, "")])[0]
        if module is not None and module._parameters[name] is copy:  # else dropped, or copied again
            self._show(parameter, self._places.pop(parameter))
        hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(parameter)

    def held_bytes(self, part: nn.Module) -> int:
        """Bytes of the copies that modules of ``part`` use now."""
        modules = set(part.modules())
        held = [places[0] for places in self._places.values() if places[0][0] in modules]
        return sum(_local(module.get_parameter(name)).nbytes for module, name in held)

    def drop(self) -> None:
        """Put all parameters back into their modules."""
        for parameter, places in self._places.items():
            self._show(parameter, places)
        self._places.clear()

    def _show(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> None:
        for module, name in places:
            module._parameters[name] = parameter
