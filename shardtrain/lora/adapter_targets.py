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
_STYLES = ("colwise", "rowwise", "head", "replicate")


def find(
    model: nn.Module,
    module: ModuleType,
    shape: Any,
    wanted: Sequence[str],
    saved: Sequence[str] = (),
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
    transformers_model = getattr(model, "hf", None)
    style_by_path = {}
    for path in linears_of(model):
        style_by_path[path] = style_of(layout, path)
    if transformers_model is not None:
        head = transformers_model.get_output_embeddings()
        for path in style_by_path:
            style_by_path[path] = "replicate"
            if model.get_submodule(path) is head:
                style_by_path[path] = "head"
    linears = [path for path, style in style_by_path.items() if style in _STYLES]
    embeddings = [
        path for path, submodule in model.named_modules() if isinstance(submodule, nn.Embedding)
    ]
    theirs = their_names([*linears, *embeddings], module, shape)
    if not wanted and transformers_model is not None:
        wanted = [ALL]

    # By default, adapt the linear modules of attention. A name may be ours
    # or that of the Hugging Face format.
    selected: set[str] = set()
    if not wanted:
        attention = _attention_linears(linears, layout)
        selected = {path for path in attention if not _within(path, saved)}
    problems = []
    for name in wanted:
        # "all-linear" means all linear modules except the head and the fully trained modules.
        if name == ALL:
            without_head = [path for path in linears if style_by_path[path] != "head"]
            matching = [path for path in without_head if not _within(path, saved)]
        else:
            matching = [path for path in linears if _fits_any(name, path, theirs.get(path))]
            if not matching:
                problems.append(_unknown(name, model, layout, linears, theirs))
        saved_too = [path for path in matching if _within(path, saved)]
        if saved_too:
            problems.append(
                Problem(
                    OPTION,
                    name,
                    rule=f"names {min(saved_too)}, which lora.modules_to_save trains fully",
                    fix="remove it from one of the two options",
                )
            )
        selected.update(matching)
    if problems:
        raise ConfigError(problems)

    # Reject a head that shares its weight with the embedding, because a merge would change both.
    embedding_ids = set()
    for path in embeddings:
        embedding_ids |= {id(parameter) for parameter in model.get_submodule(path).parameters()}
    for path in selected:
        if id(model.get_submodule(path).weight) in embedding_ids:
            raise ConfigError(
                Problem(
                    OPTION,
                    list(wanted),
                    rule=f"names {path}, which shares its weight with the embedding, so a merge would change both",
                    fix=f"remove {path}",
                )
            )
    return [path for path in linears if path in selected]


def _attention_linears(linears: Sequence[str], layout: Layout) -> list[str]:
    """Return the linear modules of attention and recurrent layers: the siblings of the cores in the layout.

    Raises:
        ConfigError: there are none.
    """
    owners = [
        core.rpartition(".")[0] for core in (layout.context, layout.recurrence) if "." in core
    ]
    paths = []
    for path in linears:
        if any(matches(path.rpartition(".")[0], owner) for owner in owners):
            paths.append(path)
    if not paths:
        raise ConfigError(
            Problem(
                OPTION,
                None,
                rule="is empty, and the model has no attention with linear modules to adapt by default",
                fix=f"name modules, such as {', '.join(linears[:3])}",
            )
        )
    return paths


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
    selected: set[str] = set()
    problems = []
    for name in wanted:
        matching = [path for path in known if _fits_any(name, path, stack_name(path))]
        if not matching:
            fix = "remove it: this model has no experts"
            if known:
                examples = dict.fromkeys(".".join(path.split(".")[-2:]) for path in known)
                fix = f"use names like {', '.join(examples)}"
            problems.append(
                Problem(
                    PARAMETERS,
                    name,
                    rule="matches no stack of expert weights in the model",
                    fix=fix,
                )
            )
        selected.update(matching)
    if problems:
        raise ConfigError(problems)
    return [stack for path, stack in known.items() if path in selected]


def find_saved(
    model: nn.Module,
    module: ModuleType,
    shape: Any,
    wanted: Sequence[str],
    head: str = "",
) -> list[str]:
    """Return the paths of the modules that ``lora.modules_to_save`` names, in model order.

    A module that shares a tied weight with a selected module is selected too.

    Args:
        head: Path of a new head, which is always selected. Empty if there is no new head.

    Raises:
        ConfigError: a name matches no module with weights.
    """
    paths = []
    for path, submodule in model.named_modules():
        if path and next(submodule.parameters(), None) is not None:
            paths.append(path)
    theirs = dict.fromkeys(paths, "")
    theirs.update(their_names(paths, module, shape))
    if head and not hasattr(model, "hf"):
        theirs[head] = SCORE
    selected = {head} if head else set()
    problems = []
    for name in wanted:
        matching = [path for path in paths if _fits_any(name, path, theirs[path])]
        if not matching:
            their_ends = _ends(theirs.values())
            near = nearest(name, [*_ends(paths), *their_ends, *paths])
            fix = f"use names like {', '.join(their_ends[:8])}"
            if near:
                fix = f"did you mean {near}?"
            problems.append(
                Problem(
                    SAVED,
                    name,
                    rule="matches no module with weights in the model",
                    fix=fix,
                )
            )
        selected.update(matching)
    if problems:
        raise ConfigError(problems)
    # Add the modules that share a tied weight with a selected module.
    for names in tied_names(model):
        owners = {name.rpartition(".")[0] for name in names}
        if any(_within(owner, list(selected)) for owner in owners):
            selected |= owners
    return [path for path in paths if path in selected]


def their_names(paths: Iterable[str], module: ModuleType, shape: Any) -> dict[str, str]:
    """Map each of our modules to the module of the Hugging Face format that contains its weight,
    if one exists.

    That module may contain several of our modules, such as q, k and v (``Heads``).
    """
    # Names in a transformers class are ours without the attribute that holds the network.
    if getattr(module, "AS_IS", False):
        return {path: path.partition(".")[2] for path in paths}
    hub = getattr(module, "HUB", None)
    theirs: dict[str, str] = {}
    if hub is None:
        return theirs
    for path in paths:
        source = hub.source(f"{path}.weight", shape)
        if isinstance(source, Heads):
            source = source.name
        if isinstance(source, str):
            theirs[path] = source.removesuffix(".weight")
    return theirs


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
    num_components = name.count(".") + 1
    last_components = path.split(".")[-num_components:]
    return matches(path, name) or matches(".".join(last_components), name)


def _fits_any(name: str, *paths: str | None) -> bool:
    return any(path is not None and _fits(path, name) for path in paths)


def _unknown(
    name: str,
    model: nn.Module,
    layout: Layout,
    linears: Sequence[str],
    theirs: Mapping[str, str],
) -> Problem:
    """Return the problem of a name that matches no adaptable module, depending on what it matches instead."""
    examples = ", ".join(_ends(linears))
    owners = []
    for path, _ in model.named_modules():
        if path and _fits(path, name):
            owners.append(path)
    # The name may also be a name in the published model.
    if not owners:
        owners = [path for path, their_path in theirs.items() if _fits(their_path, name)]
    if not owners:
        their_linears = [theirs[path] for path in linears if path in theirs]
        near = nearest(name, [*_ends(linears), *_ends(their_linears), ALL, *linears])
        hint = f"did you mean {near}? " if near else ""
        return Problem(
            OPTION,
            name,
            rule="matches no module of the model",
            fix=f"{hint}use names like {examples}",
        )

    # The name matches a module that is not linear. Name its class.
    owner = owners[0]
    style = style_of(layout, owner)
    if isinstance(model.get_submodule(owner), nn.Embedding):
        return Problem(
            OPTION,
            name,
            rule=f"names {owner}, an embedding, but only linear modules and experts can have adapters",
            fix=f'train it fully with lora.modules_to_save = ["{name}"]',
        )
    if style == "expert":
        return Problem(
            OPTION,
            name,
            rule=f"names {owner}, whose weights are a stack of all experts instead of linear modules",
            fix='set lora.target_parameters = ["experts.gate_up_proj", "experts.down_proj"]',
        )
    rule = f"names {owner}, which is not a linear module that can have an adapter"
    if style == "router":
        rule = f"names {owner}, a router, and routers cannot have adapters"
    return Problem(OPTION, name, rule, f"name linear modules, such as {examples}")


def _ends(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
