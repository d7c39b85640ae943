"""Find out which gradients are partial sums under the tensor-parallel plan of a ``transformers`` network.

A plan names the split modules. It may leave out replicated weights, and whether the gradient of such a
weight is complete depends on its use: a norm of the residual stream has the complete gradient on every
rank, a norm of a rank's own heads has only a part. A forward pass on the meta device follows the
activations that differ between ranks from the modules that split them to the modules that sum them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardtrain.ops.user_state import trial

_TOKENS = 8
SPLIT = "split"
"""Effect of a module: its output differs between ranks, for example by heads."""
WHOLE = "whole"
"""Effect of a module: its output is equal on all ranks, and the gradient of its input is complete."""
SUMMED = "summed"
"""Effect of a module: like WHOLE, but its input differs between ranks."""
SHARED = "shared"
"""Effect of a module: like WHOLE, and ranks may use its output for their own heads."""


@dataclass
class Findings:
    """Result of following a forward pass.

    Attributes:
        partial: names of replicated parameters whose gradient is a part on each rank.
        problems: places at which no plan of modules gives correct gradients, one phrase each.
        is_complete: the forward pass did not fail.
    """

    partial: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    is_complete: bool = False


@dataclass(frozen=True)
class _Label:
    """Origin of an activation.

    Attributes:
        is_split: it differs between ranks.
        is_trained: it depends on parameters, so it has a gradient.
        is_shared: it is the output of a module with the effect SHARED, or computed from it and constants.
        weights: names of the parameters that it is computed from, if it depends on nothing else.
    """

    is_split: bool = False
    is_trained: bool = False
    is_shared: bool = False
    weights: frozenset[str] = frozenset()


_CONSTANT = _Label()


def follow(model: nn.Module, effects: Mapping[str, str], split_parameters: set[str], experts: set[str]) -> Findings:
    """Follow one forward pass of a model on the meta device.

    Args:
        model: the unsplit model, on the meta device. It is not changed.
        effects: module path -> effect, one of SPLIT, WHOLE, SUMMED and SHARED.
        split_parameters: names of parameters that other modules use and that differ between ranks.
        experts: paths of modules that select tokens by value, which the meta device cannot. Their output is
            taken to be like their first input, on which it depends.
    """
    findings = Findings()
    whole = copy.deepcopy(model).to("meta")  # buffers are on the CPU
    for path in experts:
        whole.get_submodule(path).forward = _same_shape
    watch = _Watch(findings)
    for name, parameter in whole.named_parameters():
        label = _Label(is_split=True) if name in split_parameters else _Label(weights=frozenset([name]))
        watch.set_label(parameter, label)
    for path, module in whole.named_modules():
        watch.hook(path, module, effects.get(path))
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    # A forward may need values, which the meta device does not have.
    with suppress(Exception), trial(whole), torch.no_grad(), torch.device("meta"), watch:
        whole(tokens)
        findings.is_complete = True
    return findings


class _Watch(TorchDispatchMode):
    """Label the storage of each tensor, so that views share their label."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings
        self._labels: dict[int, _Label] = {}
        self._kept: list[Any] = []
        """All labelled storages: the address of a freed one may be used again."""
        self._running: list[str] = []
        self._opaque_depth = 0

    def label(self, tensor: Tensor) -> _Label:
        return self._labels.get(tensor.untyped_storage()._cdata, _CONSTANT)

    def set_label(self, tensor: Tensor, label: _Label) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._labels[storage._cdata] = label

    def hook(self, path: str, module: nn.Module, effect: str | None) -> None:
        """Track the calls of a module. Inside a module with an effect, operations are not followed."""

        def enter(_: nn.Module, inputs: Any, keywords: Any) -> None:
            self._running.append(path)
            if effect is None:
                return
            if not self._opaque_depth:
                self._check_input(path, effect, [inputs, keywords])
            self._opaque_depth += 1

        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            self._running.pop()
            if effect is None:
                return
            self._opaque_depth -= 1
            label = _Label(is_split=effect == SPLIT, is_trained=True, is_shared=effect == SHARED)
            for tensor in _tensors(output):
                self.set_label(tensor, label)

        module.register_forward_pre_hook(enter, with_kwargs=True)
        module.register_forward_hook(leave, always_call=True)

    def _check_input(self, path: str, effect: str, inputs: Any) -> None:
        is_split = any(self.label(tensor).is_split for tensor in _tensors(inputs))
        if effect == SUMMED and not is_split:
            self._findings.problems.append(f"{path} sums outputs over ranks, and its input is not split")
        if effect != SUMMED and is_split:
            self._findings.problems.append(f"{path} has an input that is split over ranks")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            # Networks test properties of masks, such as whether rows are packed. Any answer is useful here.
            return 0.0 if args[0].is_floating_point() else 0
        output = func(*args, **kwargs)
        if self._opaque_depth:
            return output
        inputs = list(_tensors([args, kwargs]))
        labels = [self.label(tensor) for tensor in inputs]
        label = self._combined(labels)
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in _tensors(output):
            is_view = tensor.untyped_storage()._cdata in storages
            if is_view and not func._schema.is_mutable:
                continue
            has_gradient = tensor.is_floating_point() or tensor.is_complex()
            if not has_gradient:
                # No gradient flows through an index or a mask.
                self.set_label(tensor, _Label(is_split=label.is_split))
            else:
                self.set_label(tensor, label)
        return output

    def _combined(self, labels: list[_Label]) -> _Label:
        """Return the label of the result of an operation, and note gradients that are partial."""
        trained = [label for label in labels if label.is_trained]
        of_weights = [label for label in labels if label.weights]
        if any(label.is_split for label in labels):
            for label in of_weights:
                self._findings.partial |= label.weights
            if any(not label.is_split and not label.is_shared for label in trained):
                place = self._running[-1] if self._running else "the model"
                problem = f"{place} combines activations that are split over ranks with others that are not"
                if problem not in self._findings.problems:
                    self._findings.problems.append(problem)
            return _Label(is_split=True, is_trained=True)
        if trained:
            is_shared = not of_weights and all(label.is_shared for label in trained)
            return _Label(is_trained=True, is_shared=is_shared)
        weights: frozenset[str] = frozenset()
        for label in of_weights:
            weights |= label.weights
        return _Label(weights=weights)


def _same_shape(hidden_states: Tensor, *_: Any, **keywords: Any) -> Tensor:
    return hidden_states.clone()


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
