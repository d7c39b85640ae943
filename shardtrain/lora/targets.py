"""Which modules of a model get an adapter: ``lora.target_modules`` against the model, its layout and its HUB."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

from torch import nn

from shardtrain.config.options import nearest
from shardtrain.errors import ConfigError, Problem
from shardtrain.layout import Layout, matches, word_of

OPTION = "lora.target_modules"
ALL = "all-linear"
"""Every linear module but the head and routers: PEFT's word."""
_WORDS = ("colwise", "rowwise", "head", "replicate")


def find(model: nn.Module, module: ModuleType, shape: Any, wanted: Sequence[str]) -> list[str]:
    """Paths of the modules that get an adapter, in the order of the model.

    Raises:
        ConfigError: for a name that fits no module or one that cannot be adapted; names the nearest.
    """
    layout: Layout = module.LAYOUT
    words = {path: word_of(layout, path) for path, m in model.named_modules() if type(m) is nn.Linear}
    linears = [path for path, word in words.items() if word in _WORDS]
    theirs = their_names(linears, module, shape)
    if not wanted:
        parent = layout.context.rpartition(".")[0]
        found = {path for path in linears if parent and matches(path.rpartition(".")[0], parent)}
        if not found:
            rule = "is empty, and the model's layout names no attention with linear modules"
            raise ConfigError(Problem(OPTION, None, rule, f"name some, such as {', '.join(linears[:3])}"))
    else:
        found = set()
        problems = []
        for name in wanted:
            fitting = _fitting(name, linears, theirs, words)
            if not fitting:
                problems.append(_unknown(name, model, layout, linears, theirs))
            found |= fitting
        if problems:
            raise ConfigError(problems)
    tied = {id(p) for _, m in model.named_modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    for path in found:
        if id(model.get_submodule(path).weight) in tied:
            rule = f"names {path}, whose weight is the embedding's: merging would change both"
            raise ConfigError(Problem(OPTION, list(wanted), rule, "leave it out"))
    return [path for path in linears if path in found]


def their_names(paths: Iterable[str], module: ModuleType, shape: Any) -> dict[str, str]:
    """Our module path -> the path of the one module of the Hugging Face format that it is, where there is one."""
    hub = getattr(module, "HUB", None)
    sources = {path: hub.source(f"{path}.weight", shape) for path in paths} if hub is not None else {}
    return {path: source.removesuffix(".weight") for path, source in sources.items() if isinstance(source, str)}


def _fits(path: str, name: str) -> bool:
    """Whether a name is a path, or the end of one, with globs.

    >>> _fits("layers.0.attn.wq", "layers.*.attn.w[qv]"), _fits("layers.0.attn.wq", "wq"), _fits("layers.0.wq", "q")
    (True, True, False)
    """
    return matches(path, name) or matches(".".join(path.split(".")[-name.count(".") - 1 :]), name)


def _fitting(name: str, linears: Sequence[str], theirs: Mapping[str, str], words: Mapping[str, str | None]) -> set[str]:
    if name == ALL:
        return {path for path in linears if words[path] != "head"}
    return {path for path in linears if _fits(path, name) or (path in theirs and _fits(theirs[path], name))}


def _unknown(name: str, model: nn.Module, layout: Layout, linears: Sequence[str], theirs: Mapping[str, str]) -> Problem:
    owners = [path for path, _ in model.named_modules() if path and _fits(path, name)]
    if owners:
        rule = f"names {owners[0]}, which is no linear module that can have an adapter"
        if word_of(layout, owners[0]) == "router":
            rule = f"names {owners[0]}, a router: which experts a token sees is not trained by adapters here"
        elif word_of(layout, owners[0]) == "expert":
            rule = f"names {owners[0]}, whose weights are one stack for all experts and no linear module"
        return Problem(OPTION, name, rule, f"name linear modules, such as {', '.join(_ends(linears))}")
    known = [*_ends(linears), *_ends(theirs.values()), ALL, *linears]
    near = nearest(name, known)
    fix = f"did you mean {near}? " if near else ""
    return Problem(OPTION, name, "names no module of the model", f"{fix}use names like {', '.join(_ends(linears))}")


def _ends(paths: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(path.rpartition(".")[2] for path in paths))
