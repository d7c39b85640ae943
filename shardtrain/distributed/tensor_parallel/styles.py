"""The parallel styles of ``LAYOUT.tensor``: how a module computes on tensor-parallel ranks.

Shape suffixes: B batch, t tokens of this rank, T all tokens, D features, V rows of this rank's part of a
table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from shardtrain.distributed.local_weights import use_local_weights
from shardtrain.distributed.tensor_parallel.sequences import SequenceLength, Sequences, plain


class GatherSequence(ParallelStyle):
    """All-gather a module's first input along the sequence.

    The other inputs, such as rotary angles, are passed on unchanged, because they are not split.
    """

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self._sequences.gather(inputs[0], device_mesh), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class GatheringColwise(ColwiseParallel):
    """Split a linear layer's output features. If its input is a part of the sequence, all-gather it first."""

    def __init__(
        self,
        length: SequenceLength,
        sequences: Sequences,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts)
        self._length = length
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = inputs[0]
            if isinstance(x, DTensor) or not self._length.is_part(x):
                return inputs
            return (self._sequences.gather(x, device_mesh), *inputs[1:])

        def prepare_input(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            # a gathered sequence with a plain copy needs no conversion
            if hasattr(inputs[0], "for_local_products"):
                return inputs
            return self._prepare_input_fn(self.input_layouts, (Replicate(),), module, inputs, mesh)

        def prepare_output(_: nn.Module, output: Tensor, mesh: DeviceMesh) -> Any:
            if not isinstance(output, DTensor):
                # a plain output contains only this rank's features
                if self.output_layouts == (Shard(-1),):
                    return output
                output = DTensor.from_local(
                    output, mesh, (Shard(output.ndim - 1),), run_check=False
                )
            return self._prepare_output_fn(
                self.output_layouts, self.use_local_output, module, output, mesh
            )

        module.register_forward_pre_hook(gather)
        if self._sequences.keep_plain(module):
            return distribute_module(
                module, device_mesh, self._partition_linear_fn, prepare_input, prepare_output
            )
        return super()._apply(module, device_mesh)


class ScatteringRowwise(RowwiseParallel):
    """Split input features, and reduce-scatter the output along the sequence.

    If the input is replicated, such as the output of a "replicate" module, split it by features first.
    Backward then gathers its gradient. ``take`` converts such an input to a plain tensor, and may raise
    ConfigError.
    """

    def __init__(self, take: Callable[[Tensor], Tensor], sequences: Sequences) -> None:
        super().__init__(output_layouts=Shard(1))
        self._take = take
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split_features(linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = inputs[0]
            # An input with fewer features than the layer is split already.
            if (
                not isinstance(linear, nn.Linear)
                or isinstance(x, DTensor)
                or x.size(-1) != linear.in_features
            ):
                return inputs
            replicated = DTensor.from_local(
                self._take(x), device_mesh, (Replicate(),), run_check=False
            )
            split = replicated.redistribute(placements=(Shard(-1),))
            return (split, *inputs[1:])

        def scatter(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            if not keeps_plain and not isinstance(output, DTensor):
                return output
            return self._sequences.reduce_scatter(output, device_mesh)

        keeps_plain = self._sequences.keep_plain(module)
        module.register_forward_pre_hook(split_features)
        # Register scatter before PyTorch's own hook. That hook then receives a plain tensor, which it ignores.
        module.register_forward_hook(scatter)
        if keeps_plain:
            return distribute_module(module, device_mesh, self._partition_linear_fn)
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any,
        use_local_output: bool,
        mod: nn.Module,
        outputs: Tensor,
        device_mesh: DeviceMesh,
    ) -> Tensor:
        return outputs


class LocalSequence(ParallelStyle):
    """Pass this rank's part of the sequence to a module as a plain tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def make_plain(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (plain(inputs[0]), *inputs[1:])

        module.register_forward_pre_hook(make_plain)
        return module


class ReplicatedWeights(ParallelStyle):
    """Replicated weights that compute with plain tensors."""

    def __init__(
        self,
        gradient: Placement,
        take: Callable[[Tensor], Tensor] | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Store how the style treats inputs and gradients.

        Args:
            gradient: placement of the gradient that a rank computes. Partial if ranks use the weights for
                different tokens or heads, Replicate if all ranks compute the same.
            take: converts the first input to a plain tensor, and may raise ConfigError.
            sum_over_ranks: sums Partial gradients in backward. By default FSDP or
                ``partial_gradients.py`` sums them.
        """
        self._gradient = gradient
        self._take = take or plain
        self._sum_over_ranks = sum_over_ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replicated = DTensor.from_local(
                parameter.detach(), device_mesh, (Replicate(),), run_check=False
            )
            module.register_parameter(
                name, nn.Parameter(replicated, requires_grad=parameter.requires_grad)
            )

        def take_first(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self._take(inputs[0]), *inputs[1:])

        module.register_forward_pre_hook(take_first)
        use_local_weights(module, (self._gradient,), self._sum_over_ranks)
        return module


class SplitHeadNumbers(ParallelStyle):
    """Split parameters that have one number per head, in the same way as the heads. The module sees local tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter.detach(), device_mesh, (Shard(0),))
            module.register_parameter(
                name, nn.Parameter(split, requires_grad=parameter.requires_grad)
            )
        use_local_weights(module, (Shard(0),))
        return module


class SplitEmbedding(RowwiseParallel):
    """Split an embedding table by rows. Each rank looks up its own rows, and the results are summed.

    Unlike PyTorch's RowwiseParallel, this waits for the sum before it returns, because compiled modules lose
    the gradient of an asynchronous output (torch 2.13). A subclass of nn.Embedding may apply nonlinear
    functions to its lookups. For such a subclass, each lookup is summed instead of the output.
    """

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # For a subclass with its own forward, reduce each lookup inside this forward.
        if isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:
            original_forward = module.forward

            def forward(*inputs: Any, **keywords: Any) -> Any:
                with _ReducedLookups():
                    return original_forward(*inputs, **keywords)

            module.forward = forward  # type: ignore[method-assign]
        elif self._sequences.is_shared and module.padding_idx is None and module.max_norm is None:
            return self._look_up_plain(module, device_mesh)  # type: ignore[arg-type]
        return super()._apply(module, device_mesh)

    def _look_up_plain(self, module: nn.Embedding, device_mesh: DeviceMesh) -> nn.Module:
        """Look up local rows as a plain tensor, and reduce-scatter the results through shared memory."""
        rows = -(-module.num_embeddings // device_mesh.size())
        first_id = rows * device_mesh.get_local_rank()
        # Mask of the tokens whose rows are on other ranks. The pre-hook stores it for the hook.
        masks: list[Tensor] = []

        def take_own(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            weight = module._parameters["weight"]
            local_VD = weight.to_local() if isinstance(weight, DTensor) else weight
            ids_BT = plain(inputs[0]) - first_id
            # Tokens whose rows are on other ranks look up row 0, and their output is set to zero.
            is_other_BT = (ids_BT < 0) | (ids_BT >= local_VD.size(0))  # type: ignore[union-attr]
            masks[:] = [is_other_BT.unsqueeze(-1)]
            # An instance attribute hides the parameter of that name, even from functions that have replaced
            # forward.
            module.__dict__["weight"] = local_VD
            return (ids_BT.masked_fill(is_other_BT, 0), *inputs[1:])

        def scatter(_: nn.Module, inputs: tuple[Any, ...], output_BTD: Tensor) -> Tensor:
            del module.__dict__["weight"]
            own_rows_BTD = output_BTD.masked_fill(masks.pop(), 0.0)
            return self._sequences.reduce_scatter(own_rows_BTD, device_mesh)

        distribute_module(module, device_mesh, self._partition_embedding_fn)
        module.register_forward_pre_hook(take_own)
        module.register_forward_hook(scatter)
        return module

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any,
        use_local_output: bool,
        mod: nn.Module,
        outputs: Any,
        device_mesh: DeviceMesh,
    ) -> Tensor:
        if not isinstance(outputs, DTensor):
            return outputs  # already this rank's part of the sequence
        return outputs.redistribute(placements=output_layouts, async_op=False).to_local()  # type: ignore[no-any-return]


class _ReducedLookups(TorchFunctionMode):
    """Reduce-scatter the result of each lookup in a split table to this rank's part of the sequence."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is nn.functional.embedding and isinstance(result, DTensor):
            return result.redistribute(placements=(Shard(1),), async_op=False).to_local()
        return result


class ReplicatedEmbedding(ReplicatedWeights):
    """A replicated embedding. Each rank looks up only its part of the sequence.

    This is for tables with fewer rows than ranks, such as token types, and for embeddings that are computed
    without a table, such as sinusoidal positions.
    """

    def __init__(self) -> None:
        super().__init__(Partial())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            parts = plain(inputs[0]).chunk(device_mesh.size(), dim=1)
            own_part = parts[device_mesh.get_local_rank()]
            return (own_part, *inputs[1:])

        module.register_forward_pre_hook(cut)
        return super()._apply(module, device_mesh)


class ReplicatedHead(ReplicatedWeights):
    """A replicated head that gathers the full sequences. Used for few outputs, such as a single reward."""

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(Replicate())
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(x_BtD: Tensor) -> Tensor:
            return self._sequences.gather(x_BtD, device_mesh).to_local()

        self._take = gather
        return super()._apply(module, device_mesh)


class GatherFeatures(ReplicatedWeights):
    """A norm over split features: all-gather the features before it, and split its output again."""

    def __init__(self) -> None:
        super().__init__(Replicate())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        forward_of_all = module.forward

        def forward(x: Tensor, *others: Any, **keywords: Any) -> Tensor:
            # DTensor provides the gradients of both conversions: backward splits where forward gathers, and
            # gathers where forward splits.
            split = DTensor.from_local(x, device_mesh, (Shard(-1),), run_check=False)
            gathered = split.redistribute(placements=(Replicate(),)).to_local()
            out = forward_of_all(gathered, *others, **keywords)
            replicated = DTensor.from_local(out, device_mesh, (Replicate(),), run_check=False)
            return replicated.redistribute(placements=(Shard(-1),)).to_local()

        module.forward = forward  # type: ignore[method-assign]
        return module


class CopyToHeads(ParallelStyle):
    """Return the output unchanged, and sum its gradient over ranks in backward.

    This is for a replicated tensor that each rank uses only for its own heads.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def copy(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            # The DTensor sums the partial gradients of the ranks in backward.
            replicated = DTensor.from_local(output, device_mesh, (Replicate(),), run_check=False)
            return replicated.to_local(grad_placements=(Partial(),))

        module.register_forward_hook(copy)
        return module
