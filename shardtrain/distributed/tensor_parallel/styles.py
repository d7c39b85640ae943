"""Parallel styles: how a module of a layout's word computes on tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from shardtrain.distributed.local_weights import use_local_weights
from shardtrain.distributed.tensor_parallel.sequences import SequenceLength, Sequences, plain


class GatherSequence(ParallelStyle):
    """All-gather a module's first input along the sequence; other inputs, such as rotary angles, are whole already."""

    def __init__(self, sequences: Sequences) -> None:
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (self._sequences.gather(inputs[0], device_mesh), *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


class GatheringColwise(ColwiseParallel):
    """Output features split; an input that is a part of the sequence is all-gathered, as a "gather" module does."""

    def __init__(
        self,
        length: SequenceLength,
        sequences: Sequences,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
    ) -> None:
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts)
        self._length, self._sequences = length, sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            is_part = not isinstance(inputs[0], DTensor) and self._length.is_part(inputs[0])
            return (self._sequences.gather(inputs[0], device_mesh), *inputs[1:]) if is_part else inputs

        def take(_: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
            if hasattr(inputs[0], "for_local_products"):
                return inputs
            return self._prepare_input_fn(self.input_layouts, (Replicate(),), module, inputs, mesh)

        def place(_: nn.Module, output: Tensor, mesh: DeviceMesh) -> Any:
            if not isinstance(output, DTensor):
                if self.output_layouts == (Shard(-1),):
                    return output
                output = DTensor.from_local(output, mesh, (Shard(output.ndim - 1),), run_check=False)
            return self._prepare_output_fn(self.output_layouts, self.use_local_output, module, output, mesh)

        module.register_forward_pre_hook(gather)
        if self._sequences.keep_plain(module):
            return distribute_module(module, device_mesh, self._partition_linear_fn, take, place)
        return super()._apply(module, device_mesh)


class ScatteringRowwise(RowwiseParallel):
    """Input features split, output reduce-scattered along the sequence.

    A replicated input, as a "replicate" module returns it, is split by features, and its gradient gathered again.
    ``take`` makes such an input a plain tensor, and may refuse it.
    """

    def __init__(self, take: Callable[[Tensor], Tensor], sequences: Sequences) -> None:
        super().__init__(output_layouts=Shard(1))
        self._take, self._sequences = take, sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def split_features(linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            x = inputs[0]
            if not isinstance(linear, nn.Linear) or isinstance(x, DTensor) or x.size(-1) != linear.in_features:
                return inputs
            whole = DTensor.from_local(self._take(x), device_mesh, (Replicate(),), run_check=False)
            return (whole.redistribute(placements=(Shard(-1),)), *inputs[1:])

        def scatter(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            if not keeps_plain and not isinstance(output, DTensor):
                return output
            return self._sequences.reduce_scatter(output, device_mesh)

        keeps_plain = self._sequences.keep_plain(module)
        module.register_forward_pre_hook(split_features)
        module.register_forward_hook(scatter)  # before PyTorch's hook, which leaves plain tensors alone
        if keeps_plain:
            return distribute_module(module, device_mesh, self._partition_linear_fn)
        return super()._apply(module, device_mesh)

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Tensor, device_mesh: DeviceMesh
    ) -> Tensor:
        return outputs


class LocalSequence(ParallelStyle):
    """A module whose first input is this rank's part of the sequence, as a plain tensor."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(lambda _, inputs: (plain(inputs[0]), *inputs[1:]))
        return module


class WholeWeights(ParallelStyle):
    """Replicated weights that compute with plain tensors; ``gradient`` is the placement of each rank's gradient.

    Partial where ranks compute on different tokens or heads, Replicate where all compute the same. ``take`` makes the
    first input a plain tensor, and may refuse it. ``sum_over_ranks`` adds up gradients that are Partial.
    """

    def __init__(
        self,
        gradient: Placement,
        take: Callable[[Tensor], Tensor] | None = None,
        sum_over_ranks: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._gradient = gradient
        self._take = take or plain
        self._sum_over_ranks = sum_over_ranks

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.detach(), device_mesh, (Replicate(),), run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        module.register_forward_pre_hook(lambda _, inputs: (self._take(inputs[0]), *inputs[1:]))
        use_local_weights(module, (self._gradient,), self._sum_over_ranks)
        return module


class SplitHeadNumbers(ParallelStyle):
    """One number per head, split over ranks as the heads are; computes with plain tensors."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            split = distribute_tensor(parameter.detach(), device_mesh, (Shard(0),))
            module.register_parameter(name, nn.Parameter(split, requires_grad=parameter.requires_grad))
        use_local_weights(module, (Shard(0),))
        return module


class SplitEmbedding(RowwiseParallel):
    """PyTorch's RowwiseParallel, with a synchronous output: compiled modules lose the gradient of an async one (2.13).

    Each rank looks up its rows of the table, so that the result is a sum over ranks. A subclass with its own forward
    may apply what is not linear, so for it the lookup itself is reduced.
    """

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
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
        """With plain tensors, reduce-scattered by shared memory."""
        rows = -(-module.num_embeddings // device_mesh.size())
        first_id = rows * device_mesh.get_local_rank()
        others: list[Tensor] = []

        def take_own(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            weight = module._parameters["weight"]
            local_VD = weight.to_local() if isinstance(weight, DTensor) else weight
            ids_BT = plain(inputs[0]) - first_id
            is_other_BT = (ids_BT < 0) | (ids_BT >= local_VD.size(0))  # type: ignore[union-attr]
            others[:] = [is_other_BT.unsqueeze(-1)]
            # an attribute of the instance hides the parameter of that name, also from what replaces forward
            module.__dict__["weight"] = local_VD
            return (ids_BT.masked_fill(is_other_BT, 0), *inputs[1:])

        def scatter(_: nn.Module, inputs: tuple[Any, ...], output_BTD: Tensor) -> Tensor:
            del module.__dict__["weight"]
            return self._sequences.reduce_scatter(output_BTD.masked_fill(others.pop(), 0.0), device_mesh)

        distribute_module(module, device_mesh, self._partition_embedding_fn)
        module.register_forward_pre_hook(take_own)
        module.register_forward_hook(scatter)
        return module

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: nn.Module, outputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        if not isinstance(outputs, DTensor):
            return outputs  # a part of the sequence already
        return outputs.redistribute(placements=output_layouts, async_op=False).to_local()  # type: ignore[no-any-return]


class _ReducedLookups(TorchFunctionMode):
    """Reduce-scatters each lookup in a split table at once: this rank's part of the sequence, as a plain tensor."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is nn.functional.embedding and isinstance(result, DTensor):
            return result.redistribute(placements=(Shard(1),), async_op=False).to_local()
        return result


class WholeEmbedding(WholeWeights):
    """Replicated, each rank for its part of the sequence: a table of fewer rows than ranks, such as token types, or a
    formula, such as sinusoidal positions."""

    def __init__(self) -> None:
        super().__init__(Partial())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def cut(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
            return (plain(inputs[0]).chunk(device_mesh.size(), dim=1)[device_mesh.get_local_rank()], *inputs[1:])

        module.register_forward_pre_hook(cut)
        return super()._apply(module, device_mesh)


class WholeHead(WholeWeights):
    """A head whose outputs cannot be split evenly, such as a reward: replicated, with full sequences on every rank."""

    def __init__(self, sequences: Sequences) -> None:
        super().__init__(Replicate())
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self._take = lambda x_BtD: self._sequences.gather(x_BtD, device_mesh).to_local()
        return super()._apply(module, device_mesh)


class GatherFeatures(WholeWeights):
    """A norm over features that are split over ranks: all-gathered for it, and its output is split again."""

    def __init__(self) -> None:
        super().__init__(Replicate())

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        super()._apply(module, device_mesh)
        whole_forward = module.forward

        def forward(x: Tensor, *others: Any, **keywords: Any) -> Tensor:
            split = DTensor.from_local(x, device_mesh, (Shard(-1),), run_check=False)
            out = whole_forward(split.redistribute(placements=(Replicate(),)).to_local(), *others, **keywords)
            whole = DTensor.from_local(out, device_mesh, (Replicate(),), run_check=False)
            return whole.redistribute(placements=(Shard(-1),)).to_local()

        module.forward = forward  # type: ignore[method-assign]
        return module


class CopyToHeads(ParallelStyle):
    """Identity on a replicated tensor that each rank uses for its heads; its gradient is the sum over ranks."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def copy(_: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
            whole = DTensor.from_local(output, device_mesh, (Replicate(),), run_check=False)
            return whole.to_local(grad_placements=(Partial(),))

        module.register_forward_hook(copy)
        return module
