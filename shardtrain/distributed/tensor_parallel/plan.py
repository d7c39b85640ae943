"""Tensor and sequence parallelism: the layout's words become PyTorch's parallel styles (Megatron-LM: Shoeybi et al.
2019, Korthikanti et al. 2022). Must run before anything that replaces or wraps parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.overrides import TorchFunctionMode

from shardtrain.config.schema import Config
from shardtrain.distributed import adapters
from shardtrain.distributed.cpu.shared_memory import SequenceExchange
from shardtrain.distributed.local_weights import local_weight, use_local_weights
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.tensor_parallel import hf_plan
from shardtrain.layout import TENSOR_WORDS, Layout, matches, word_of
from shardtrain.ops.cpu import onednn_linear
from shardtrain.ops.cpu.onednn_linear import OneDnnLinear
from shardtrain.ops.tied import tie, tied_names
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "tp"


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Split the model's layers over the tensor-parallel ranks, in place; parameters become DTensors."""
    if mesh.size(AXIS) == 1:
        return
    if hasattr(model, "tensor_plan"):  # a network of transformers, whose plan has other words
        return hf_plan.apply(model, mesh, config)
    loss_parallel = not config.parallelism.disable_loss_parallel
    length, sequences = _Length(mesh.size(AXIS)), _Sequences.of(mesh, config)
    model.register_forward_pre_hook(length.set_from_positions, with_kwargs=True)

    # a style of PyTorch for each module that the layout names
    plan = {}
    for path, module in model.named_modules():
        word = word_of(layout, path)
        # experts are split in expert_parallel.py. An nn.Identity needs no style, except one with the word "copy"
        if word not in (None, "expert") and (word == "copy" or not isinstance(module, nn.Identity)):
            plan[path] = _style(word, loss_parallel, path, length, sequences)
            _accept_keyword_input(module)
            # FSDP fails on a rank without rows: such an embedding stays whole on each rank
            rows = module.num_embeddings if word == "embed" and isinstance(module, nn.Embedding) else mesh.size(AXIS)
            if -(-rows // mesh.size(AXIS)) * (mesh.size(AXIS) - 1) >= rows:
                plan[path] = WholeEmbedding()
            outputs = module.out_features if word == "head" and isinstance(module, nn.Linear) else mesh.size(AXIS)
            if outputs < mesh.size(AXIS) or (outputs % mesh.size(AXIS) and not loss_parallel):
                plan[path] = WholeHead(sequences)
            if word == "embed" and not isinstance(module, nn.Embedding):  # computes from positions, has no table
                plan[path] = WholeEmbedding()
    if not layout.tensor:
        rule = "needs LAYOUT.tensor of the model, which names no module"
        fix = f"give every weight one of the words {', '.join(TENSOR_WORDS)}, or set the degree to 1"
        raise ConfigError(Problem("parallelism.tensor_parallel_degree", mesh.size(AXIS), rule, fix))
    # PyTorch would fail on these with an error about its parallel styles
    if problems := misnamed(model, layout):
        raise ConfigError(problems)
    if config.parallelism.enable_async_tensor_parallel and mesh.device.type == "cuda":
        # let the compiler split matmuls and overlap their pieces with the collectives around them
        import torch._inductor.config as inductor
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        inductor._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.group(AXIS).group_name)

    ties = tied_names(model)
    # adapters are split by the word of the weight beside them; PyTorch's style for the weight does not know them
    factors = adapters.set_aside(model, partial(word_of, layout))
    parallelize_module(model, mesh.submesh(AXIS), plan)
    tie(model, ties)  # parallelize_module gives each module its own parameter
    if not config.compile.enable:  # a compiler removes the overhead of DTensors itself
        for module in model.modules():
            if type(module) in (nn.Linear, OneDnnLinear) and isinstance(module.weight, DTensor):
                _multiply_local_parts(module)  # type: ignore[arg-type]
    adapters.put_back(model, partial(word_of, layout), mesh.submesh(AXIS), factors)

    # each attention core keeps the slopes of this rank's heads
    size = mesh.size(AXIS)
    rank = mesh.rank(AXIS)
    for place, core in model.named_modules():
        if layout.context and matches(place, layout.context) and (slopes_N := getattr(core, "alibi_slopes", None)):
            heads = len(slopes_N) // size
            core.alibi_slopes = tuple(slopes_N[rank * heads : (rank + 1) * heads])  # type: ignore[assignment]
    _refuse_replicated_dropout(model, layout, mesh, config)


