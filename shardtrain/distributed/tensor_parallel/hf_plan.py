"""Tensor parallelism by the plan that a network of ``transformers`` brings: its words become PyTorch's styles.

Between the modules that are split, activations are whole on every rank (Megatron-LM, Shoeybi et al. 2019, section 3;
no sequence parallelism). Weights that the plan does not name are whole, and computed with alike on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
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
WORDS = {
    "colwise": "linear, output features split",
    "rowwise": "linear, input features split, outputs summed",
    "colwise_gather_output": "linear, output features split; gathered, unless the loss is split as they are",
    "colwise_rep": "older name of colwise_gather_output",
    "embedding_rowwise": "embedding, vocabulary rows split, outputs summed",
    "replicated_with_grad_allreduce": "whole weights used on a rank's own heads: the gradient is the ranks' sum",
    "replicate": "whole weights, computed with alike on every rank",
}
"""The words of a plan that are known; a plan with any other is refused."""
HEADS = ("colwise_gather_output", "colwise_rep")


def apply(model: Any, mesh: Mesh, config: Config) -> None:
    """Split a model by its ``tensor_plan``, in place; every parameter becomes a DTensor.

    Raises:
        ConfigError: where there is no plan, a word of it is not known, or weights beside split ones are not named.
    """
    plan: Mapping[str, str] = model.tensor_plan
    name = model.config_name
    ties = tied_names(model)
    words = dict(_words(model, plan))
    # older plans name the head alone, and not the embedding that is the same tensor
    embedding = _path(model, model.hf.get_input_embeddings())
    tied = next((names for names in ties if f"{embedding}.weight" in names), [])
    if embedding not in words and any(words.get(name.rpartition(".")[0]) in HEADS for name in tied):
        words[embedding] = "embedding_rowwise"
    unknown = sorted({word for word in words.values() if word not in WORDS})
    if not words or unknown:
        what = f"has words that are not known ({', '.join(unknown)})" if unknown else "does not exist"
        _refuse(mesh, f"needs the plan of {name}, which {what}")
    _check_beside(model, words, name, mesh)
    loss_parallel = not config.parallelism.disable_loss_parallel
    head = _path(model, model.hf.get_output_embeddings())
    if loss_parallel and words.get(head) not in HEADS:
        rule = f"splits the loss over the vocabulary, and the plan of {name} does not split its head"
        raise ConfigError(Problem("parallelism.disable_loss_parallel", False, rule, "set it to true"))
    _check_ties(ties, words, name, mesh)
    styles = {path: _style(word, loss_parallel and path == head) for path, word in words.items()}
    for path, module in model.named_modules():
        if path not in styles and any(True for _ in module.parameters(recurse=False)):
            styles[path] = ReplicatedWeights(Replicate())
    # adapters are split by hand: styles would take their factors for weights
    factors = adapter_styles.set_aside(model, words.get)
    parallelize_module(model, mesh.submesh(AXIS), styles)
    for path in (path for path, word in words.items() if word == "embedding_rowwise"):
        # FSDP, which wraps it, loses its hooks where a network then changes a view in place
        model.get_submodule(path).register_forward_hook(lambda _, inputs, output: output.clone())
    tie(model, ties)  # parallelize_module gives each module a parameter of its own
    adapter_styles.put_back(model, words.get, mesh.submesh(AXIS), factors)


class ReplicatedWeights(ParallelStyle):
    """As in ``plan.py``, for any arguments: whole weights, and what a rank's gradient of them is."""

    def __init__(self, gradient: Placement) -> None:
        self._gradient = gradient

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            whole = DTensor.from_local(parameter.detach(), device_mesh, (Replicate(),), run_check=False)
            module.register_parameter(name, nn.Parameter(whole, requires_grad=parameter.requires_grad))
        use_local_weights(module, (self._gradient,))
        return module


def _words(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Each module with weights that a plan names (itself or one of its parameters), and the word."""
    for path, module in model.named_modules():
        names = [path, *(f"{path}.{name}" for name, _ in module.named_parameters(recurse=False))]
        word = next((word for pattern, word in plan.items() for name in names if matches(name, pattern)), None)
        if word is not None and any(True for _ in module.parameters()):
            yield path, word


def _path(model: nn.Module, wanted: nn.Module | None) -> str:
    return next((path for path, module in model.named_modules() if module is wanted), "")


def _check_beside(model: Any, words: Mapping[str, str], name: str, mesh: Mesh) -> None:
    """Within a module whose children are split, every weight needs a word: a rank may use it on its own heads."""
    split = {path.rpartition(".")[0] for path, word in words.items() if word in ("colwise", "rowwise")}
    for path, module in model.named_modules():
        inside = any(path == owner or path.startswith(f"{owner}.") for owner in split - {"", *model.blocks})
        if inside and path not in words and any(True for _ in module.parameters(recurse=False)):
            _refuse(mesh, f"needs a plan that names {path}, and that of {name} does not")


def _check_ties(ties: list[list[str]], words: Mapping[str, str], name: str, mesh: Mesh) -> None:
    """Names of one parameter must be split in one way, over its first dimension, or not at all."""
    by_rows = {"colwise", *HEADS, "embedding_rowwise"}
    for names in ties:
        owners = [words.get(own.rpartition(".")[0], "replicate") for own in names]
        if len({word in by_rows for word in owners}) > 1 or "rowwise" in owners:
            _refuse(mesh, f"splits {names[0]} and {names[-1]} of {name} in two ways, and they are one tensor")


def _refuse(mesh: Mesh, rule: str) -> None:
    fix = "set it to 1 and use data_parallel_shard_degree, or a newer version of transformers"
    raise ConfigError(Problem(OPTION, mesh.size(AXIS), rule, fix))


def _style(word: str, stays_split: bool) -> ParallelStyle:
    if word == "colwise":
        return ColwiseParallel()
    if word == "rowwise":
        return RowwiseParallel()
    if word in HEADS:
        return ColwiseParallel(output_layouts=Shard(-1) if stays_split else Replicate())
    if word == "embedding_rowwise":
        return RowwiseParallel(input_layouts=Replicate())
    return ReplicatedWeights(Partial() if word == "replicated_with_grad_allreduce" else Replicate())
