"""Tensor parallelism for ``transformers`` networks, whose plan assigns a style name to each split module.

``resolve`` checks the plan, and ``apply`` turns its style names into PyTorch's parallel styles. Between the
split modules, sequences are split if the blocks of the network allow it (``hf_sequences.py``). Otherwise
activations are replicated there (Megatron-LM, Shoeybi et al. 2019, section 3). Weights that the plan does not
name are replicated. ``hf_gradients.py`` finds out which of them each rank uses only for its own heads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from shardtrain.config.schema import Config
from shardtrain.distributed import adapter_styles
from shardtrain.distributed.chain import Absent
from shardtrain.distributed.mesh import Mesh
from shardtrain.distributed.tensor_parallel import hf_derived_plan, hf_gradients, hf_sequences
from shardtrain.distributed.tensor_parallel.hf_styles import (
    EXPERT_INPUTS,
    GatheredWeights,
    PlannedReplicatedWeights,
    SharedRotaryKey,
    SplitExperts,
    SplitHeadParameters,
    SummedOutput,
    UnreducedRowwise,
)
from shardtrain.layout import matches
from shardtrain.ops.tied import tie, tied_names
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "tp"
OPTION = "parallelism.tensor_parallel_degree"
STYLES = {
    "colwise": "linear: output features split; parameter with one number per head: split like the heads",
    "rowwise": "linear: input features split, outputs summed",
    "colwise_gather_output": "linear: output features split; outputs gathered, unless the loss is split like them",
    "colwise_rep": "older name of colwise_gather_output",
    "rowwise_split_input": "linear: input features split, from a replicated input; outputs summed",
    "rowwise_rep": "older name of rowwise_split_input",
    "packed_colwise": "fused weight of experts, split like the experts",
    "packed_rowwise": "fused weight of experts, split like the experts",
    "embedding_rowwise": "embedding: vocabulary rows split, outputs summed",
    "embedding_colwise": "embedding: features split, outputs gathered",
    "moe_tp_experts": "stacked experts: split by expert, outputs summed",
    "moe_identity_expert": "expert without weights: computed on all ranks",
    "mla_kv_a_proj": "linear: replicated; gradients of its last outputs, the rotary key, are summed over ranks",
    "local_params": "module with one number per head: each rank uses the numbers of its own heads",
    "all_reduce": "module whose outputs are summed",
    "replicated_with_grad_allreduce": "replicated weights used on a rank's own heads: gradients are summed over ranks",
    "replicate": "replicated weights; all ranks compute the same",
}
"""Supported style names, with their meaning. A plan that contains any other style is refused."""
HEADS = ("colwise_gather_output", "colwise_rep")
_SPLIT_INPUT = ("rowwise_split_input", "rowwise_rep")
_SPLIT_BY_ROWS = {"colwise", *HEADS, "embedding_rowwise"}
_SPLIT_BY_COLUMNS = {"rowwise", "embedding_colwise", *_SPLIT_INPUT}
_REPLICATED = ("replicate", "replicated_with_grad_allreduce")
_LINEAR = {"colwise", "rowwise", *HEADS, *_SPLIT_INPUT, "mla_kv_a_proj"}
_EMBEDDING = {"embedding_rowwise", "embedding_colwise"}
_EXPERTS = "moe_tp_experts"
_EFFECTS = {
    "colwise": hf_gradients.SPLIT,
    "rowwise": hf_gradients.SUMMED,
    "all_reduce": hf_gradients.SUMMED,
    "mla_kv_a_proj": hf_gradients.SHARED,
    _EXPERTS: hf_gradients.REPLICATED,
    **dict.fromkeys((*HEADS, *_SPLIT_INPUT, *_EMBEDDING), hf_gradients.REPLICATED),
}
"""Maps a style name to its effect on activations, see ``hf_gradients``."""


@dataclass
class Resolved:
    """The plan of a network, applied to its modules.

    Attributes:
        names: module path -> style name.
        partial: module path -> names of replicated parameters whose gradients are summed over ranks.
        gathered: for modules that can compute only with full weights: module path -> parameter name -> the
            dimension along which the parameter is stored in parts.
        of_heads: module path -> names of parameters with one number per head, which are split like the heads.
        experts: paths of modules that select the tokens of each expert, whether they are split or not.
        sequences: how blocks run on parts of sequences. None if they run on full sequences.
        unsplit_sequences: the reason why blocks run on full sequences. The phrase follows the network's name.
        derived: the plan, if ``hf_derived_plan`` derived it from the structure of the network.
    """

    names: dict[str, str] = field(default_factory=dict)
    partial: dict[str, set[str]] = field(default_factory=dict)
    gathered: dict[str, dict[str, int]] = field(default_factory=dict)
    of_heads: dict[str, set[str]] = field(default_factory=dict)
    experts: set[str] = field(default_factory=set)
    sequences: hf_sequences.SplitSequences | None = None
    unsplit_sequences: str = ""
    derived: dict[str, str] = field(default_factory=dict)


def resolve(model: Any, config: Config) -> Resolved:
    """Return the style of each module of an unsplit model on the meta device.

    Raises:
        ConfigError: the plan does not exist, contains an unknown style, would compute wrong gradients, or
            does not fit the model's sizes, its loss or its tied weights.
    """
    ranks = config.parallelism.tensor_parallel_degree
    refuse = _Refusal(ranks, model.config_name)

    # Read the plan of the architecture, or derive one.
    plan: Mapping[str, str] = model.tensor_plan
    derived: dict[str, str] = {}
    if not plan:
        derived = hf_derived_plan.derive(model, ranks)
        plan = derived
    if not plan:
        raise refuse.error(
            f"requires a tensor-parallel plan, and transformers has none for {model.config_name}"
        )
    unknown = sorted(set(plan.values()) - STYLES.keys())
    if unknown:
        names = ", ".join(unknown)
        raise refuse.error(f"does not support styles in the plan of {model.config_name} ({names})")

    # Assign its styles to modules, except to experts that expert parallelism splits.
    ties = tied_names(model)
    resolved = _styles_by_module(model, plan, ties, ranks)
    resolved.derived = derived
    for path in _expert_parallel(model, config):
        resolved.names.pop(path, None)
        resolved.gathered.pop(path, None)
        resolved.of_heads.pop(path, None)

    _check_sizes(model, resolved, refuse)
    _complete(model, resolved, refuse)
    _check_head(model, resolved, config)
    _check_ties(ties, resolved.names, refuse)
    _split_sequences(model, resolved, config)
    return resolved


def _check_head(model: Any, resolved: Resolved, config: Config) -> None:
    """Check that the head is split if the loss is."""
    if config.parallelism.disable_loss_parallel:
        return
    head = _path(model, model.hf.get_output_embeddings())
    if resolved.names.get(head) in HEADS:
        return
    rule = f"splits the loss over the vocabulary, but the plan of {model.config_name} does not split its head"
    problem = Problem("parallelism.disable_loss_parallel", False, rule, "set it to true")
    raise ConfigError(problem)


def apply(model: Any, mesh: Mesh, config: Config) -> None:
    """Split a model or a pipeline stage in place, according to ``model.resolved_plan``.

    Every parameter becomes a DTensor.
    """
    resolved: Resolved = model.resolved_plan
    tensor_mesh = mesh.submesh(AXIS)
    ties = tied_names(model)
    head = _path(model, model.hf.get_output_embeddings())
    keeps_logits_split = not config.parallelism.disable_loss_parallel

    # Every module with weights has a style, because every parameter must be a DTensor on the same mesh.
    styles: dict[str, ParallelStyle] = {}
    other_experts = _expert_parallel(model, config)
    for path, module in model.named_modules():
        if path in other_experts or isinstance(module, Absent):
            continue
        is_split_head = keeps_logits_split and path == head
        style = _style(path, module, model, resolved, is_split_head)
        if style is not None:
            styles[path] = style

    # Adapters are split separately, because the styles would split their factors like the layer's weight.
    style_of = resolved.names.get
    factors = adapter_styles.set_aside(model, style_of)
    parallelize_module(model, tensor_mesh, styles)
    _copy_changed_outputs(model, resolved)
    tie(model, ties)  # parallelize_module has created a separate parameter for each module
    adapter_styles.put_back(model, style_of, tensor_mesh, factors)

    for attention in hf_derived_plan.split_attention(model, resolved.derived):
        hf_derived_plan.divide_heads(attention, mesh.size(AXIS))
    if resolved.sequences is not None:
        hf_sequences.apply(model, resolved.sequences, tensor_mesh)


def _copy_changed_outputs(model: nn.Module, resolved: Resolved) -> None:
    """Let embeddings and shared experts return a copy.

    Some networks change their output in place. This output is a view, and FSDP would lose the hooks on it.
    """
    blocks_of_experts = []
    for path in resolved.experts:
        blocks_of_experts.append(f"{_owner_path(path)}.")
    for path, module in model.named_modules():
        style = resolved.names.get(path)
        is_embedding = style in _EMBEDDING and isinstance(module, nn.Embedding)
        is_shared_expert = style == "rowwise" and path.startswith(tuple(blocks_of_experts))
        if is_embedding or is_shared_expert:
            module.register_forward_hook(_copy_output)


def _expert_parallel(model: Any, config: Config) -> set[str]:
    """Return the paths of experts that expert parallelism splits. Tensor parallelism must not split them too."""
    if config.parallelism.expert_parallel_degree == 1:
        return set()
    return set(model.experts)


def _copy_output(_: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.clone()


@dataclass(frozen=True)
class _Refusal:
    """Creates errors for a plan that cannot be used.

    Attributes:
        ranks: tensor-parallel degree.
        class_name: class of the network.
    """

    ranks: int
    class_name: str

    def error(self, rule: str) -> ConfigError:
        """Return an error about the degree. In the message, ``rule`` follows the option and its value."""
        fix = "set it to 1 and use data_parallel_shard_degree, or a newer version of transformers"
        return ConfigError(Problem(OPTION, self.ranks, rule, fix))

    def uneven(self, size: int, things: str) -> ConfigError:
        """Return the error that ``size`` is not a multiple of the degree."""
        rule = f"does not divide the {size} {things}"
        return ConfigError(Problem(OPTION, self.ranks, rule, "set it to a divisor"))


def _styles_by_module(
    model: Any, plan: Mapping[str, str], ties: list[list[str]], ranks: int
) -> Resolved:
    """Assign the plan's styles to modules. The plan itself may name modules or parameters."""
    resolved = Resolved()
    for path, module in model.named_modules():
        own_parameters = dict(module.named_parameters(recurse=False))
        style = _planned(plan, path)
        planned_own: dict[str, str] = {}
        for name in own_parameters:
            style_of_parameter = _planned(plan, f"{path}.{name}")
            if style_of_parameter:
                planned_own[name] = style_of_parameter

        has_stacks = any(parameter.ndim == 3 for parameter in own_parameters.values())
        if has_stacks and not isinstance(module, nn.Conv1d):
            resolved.experts.add(path)

        if isinstance(module, nn.Linear | nn.Embedding):
            # The plan may name the weight instead of the module.
            if style is None and planned_own:
                style = next(iter(planned_own.values()))
            if _fits(style, module):
                resolved.names[path] = str(style)
        elif style == _EXPERTS or planned_own:
            _assign_parameters(path, module, planned_own, style, ranks, resolved)
        elif style in ("all_reduce", *_REPLICATED):
            resolved.names[path] = str(style)

    _split_tied_embedding(model, ties, resolved)
    return resolved