def misnamed(model: nn.Module, layout: Layout) -> list[Problem]:
    """Rules of LAYOUT.tensor that give the word of an nn.Linear to another module; each rule is reported once."""
    fixes = {
        "colwise": 'write "per_head" where dim 0 of its weights goes with the heads or features that a rank has, and '
        'where it takes its sizes from them; else "replicate"',
        "rowwise": "end in an nn.Linear",
        "head": "end in an nn.Linear, which a module around it may scale or cap",
    }
    kinds = {"head": nn.Linear}
    problems = {}
    for path, module in model.named_modules():
        rule = next((rule for rule in layout.tensor if matches(path, rule)), None)
        word = "" if rule is None else layout.tensor[rule]
        if word not in fixes or rule in problems or isinstance(module, nn.Identity):
            continue
        if not isinstance(module, kinds.get(word, nn.Linear | nn.Embedding)):
            mismatch = f"is for nn.Linear, and {path} is of class {type(module).__name__}"
            problems[rule] = Problem(f"LAYOUT.tensor[{rule!r}]", word, mismatch, fixes[word])
    return list(problems.values())


def _accept_keyword_input(module: nn.Module) -> None:
    """Let a module be called by keyword: parallel styles expect its input as the first positional argument."""
    first = next(iter(inspect.signature(module.forward).parameters), "")

    def make_positional(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if inputs or first not in keywords:
            return None
        return (keywords[first],), {name: value for name, value in keywords.items() if name != first}

    module.register_forward_pre_hook(make_positional, with_kwargs=True)


def _refuse_replicated_dropout(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Refuse dropout of replicated activations: each rank would drop other elements, and ranks would diverge.

    Random numbers differ between ranks (``seeding.seed_step``), as split activations need. Activations are known to be
    replicated if they are such a DTensor or the output of a "replicate" module. What a model computes from these is not
    tracked; a wrong result shows where ``train`` compares a model file before its first step (``verify.judge``).
    """

    def refuse(path: str) -> None:
        rule = f"drops {path}, where every tensor-parallel rank holds the same activations, and would drop others"
        fix = "drop after the rowwise linear, where ranks hold different tokens, or set the degree to 1"
        raise ConfigError(Problem("parallelism.tensor_parallel_degree", mesh.size(AXIS), rule, fix))

    for path, module in model.named_modules():
        if not isinstance(module, nn.modules.dropout._DropoutNd) or module.p == 0:
            continue

        def check_input(_: nn.Module, inputs: tuple[Any, ...], path: str = path) -> None:
            if _is_replicated(inputs[0]):
                refuse(f"in {path}")

        module.register_forward_pre_hook(check_input)
    # attributes of tensors and a TorchFunctionMode would break the compiler's graphs
    if not config.compile.enable:
        for path, module in model.named_modules():
            if word_of(layout, path) == "replicate":
                module.register_forward_hook(_mark_replicated)
        _check_dropout_calls(model, refuse)


def _mark_replicated(_: nn.Module, _inputs: Any, output: Any) -> None:
    if isinstance(output, Tensor):
        output.is_whole_on_each_rank = True  # type: ignore[attr-defined]


def _is_replicated(x: Any) -> bool:
    """Whether a tensor is known to be replicated over tensor-parallel ranks."""
    if isinstance(x, DTensor):
        return not any(place.is_shard() for place in x.placements)
    return getattr(x, "is_whole_on_each_rank", False)


def _check_dropout_calls(model: nn.Module, refuse: Callable[[str], None]) -> None:
    """Check calls of dropout as a function, in the first forward pass alone: later passes do the same."""
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            values = [*args, *(kwargs or {}).values()]
            name = getattr(function, "__name__", "")
            is_on = next((value for value in values[2:3] if isinstance(value, bool)), True)
            if "dropout" in name and is_on and values and isinstance(values[0], Tensor) and _is_replicated(values[0]):
                seen.append(name)
            return function(*args, **(kwargs or {}))

    # hooks enter the mode for the first forward pass and exit it after that: it slows every call of PyTorch
    waiting = [Watch()]
    watching = []

    def begin(*_: Any) -> None:
        if waiting:
            watching.append(waiting.pop())
            watching[0].__enter__()

    def end(*_: Any) -> None:
        if watching:
            watching.pop().__exit__(None, None, None)
            if seen:
                refuse(f"by a call of {seen[0]}")

    model.register_forward_pre_hook(begin)
    model.register_forward_hook(end, always_call=True)


class _Length:
    """The sequence length of the current pass, by which a shape tells this rank's part of a sequence from a whole one.

    It is read from the positions: every pipeline stage gets them, and they are not split over tensor-parallel ranks.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._tokens = 0

    def set_from_positions(self, model: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        positions_BT = inputs[1] if len(inputs) > 1 else next(iter(keywords.values()))
        self._tokens = positions_BT.size(1)

    def is_part(self, x_BtD: Tensor) -> bool:
        """Whether a plain tensor is this rank's part of a sequence."""
        return x_BtD.ndim == 3 and x_BtD.size(1) * self._ranks == self._tokens

    def require(self, path: str, word: str, x_BtD: Tensor, part: bool) -> Tensor:
        """A module's input as a plain tensor; ConfigError if it is whole and must be a part, or the reverse."""
        x_BtD = _plain(x_BtD)
        if part and x_BtD.ndim == 3 and x_BtD.size(1) == self._tokens:
            rule = "works on a part of the sequence, and is given all of it"
            fix = 'write "replicate" for a module within one that is gathered'
        elif not part and self.is_part(x_BtD):
            rule = "works on the whole sequence, and is given this rank's part of it"
            word_for_parts = "router" if word == "rowwise" else "sequence"
            fix = f'write "{word_for_parts}", or put it into a module with the word "gather"'
        else:
            return x_BtD
        raise ConfigError(Problem(f"LAYOUT.tensor[{path!r}]", word, rule, fix))


class _Sequences:
    """All-gather and reduce-scatter along the sequence.

    Without a compiler, CPU ranks of one machine use shared memory, others PyTorch's collectives.
    """

    def __init__(self, shared: SequenceExchange | None = None, sums_weights: bool = False) -> None:
        self.shared = shared
        self._sums_weights = sums_weights

    @classmethod
    def of(cls, mesh: Mesh, config: Config) -> _Sequences:
        """For the tensor-parallel ranks of a mesh (a collective)."""
        recompute = config.activation_checkpoint
        # "op" saves the outputs of reduce-scatters, which it recognizes by PyTorch's operation
        keeps_exchanges = recompute.mode == "selective" and recompute.selective_ac_option == "op"
        if mesh.device.type != "cpu" or config.compile.enable or keeps_exchanges:
            return cls()
        # a pipeline may go backward to weights in an order of its own on each rank, and then all must wait for FSDP
        return cls(SequenceExchange.between(mesh.group(AXIS)), sums_weights=mesh.size("pp") == 1)

    def sum_weights(self) -> Callable[[Tensor], Tensor] | None:
        """What adds up the ranks' gradients of a weight in backward; None where FSDP or partial_gradients.py does."""
        return self.shared.all_reduce if self.shared is not None and self._sums_weights else None

    def keep_plain(self, module: nn.Module) -> bool:
        """Whether a split linear layer is given plain tensors and gives them."""
        return self.shared is not None and type(module) in (nn.Linear, OneDnnLinear)

    def gather(self, x_BtD: Tensor, device_mesh: DeviceMesh) -> DTensor:
        """All-gather the parts of a sequence."""
        if not isinstance(x_BtD, DTensor):
            if self.shared is not None and x_BtD.ndim == 3:
                # all split layers that take it share the plain tensor and the sum of their gradients
                gradient = _GradientSum()
                plain_BTD, x_BTD = _GatherSequence.apply(x_BtD, self.shared, device_mesh, gradient)
                x_BTD.for_local_products = (plain_BTD, gradient if self._sums_weights else None)
                return x_BTD  # type: ignore[no-any-return]
            x_BtD = DTensor.from_local(x_BtD, device_mesh, (Shard(1),), run_check=False)
        return x_BtD.redistribute(placements=(Replicate(),))

    def reduce_scatter(self, sums_BTD: Tensor, device_mesh: DeviceMesh) -> Tensor:
        """Sum over ranks, and keep this rank's part of the sequence; a plain tensor is this rank's addend."""
        is_even = sums_BTD.ndim == 3 and sums_BTD.size(1) % device_mesh.size() == 0
        if not isinstance(sums_BTD, DTensor):
            if self.shared is not None and is_even:
                return _ReduceScatterSequence.apply(sums_BTD, self.shared)  # type: ignore[no-any-return]
            sums_BTD = DTensor.from_local(sums_BTD, device_mesh, (Partial(),), run_check=False)
        if self.shared is not None and is_even and sums_BTD.placements == (Partial(),):
            local_BTD = sums_BTD.to_local(grad_placements=(Replicate(),))
            return _ReduceScatterSequence.apply(local_BTD, self.shared)  # type: ignore[no-any-return]
        return sums_BTD.redistribute(placements=(Shard(1),)).to_local()


class _GradientSum:
    """The gradient of a gathered sequence, to which the split layers that multiply it add their own in backward."""

    def __init__(self) -> None:
        self._total_BTD: Tensor | None = None

    def add_product(self, gradient_BTO: Tensor, weight_OD: Tensor, by_onednn: bool) -> None:
        """Add ``gradient @ weight``, in the product itself where its kernel can."""
        gradient_RO = gradient_BTO.flatten(0, -2)
        if by_onednn:
            self.add(onednn_linear.product(gradient_RO, weight_OD.t()).unflatten(0, gradient_BTO.shape[:-1]))
        elif self._total_BTD is None:
            self._total_BTD = (gradient_RO @ weight_OD).unflatten(0, gradient_BTO.shape[:-1])
        else:
            self._total_BTD.view(-1, weight_OD.size(1)).addmm_(gradient_RO, weight_OD)

    def add(self, gradient_BTD: Tensor) -> None:
        """Add a tensor, which nobody else may use."""
        if self._total_BTD is None:
            self._total_BTD = gradient_BTD
        else:
            self._total_BTD += gradient_BTD

    def take(self) -> Tensor | None:
        """The sum, and begin again with nothing; None if no layer has added to it."""
        total_BTD, self._total_BTD = self._total_BTD, None
        return total_BTD


class _GatherSequence(torch.autograd.Function):
    """The gathered sequence as a plain tensor and as a DTensor.

    Autograd goes back to it when all layers that use it have gone back, whether they give a gradient of their input to
    autograd or add it to ``gradient``.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BtD: Tensor, shared: SequenceExchange, mesh: DeviceMesh, gradient: _GradientSum
    ) -> tuple[Tensor, DTensor]:
        ctx.shared = shared
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)  # zeros of all tokens
        x_BTD = shared.gather(x_BtD)
        return x_BTD, DTensor.from_local(x_BTD, mesh, (Replicate(),), run_check=False)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor | None, None, None, None]:
        total_BTD = ctx.gradient.take()
        plain_BTD, split_BTD = gradients
        whole_BTD = None
        if split_BTD is not None and split_BTD.placements != (Partial(),):
            whole_BTD = split_BTD
        for addend_BTD in (plain_BTD, None if whole_BTD is not None else split_BTD):
            if addend_BTD is not None:
                total_BTD = _plain(addend_BTD) if total_BTD is None else total_BTD + _plain(addend_BTD)
        gradient_BtD = None if total_BTD is None else ctx.shared.reduce_scatter(total_BTD)
        if whole_BTD is not None:
            part_BtD = whole_BTD.redistribute(placements=(Shard(1),)).to_local()
            gradient_BtD = part_BtD if gradient_BtD is None else gradient_BtD + part_BtD
        return gradient_BtD, None, None, None


class _ProductOfGathered(torch.autograd.Function):
    """A split linear layer's product; it adds the gradient of its input to ``gradient``, and gives autograd none.

    ``by_onednn``: whether oneDNN multiplies, as in ``OneDnnLinear``.
    """

    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, weight: DTensor, bias_O: Tensor | None, gradient: _GradientSum, by_onednn: bool
    ) -> Tensor:
        local_OD = weight._local_tensor
        ctx.save_for_backward(x_BTD, local_OD)
        ctx.spec = weight._spec
        ctx.gradient = gradient
        ctx.by_onednn = by_onednn
        if by_onednn:
            return onednn_linear.product(x_BTD, local_OD, bias_O)
        return nn.functional.linear(x_BTD, local_OD, bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, DTensor | None, Tensor | None, None, None]:
        (gradient_BTO,) = gradients
        x_BTD, local_OD = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_x:
            ctx.gradient.add_product(gradient_BTO, local_OD, ctx.by_onednn)
        gradient_RO = gradient_BTO.flatten(0, -2)
        dweight = None
        if needs_weight:
            x_RD = x_BTD.flatten(0, -2)
            by_kernel = onednn_linear.weight_gradient if ctx.by_onednn else _weight_gradient
            # as FSDP makes its DTensors: the gradient is placed as the weight is
            dweight = DTensor(by_kernel(gradient_RO, x_RD), ctx.spec, requires_grad=False)
        return None, dweight, gradient_RO.sum(0) if needs_bias else None, None, None


def _weight_gradient(gradient_RO: Tensor, x_RI: Tensor) -> Tensor:
    return gradient_RO.t() @ x_RI


class _ReduceScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sums_BTD: Tensor, shared: SequenceExchange) -> Tensor:
        ctx.shared = shared
        return shared.reduce_scatter(sums_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.shared.gather(gradients[0]), None


def _multiply_local_parts(linear: nn.Linear) -> None:
    """Let a split linear layer compute with plain tensors, in place.

    DTensor decides at each operation, forward and backward, how to compute it on shards, and the kernels chosen for a
    CPU take only plain tensors. Where sequences are gathered and scattered by shared memory, its input and output are
    plain tensors too: a gathered sequence brings its own along, and that of "rowwise" is this rank's features.
    """
    original_forward = linear.forward
    by_outputs = linear.weight.placements == (Shard(0),)  # type: ignore[attr-defined]
    if not by_outputs and linear.weight.placements != (Shard(1),):  # type: ignore[attr-defined]
        return
    partial_sum = (Partial(),)

    def forward(x: Tensor) -> Tensor:
        weight = linear._parameters["weight"]
        bias = linear._parameters.get("bias")
        if not isinstance(weight, DTensor):
            return original_forward(x)
        is_split = isinstance(x, DTensor)
        stays_plain = hasattr(x, "for_local_products") if by_outputs else not is_split
        if stays_plain and by_outputs:
            x_local, gradient = x.for_local_products  # type: ignore[attr-defined]
            if x._backward_hooks or x.retains_grad:  # somebody looks at its gradient, and is to see the whole of it
                x_local = x.to_local(grad_placements=partial_sum)  # type: ignore[attr-defined]
            elif gradient is not None and torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu"):
                bias_O = bias.to_local() if isinstance(bias, DTensor) else None
                by_onednn = type(linear) is OneDnnLinear and onednn_linear.can_multiply(x_local, weight._local_tensor)
                return _ProductOfGathered.apply(x_local, weight, bias_O, gradient, by_onednn)  # type: ignore[no-any-return]
        elif stays_plain:
            x_local = x
        elif is_split and x.placements == ((Replicate(),) if by_outputs else (Shard(x.ndim - 1),)):
            # the gradient of a replicated input is the sum over ranks: each computes a part of it
            x_local = x.to_local(grad_placements=partial_sum if by_outputs else None)
        else:
            return original_forward(x)
        # an instance attribute hides the registered parameter of that name, so forward sees a plain tensor
        linear.__dict__["weight"] = local_weight(weight)
        linear.__dict__["bias"] = bias.to_local() if by_outputs and isinstance(bias, DTensor) else None
        try:
            out = original_forward(x_local)
        finally:
            del linear.__dict__["weight"], linear.__dict__["bias"]
        mesh = weight.device_mesh
        if not by_outputs and isinstance(bias, DTensor):
            # outputs are summed over ranks, so one rank adds the bias; its gradient too is summed over ranks
            out = out + bias.to_local(grad_placements=partial_sum) * float(mesh.get_local_rank() == 0)
        if stays_plain:
            return out
        placement = Shard(out.ndim - 1) if by_outputs else Partial()
        return DTensor.from_local(out, mesh, (placement,), run_check=False)

    linear.forward = forward  # type: ignore[method-assign, assignment]


def _style(
    word: str,
    loss_parallel: bool,
    path: str = "",
    length: _Length | None = None,
    sequences: _Sequences | None = None,
) -> ParallelStyle:
    sequence = Shard(1)
    length = length or _Length(1)
    sequences = sequences or _Sequences()
    if word == "embed":
        return SplitEmbedding(sequences)
    if word == "sequence":
        return WholeWeights(Partial(), lambda x: length.require(path, word, x, part=True), sequences.sum_weights())
    if word == "gather":
        return GatherSequence(sequences)
    if word == "colwise":
        return GatheringColwise(length, sequences)
    if word == "rowwise":
        return ScatteringRowwise(lambda x: length.require(path, word, x, part=False), sequences)
    if word == "head":
        output = Shard(-1) if loss_parallel else Replicate()
        return GatheringColwise(length, sequences, input_layouts=sequence, output_layouts=output)
    if word == "local":
        return LocalSequence()
    if word in ("router", "heads"):
        return WholeWeights(Partial(), sum_over_ranks=sequences.sum_weights())
    if word == "per_head":
        return SplitHeadNumbers()
    if word == "features":
        return GatherFeatures()
    if word == "replicate":
        return WholeWeights(Replicate(), lambda x: length.require(path, word, x, part=False))
    if word == "copy":
        return CopyToHeads()
    raise ValueError(f"unknown layout word {word!r}")  # layout.check has refused it


class GatherSequence(ParallelStyle):
    """All-gather a module's first input along the sequence; other inputs, such as rotary angles, are whole already."""

    def __init__(self, sequences: _Sequences) -> None:
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
        length: _Length,
        sequences: _Sequences,
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

    def __init__(self, take: Callable[[Tensor], Tensor], sequences: _Sequences) -> None:
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
        module.register_forward_pre_hook(lambda _, inputs: (_plain(inputs[0]), *inputs[1:]))
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
        self._take = take or _plain
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

    def __init__(self, sequences: _Sequences) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))
        self._sequences = sequences

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward:
            original_forward = module.forward

            def forward(*inputs: Any, **keywords: Any) -> Any:
                with _ReducedLookups():
                    return original_forward(*inputs, **keywords)

            module.forward = forward  # type: ignore[method-assign]
        elif self._sequences.shared is not None and module.padding_idx is None and module.max_norm is None:
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
            ids_BT = _plain(inputs[0]) - first_id
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
            return (_plain(inputs[0]).chunk(device_mesh.size(), dim=1)[device_mesh.get_local_rank()], *inputs[1:])

        module.register_forward_pre_hook(cut)
        return super()._apply(module, device_mesh)


class WholeHead(WholeWeights):
    """A head whose outputs cannot be split evenly, such as a reward: replicated, with full sequences on every rank."""

    def __init__(self, sequences: _Sequences) -> None:
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


def _plain(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class SplitVocabulary:
    """The vocabulary split over tensor-parallel ranks, for the loss (``cross_entropy.Vocabulary``)."""

    def __init__(self, mesh: Mesh, vocab_size: int) -> None:
        self.size = vocab_size
        self.columns = -(-vocab_size // mesh.size(AXIS))
        self.offset = self.columns * mesh.rank(AXIS)
        self._group = mesh.group(AXIS)

    def max(self, values: Tensor) -> Tensor:
        """Largest value over the ranks, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        dist.all_reduce(values, group=self._group)
        return values

    def gather(self, values: Tensor) -> Tensor:
        """The values of each rank, along a new first dimension."""
        ranks = [torch.empty_like(values) for _ in range(self._group.size())]
        dist.all_gather(ranks, values, group=self._group)
        return torch.stack(ranks)
