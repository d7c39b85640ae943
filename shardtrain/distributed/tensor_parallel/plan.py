"""Tensor and sequence parallelism: the styles in ``LAYOUT.tensor`` become PyTorch's parallel styles.

The method is Megatron-LM's (Shoeybi et al. 2019, Korthikanti et al. 2022). Must run before anything that
replaces or wraps parameters.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from shardtrain.config.schema import Config
from shardtrain.distributed import adapter_styles
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.tensor_parallel import hf_plan
from shardtrain.distributed.tensor_parallel.dropout_check import refuse_replicated_dropout
from shardtrain.distributed.tensor_parallel.local_linear import multiply_local_parts
from shardtrain.distributed.tensor_parallel.sequences import SequenceLength, Sequences
from shardtrain.distributed.tensor_parallel.styles import (
    CopyToHeads,
    GatherFeatures,
    GatheringColwise,
    GatherSequence,
    LocalSequence,
    ReplicatedEmbedding,
    ReplicatedHead,
    ReplicatedWeights,
    ScatteringRowwise,
    SplitEmbedding,
    SplitHeadNumbers,
)
from shardtrain.layout import TENSOR_STYLES, Layout, matches, style_of
from shardtrain.ops.linear_layers import is_plain_linear
from shardtrain.ops.tied import tie, tied_names
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "tp"


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Split the model's layers over the tensor-parallel ranks, in place. Parameters become DTensors.

    Raises:
        ConfigError: LAYOUT.tensor is empty, or assigns a style for linear layers to another type of module.
    """
    if mesh.size(AXIS) == 1:
        return
    # A network of the transformers library has its own plan, with other style names.
    if hasattr(model, "tensor_plan"):
        if not hasattr(model, "resolved_plan"):
            prepare(model, config)
        return hf_plan.apply(model, mesh, config)
    splitting = Splitting(
        ranks=mesh.size(AXIS),
        loss_parallel=not config.parallelism.disable_loss_parallel,
        length=SequenceLength(mesh.size(AXIS)),
        sequences=sequences_of(mesh, config),
    )
    model.register_forward_pre_hook(splitting.length.set_from_positions, with_kwargs=True)
    styles = _styles(model, layout, splitting)
    if not layout.tensor:
        rule = "requires LAYOUT.tensor, which is empty for this model"
        fix = f"assign one of the styles {', '.join(TENSOR_STYLES)} to every weight, or set the degree to 1"
        raise ConfigError(Problem("parallelism.tensor_parallel_degree", mesh.size(AXIS), rule, fix))
    # Check this here, because PyTorch's own error would be about its parallel styles, which users do not
    # know.
    problems = misnamed(model, layout)
    if problems:
        raise ConfigError(problems)
    if config.parallelism.enable_async_tensor_parallel and mesh.device.type == "cuda":
        _overlap_collectives(mesh)

    # parallelize_module would silently untie parameters.
    ties = tied_names(model)
    # Remove adapters for now, because PyTorch's styles do not know them. put_back splits them like their
    # layer.
    factors = adapter_styles.set_aside(model, partial(style_of, layout))
    parallelize_module(model, mesh.submesh(AXIS), styles)
    tie(model, ties)  # parallelize_module has created a separate parameter for each module
    if not config.compile.enable:  # a compiler removes the overhead of DTensors itself
        for module in model.modules():
            if is_plain_linear(module) and isinstance(module.weight, DTensor):
                multiply_local_parts(module)  # type: ignore[arg-type]
    adapter_styles.put_back(model, partial(style_of, layout), mesh.submesh(AXIS), factors)
    _split_alibi_slopes(model, layout, mesh)
    refuse_replicated_dropout(model, layout, mesh, config)


def prepare(model: Any, config: Config) -> None:
    """Resolve the plan of a ``transformers`` network while it is complete, before it is cut into stages.

    Raises:
        ConfigError: the plan cannot be used.
    """
    if hasattr(model, "tensor_plan"):
        model.resolved_plan = hf_plan.resolve(model, config)


def check(model: nn.Module, layout: Layout, config: Config) -> None:
    """Check an unsplit model on the meta device, before ranks start.

    Raises:
        ConfigError: ``apply`` would refuse the model.
    """
    if hasattr(model, "tensor_plan"):
        hf_plan.resolve(model, config)
        return
    problems = misnamed(model, layout)
    if problems:
        raise ConfigError(problems)


class Splitting(NamedTuple):
    """Values that all styles need.

    Attributes:
        ranks: tensor-parallel degree.
        loss_parallel: True if the loss is computed on logits that are split over the vocabulary.
        length: the sequence length of the current pass.
        sequences: all-gather and reduce-scatter along the sequence.
    """

    ranks: int
    loss_parallel: bool
    length: SequenceLength
    sequences: Sequences


def _styles(model: nn.Module, layout: Layout, splitting: Splitting) -> dict[str, ParallelStyle]:
    """Return the parallel style of each module that the layout names."""
    styles = {}
    for path, module in model.named_modules():
        name = style_of(layout, path)
        # expert_parallel.py splits experts. An nn.Identity needs no style, except "copy".
        if name in (None, "expert") or (name != "copy" and isinstance(module, nn.Identity)):
            continue
        styles[path] = style_for(path, module, str(name), splitting)
        _accept_keyword_input(module)
    return styles


