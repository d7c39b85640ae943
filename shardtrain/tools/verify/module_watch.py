"""Follow the modules of one rank through its first training step."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from shardtrain import layout
from shardtrain.config import Config
from shardtrain.layout import Layout
from shardtrain.ops.dtensor import local_tensor
from shardtrain.tools.verify import backward_rounding, dropout

EMBEDDING = "embedding"
"""Prefix of the keys of tokens and gradients of an embedding."""


class ModuleWatch:
    """Record the first call of each module: inputs, outputs and the gradients of both. Also locate errors.

    Partial sums are not recorded, because no other rank has the value that they should have.

    Attributes:
        layout: Layout of the model, once it is known.
        calls: Paths of the modules, in the order in which their first calls ended.
        tensors: Local tensors by key: "trace/CALL/in/INDEX", "trace/CALL/out/INDEX", "back/..." for
            gradients, "dropped/INDEX" for inputs of disabled dropout, and "embedding/PATH/INDEX/ids" and
            ".../gradient" for each micro-batch.
        drops: Module path and description of each disabled dropout that ran.
    """

    def __init__(self, keep: bool) -> None:
        """Without ``keep``, record no tensors and only locate errors."""
        self.layout: Layout | None = None
        self.calls: list[str] = []
        self.tensors: dict[str, Tensor] = {}
        self.drops: list[tuple[str, str]] = []
        self._keep = keep
        self._has_begun = False
        self._stack: list[str] = []
        self._handles: list[Any] = []
        # Copy inputs when a module is entered, because it may modify them in place.
        self._inputs: dict[str, list[Tensor]] = {}
        self._copies: dict[str, list[Tensor | None]] = {}
        self._num_embedded: dict[str, int] = {}
        self._ids: dict[str, Tensor] = {}

    def begin(self, parts: Sequence[nn.Module]) -> None:
        """Start to watch the modules of this rank's model parts."""
        self._has_begun = True
        dropout.listeners.append(self._record_dropout)
        for part in parts:
            for path, module in part.named_modules():
                before = functools.partial(self._enter, path)
                after = functools.partial(self._leave, path)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(after, with_kwargs=True))
                if self._keep and isinstance(module, nn.Embedding):
                    # Before the hooks of tensor parallelism, which replace tokens of other ranks.
                    keep_ids = functools.partial(self._keep_ids, path)
                    self._handles.append(module.register_forward_pre_hook(keep_ids, prepend=True))
                    keep = functools.partial(self._keep_embedding, path)
                    self._handles.append(module.register_forward_hook(keep))

    def end(self) -> None:
        """Remove all hooks, so later steps run without them."""
        dropout.listeners.clear()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def locate(self, config: Config, error: str = "") -> str:
        """Describe where the rank is and how to fix the error, as a part of a message."""
        if not self._has_begun:
            return "while the model was split over the mesh"
        if not self._stack or self._stack[0] != "":
            return "outside of the model's forward: in the backward pass, an exchange between ranks, or the update"
        path = self._stack[-1]
        where = f"in module {path}" if path else "in the model's own forward"
        if config.parallelism.tensor_parallel_degree == 1 or self.layout is None:
            return f"{where}; correct its forward for a part of the batch, of the layers or of the sequence"

        # "must match the size of tensor" and "mixed torch.Tensor and DTensor" are phrases of
        # PyTorch's error messages.
        style = layout.style_of(self.layout, path)
        parents = [path.rsplit(".", count)[0] for count in range(path.count(".") + 1)]
        is_on_residual = all(layout.style_of(self.layout, parent) is None for parent in parents)
        if is_on_residual and "must match the size of tensor" in error:
            return (
                f"{where}, where each rank has a part of the sequence and can only add another part "
                "of it; end a "
                'gathered module with a "rowwise" linear, '
                "and compute positions in their own module with the style "
                '"embed"'
            )
        if style is None:
            return f"{where}, which has no style in LAYOUT.tensor; add a style for it or for a module that contains it"
        if "mixed torch.Tensor and DTensor" in error:
            return (
                f"{where}: a gathered tensor is a DTensor, but the output of a linear is a plain "
                "tensor; create new tensors from the output of a linear (q.new_zeros instead of "
                "x.new_zeros), and combine gathered tensors with others only after a linear"
            )
        fix = "correct the style, or change the module's forward to work on a part of the heads or of the sequence"
        return (
            f'{where}, which LAYOUT.tensor calls "{style}" ({layout.TENSOR_STYLES[style]}); {fix}'
        )

    def _enter(self, path: str, module: nn.Module, positional: Any, named: Any) -> Any:
        # Activation checkpointing ends a recomputation early with an exception, so forward hooks are skipped.
        # The stack may therefore contain modules of the previous pass.
        if path == "":
            self._stack.clear()
        self._stack.append(path)
        if not self._keep:
            return None
        inputs = backward_rounding.with_separate_inputs(module, positional, named)
        if path not in self._inputs:
            self._inputs[path] = _float_tensors(inputs)
            self._copies[path] = [_copy_unless_partial(leaf) for leaf in self._inputs[path]]
        return inputs

    def _leave(self, path: str, _: nn.Module, _positional: Any, _named: Any, output: Any) -> None:
        while self._stack and self._stack.pop() != path:
            pass
        if not self._keep or path in self.calls:
            return
        number = len(self.calls)
        self.calls.append(path)
        inputs = self._inputs.pop(path, [])
        outputs = _float_tensors(output)
        self._record(number, "in", inputs, self._copies.pop(path, []))
        self._record(number, "out", outputs, [_copy_unless_partial(leaf) for leaf in outputs])
        # An entry without tensors marks the module as recorded, so ``_enter`` ignores its second call.
        self._inputs[path] = []

    def _record_dropout(self, name: str, dropped: Tensor) -> None:
        """Keep the input of a disabled dropout.

        Two ranks with the same input would drop different elements of it.
        """
        number = len(self.drops)
        module = self._stack[-1] if self._stack else ""
        self.tensors[f"dropped/{number}"] = local_copy(dropped)
        self.drops.append((module, name))

    def _keep_ids(self, path: str, _: nn.Module, inputs: Any) -> None:
        self._ids[path] = local_copy(inputs[0])

    def _keep_embedding(self, path: str, _: nn.Module, _inputs: Any, output: Any) -> None:
        """Keep tokens and output gradient of an embedding, whose gradient is a sum over all micro-batches."""
        is_plain = isinstance(output, Tensor) and not isinstance(output, DTensor)
        if not is_plain or not output.requires_grad:
            return
        number = self._num_embedded.get(path, 0)
        self._num_embedded[path] = number + 1
        key = f"{EMBEDDING}/{path}/{number}"
        self.tensors[f"{key}/ids"] = self._ids[path]
        output.register_hook(functools.partial(self._record_gradient, f"{key}/gradient"))

    def _record(
        self,
        number: int,
        kind: str,
        leaves: Sequence[Tensor],
        copies: Sequence[Tensor | None],
    ) -> None:
        for index, (leaf, copied) in enumerate(zip(leaves, copies, strict=True)):
            key = f"{number}/{kind}/{index}"
            if copied is not None:
                self.tensors[f"trace/{key}"] = copied
            # Skip the gradient of a gathered sequence: it is a partial sum, or is accumulated
            # outside of autograd.
            if leaf.requires_grad and not hasattr(leaf, "for_local_products"):
                leaf.register_hook(functools.partial(self._record_gradient, f"back/{key}"))

    def _record_gradient(self, key: str, gradient: Tensor) -> None:
        if key in self.tensors:
            return
        copied = _copy_unless_partial(gradient)
        if copied is not None:
            self.tensors[key] = copied


def local_copy(tensor: Tensor) -> Tensor:
    """Copy this rank's part of a tensor to contiguous CPU memory."""
    return local_tensor(tensor.detach()).detach().cpu().clone(memory_format=torch.contiguous_format)


def _copy_unless_partial(tensor: Tensor) -> Tensor | None:
    """Copy this rank's part of a tensor, or return None if the part is a partial sum."""
    if isinstance(tensor, DTensor) and any(
        placement.is_partial() for placement in tensor.placements
    ):
        return None
    return local_copy(tensor)


def _float_tensors(value: Any) -> list[Tensor]:
    """Return the floating-point tensors of a nested structure."""
    return [
        leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]