def _fits(style: str | None, module: nn.Module) -> bool:
    """True if a linear layer or an embedding can have a style."""
    if style in _REPLICATED:
        return True
    if isinstance(module, nn.Linear):
        return style in _LINEAR
    return style in _EMBEDDING


def _split_tied_embedding(model: Any, ties: list[list[str]], resolved: Resolved) -> None:
    """Split the embedding like the head if both are the same tensor.

    Older plans name only the head.
    """
    embedding = _path(model, model.hf.get_input_embeddings())
    if embedding in resolved.names:
        return
    for names in ties:
        if f"{embedding}.weight" not in names:
            continue
        for name in names:
            if resolved.names.get(_owner_path(name)) in HEADS:
                resolved.names[embedding] = "embedding_rowwise"
        return


def _planned(plan: Mapping[str, str], name: str) -> str | None:
    """Return the style of the first pattern of a plan that matches a name."""
    for pattern, style in plan.items():
        if matches(name, pattern):
            return style
    return None


def _takes_pairs(module: nn.Module) -> bool:
    """True for an experts module whose arguments are tokens, and for each token its experts and weights."""
    # Inspect the class, because adapters replace the forward of the instance.
    signature = inspect.signature(type(module).forward)
    _, *inputs = signature.parameters
    return tuple(inputs) == EXPERT_INPUTS and _has_own_parameters(module)


