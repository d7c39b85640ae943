"""Sequence parallelism for ``transformers`` networks (Korthikanti et al. 2022).

Between split modules, each tensor-parallel rank holds only its part of the tokens. The first block cuts its
input to this part, and the last block gathers all parts. Inside a block, children with matrices, such as
attention, run on full sequences: their input is gathered, and their output is cut again. If the output comes
from a split linear layer, one reduce-scatter replaces the sum over ranks and the cut. Norms run on parts, so
the gradients of their weights are partial sums.

``find`` runs a copy of the network on the meta device, to reject blocks whose own code combines tokens.
Shape suffixes: B batch, T tokens, t tokens of this rank, D features.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_leaves

from shardtrain.distributed.chain import HIDDEN_STATES
from shardtrain.distributed.tensor_parallel.meta_pass import MetaPass
from shardtrain.ops.meta_autocast import meta_autocast
from shardtrain.ops.user_state import trial
from shardtrain.utils.errors import ConfigError, Problem

_PART = 11
"""Tokens per rank in the test pass. Chosen so that hardly any network has another dimension of this size."""
_ATEN = torch.ops.aten
_TOKENWISE = {
    _ATEN.alias.default,
    _ATEN.clone.default,
    _ATEN.detach.default,
    _ATEN.empty_like.default,
    _ATEN.new_empty.default,
    _ATEN.native_layer_norm.default,
    _ATEN.native_dropout.default,
    _ATEN.zeros_like.default,
    _ATEN._to_copy.default,
}
"""Operations on (B, t, D) that do not mix tokens, in addition to PyTorch's pointwise operations."""
_OVER_FEATURES = {
    _ATEN.mean.dim,
    _ATEN.sum.dim_IntList,
    _ATEN.linalg_vector_norm.default,
    _ATEN.var.correction,
}
"""Operations that do not mix tokens if they reduce only the last dimension."""


class Unsplittable(Exception):
    """The blocks of a network cannot run on parts of sequences.

    The message is the reason, a phrase that follows the network's name.
    """


@dataclass
class SplitSequences:
    """How the modules of a network's blocks run when blocks get parts of sequences.

    Attributes:
        full: paths of the modules that run on full sequences.
        scattered: maps the path of a split linear layer to the module in ``full`` whose output it computes.
        partial: module path -> names of parameters that are applied to parts of sequences, so that their
            gradients are partial sums.
    """

    full: set[str] = field(default_factory=set)
    scattered: dict[str, str] = field(default_factory=dict)
    partial: dict[str, set[str]] = field(default_factory=dict)


def find(model: Any, split: Mapping[str, str], experts: set[str]) -> SplitSequences:
    """Return how the blocks of a network run on parts of sequences.

    Args:
        model: the unsplit model, on the meta device. It is not changed.
        split: maps the path of each module that tensor parallelism splits to its style, such as "colwise".
        experts: paths of modules that select tokens by value, which the meta device does not support.

    Raises:
        Unsplittable: a block may combine tokens.
    """
    if model.kind == "sequence_to_sequence":
        raise Unsplittable("is an encoder with a decoder")
    found = SplitSequences()
    for path, block in model.blocks.items():
        found.full |= set(_full_children(path, block))
        for child_path, child in block.named_modules(prefix=path):
            names = {name for name, _ in child.named_parameters(recurse=False)}
            # Each rank sees only its tokens here, so the gradients of these weights are partial sums
            if names and not _is_in_full(child_path, found.full):
                found.partial[child_path] = names
    for path in sorted(found.full):
        if split.get(path) in ("colwise", "rowwise"):
            raise Unsplittable(f"has blocks that call {path} directly, and this layer is split")
    _Trial(model, found, split, experts).run()
    return found


def _is_in_full(path: str, full: set[str]) -> bool:
    """True if a module is one of those on full sequences, or inside one."""
    return any(f"{path}.".startswith(f"{full_path}.") for full_path in full)


