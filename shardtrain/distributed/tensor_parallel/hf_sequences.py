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
from shardtrain.ops.trial_failure import failure_of
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

    split_sequences = SplitSequences()
    for path, block in model.blocks.items():
        split_sequences.full.update(_full_children(path, block))
    # A block calls a child in `full` and expects the child's full output. A linear layer that is split
    # returns only a part of its features.
    for path in sorted(split_sequences.full):
        if split.get(path) in ("colwise", "rowwise"):
            raise Unsplittable(f"has blocks that call {path} directly, and this layer is split")

    # All other weights see only the tokens of their rank, so their gradients are partial sums.
    for path, block in model.blocks.items():
        for child_path, child in block.named_modules(prefix=path):
            if _is_in_full(child_path, split_sequences.full):
                continue
            names = {name for name, _ in child.named_parameters(recurse=False)}
            if names:
                split_sequences.partial[child_path] = names

    # The structure fits. Now check that the code of the blocks does, too.
    _Trial(model, split_sequences, split, experts).run()
    return split_sequences


def _is_in_full(path: str, full: set[str]) -> bool:
    """True if a module is one of those on full sequences, or inside one."""
    return any(path == full_path or path.startswith(f"{full_path}.") for full_path in full)


def _full_children(path: str, module: nn.Module) -> Iterator[str]:
    """Yield the children that need full sequences: all except norms and modules without parameters."""
    for name, child in module.named_children():
        child_path = f"{path}.{name}"
        # A container is not called itself. The block calls its items.
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _full_children(child_path, child)
            continue
        if isinstance(child, nn.Dropout | nn.Identity):
            continue
        # A norm has only vectors. A module without any parameter may do anything, such as an attention core.
        parameters = list(child.parameters())
        is_norm = bool(parameters) and all(parameter.ndim < 2 for parameter in parameters)
        if not is_norm:
            yield child_path


class _Trial(MetaPass):
    """A test pass on the meta device, which raises ``Unsplittable`` if a block combines tokens.

    It simulates two ranks: blocks run on half of the tokens, and modules in ``SplitSequences.full`` on all.
    """

    def __init__(
        self,
        model: Any,
        split_sequences: SplitSequences,
        split: Mapping[str, str],
        experts: set[str],
    ) -> None:
        super().__init__()
        # also moves the buffers, which are on the CPU
        self._model = copy.deepcopy(model).to("meta")
        self._split_sequences = split_sequences
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
        """Run the pass, and fill ``SplitSequences.scattered``."""
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
            raise Unsplittable(failure_of(error, self._model)) from None
        if self._num_finished != len(self._blocks):
            raise Unsplittable("does not call each block once and in order")

    def _entry(self, path: str) -> Callable[..., Any]:
        """Return the forward pre-hook of a module."""

        def enter(_: nn.Module, inputs: Any, keywords: Any) -> Any:
            if path in self._blocks:
                return self._enter_block(path, inputs, keywords)

            # Code between two blocks would run on parts of sequences, and no hook gathers them there.
            if self._is_between_blocks():
                raise Unsplittable(f"calls {path} on parts of sequences")
            # Modules before the first block and after the last one run on full sequences.
            if not self._running:
                return None

            is_on_parts = self._depth_of_full == 0
            if is_on_parts and self._is_unknown(path):
                raise Unsplittable(f"calls {path} on parts of sequences")
            self._running.append(path)
            if path in self._split_sequences.full:
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
        """Check the order of the blocks, and pass a part of the sequence to the first one."""
        expected = ""
        if self._num_finished < len(self._blocks):
            expected = self._blocks[self._num_finished]
        if self._running or path != expected:
            raise Unsplittable("does not call each block once and in order")
        self._running.append(path)

        hidden = _hidden(inputs, keywords)
        is_first = self._num_finished == 0
        if not is_first:
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

            hidden = _first(output)
            if self._split.get(path) == "rowwise":
                self._last_sum = (path, hidden)
            if path in self._blocks:
                return self._leave_block(path, hidden, output)
            if path in self._split_sequences.full:
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

        # If the output is that of a split linear layer, unchanged, a reduce-scatter can replace both collectives.
        if self._last_sum is not None:
            linear, linear_output = self._last_sum
            if linear_output is hidden:
                self._split_sequences.scattered[linear] = path

        part = hidden.new_empty(1, _PART, hidden.size(-1))
        return _replace_output(output, part)

    def _is_between_blocks(self) -> bool:
        """True after the first block and before the last one, if no block is running."""
        if self._running:
            return False
        return 0 < self._num_finished < len(self._blocks)

    def _is_unknown(self, path: str) -> bool:
        """True if a module has matrices but is not in ``full``, so that it must not run on parts."""
        if path in self._split_sequences.full:
            return False
        module = self._model.get_submodule(path)
        return any(parameter.ndim > 1 for parameter in module.parameters(recurse=False))

    def _require(self, path: str, hidden: Any, tokens: int) -> None:
        """Check that the activations of a module have the shape (batch, ``tokens``, features)."""
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
            self._check_operation(function, args, kwargs)
        return super().__torch_dispatch__(function, types, args, kwargs)

    def _check_operation(self, function: Any, args: Any, kwargs: Any) -> None:
        """Raise ``Unsplittable`` if an operation may combine the tokens of a part of a sequence."""
        has_part = any(_is_part(leaf) for leaf in tree_leaves([args, kwargs]))
        if not has_part or _is_tokenwise(function, args):
            return
        place = "the model"
        if self._running:
            place = self._running[-1]
        operation = function.__name__.partition(".")[0]
        raise Unsplittable(f"may combine tokens with {operation} in {place}")