def _has_own_parameters(module: nn.Module) -> bool:
    """True if a module has parameters that belong to no child."""
    return next(module.parameters(recurse=False), None) is not None


def _assign_parameters(
    path: str,
    module: nn.Module,
    planned: Mapping[str, str],
    style: str | None,
    ranks: int,
    resolved: Resolved,
) -> None:
    """Choose the style of a module that is neither a linear layer nor an embedding.

    Args:
        planned: maps the module's parameters that the plan names to their styles.
        style: the module's own style in the plan, or None.
    """
    own = dict(module.named_parameters(recurse=False))

    # Experts are split over the ranks if possible.
    if style == _EXPERTS:
        resolved.experts.add(path)
        if _is_split_by_expert(module, ranks):
            resolved.names[path] = _EXPERTS
            return

    # Parameters with one number per head: each rank uses those of its heads.
    has_only_vectors = all(own[name].ndim == 1 for name in planned)
    is_of_heads = style == "local_params" or has_only_vectors
    if is_of_heads and style != _EXPERTS:
        resolved.of_heads[path] = set(planned)
        return

    # All other modules: every rank gathers the weights and computes the same. A weight is stored in parts if
    # one of its dimensions can be divided evenly.
    dims = {}
    for name, parameter in own.items():
        if name not in planned and style != _EXPERTS:
            continue
        for dim, size in enumerate(parameter.shape):
            if size % ranks == 0:
                dims[name] = dim
                break
    resolved.gathered[path] = dims