def _full_children(path: str, module: nn.Module) -> Iterator[str]:
    """Yield the children that need full sequences: all except norms and modules without parameters."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}"
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _full_children(child_path, child)
            continue
        has_matrices = any(parameter.ndim > 1 for parameter in child.parameters())
        is_tokenwise = isinstance(child, nn.Dropout | nn.Identity)
        has_vectors = any(True for _ in child.parameters())
        if has_matrices or not (has_vectors or is_tokenwise):
            yield child_path


class _Trial(MetaPass):
    """A test pass on the meta device, which raises ``Unsplittable`` if a block combines tokens.

    It simulates two ranks: blocks run on half of the tokens, and modules in ``found.full`` on all.
    """

    def __init__(
        self, model: Any, found: SplitSequences, split: Mapping[str, str], experts: set[str]
    ) -> None:
        super().__init__()
        # also moves the buffers, which are on the CPU
        self._model = copy.deepcopy(model).to("meta")
        self._found = found
        self._split = split
        self._blocks = list(model.blocks)
        self._num_finished = 0
        self._running: list[str] = []
        """Paths of the modules inside a block that are running now, outermost first."""
        self._depth_of_full = 0
        self._last_sum: tuple[str, Any] | None = None
        """Path and output of the last linear layer whose output is a sum over ranks."""
        for path in experts:
            self._model.get_submodule(path).forward = _copy_of_first_input

    def run(self) -> None:
        """Run the pass, and fill ``found.scattered``."""
        for path, module in self._model.named_modules():
            module.register_forward_pre_hook(self._entry(path), with_kwargs=True)
            module.register_forward_hook(self._exit(path))
        tokens = torch.zeros(1, 2 * _PART, dtype=torch.int64, device="meta")
        try:
            with trial(self._model), torch.no_grad(), torch.device("meta"), meta_autocast(), self:
                self._model(tokens)
        except Unsplittable:
            raise
        except Exception as error:
            # Shapes do not fit, or the network needs values, which meta tensors do not have.
            first_line = (str(error).splitlines() or [""])[0]
            raise Unsplittable(f"fails in a test with split sequences: {first_line}") from None
        if self._num_finished != len(self._blocks):
            raise Unsplittable("does not call each block once and in order")

    def _entry(self, path: str) -> Callable[..., Any]:
        """Return the forward pre-hook of a module."""

        def enter(_: nn.Module, inputs: Any, keywords: Any) -> Any:
            if path in self._blocks:
                return self._enter_block(path, inputs, keywords)
            is_on_parts_in_block = bool(self._running) and not self._depth_of_full
            if self._is_between_blocks() or (is_on_parts_in_block and self._is_unknown(path)):
                raise Unsplittable(f"calls {path} on parts of sequences")
            if not self._running:
                return None
            self._running.append(path)
            if path in self._found.full:
                return self._enter_full(path, inputs, keywords)
            return None

        return enter

    def _enter_full(self, path: str, inputs: Any, keywords: Any) -> Any:
        """Pass a full sequence to a module in ``full``. Its other arguments must not be parts of sequences."""
        self._depth_of_full += 1
        hidden = _hidden(inputs, keywords)
        self._require(path, hidden, _PART)
        for leaf in tree_leaves([inputs, keywords]):
            # Only the first argument is gathered. Another part would meet a full sequence inside
            if leaf is not hidden and _is_part(leaf):
                raise Unsplittable(f"passes several activations to {path}")
        full = hidden.new_empty(1, 2 * _PART, hidden.size(-1))
        return _replace_hidden(inputs, keywords, full)

    def _enter_block(self, path: str, inputs: Any, keywords: Any) -> Any:
        expected = ""
        if self._num_finished < len(self._blocks):
            expected = self._blocks[self._num_finished]
        if self._running or path != expected:
            raise Unsplittable("does not call each block once and in order")
        self._running.append(path)
        hidden = _hidden(inputs, keywords)
        if self._num_finished:
            self._require(path, hidden, _PART)
            return None
        # The first block receives full sequences, and its hook takes this rank's part
        self._require(path, hidden, 2 * _PART)
        part = hidden.new_empty(1, _PART, hidden.size(-1))
        return _replace_hidden(inputs, keywords, part)

    def _exit(self, path: str) -> Callable[..., Any]:
        """Return the forward hook of a module."""

        def leave(_: nn.Module, inputs: Any, output: Any) -> Any:
            if not self._running:
                return None
            self._running.pop()
            hidden = output[0] if isinstance(output, tuple) else output
            if self._split.get(path) == "rowwise":
                self._last_sum = (path, hidden)
            if path in self._blocks:
                return self._leave_block(path, hidden, output)
            if path in self._found.full:
                return self._leave_full(path, hidden, output)
            return None

        return leave

    def _leave_block(self, path: str, hidden: Any, output: Any) -> Any:
        """Gather the output of the last block."""
        self._require(path, hidden, _PART)
        self._num_finished += 1
        if self._num_finished < len(self._blocks):
            return None
        full = hidden.new_empty(1, 2 * _PART, hidden.size(-1))
        return _replace_output(output, full)

    def _leave_full(self, path: str, hidden: Any, output: Any) -> Any:
        """Cut the output of a module in ``full``, and record the split linear layer that computed it."""
        self._depth_of_full -= 1
        self._require(path, hidden, 2 * _PART)
        if self._last_sum is not None and self._last_sum[1] is hidden:
            linear = self._last_sum[0]
            self._found.scattered[linear] = path
        part = hidden.new_empty(1, _PART, hidden.size(-1))
        return _replace_output(output, part)

    def _is_between_blocks(self) -> bool:
        return not self._running and 0 < self._num_finished < len(self._blocks)

    def _is_unknown(self, path: str) -> bool:
        """True if a module has matrices but is not in ``full``, so that it must not run on parts."""
        own = self._model.get_submodule(path).parameters(recurse=False)
        return path not in self._found.full and any(parameter.ndim > 1 for parameter in own)

    def _require(self, path: str, hidden: Any, tokens: int) -> None:
        if not isinstance(hidden, Tensor) or hidden.ndim != 3 or hidden.size(1) != tokens:
            raise Unsplittable(
                f"has activations at {path} whose shape is not (batch, tokens, features)"
            )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_in_blocks = bool(self._running) or self._is_between_blocks()
        # Modules on full sequences may combine tokens
        if is_in_blocks and not self._depth_of_full:
            has_part = any(_is_part(leaf) for leaf in tree_leaves([args, kwargs]))
            if has_part and not _is_tokenwise(function, args):
                place = self._running[-1] if self._running else "the model"
                operation = function.__name__.partition(".")[0]
                raise Unsplittable(f"may combine tokens with {operation} in {place}")
        return super().__torch_dispatch__(function, types, args, kwargs)


def _is_part(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim > 1 and _PART in value.shape


def _is_tokenwise(function: Any, args: Any) -> bool:
    if function in _TOKENWISE or torch.Tag.pointwise in function.tags:
        return True
    if function not in _OVER_FEATURES:
        return False
    # The arguments of a vector norm are the tensor, the order of the norm, and the dimensions
    position = 2 if function is _ATEN.linalg_vector_norm.default else 1
    dims = list(args[position])
    last_dim = args[0].ndim - 1
    return dims in ([-1], [last_dim])


def _copy_of_first_input(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states.clone()


def _hidden(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return a module's activations: its first positional argument, or the keyword argument HIDDEN_STATES."""
    return inputs[0] if inputs else keywords.get(HIDDEN_STATES)


