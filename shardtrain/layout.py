"""How a model is sharded, as data beside it: one word for each module. No torch is imported here.

``distributed/`` turns the words into PyTorch's parallel styles; the planner divides bytes by the same words. A model
file has one ``LAYOUT``, and a function ``initial`` that gives each parameter a ``Draw``; ``check`` proves that a layout
covers its model.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

TENSOR_WORDS = {
    "embed": "embedding, vocabulary rows split over tp, output split along the sequence",
    "sequence": "norm on activations split along the sequence, as its output is; weights whole on every tp rank",
    "gather": "the module's first input is gathered along the sequence; holds no weights of its own",
    "colwise": "linear, output features split over tp; an input split along the sequence is gathered",
    "rowwise": "linear, input features split over tp (of whole ones its own), output split along the sequence",
    "head": "linear to the vocabulary, output features split over tp",
    "local": "the module works on this rank's part of the sequence; holds no weights of its own",
    "router": "linear on activations that are split along the sequence; weights whole on every tp rank",
    "expert": "weights never split over tp; split on dim 0 over ep, and over all other ranks that hold other tokens",
    "heads": "norm of each head by itself, on the heads that this tp rank has; weights whole on every tp rank",
    "per_head": "one number per query head, split over tp as the heads are",
    "features": "norm over all features, of which a tp rank has some: these are gathered; weights whole on each",
    "replicate": "computed alike on every tp rank from whole inputs; weights whole on every tp rank",
    "copy": "identity whose input is whole on every tp rank and whose output each rank uses for its own heads",
}


@dataclass(frozen=True)
class Layout:
    """Where a model may be cut into stages and split over ranks. Paths are globs in which ``*`` stops at a dot.

    first:   modules of the first pipeline stage only, in the order of the forward chain.
    layers:  the ModuleDict of repeated layers: unit of sharding, recompute, compile and pipeline cuts.
    last:    modules of the last pipeline stage only, in the order of the forward chain.
    tensor:  module path -> one of TENSOR_WORDS.
    context: path of the weightless attention core: softmax(scale q k + bias) v, as docs/models.md says.
    expert:  path of the mixture-of-experts module, or empty: it has ``.router``, ``.balance``, ``.dispatch`` and
             ``.experts`` (see models/moe.py).
    buffers: buffers that start at zero and are saved in checkpoints; a model may have no others.
    optional: modules that some sizes of the model lack, such as shared experts: rules of ``tensor``, ``context`` and
             ``expert`` for them and their submodules may match nothing.
    """

    first: tuple[str, ...]
    layers: str
    last: tuple[str, ...]
    tensor: Mapping[str, str] = field(default_factory=dict)
    context: str = ""
    expert: str = ""
    buffers: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


Depth = Literal["none", "layer", "total"]
"""How the standard deviation of a parameter depends on the depth of the model; see ``Draw``."""


@dataclass(frozen=True)
class Draw:
    """How a parameter is initialized.

    ``std`` is the standard deviation (ignored by ``ones`` and ``zeros``); ``cutoff`` bounds a truncated normal, in
    units of ``std``. ``depth`` divides std by sqrt(2 (i + 1)) for layer i ("layer") or by
    sqrt(2 L) for all L layers ("total"), so that the residual stream keeps its variance (GPT-2, section 2.3).
    """

    distribution: Literal["normal", "truncated_normal", "uniform", "ones", "zeros"]
    std: float = 1.0
    cutoff: float = 2.0
    depth: Depth = "none"


@lru_cache(maxsize=4096)
def _globs(pattern: str) -> tuple[re.Pattern[str], ...]:
    # fnmatch's "*" crosses dots; a layout's must not, or "layers.*.ffn" would also name its children
    return tuple(re.compile(fnmatch.translate(part)) for part in pattern.split("."))


def matches(path: str, pattern: str) -> bool:
    """Whether a dotted path matches a glob; each part between dots is matched by ``fnmatch``: *, ?, [ab], [!ab].

    >>> matches("layers.3.attn.wq", "layers.*.attn.w[!o]"), matches("layers.3.ffn.w1", "layers.*")
    (True, False)
    """
    names = path.split(".")
    globs = _globs(pattern)
    return len(names) == len(globs) and all(glob.match(name) for name, glob in zip(names, globs, strict=True))


def word_of(layout: Layout, module_path: str) -> str | None:
    """The word that ``layout.tensor`` gives a module path, or None when no rule matches it."""
    return next((word for pattern, word in layout.tensor.items() if matches(module_path, pattern)), None)


def _may_be_absent(pattern: str, optional: tuple[str, ...]) -> bool:
    return any(pattern == path or pattern.startswith(f"{path}.") for path in optional)


def check(layout: Layout, module_paths: Iterable[str], parameter_names: Iterable[str]) -> list[str]:
    """Return the problems of a layout, one sentence each; an empty list means that the layout fits the model.

    Each rule must match a module, each word be known, the ends and layers exist, and exactly one rule match the module
    of each parameter.
    """
    modules = set(module_paths)
    problems = []

    # each rule has a known word and matches a module
    for pattern, word in layout.tensor.items():
        if word not in TENSOR_WORDS:
            problems.append(
                f"LAYOUT.tensor[{pattern!r}]={word!r} is not a known word; use one of {sorted(TENSOR_WORDS)}"
            )
        if not any(matches(module, pattern) for module in modules) and not _may_be_absent(pattern, layout.optional):
            problems.append(f"LAYOUT.tensor[{pattern!r}] names no module; remove the rule or correct the path")

    # the paths of the other roles
    for role, names in (("first", layout.first), ("layers", (layout.layers,)), ("last", layout.last)):
        problems += [f"LAYOUT.{role} names {name!r}, which is not a module" for name in names if name not in modules]
    for role, pattern in (("context", layout.context), ("expert", layout.expert)):
        absent = pattern and not any(matches(module, pattern) for module in modules)
        if absent and not _may_be_absent(pattern, layout.optional):
            problems.append(f"LAYOUT.{role}={pattern!r} names no module; remove it or correct the path")

    # without a rule a parameter would be replicated silently; "gather", "local" and "copy" say nothing about weights
    for name in parameter_names:
        owner = name.rpartition(".")[0]
        rules = [pattern for pattern in layout.tensor if matches(owner, pattern)]
        if len(rules) != 1:
            if rules:
                fix = f"leave one of {rules}"
            elif not owner:
                fix = "move it into a module of LAYOUT.first, layers or last"
            elif any(module.startswith(f"{owner}.") for module in modules):
                # a word for the container would also apply to its other modules
                word = "sequence" if matches(owner, f"{layout.layers}.*") else "replicate"
                fix = f'move it into a child module, and add the rule "{owner}.CHILD": "{word}"'
            else:
                fix = (
                    f'add a rule for "{owner}" with a word of docs/models.md: "colwise" or "rowwise" for a linear, '
                    '"sequence" for a norm or a scale on the residual stream, "replicate" for one in a gathered module'
                )
            problems.append(f"parameter {name} is named by {len(rules)} rules of LAYOUT.tensor; {fix}")
        elif (word := layout.tensor[rules[0]]) in ("gather", "local", "copy"):
            problems.append(f"parameter {name} belongs to a {word!r} module, which may hold none; move it into a child")
    return problems
