"""Tensor and sequence parallelism: the layout's words become PyTorch's parallel styles (Megatron-LM: Shoeybi et al.
2019, Korthikanti et al. 2022). Must run before anything that replaces or wraps parameters."""

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
    ScatteringRowwise,
    SplitEmbedding,
    SplitHeadNumbers,
    WholeEmbedding,
    WholeHead,
    WholeWeights,
)
from shardtrain.layout import TENSOR_STYLES, Layout, matches, style_of
from shardtrain.ops.linear_layers import is_plain_linear
from shardtrain.ops.tied import tie, tied_names
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "tp"


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Split the model's layers over the tensor-parallel ranks, in place; parameters become DTensors."""
    if mesh.size(AXIS) == 1:
        return
    if hasattr(model, "tensor_plan"):  # a network of transformers, whose plan has other words
        return hf_plan.apply(model, mesh, config)
    splitting = Splitting(
        ranks=mesh.size(AXIS),
        loss_parallel=not config.parallelism.disable_loss_parallel,
        length=SequenceLength(mesh.size(AXIS)),
        sequences=sequences_of(mesh, config),
    )
    model.register_forward_pre_hook(splitting.length.set_from_positions, with_kwargs=True)

    # a style of PyTorch for each module that the layout names
    styles = {}
    for path, module in model.named_modules():
        word = style_of(layout, path)
        # experts are split in expert_parallel.py. An nn.Identity needs no style, except one with the word "copy"
        if word not in (None, "expert") and (word == "copy" or not isinstance(module, nn.Identity)):
            styles[path] = style_for(path, module, word, splitting)
            _accept_keyword_input(module)
    if not layout.tensor:
        rule = "needs LAYOUT.tensor of the model, which names no module"
        fix = f"give every weight one of the words {', '.join(TENSOR_STYLES)}, or set the degree to 1"
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
    factors = adapter_styles.set_aside(model, partial(style_of, layout))
    parallelize_module(model, mesh.submesh(AXIS), styles)
    tie(model, ties)  # parallelize_module gives each module its own parameter
    if not config.compile.enable:  # a compiler removes the overhead of DTensors itself
        for module in model.modules():
            if is_plain_linear(module) and isinstance(module.weight, DTensor):
                multiply_local_parts(module)  # type: ignore[arg-type]
    adapter_styles.put_back(model, partial(style_of, layout), mesh.submesh(AXIS), factors)

    # each attention core keeps the slopes of this rank's heads
    size = mesh.size(AXIS)
    rank = mesh.rank(AXIS)
    for place, core in model.named_modules():
        if layout.context and matches(place, layout.context) and (slopes_N := getattr(core, "alibi_slopes", None)):
            heads = len(slopes_N) // size
            core.alibi_slopes = tuple(slopes_N[rank * heads : (rank + 1) * heads])  # type: ignore[assignment]
    refuse_replicated_dropout(model, layout, mesh, config)


class Splitting(NamedTuple):
    """What styles share: the number of ranks, whether the loss splits the vocabulary, and the exchange of sequences."""

    ranks: int
    loss_parallel: bool
    length: SequenceLength
    sequences: Sequences


def style_for(path: str, module: nn.Module, word: str, splitting: Splitting) -> ParallelStyle:
    """Return the parallel style of a module, by its word in ``LAYOUT.tensor``."""
    ranks, loss_parallel, length, sequences = splitting
    if word == "embed":
        if not isinstance(module, nn.Embedding):  # computes from positions, has no table
            return WholeEmbedding()
        rows_per_rank = -(-module.num_embeddings // ranks)
        if rows_per_rank * (ranks - 1) >= module.num_embeddings:  # FSDP fails on a rank without rows
            return WholeEmbedding()
        return SplitEmbedding(sequences)
    if word == "head":
        if isinstance(module, nn.Linear):
            is_uneven = module.out_features % ranks != 0 and not loss_parallel
            if module.out_features < ranks or is_uneven:
                return WholeHead(sequences)
        output = Shard(-1) if loss_parallel else Replicate()
        return GatheringColwise(length, sequences, input_layouts=Shard(1), output_layouts=output)
    if word == "sequence":
        return WholeWeights(Partial(), lambda x: length.require(path, word, x, part=True), sequences.sum_weights())
    if word == "gather":
        return GatherSequence(sequences)
    if word == "colwise":
        return GatheringColwise(length, sequences)
    if word == "rowwise":
        return ScatteringRowwise(lambda x: length.require(path, word, x, part=False), sequences)
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


def sequences_of(mesh: Mesh, config: Config) -> Sequences:
    """Return the exchange of the tensor-parallel ranks of a mesh (a collective)."""
    recompute = config.activation_checkpoint
    # "op" saves the outputs of reduce-scatters, which it recognizes by PyTorch's operation
    keeps_exchanges = recompute.mode == "selective" and recompute.selective_ac_option == "op"
    if mesh.device.type != "cpu" or config.compile.enable or keeps_exchanges:
        return Sequences()
    from shardtrain.distributed.cpu import shared_sequences  # a run on an accelerator does not import it

    return shared_sequences.between(mesh)