def _replace_hidden(
    inputs: tuple[Any, ...], keywords: dict[str, Any], hidden: Tensor
) -> tuple[Any, dict[str, Any]]:
    if inputs:
        return (hidden, *inputs[1:]), keywords
    return inputs, {**keywords, HIDDEN_STATES: hidden}


def _replace_output(output: Any, hidden: Tensor) -> Any:
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def apply(model: Any, found: SplitSequences, mesh: DeviceMesh) -> None:
    """Run the blocks of a model or a pipeline stage on parts of sequences, in place."""
    parts = _Parts(mesh)
    blocks = list(model.blocks.values())
    blocks[0].register_forward_pre_hook(parts.cut_input, with_kwargs=True)
    blocks[-1].register_forward_hook(parts.gather_output)
    scattering = set(found.scattered.values())
    # A pipeline stage has only some of the modules
    paths = {path for path, _ in model.named_modules()}
    for path in sorted(found.full & paths):
        is_in_own_block = any(path.startswith(f"{block}.") for block in model.blocks)
        if not is_in_own_block:
            continue
        module = model.get_submodule(path)
        module.register_forward_pre_hook(parts.gather_input, with_kwargs=True)
        if path not in scattering:
            module.register_forward_hook(parts.cut_output)
    for path in found.scattered:
        if path in paths:
            model.get_submodule(path).register_forward_hook(parts.reduce_scatter)


