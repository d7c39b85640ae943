"""Selection of the modules to adapt, by names in our model, in the Hugging Face format, or by globs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from shardtrain.config.options import nearest
from shardtrain.hub_formats.format import Heads
from shardtrain.layout import Layout, matches, style_of
from shardtrain.lora import stacks
from shardtrain.lora.linear import is_linear
from shardtrain.lora.stacks import Stack
from shardtrain.ops.tied import tied_names
from shardtrain.utils.errors import ConfigError, Problem

OPTION = "lora.target_modules"
PARAMETERS = "lora.target_parameters"
SAVED = "lora.modules_to_save"
SCORE = "score"
"""Name of the classification head of a decoder in transformers."""
ALL = "all-linear"
"""PEFT's name for all linear modules except the head and routers."""
_WORDS = ("colwise", "rowwise", "head", "replicate")


def find(
    model: nn.Module, module: ModuleType, shape: Any, wanted: Sequence[str], saved: Sequence[str] = ()
) -> list[str]:
    """Return the paths of the modules to adapt, in model order.

    Args:
        wanted: Values of ``lora.target_modules``. If empty, the linear modules of attention, or "all-linear"
            for a transformers class.
        saved: Paths of fully trained modules. They get no adapter.

    Raises:
        ConfigError: a name matches no module, or a module that cannot be adapted. The message
            suggests the nearest name.
    """
    # Classify linear modules by their layout style. A transformers class has no layout, only a head.
    layout: Layout = module.LAYOUT
    foreign = getattr(model, "hf", None)
    paths = linears_of(model)
    words = {path: style_of(layout, path) for path in paths}
    if foreign is not None:
        head = foreign.get_output_embeddings()
        words = {path: "head" if model.get_submodule(path) is head else "replicate" for path in paths}
    linears = [path for path in paths if words[path] in _WORDS]
    embeddings = [path for path, m in model.named_modules() if isinstance(m, nn.Embedding)]
    theirs = their_names([*linears, *embeddings], module, shape)
    if not wanted and foreign is not None:
        wanted = [ALL]

    # By default, adapt the linear modules of attention. A name may be ours or that of the Hugging Face format.
    if not wanted:
        parent = layout.context.rpartition(".")[0]
        found = {path for path in linears if parent and matches(path.rpartition(".")[0], parent)}
        if not found:
            rule = "is empty, and the model's layout names no attention with linear modules"
            raise ConfigError(Problem(OPTION, None, rule, f"name modules, such as {', '.join(linears[:3])}"))
        found = {path for path in found if not _within(path, saved)}
    else:
        found = set()
        problems = []
        for name in wanted:
            if name == ALL:
                fitting = {path for path in linears if words[path] != "head" and not _within(path, saved)}
            else:
                fitting = {
                    path for path in linears if _fits(path, name) or (path in theirs and _fits(theirs[path], name))
                }
                if not fitting:
                    problems.append(_unknown(name, model, layout, linears, theirs))
            both = sorted(path for path in fitting if _within(path, saved))
            if both:
                rule = f"names {both[0]}, which lora.modules_to_save trains fully"
                problems.append(Problem(OPTION, name, rule, "remove it from one of the two options"))
            found |= fitting
        if problems:
            raise ConfigError(problems)

    # Reject a head that shares its weight with the embedding, because a merge would change both.
    tied = {id(parameter) for path in embeddings for parameter in model.get_submodule(path).parameters()}
    for path in found:
        if id(model.get_submodule(path).weight) in tied:
            rule = f"names {path}, which shares its weight with the embedding, so a merge would change both"
            raise ConfigError(Problem(OPTION, list(wanted), rule, f"remove {path}"))
    return [path for path in linears if path in found]


def linears_of(model: nn.Module) -> list[str]:
    """Return the paths of the linear modules, in model order."""
    return [path for path, module in model.named_modules() if is_linear(module)]


def find_stacks(model: nn.Module, wanted: Sequence[str]) -> list[Stack]:
    """Return the stacks of expert weights that ``lora.target_parameters`` names, in model order.

    Raises:
        ConfigError: a name matches no stack.
    """
    if not wanted:
        return []
    known = stacks.find(model)
    found: set[str] = set()
    problems = []
    for name in wanted:
        fitting = {path for path in known if _fits(path, name) or _fits(stack_name(path), name)}
        if not fitting:
            ends = list(dict.fromkeys(".".join(path.split(".")[-2:]) for path in known))
            fix = f"use names like {', '.join(ends)}" if ends else "remove it: this model has no experts"
            problems.append(Problem(PARAMETERS, name, "matches no stack of expert weights in the model", fix))
        found |= fitting
    if problems:
        raise ConfigError(problems)
    return [stack for path, stack in known.items() if path in found]