def _is_split_by_expert(module: nn.Module, ranks: int) -> bool:
    """True if each rank can compute a part of the experts.

    Dim 0 of all weights must be the number of experts, and no other module may take part in their computation.
    """
    if not _takes_pairs(module):
        return False
    counts = set()
    for parameter in module.parameters(recurse=False):
        if parameter.ndim < 2:
            return False
        counts.add(parameter.size(0))
    num_experts = min(counts)
    if len(counts) > 1 or num_experts == 0 or num_experts % ranks:
        return False
    for child in module.children():
        if next(child.parameters(), None) is not None:
            return False
    return not any(isinstance(child, nn.Identity) for child in module.modules())


def _check_sizes(model: Any, resolved: Resolved, refuse: _Refusal) -> None:
    """Check that split features and heads can be divided evenly among the ranks."""
    ranks = refuse.ranks
    for path, style in resolved.names.items():
        module = model.get_submodule(path)
        if style == "rowwise" and module.in_features % ranks:
            raise refuse.uneven(module.in_features, f"input features of {path}")
        if style != "colwise":
            continue
        owner = model.get_submodule(_owner_path(path))
        heads = _num_heads(owner, module)
        if heads % ranks:
            raise refuse.uneven(heads, f"heads of {path}")
        if module.out_features % ranks:
            raise refuse.uneven(module.out_features, f"output features of {path}")

    for path, names in resolved.of_heads.items():
        module = model.get_submodule(path)
        for name in names:
            parameter = module.get_parameter(name)
            heads = parameter.size(0)
            if heads % ranks:
                raise refuse.uneven(heads, f"heads of {path}.{name}")


def _num_heads(owner: nn.Module, linear: nn.Linear) -> int:
    """Return the number of heads in the output of a linear layer, or 0 if it has none."""
    head_dim = getattr(owner, "head_dim", None)
    if isinstance(head_dim, int) and linear.out_features % head_dim == 0:
        return linear.out_features // head_dim
    heads = getattr(owner, "num_heads", 0)
    if isinstance(heads, int):
        return heads
    return 0


def _owner_path(path: str) -> str:
    """Return the path of the module that contains a module."""
    return path.rpartition(".")[0]


def _complete(model: Any, resolved: Resolved, refuse: _Refusal) -> None:
    """Find the gradients that are partial sums. Refuse a plan with which some gradient would be wrong."""
    # Follow the activations that differ between ranks.
    effects = {}
    for path, style in resolved.names.items():
        if style in _EFFECTS:
            effects[path] = _EFFECTS[style]
    for path in resolved.gathered:
        effects[path] = hf_gradients.REPLICATED
    split_parameters = set()
    for path, names in resolved.of_heads.items():
        for name in names:
            split_parameters.add(f"{path}.{name}")
    findings = hf_gradients.follow(model, effects, split_parameters, resolved.experts)
    if findings.problems:
        problem = findings.problems[0]
        rule = f"would compute wrong gradients with the plan of {refuse.class_name}: {problem}"
        raise refuse.error(rule)
    if not findings.is_complete:
        _check_neighbours(model, resolved, refuse)

    # Gradients are partial sums if the plan says so, or if the pass found it.
    partial_parameters = set(findings.partial)
    for path, style in resolved.names.items():
        if style != "replicated_with_grad_allreduce":
            continue
        module = model.get_submodule(path)
        for name, _ in module.named_parameters(recurse=False):
            partial_parameters.add(f"{path}.{name}")
    for parameter in partial_parameters:
        path, _, name = parameter.rpartition(".")
        resolved.partial.setdefault(path, set()).add(name)


def _split_sequences(model: Any, resolved: Resolved, config: Config) -> None:
    """Let the blocks run on parts of sequences, if they support it and the sequence length can be split."""
    ranks = config.parallelism.tensor_parallel_degree
    tokens = config.training.seq_len // config.parallelism.context_parallel_degree
    if config.task.name != "language_model" or tokens % ranks:
        reason = f"has rows whose length is not a multiple of {ranks} ranks"
        resolved.unsplit_sequences = reason
        return
    try:
        sequences = hf_sequences.find(model, resolved.names, resolved.experts)
    except hf_sequences.Unsplittable as error:
        resolved.unsplit_sequences = str(error)
        return
    for path in sequences.partial:
        if path in resolved.gathered or path in resolved.of_heads:
            resolved.unsplit_sequences = f"splits {path} between the layers"
            return

    resolved.sequences = sequences
    for path, names in sequences.partial.items():
        resolved.partial.setdefault(path, set()).update(names)


def _check_neighbours(model: Any, resolved: Resolved, refuse: _Refusal) -> None:
    """Check that every weight in a module with split children has a style.

    Without one, its gradient would be wrong if each rank applies it only to its own heads.
    """
    owners = set()
    for path, style in resolved.names.items():
        if style in ("colwise", "rowwise"):
            owners.add(_owner_path(path))
    # Exclude the model and its layers: their norms next to split modules are applied to replicated activations.
    owners -= {"", *model.blocks}
    planned = {*resolved.names, *resolved.gathered, *resolved.of_heads}
    for path, module in model.named_modules():
        if path in planned or not _has_own_parameters(module):
            continue
        for owner in owners:
            is_in_owner = f"{path}.".startswith(f"{owner}.")
            if is_in_owner:
                rule = (
                    f"needs a style for {path}, which the plan of {refuse.class_name} does not name"
                )
                raise refuse.error(rule)


def _path(model: nn.Module, wanted: nn.Module | None) -> str:
    """Return the path of a submodule, or an empty string."""
    for path, module in model.named_modules():
        if module is wanted:
            return path
    return ""


def _check_ties(ties: list[list[str]], style_names: Mapping[str, str], refuse: _Refusal) -> None:
    """Check that a tied parameter is split by rows under all of its names, or under none."""
    for names in ties:
        # A tied parameter is one tensor, so it can have only one placement.
        num_by_rows = 0
        is_by_columns = False
        for name in names:
            style = style_names.get(_owner_path(name), "replicate")
            if style in _SPLIT_BY_ROWS:
                num_by_rows += 1
            if style in _SPLIT_BY_COLUMNS:
                is_by_columns = True
        has_one_placement = num_by_rows in (0, len(names))
        if is_by_columns or not has_one_placement:
            rule = (
                f"splits {names[0]} and {names[-1]} of {refuse.class_name} differently, but they are one "
                "tied parameter"
            )
            raise refuse.error(rule)


def _style(
    path: str, module: nn.Module, model: Any, resolved: Resolved, keeps_output_split: bool
) -> ParallelStyle | None:
    """Return the parallel style of a module. None if it has no direct parameters and needs no style."""
    name = resolved.names.get(path)
    if not _has_own_parameters(module):
        # Without any parameters, this is only a placeholder: the module is on another pipeline stage.
        is_present = next(module.parameters(), None) is not None
        if name == "all_reduce" and is_present:
            return SummedOutput()
        return None
    if name == "colwise":
        return ColwiseParallel()
    if name in HEADS:
        if keeps_output_split:
            return ColwiseParallel(output_layouts=Shard(-1))
        return ColwiseParallel(output_layouts=Replicate())
    if name == "rowwise":
        if resolved.sequences is not None and path in resolved.sequences.scattered:
            return UnreducedRowwise()
        return RowwiseParallel()
    if name in _SPLIT_INPUT or name == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    if name == "embedding_colwise":
        return ColwiseParallel(output_layouts=Replicate())
    if name == _EXPERTS:
        return SplitExperts()
    if name == "mla_kv_a_proj":
        text_config = model.hf.config.get_text_config()
        return SharedRotaryKey(text_config.qk_rope_head_dim)
    if path in resolved.gathered:
        return GatheredWeights(resolved.gathered[path])
    if path in resolved.of_heads:
        return SplitHeadParameters(resolved.of_heads[path])

    # All other weights are replicated.
    owner_path = _owner_path(path)
    readers = []
    if _may_be_read_by_owner(module, owner_path, model):
        readers.append(model.get_submodule(owner_path))
    partial = resolved.partial.get(path, ())
    return PlannedReplicatedWeights(partial, readers)


def _may_be_read_by_owner(module: nn.Module, owner_path: str, model: Any) -> bool:
    """True if the module that contains this one may use its weights without calling it.

    PyTorch's attention does this with its last layer, as in the vision towers of SigLIP. Recurrent layers do
    this with causal convolutions, and Mamba with the projection of time steps (in Jamba).
    """
    # Exclude linear layers that are direct children of a block. For these, the block's forward would be
    # replaced, but context parallelism already replaces the forward of its class.
    is_in_module_of_block = any(owner_path.startswith(f"{block}.") for block in model.blocks)
    if isinstance(model.get_submodule(owner_path), nn.MultiheadAttention):
        return True
    if isinstance(module, nn.Conv1d):
        return True
    return isinstance(module, nn.Linear) and is_in_module_of_block