def _is_part(value: Any) -> bool:
    """True if a tensor has a dimension of the size of a part. Vectors, such as position tables, do not count."""
    if not isinstance(value, Tensor) or value.ndim < 2:
        return False
    return _PART in value.shape


def _is_tokenwise(function: Any, args: Any) -> bool:
    """True if an operation computes each token from this token only."""
    if function in _TOKENWISE or torch.Tag.pointwise in function.tags:
        return True
    if function not in _OVER_FEATURES:
        return False
    # The arguments of a vector norm are the tensor, the order of the norm, and the dimensions
    position = 1
    if function is _ATEN.linalg_vector_norm.default:
        position = 2
    reduced_dims = list(args[position])
    last_dim = args[0].ndim - 1
    return reduced_dims in ([-1], [last_dim])


def _copy_of_first_input(hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
    return hidden_states.clone()


def _hidden(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
    """Return a module's activations: its first positional argument, or the keyword argument HIDDEN_STATES."""
    if inputs:
        return inputs[0]
    return keywords.get(HIDDEN_STATES)


def _replace_hidden(
    inputs: tuple[Any, ...], keywords: dict[str, Any], hidden: Tensor
) -> tuple[Any, dict[str, Any]]:
    """Return a module's arguments with other activations."""
    if inputs:
        return (hidden, *inputs[1:]), keywords
    return inputs, {**keywords, HIDDEN_STATES: hidden}


def _first(output: Any) -> Any:
    """Return the activations that a module returns, alone or as the first item of a tuple."""
    if isinstance(output, tuple):
        return output[0]
    return output


def _replace_output(output: Any, hidden: Tensor) -> Any:
    """Return a module's output with other activations."""
    if isinstance(output, tuple):
        return (hidden, *output[1:])
    return hidden


def apply(model: Any, split_sequences: SplitSequences, mesh: DeviceMesh) -> None:
    """Run the blocks of a model or a pipeline stage on parts of sequences, in place."""
    parts = _Parts(mesh)
    # The code around the blocks runs on full sequences.
    blocks = list(model.blocks.values())
    blocks[0].register_forward_pre_hook(parts.cut_input, with_kwargs=True)
    blocks[-1].register_forward_hook(parts.gather_output)

    # A pipeline stage has only some of the modules, and placeholders for the blocks of other stages.
    paths = {path for path, _ in model.named_modules()}
    block_prefixes = tuple(f"{block_path}." for block_path in model.blocks)
    scattering = set(split_sequences.scattered.values())
    for path in sorted(split_sequences.full & paths):
        if not path.startswith(block_prefixes):
            continue
        module = model.get_submodule(path)
        module.register_forward_pre_hook(parts.gather_input, with_kwargs=True)
        # A module that ends with a reduce-scatter already returns a part.
        if path not in scattering:
            module.register_forward_hook(parts.cut_output)
    for path in split_sequences.scattered:
        if path in paths:
            linear = model.get_submodule(path)
            linear.register_forward_hook(parts.reduce_scatter)


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
        tokens = hidden_BTD.size(1)
        ranks = self._mesh.size()
        self._is_split = tokens % ranks == 0
        if self._is_split:
            part_BtD = self._cut(hidden_BTD)
            return _replace_hidden(inputs, keywords, part_BtD)
        if torch.is_grad_enabled():
            rule = f"does not divide a sequence of {tokens} tokens"
            fix = "set training.seq_len to a multiple of it"
            raise ConfigError(Problem("parallelism.tensor_parallel_degree", ranks, rule, fix))
        return None

    def gather_input(self, _: nn.Module, inputs: Any, keywords: Any) -> Any:
        """Forward pre-hook of a module that needs full sequences: gather all parts."""
        if not self._is_split:
            return None
        part_BtD = _hidden(inputs, keywords)
        full_BTD = self._gather(part_BtD)
        return _replace_hidden(inputs, keywords, full_BTD)

    def cut_output(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        """Forward hook of a module that needs full sequences: take this rank's part."""
        return self._change_output(output, self._cut)

    def gather_output(self, _: nn.Module, inputs: Any, output: Any) -> Any:
        """Forward hook of the last block: gather all parts."""
        return self._change_output(output, self._gather)

    def reduce_scatter(self, _: nn.Module, inputs: Any, output: DTensor) -> Tensor:
        """Forward hook of a split linear layer: sum its partial outputs, and take this rank's part."""
        if self._is_split:
            return output.redistribute(placements=(Shard(1),)).to_local()
        # The pass runs on full sequences, so sum only.
        summed = output.redistribute(placements=(Replicate(),))
        return summed.to_local(grad_placements=(Replicate(),))

    def _change_output(self, output: Any, change: Callable[[Tensor], Tensor]) -> Any:
        if not self._is_split:
            return None
        hidden = _first(output)
        return _replace_output(output, change(hidden))

    def _cut(self, hidden_BTD: Tensor) -> Tensor:
        full = DTensor.from_local(hidden_BTD, self._mesh, (Replicate(),), run_check=False)
        part_BtD = full.redistribute(placements=(Shard(1),)).to_local()
        # Do not return a view: if the network changes it in place, FSDP loses its hooks.
        if part_BtD._is_view():
            return part_BtD.clone()
        return part_BtD.contiguous()

    def _gather(self, hidden_BtD: Tensor) -> Tensor:
        part = hidden_BtD.contiguous()
        split = DTensor.from_local(part, self._mesh, (Shard(1),), run_check=False)
        full = split.redistribute(placements=(Replicate(),))
        return full.to_local(grad_placements=(Replicate(),))