def _overlap_collectives(mesh: Mesh) -> None:
    """Let the compiler split matmuls and overlap their pieces with the collectives around them."""
    import torch._inductor.config as inductor
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    inductor._micro_pipeline_tp = True
    enable_symm_mem_for_group(mesh.group(AXIS).group_name)


def _split_alibi_slopes(model: nn.Module, layout: Layout, mesh: Mesh) -> None:
    """Keep the slopes of this rank's heads in each attention core."""
    if not layout.context:
        return
    for path, core in model.named_modules():
        # Skip other modules, whose attribute of this name need not be a list of numbers.
        if not matches(path, layout.context):
            continue
        slopes_N = getattr(core, "alibi_slopes", None)
        if slopes_N:
            heads = len(slopes_N) // mesh.size(AXIS)
            start = mesh.rank(AXIS) * heads
            core.alibi_slopes = tuple(slopes_N[start : start + heads])  # type: ignore[assignment]


def style_for(path: str, module: nn.Module, name: str, splitting: Splitting) -> ParallelStyle:
    """Return the parallel style of a module by its style name in ``LAYOUT.tensor``."""
    ranks, loss_parallel, length, sequences = splitting
    # Embedding and head: split by vocabulary, if each rank gets a part of it.
    if name == "embed":
        if not isinstance(module, nn.Embedding):
            # for example sinusoidal positions, which have no table to split
            return ReplicatedEmbedding()
        # Replicate a small table, because FSDP fails if a rank has no rows.
        rows_per_rank = -(-module.num_embeddings // ranks)
        if rows_per_rank * (ranks - 1) >= module.num_embeddings:
            return ReplicatedEmbedding()
        return SplitEmbedding(sequences)
    if name == "head":
        if isinstance(module, nn.Linear):
            is_uneven = module.out_features % ranks != 0 and not loss_parallel
            if module.out_features < ranks or is_uneven:
                return ReplicatedHead(sequences)
        output = Shard(-1) if loss_parallel else Replicate()
        return GatheringColwise(length, sequences, input_layouts=Shard(1), output_layouts=output)
    # Modules in layers whose input or output is this rank's part of the sequence.
    if name == "sequence":
        take = partial(length.require, path, name, part=True)
        return ReplicatedWeights(Partial(), take, sequences.sum_weights())
    if name == "gather":
        return GatherSequence(sequences)
    if name == "colwise":
        return GatheringColwise(length, sequences)
    if name == "rowwise":
        return ScatteringRowwise(partial(length.require, path, name, part=False), sequences)
    if name == "local":
        return LocalSequence()
    # Replicated modules, parameters with one number per head, and modules that need all features.
    if name in ("router", "heads"):
        return ReplicatedWeights(Partial(), sum_over_ranks=sequences.sum_weights())
    if name == "per_head":
        return SplitHeadNumbers()
    if name == "features":
        return GatherFeatures()
    if name == "replicate":
        return ReplicatedWeights(Replicate(), partial(length.require, path, name, part=False))
    if name == "copy":
        return CopyToHeads()
    # Unreachable with a checked layout, because layout.check rejects unknown styles.
    raise ValueError(f"unknown layout style {name!r}")


def misnamed(model: nn.Module, layout: Layout) -> list[Problem]:
    """Return a problem for each rule of LAYOUT.tensor that applies a style of nn.Linear to another module."""
    fixes = {
        "colwise": 'write "per_head" if dim 0 of its weights can be split like heads or features, and its '
        'forward takes sizes from its weights; else "replicate"',
        "rowwise": "let the rule match an nn.Linear inside it",
        "head": "let the rule match an nn.Linear; a module around it may scale or cap the logits",
    }
    classes = {"head": nn.Linear}
    problems = {}
    for path, module in model.named_modules():
        # As in style_of, the first matching rule applies.
        rule = next((rule for rule in layout.tensor if matches(path, rule)), None)
        if rule is None or rule in problems or isinstance(module, nn.Identity):
            continue
        name = layout.tensor[rule]
        if name not in fixes:
            continue
        expected_class = classes.get(name, nn.Linear | nn.Embedding)
        if not isinstance(module, expected_class):
            mismatch = f"is for nn.Linear, and {path} is of class {type(module).__name__}"
            problems[rule] = Problem(f"LAYOUT.tensor[{rule!r}]", name, mismatch, fixes[name])
    return list(problems.values())


def _accept_keyword_input(module: nn.Module) -> None:
    """Let callers pass a module's first argument by keyword.

    Parallel styles transform the first positional argument, so a hook makes it positional.
    """
    first = next(iter(inspect.signature(module.forward).parameters), "")

    def make_positional(_: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        if inputs or first not in keywords:
            return None
        others = {**keywords}
        return (others.pop(first),), others

    module.register_forward_pre_hook(make_positional, with_kwargs=True)


def sequences_of(mesh: Mesh, config: Config) -> Sequences:
    """Return the object that gathers and scatters sequences among tensor-parallel ranks (a collective).

    On a CPU, it uses shared memory if possible.
    """
    recompute = config.activation_checkpoint
    # Recomputation by "op" keeps the outputs of PyTorch's reduce-scatter operation. It would not recognize
    # the one through shared memory.
    keeps_exchanges = recompute.mode == "selective" and recompute.selective_ac_option == "op"
    if mesh.device.type != "cpu" or config.compile.enable or keeps_exchanges:
        return Sequences()
    # a run on an accelerator does not import it
    from shardtrain.distributed.cpu import (
        shared_sequences,
    )

    return shared_sequences.between(mesh)
