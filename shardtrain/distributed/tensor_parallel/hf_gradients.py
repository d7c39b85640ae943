"""Find which replicated weights of a ``transformers`` network have partial gradients with tensor parallelism.

A plan names the split modules and may omit replicated weights. A replicated weight that is applied to
replicated activations has its complete gradient on every rank. An example is a norm of the residual stream. A
weight that each rank applies only to its own heads, such as a norm of queries, has a partial gradient on each
rank, and these must be summed over ranks.

To distinguish the two cases, ``follow`` runs a forward pass on the meta device. It labels every activation
as split or replicated, from the modules that split activations to the modules that sum them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardtrain.distributed.tensor_parallel.meta_pass import MetaPass
from shardtrain.ops.meta_autocast import meta_autocast
from shardtrain.ops.user_state import trial

_TOKENS = 8
SPLIT = "split"
"""Effect of a module: its input is replicated, and each rank has a different part of its output, such as heads."""
REPLICATED = "replicated"
"""Effect of a module: input and output are replicated, and backward returns the complete input gradient."""
SUMMED = "summed"
"""Effect of a module: each rank has a different part of its input, and its output is the sum over ranks."""
SHARED = "shared"
"""Effect of a module: like REPLICATED, but ranks may also combine its output with their own heads."""


@dataclass
class Findings:
    """Result of ``follow``.

    Attributes:
        partial: names of replicated parameters whose gradients are partial sums.
        problems: a phrase for each module that would compute or cause a wrong gradient.
        is_complete: True if the forward pass finished. If it failed, the other attributes cover only the
            modules before the failure.
    """

    partial: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)
    is_complete: bool = False


@dataclass(frozen=True)
class _Label:
    """Properties of a tensor.

    Attributes:
        is_split: True if the tensor differs between ranks.
        is_trained: True for an activation that depends on parameters, so that it has a gradient.
        is_shared: True if it is computed only from constants and the outputs of SHARED modules.
        weights: for a tensor that is computed only from parameters: the names of the replicated ones.
    """

    is_split: bool = False
    is_trained: bool = False
    is_shared: bool = False
    weights: frozenset[str] = frozenset()


_CONSTANT = _Label()


def follow(
    model: nn.Module, effects: Mapping[str, str], split_parameters: set[str], experts: set[str]
) -> Findings:
    """Find partial gradients and problems by labelling the activations of a forward pass.

    Args:
        model: the unsplit model, with parameters on the meta device. It is not changed.
        effects: maps the path of each module with a style to its effect: SPLIT, REPLICATED, SUMMED or SHARED.
        split_parameters: names of parameters that are split over ranks, but whose module has no effect, such
            as attention sinks.
        experts: paths of modules that select tokens by value, which the meta device does not support. They
            return a copy of their first input instead.
    """
    findings = Findings()
    copied = copy.deepcopy(model).to("meta")  # also moves the buffers, which are on the CPU
    for path in experts:
        copied.get_submodule(path).forward = _copy_of_first_input
    watch = _Watch(findings)
    for name, parameter in copied.named_parameters():
        label = (
            _Label(is_split=True) if name in split_parameters else _Label(weights=frozenset([name]))
        )
        watch.set_label(parameter, label)
    for path, module in copied.named_modules():
        watch.hook(path, module, effects.get(path))
    tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    # A forward pass may raise any exception, because tensors on the meta device have no values.
    with (
        suppress(Exception),
        trial(copied),
        torch.no_grad(),
        torch.device("meta"),
        meta_autocast(),
        watch,
    ):
        copied(tokens)
        findings.is_complete = True
    return findings


class _Watch(MetaPass):
    """Propagate labels through operations. A label belongs to a storage, so views share it."""

    def __init__(self, findings: Findings) -> None:
        super().__init__()
        self._findings = findings
        self._labels: dict[int, _Label] = {}
        self._kept: list[Any] = []
        """All labelled storages. Kept alive, because a new storage could reuse the address of a freed one."""
        self._running: list[str] = []
        """Paths of the modules that are running now, outermost first."""
        self._opaque_depth = 0
        """Number of running modules with an effect. Operations inside them are not labelled."""

    def label(self, tensor: Tensor) -> _Label:
        return self._labels.get(tensor.untyped_storage()._cdata, _CONSTANT)

    def set_label(self, tensor: Tensor, label: _Label) -> None:
        storage = tensor.untyped_storage()
        self._kept.append(storage)
        self._labels[storage._cdata] = label

    def hook(self, path: str, module: nn.Module, effect: str | None) -> None:
        """Register hooks that label the outputs of a module with an effect, and check its inputs."""

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
            self._findings.problems.append(
                f"{path} sums outputs over ranks, but its input is not split"
            )
        if effect != SUMMED and is_split:
            self._findings.problems.append(f"{path} has an input that is split over ranks")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_dispatch__(func, types, args, kwargs)
        if self._opaque_depth or not isinstance(output, Tensor | tuple | list):
            return output
        inputs = list(_tensors([args, kwargs]))
        labels = [self.label(tensor) for tensor in inputs]
        label = self._combined(labels)
        storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in _tensors(output):
            # Skip views, which already have the label of their storage. But an in-place operation changes
            # this label.
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
        """Return the label of the result of an operation. Record partial gradients and problems."""
        trained = [label for label in labels if label.is_trained]
        of_weights = [label for label in labels if label.weights]
        if any(label.is_split for label in labels):
            # Each rank combines the weights with its own part of the activations. So it computes only part of
            # the weights' gradient.
            for label in of_weights:
                self._findings.partial |= label.weights
            # The gradient of a replicated activation would be partial too, and nothing would sum it.
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


def _copy_of_first_input(hidden_states: Tensor, *_: Any, **keywords: Any) -> Tensor:
    return hidden_states.clone()


def _tensors(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
