"""Bytes that the layers of a ``transformers`` network save for backward, counted in a forward pass without memory.

The formulas of ``layer_memory`` describe layers of this package. Networks of ``transformers`` have other norms,
gates and recurrences, and some save several float32 copies. So a copy of the network runs on the meta device, and
``torch.autograd.graph.saved_tensors_hooks`` sees what autograd saves. Two parts do not run, because they need values
or kernels of the device: attention saves its queries, keys, values and output, and experts save nothing.
``layer_memory`` adds the rest of both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardtrain.ops.attention_interface import route
from shardtrain.ops.meta_autocast import meta_autocast
from shardtrain.ops.no_token_chosen import NoTokenChosen
from shardtrain.ops.user_state import trial

_TOKENS = 512
"""Largest length of the traced row. Chunked recurrences need several chunks."""
_FUNCTION = "shardtrain_planned"
_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class SavedBytes:
    """Bytes per token that a layer saves for backward on one rank.

    Attributes:
        attention: saved by the norm before attention, and by attention or recurrence.
        feed_forward: saved by everything after that.
        attention_norms: part of ``attention`` that norms of the residual stream save.
        feed_forward_norms: part of ``feed_forward`` that norms of the residual stream save.
    """

    attention: float
    feed_forward: float
    attention_norms: float = 0.0
    feed_forward_norms: float = 0.0


def saved_per_token(model: Any, seq_len: int, width: int) -> dict[str, SavedBytes]:
    """Return the saved bytes of each block, by its path.

    Empty if the network does not run on the meta device. The formulas then describe its layers.

    Args:
        model: a ``models.transformers.Model`` on the meta device. Only a copy of it runs.
        seq_len: tokens of a row of the run.
        width: bytes of an element in the compute dtype.
    """
    # Tensors that autograd saves have the dtype of the weights and activations, so convert the weights to the
    # compute dtype.
    copied = copy.deepcopy(model).to("meta")
    for parameter in copied.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(_DTYPES[width])
    # Experts do not run, because the numbers of their tokens depend on values.
    for experts in copied.experts.values():
        experts.forward = _first_input
    tokens = min(seq_len, _TOKENS)
    recorder = _Recorder(copied)
    row = torch.zeros(1, tokens, dtype=torch.int64, device="meta")
    try:
        with (
            trial(copied),
            _attention_saves_its_inputs(copied),
            torch.device("meta"),
            meta_autocast(),
            NoTokenChosen(),
            recorder.recording(),
        ):
            copied(row)
    except Exception:  # the code of a network may raise any exception on tensors without values
        return {}
    saved = {}
    for path, num_bytes in recorder.by_block.items():
        saved[path] = SavedBytes(*(part / tokens for part in num_bytes))
    return saved


def saved_by_gate(experts: Any, features: int, width: int) -> int:
    """Return the bytes that the activation of an expert saves for each row.

    Args:
        experts: stacked experts of the experts interface, on the meta device.
        features: hidden features of an expert.
        width: bytes of an element in the compute dtype.
    """
    # A gated activation takes the gate and the hidden features in one tensor.
    rows = 16
    columns = features
    if experts.has_gate:
        columns = 2 * features
        activation = experts._apply_gate
    else:
        # Experts with their own gate, such as those of gpt-oss, may have no such attribute.
        activation = experts.act_fn
    hidden = torch.empty(rows, columns, dtype=_DTYPES[width], device="meta", requires_grad=True)
    count = _Count(set())
    with torch.autograd.graph.saved_tensors_hooks(count.add, _unchanged):
        activation(hidden)
    return count.bytes // rows


@dataclass
class _Count:
    """Sum of the sizes of different storages.

    Attributes:
        ignored: addresses of storages that do not count, such as those of weights.
        bytes: the sum.
        kept: the counted tensors, because the address of a freed storage may be used again.
    """

    ignored: set[int]
    bytes: int = 0
    kept: list[Tensor] = field(default_factory=list)

    def add(self, tensor: Tensor) -> Tensor:
        """Count the storage of a tensor, unless it was counted before."""
        # Several operations may save views of one tensor, which needs its memory once.
        storage = tensor.untyped_storage()
        if storage._cdata not in self.ignored:
            self.ignored.add(storage._cdata)
            self.kept.append(tensor.detach())
            self.bytes += storage.nbytes()
        return tensor

    def ignore(self, tensor: Tensor) -> None:
        """Do not count the storage of a tensor later."""
        self.ignored.add(tensor.untyped_storage()._cdata)
        self.kept.append(tensor.detach())


class _Recorder:
    """Counts the bytes that each block saves before and after the end of its attention.

    Attributes:
        by_block: path of a block -> bytes of its attention, of all that follows, and of the norms of the residual
            stream in both.
    """

    def __init__(self, model: Any) -> None:
        self.by_block: dict[str, tuple[int, int, int, int]] = {}
        self._model = model
        # Weights are in memory anyway, so saving them costs nothing.
        weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        self._count = _Count(weights)
        self._start = 0
        self._end_of_attention = 0
        self._start_of_norm = 0
        self._norms = 0
        self._norms_of_attention = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the passes in this context."""
        for path, block in self._model.blocks.items():
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leave(path))
            mixer = _mixer(block)
            if mixer is not None:
                mixer.register_forward_hook(self._leave_attention)
            for child in block.children():
                if {parameter.ndim for parameter in child.parameters()} == {1}:
                    child.register_forward_pre_hook(self._enter_norm)
                    child.register_forward_hook(self._leave_norm)
        with torch.autograd.graph.saved_tensors_hooks(self._count.add, _unchanged):
            yield

    def _enter(self, _: nn.Module, inputs: Any, keywords: Any) -> None:
        # Layers share position embeddings and masks. Without this, the first layer would count them.
        shared = [*inputs[1:]]
        for name, value in keywords.items():
            if name != "hidden_states":
                shared.append(value)
        for leaf in tree_leaves(shared):
            if isinstance(leaf, Tensor):
                self._count.ignore(leaf)
        self._start = self._count.bytes
        self._end_of_attention = self._count.bytes
        self._norms = 0
        self._norms_of_attention = 0

    def _enter_norm(self, *_: Any) -> None:
        self._start_of_norm = self._count.bytes

    def _leave_norm(self, *_: Any) -> None:
        self._norms += self._count.bytes - self._start_of_norm

    def _leave_attention(self, *_: Any) -> None:
        self._end_of_attention = self._count.bytes
        self._norms_of_attention = self._norms

    def _leave(self, path: str) -> Callable[..., None]:
        def leave(*_: Any) -> None:
            attention = self._end_of_attention - self._start
            feed_forward = self._count.bytes - self._end_of_attention
            feed_forward_norms = self._norms - self._norms_of_attention
            self.by_block[path] = (
                attention,
                feed_forward,
                self._norms_of_attention,
                feed_forward_norms,
            )

        return leave


def _mixer(block: nn.Module) -> nn.Module | None:
    """Return the first child of a block that has matrices: attention, or a recurrence."""
    for child in block.children():
        if any(parameter.ndim > 1 for parameter in child.parameters()):
            return child
    return None


@contextmanager
def _attention_saves_its_inputs(model: Any) -> Iterator[None]:
    """Let the network use an attention function that saves queries, keys, values and output, like a flash kernel."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_FUNCTION, _attention)
    route(model.hf, _FUNCTION)
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS._global_mapping[_FUNCTION]


def _attention(
    _: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_arguments: Any, **_keywords: Any
) -> tuple[Any, None]:
    return _FlashAttention.apply(query, key, value), None


class _FlashAttention(torch.autograd.Function):
    """Return an output of the right shape, and save the tensors that a flash kernel saves."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty(query.size(0), query.size(2), query.size(1), value.size(-1))
        ctx.save_for_backward(query, key, value, output)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[None, None, None]:
        """Raises AssertionError, because the network only runs forward."""
        raise AssertionError("the network of a plan only runs forward")


def _first_input(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states.clone()


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor
