"""Tensor parallelism by the plan of a ``transformers`` network: its style names become PyTorch's parallel
styles.

Between the split modules, activations are replicated (Megatron-LM, Shoeybi et al. 2019, section 3),
without sequence parallelism. Weights that the plan does not name are replicated, and all ranks compute
the same with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from shardtrain.config.schema import Config
from shardtrain.distributed import adapter_styles
from shardtrain.distributed.local_weights import use_local_weights
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import matches
from shardtrain.ops.tied import tie, tied_names
from shardtrain.utils.errors import ConfigError, Problem

AXIS = "tp"
OPTION = "parallelism.tensor_parallel_degree"
STYLES = {
    "colwise": "linear, output features split",
    "rowwise": "linear, input features split, outputs summed",
    "colwise_gather_output": "linear, output features split; outputs gathered, unless the loss is split like them",
    "colwise_rep": "older name of colwise_gather_output",
    "embedding_rowwise": "embedding, vocabulary rows split, outputs summed",
    "replicated_with_grad_allreduce": "replicated weights used on a rank's own heads: gradients are summed over ranks",
    "replicate": "replicated weights; all ranks compute the same",
}
"""Supported style names of a plan, with their meaning. A plan with any other is refused."""
HEADS = ("colwise_gather_output", "colwise_rep")
_SPLIT_BY_ROWS = {"colwise", *HEADS, "embedding_rowwise"}


def apply(model: Any, mesh: Mesh, config: Config) -> None:
    """Split a model by its ``tensor_plan``, in place. Every parameter becomes a DTensor.

    Raises:
        ConfigError: the plan does not exist, contains an unknown style, or does not cover the weights
            next to split weights, or it does not fit the loss or tied weights.
    """
    plan: Mapping[str, str] = model.tensor_plan
    name = model.config_name
    ties = tied_names(model)
    style_names = _style_names(model, plan, ties)
    _check_style_names(style_names, name, mesh)
    _check_neighbours(model, style_names, name, mesh)
    has_loss_parallel = not config.parallelism.disable_loss_parallel
    head = _path(model, model.hf.get_output_embeddings())
    if has_loss_parallel and style_names.get(head) not in HEADS:
        rule = f"splits the loss over the vocabulary, and the plan of {name} does not split its head"
        raise ConfigError(Problem("parallelism.disable_loss_parallel", False, rule, "set it to true"))
    _check_ties(ties, style_names, name, mesh)

    # Every module with weights gets a style, so that every parameter becomes a DTensor on the same mesh.
    styles: dict[str, ParallelStyle] = {}
    for path, module in model.named_modules():
        if path in style_names:
            styles[path] = _style(style_names[path], has_loss_parallel and path == head)
        elif any(True for _ in module.parameters(recurse=False)):
            styles[path] = PlannedReplicatedWeights(Replicate())
    # Adapters are split separately, because styles would treat their factors as weights.
    factors = adapter_styles.set_aside(model, style_names.get)
    parallelize_module(model, mesh.submesh(AXIS), styles)
    for path, style_name in style_names.items():
        if style_name == "embedding_rowwise":
            # The output is a view. If a network changes a view in place, FSDP loses the hooks on it.
            model.get_submodule(path).register_forward_hook(_copy_output)
    tie(model, ties)  # parallelize_module has created a separate parameter for each module
    adapter_styles.put_back(model, style_names.get, mesh.submesh(AXIS), factors)


class PlannedReplicatedWeights(ParallelStyle):
    """Replicated weights of a module with any arguments.

    ``gradient`` is the placement of each rank's gradient.
    """

    def __init__(self, gradient: Placement) -> None:
        self._gradient = gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            replicated = DTensor.from_local(parameter.detach(), device_mesh, (Replicate(),), run_check=False)
            module.register_parameter(name, nn.Parameter(replicated, requires_grad=parameter.requires_grad))
        use_local_weights(module, (self._gradient,))
        return module


def _copy_output(_: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
    return output.clone()


def _style_names(model: Any, plan: Mapping[str, str], ties: list[list[str]]) -> dict[str, str]:
    """Return the style name of each module with weights that the plan names, directly or by one of its
    parameters.
    """
    style_names = {}
    for path, module in model.named_modules():
        # A plan may name a module or one of its parameters.
        names = [path, *(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))]
        matching = (plan[pattern] for pattern in plan if any(matches(name, pattern) for name in names))
        style_name = next(matching, None)
        if style_name is not None and any(True for _ in module.parameters()):
            style_names[path] = style_name

    # Older plans name only the head and not the embedding, even if both are the same tensor.
    embedding = _path(model, model.hf.get_input_embeddings())
    if embedding in style_names:
        return style_names
    for names in ties:
        if f"{embedding}.weight" in names:
            styles = [style_names.get(name.rpartition(".")[0]) for name in names]
            if any(style in HEADS for style in styles):
                style_names[embedding] = "embedding_rowwise"
            break
    return style_names


def _path(model: nn.Module, wanted: nn.Module | None) -> str:
    """Return the path of a submodule, or an empty string."""
    return next((path for path, module in model.named_modules() if module is wanted), "")


def _check_style_names(style_names: Mapping[str, str], name: str, mesh: Mesh) -> None:
    unknown = sorted(set(style_names.values()) - STYLES.keys())
    if unknown:
        _refuse(mesh, f"needs the plan of {name}, which has unknown styles ({', '.join(unknown)})")
    if not style_names:
        _refuse(mesh, f"needs the plan of {name}, which does not exist")


def _check_neighbours(model: Any, style_names: Mapping[str, str], name: str, mesh: Mesh) -> None:
    """Require a style for every weight inside a module with split children: a rank may use it on its own
    heads.
    """
    owners = set()
    for path, style_name in style_names.items():
        if style_name in ("colwise", "rowwise"):
            owners.add(path.rpartition(".")[0])
    # Not the model and its layers, which contain replicated norms next to split modules.
    owners -= {"", *model.blocks}
    for path, module in model.named_modules():
        if path in style_names or not any(True for _ in module.parameters(recurse=False)):
            continue
        if any(path == owner or path.startswith(f"{owner}.") for owner in owners):
            _refuse(mesh, f"needs a plan that names {path}, and that of {name} does not")


def _check_ties(ties: list[list[str]], style_names: Mapping[str, str], name: str, mesh: Mesh) -> None:
    """Require that all names of a tied parameter are split by rows, or that all are replicated."""
    for names in ties:
        # A tied parameter is one tensor, so it has only one placement.
        modules = [parameter.rpartition(".")[0] for parameter in names]
        styles = [style_names.get(module, "replicate") for module in modules]
        is_by_rows = [style in _SPLIT_BY_ROWS for style in styles]
        has_both = any(is_by_rows) and not all(is_by_rows)
        if has_both or "rowwise" in styles:
            _refuse(mesh, f"splits {names[0]} and {names[-1]} of {name} in two ways, and they are one tensor")


def _refuse(mesh: Mesh, rule: str) -> None:
    fix = "set it to 1 and use data_parallel_shard_degree, or a newer version of transformers"
    raise ConfigError(Problem(OPTION, mesh.size(AXIS), rule, fix))


def _style(style_name: str, keeps_output_split: bool) -> ParallelStyle:
    if style_name == "colwise":
        return ColwiseParallel()
    if style_name == "rowwise":
        return RowwiseParallel()
    if style_name in HEADS:
        output_layout = Shard(-1) if keeps_output_split else Replicate()
        return ColwiseParallel(output_layouts=output_layout)
    if style_name == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    if style_name == "replicated_with_grad_allreduce":
        return PlannedReplicatedWeights(Partial())
    return PlannedReplicatedWeights(Replicate())