class _Parts:
    """Hooks that cut, gather and reduce sequences. Each is a collective in forward or in backward."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._is_split = True
        """False if the current pass runs on full sequences, because the ranks cannot divide their length.

        Only a pass without gradients, such as validation, may have such a length.
        """

    def cut_input(self, _: nn.Module, inputs: Any, keywords: Any) -> Any:
        """Forward pre-hook of the first block: take this rank's part."""
        hidden_BTD = _hidden(inputs, keywords)
        tokens, ranks = hidden_BTD.size(1), self._mesh.size()
        self._is_split = tokens % ranks == 0
        if self._is_split:
            return _replace_hidden(inputs, keywords, self._cut(hidden_BTD))
        if torch.is_grad_enabled():
            rule = f"does not divide a sequence of {tokens} tokens"
            fix = "set training.seq_len to a multiple of it"
            raise ConfigError(Problem("parallelism.tensor_parallel_degree", ranks, rule, fix))
        return None

    def gather_input(self, _: nn.Module, inputs: Any, keywords: Any) -> Any:
        """Forward pre-hook of a module that needs full sequences: gather all parts."""
        if not self._is_split:
            return None
        return _replace_hidden(inputs, keywords, self._gather(_hidden(inputs, keywords)))

    def cut_output(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        """Forward hook of a module that needs full sequences: take this rank's part."""
        return self._change_output(output, self._cut)

    def gather_output(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        """Forward hook of the last block: gather all parts."""
        return self._change_output(output, self._gather)

    def reduce_scatter(self, _: nn.Module, inputs: Any, output: DTensor) -> Tensor:
        """Forward hook of a split linear layer: sum its partial outputs, and take this rank's part."""
        placement = Shard(1) if self._is_split else Replicate()
        gradient = None if self._is_split else (Replicate(),)
        return output.redistribute(placements=(placement,)).to_local(grad_placements=gradient)

    def _change_output(self, output: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if not self._is_split:
            return None
        hidden = output[0] if isinstance(output, tuple) else output
        return _replace_output(output, change(hidden))

    def _cut(self, hidden_BTD: Tensor) -> Tensor:
        full = DTensor.from_local(hidden_BTD, self._mesh, (Replicate(),), run_check=False)
        part_BtD = full.redistribute(placements=(Shard(1),)).to_local()
        # Do not return a view: if the network changes it in place, FSDP loses its hooks.
        return part_BtD.contiguous() if not part_BtD._is_view() else part_BtD.clone()

    def _gather(self, hidden_BtD: Tensor) -> Tensor:
        split = DTensor.from_local(
            hidden_BtD.contiguous(), self._mesh, (Shard(1),), run_check=False
        )
        return split.redistribute(placements=(Replicate(),)).to_local(
            grad_placements=(Replicate(),)
        )
