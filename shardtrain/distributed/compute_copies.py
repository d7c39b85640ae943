"""Mixed precision without data parallelism: run forward and backward with copies in the compute dtype.

FSDP2 supports this too. But with one data-parallel rank it would needlessly
- copy all weights and gradients through its buffers
- call hooks at each layer
- keep a second set of gradients if there are several micro-batches

The results are bitwise equal to those of FSDP2, with two exceptions:

- Gradients of tensors that several layers read, such as an encoder's output: FSDP's hooks change the order
  in which autograd adds them up.
- Gradients that are partial sums on each tensor-parallel rank (partial_gradients.py): with a single
  micro-batch, FSDP adds them up in the compute dtype.
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
    """Put the parameters back into the modules.

    Call it after a backward pass, or after forward passes that have no backward pass.
    """
    if model in _copies_of:
        _copies_of[model].drop()


def held_bytes(model: nn.Module, part: nn.Module) -> int:
    """Return the bytes of the copies that are now in use in ``part``, a submodule of ``model``."""
    return _copies_of[model].held_bytes(part) if model in _copies_of else 0


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's shard: the local tensor itself, not a view of it as ``DTensor.to_local`` does."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _placed_as(tensor: Tensor, local: Tensor) -> Tensor:
    """Wrap the shard ``local`` as a DTensor with the spec of ``tensor``, as FSDP does.

    Return ``local`` unchanged if ``tensor`` is no DTensor.
    """
    return (
        DTensor(local, tensor._spec, requires_grad=False) if isinstance(tensor, DTensor) else local
    )


class ComputeCopies:
    """Copies that replace a model's parameters in its modules, from the start of a forward pass.

    In backward, as soon as the gradient of a copy is complete, it is cast and added to the parameter's
    gradient. Then the parameter is put back into its modules, and the memory of the copy is freed.
    Copies that receive no gradient stay until ``drop``.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
        """The (module, name) pairs of each parameter that has a copy now. A tied parameter has several."""
        self._versions: list[int] = []
        """For each parameter in ``_places``, PyTorch's version counter when it was copied."""

    def before_forward(self, model: nn.Module, _: Any) -> None:
        """Make the copies, unless the copies of an earlier forward pass are still valid.

        Copies are valid until ``drop`` is called, a backward pass uses them up, or a parameter changes.
        """
        if self._places and self._versions == [
            _local(parameter)._version for parameter in self._places
        ]:
            # This is validation, or the second pass of a loss that needs two forward passes. Both passes
            # then use the same copies, so each copy has one gradient, which is cast once.
            return
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
                # one call, because on an accelerator it launches a few kernels for all tensors
                torch._foreach_copy_(casts, stored)
        for (parameter, places), cast in zip(self._places.items(), casts, strict=True):
            # The copy is a leaf of the autograd graph. As with FSDP, autograd then adds up the gradients of
            # all its uses in the compute dtype.
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
            # the placements differ because one of the two gradients is a partial sum
            parameter.grad = parameter.grad + gradient.to(parameter.dtype)
        else:
            _local(parameter.grad).add_(_local(gradient))
        del gradient  # before the hooks, which may update the parameter
        # No operation needs the copy any more, but the graph keeps it alive until the loss is freed. So free
        # its memory here. With size 0, an unexpected use would fail instead of computing a wrong result.
        copied_values = _local(copy)
        copied_values.data = copied_values.new_empty(0)
        module, name = self._places.get(parameter, [(None, "")])[0]
        if module is not None and module._parameters[name] is copy:  # else dropped, or copied again
            self._show(parameter, self._places.pop(parameter))
        hooks: dict[int, Any] = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            hook(parameter)

    def held_bytes(self, part: nn.Module) -> int:
        """Return the bytes of the copies that are now in use in ``part``."""
        modules = set(part.modules())
        total = 0
        for places in self._places.values():
            # All modules of a tied parameter share one copy, so count its first place only.
            module, name = places[0]
            if module in modules:
                total += _local(module.get_parameter(name)).nbytes
        return total

    def drop(self) -> None:
        """Put all parameters back into their modules."""
        for parameter, places in self._places.items():
            self._show(parameter, places)
        self._places.clear()

    def _show(self, parameter: nn.Parameter, places: list[tuple[nn.Module, str]]) -> None:
        for module, name in places:
            module._parameters[name] = parameter