def find_saved(model: nn.Module, module: ModuleType, shape: Any, wanted: Sequence[str], head: str = "") -> list[str]:
    """Return the paths of the modules that ``lora.modules_to_save`` names, in model order.

    A module that shares a tied weight with a selected module is selected too.

    Args:
        head: Path of a new head, which is always selected. Empty if there is no new head.

    Raises:
        ConfigError: a name matches no module with weights.
    """
    paths = [path for path, m in model.named_modules() if path and any(True for _ in m.parameters())]
    theirs = {path: "" for path in paths} | their_names(paths, module, shape)
    if head and not hasattr(model, "hf"):
        theirs[head] = SCORE
    found = {head} - {""}
    problems = []
    for name in wanted:
        ends = {path for path in paths if _fits(path, name) or _fits(theirs[path], name)}
        if not ends:
            near = nearest(name, [*_ends(paths), *_ends(theirs.values()), *paths])
            fix = f"did you mean {near}?" if near else f"use names like {', '.join(_ends(theirs.values())[:8])}"
            problems.append(Problem(SAVED, name, "matches no module with weights in the model", fix))
        found |= ends
    if problems:
        raise ConfigError(problems)
    # Add the modules that share a tied weight with a selected module.
    for names in tied_names(model):
        owners = {name.rpartition(".")[0] for name in names}
        if any(_within(owner, list(found)) for owner in owners):
            found |= owners
    return [path for path in paths if path in found]


def their_names(paths: Iterable[str], module: ModuleType, shape: Any) -> dict[str, str]:
    """Map each of our modules to the module of the Hugging Face format that contains its weight, if one exists.

    That module may contain several of our modules, such as q, k and v (``Heads``).
    """
    # Transformers classes keep their names, below the attribute that holds the network.
    if getattr(module, "AS_IS", False):
        return {path: path.partition(".")[2] for path in paths}
    hub = getattr(module, "HUB", None)
    sources = {path: hub.source(f"{path}.weight", shape) for path in paths} if hub is not None else {}
    names = {path: source.name if isinstance(source, Heads) else source for path, source in sources.items()}
    return {path: name.removesuffix(".weight") for path, name in names.items() if isinstance(name, str)}


def stack_name(path: str) -> str:
    """Return the path of a stack of expert weights in transformers.

    >>> stack_name("layers.3.moe.experts.down_proj"), stack_name("hf.model.layers.3.mlp.experts.down_proj")
    ('model.layers.3.mlp.experts.down_proj', 'model.layers.3.mlp.experts.down_proj')
    """
    if path.startswith("hf."):
        return path.removeprefix("hf.")
    return f"model.{path}".replace(".moe.experts.", ".mlp.experts.")


def _within(path: str, modules: Sequence[str]) -> bool:
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def _fits(path: str, name: str) -> bool:
    """True if a name, which may contain globs, matches a path or its last components.

    >>> _fits("layers.0.attn.wq", "layers.*.attn.w[qv]"), _fits("layers.0.attn.wq", "wq"), _fits("layers.0.wq", "q")
    (True, True, False)
    """
    return matches(path, name) or matches(".".join(path.split(".")[-name.count(".") - 1 :]), name)


def _unknown(name: str, model: nn.Module, layout: Layout, linears: Sequence[str], theirs: Mapping[str, str]) -> Problem:
    owners = [path for path, _ in model.named_modules() if path and _fits(path, name)]
    owners = owners or [path for path in theirs if _fits(theirs[path], name)]
    if owners:
        if isinstance(model.get_submodule(owners[0]), nn.Embedding):
            rule = f"names {owners[0]}, an embedding, but only linear modules and experts can have adapters"
            return Problem(OPTION, name, rule, f'train it fully with lora.modules_to_save = ["{name}"]')
        rule = f"names {owners[0]}, which is not a linear module that can have an adapter"
        if style_of(layout, owners[0]) == "router":
            rule = f"names {owners[0]}, a router, and routers cannot have adapters"
        elif style_of(layout, owners[0]) == "expert":
            rule = f"names {owners[0]}, whose weights are a stack of all experts instead of linear modules"
            fix = 'set lora.target_parameters = ["experts.gate_up_proj", "experts.down_proj"]'
            return Problem(OPTION, name, rule, fix)
        return Problem(OPTION, name, rule, f"name linear modules, such as {', '.join(_ends(linears))}")
    known = [*_ends(linears), *_ends(theirs[path] for path in linears if path in theirs), ALL, *linears]
    near = nearest(name, known)
    fix = f"did you mean {near}? " if near else ""
    return Problem(OPTION, name, "matches no module of the model", f"{fix}use names like {', '.join(_ends(linears))}")


def _ends(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
