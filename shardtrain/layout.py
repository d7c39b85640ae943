"""Layout of a model: which module is sharded how, as data next to the model. Does not import torch.

Each model file defines one ``LAYOUT``, which maps module paths to the names of styles. ``distributed/`` turns the names
into PyTorch's parallel styles, and the planner divides bytes by the same names. A function ``initial`` in the model
file returns a ``Draw`` for each parameter. ``check`` verifies that a layout covers its model.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

TENSOR_STYLES = {
    "embed": "embedding: vocabulary rows split over tp, output split along the sequence",
    "sequence": "norm: input and output split along the sequence, weights replicated over tp",
    "gather": "module without weights: its first input is gathered along the sequence",
    "colwise": "linear: output features split over tp, an input split along the sequence is gathered",
    "rowwise": "linear: input features split over tp, output split along the sequence",
    "head": "linear to the vocabulary: output features split over tp",
    "local": "module without weights: works on this rank's part of the sequence",
    "router": "linear: input split along the sequence, weights replicated over tp",
    "expert": "expert weights: not split over tp; split on dim 0 over ep and over the ranks with other tokens",
    "heads": "norm of each head: works on the heads of this tp rank, weights replicated over tp",
    "per_head": "one number per query head: split over tp like the heads",
    "features": "norm over all features: the features of all tp ranks are gathered, weights replicated over tp",
    "replicate": "computed identically on every tp rank from unsplit inputs, weights replicated over tp",
    "copy": "identity: input replicated over tp, each rank uses the output for its own heads",
}

SPLIT_ON_DIM_0 = ("embed", "colwise", "head", "per_head")
"""Styles whose weights tensor parallelism splits in their first dimension: output features, heads or vocabulary."""

SPLIT_STYLES = (*SPLIT_ON_DIM_0, "rowwise")
"""Styles whose weights tensor parallelism splits in any dimension."""


@dataclass(frozen=True)
class Layout:
    """Sharding of a model over pipeline stages and ranks. Paths are globs in which ``*`` stops at a dot.

    Attributes:
        first: Modules of the first pipeline stage only, in the order of the forward chain.
        layers: The ModuleDict of repeated layers: unit of sharding, recompute, compile and pipeline cuts.
        last: Modules of the last pipeline stage only, in the order of the forward chain.
        tensor: Module path -> name of its style, a key of TENSOR_STYLES.
        context: Path of the weightless attention core: softmax(scale q k + bias) v (docs/own_model.md).
        recurrence: Path of the weightless core of a recurrence, or "". It maps a chunk of tokens and an incoming state
            to outputs and an outgoing state (docs/own_model.md).
        expert: Path of the mixture-of-experts module, or "". It has ``.router``, ``.balance``, ``.dispatch`` and
            ``.experts`` (models/moe.py).
        buffers: Buffers that start at zero and are saved in checkpoints. A model may not have others.
        optional: Modules that some sizes of the model lack, such as shared experts. Rules of ``tensor``, ``context``,
            ``recurrence`` and ``expert`` for them and their submodules may match nothing.
        mtp_layers: The ModuleDict of multi-token prediction layers, or "". They are on the last pipeline stage, and
            are sharded, recomputed and compiled like ``layers`` (models/multi_token.py).
        mtp_embed: The embedding of these layers, which is tied to the model's embedding, or "".
    """

    first: tuple[str, ...]
    layers: str
    last: tuple[str, ...]
    tensor: Mapping[str, str] = field(default_factory=dict)
    context: str = ""
    recurrence: str = ""
    expert: str = ""
    buffers: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    mtp_layers: str = ""
    mtp_embed: str = ""


RECURRENCE_METHODS = ("look_back", "chunk")
"""Methods of a core that ``Layout.recurrence`` names, with which other code runs a part of the tokens."""

Depth = Literal["none", "layer", "total"]
"""How the standard deviation of a parameter depends on the depth of the model; see ``Draw``."""


@dataclass(frozen=True)
class Draw:
    """Initial distribution of a parameter.

    Attributes:
        std: Standard deviation. ``ones`` and ``zeros`` ignore it.
        cutoff: Bound of a truncated normal, in units of ``std``.
        depth: Divide std by sqrt(2 (i + 1)) for layer i ("layer") or by sqrt(2 L) for all L layers ("total"). The
            residual stream then keeps its variance (GPT-2, section 2.3).
        low, high: Bounds of ``log_uniform``, the logarithm of a uniform variable. It ignores ``std``.
        compute: For "computed", return the full parameter as a CPU tensor, for a seed that differs between
            parameters. It is for small parameters with a special formula.
    """

    distribution: Literal[
        "normal", "truncated_normal", "uniform", "log_uniform", "ones", "zeros", "computed"
    ]
    std: float = 1.0
    cutoff: float = 2.0
    depth: Depth = "none"
    low: float = 0.0
    high: float = 1.0
    compute: Callable[[int], Any] | None = field(default=None, repr=False, compare=False)


@lru_cache(maxsize=4096)
def _globs(pattern: str) -> tuple[re.Pattern[str], ...]:
    # fnmatch's "*" crosses dots. A layout's must not, or "layers.*.ffn" would also match its children.
    return tuple(re.compile(fnmatch.translate(part)) for part in pattern.split("."))


def matches(path: str, pattern: str) -> bool:
    """True if a dotted path matches a glob. ``fnmatch`` matches each part between dots: *, ?, [ab], [!ab].

    >>> matches("layers.3.attn.wq", "layers.*.attn.w[!o]"), matches("layers.3.ffn.w1", "layers.*")
    (True, False)
    """
    names = path.split(".")
    globs = _globs(pattern)
    return len(names) == len(globs) and all(
        glob.match(name) for name, glob in zip(names, globs, strict=True)
    )


def style_of(layout: Layout, module_path: str) -> str | None:
    """Return the style of a module path from ``layout.tensor``, or None if no rule matches it."""
    for pattern, style in layout.tensor.items():
        if matches(module_path, pattern):
            return style
    return None


def all_layers(model: Any, layout: Layout) -> dict[str, Any]:
    """Return the layers of a model or a pipeline stage by path, followed by its multi-token prediction layers."""
    layers = {}
    for container in (layout.layers, layout.mtp_layers):
        for name, layer in getattr(model, container, {}).items():
            layers[f"{container}.{name}"] = layer
    return layers


def mtp_modules(model: Any, layout: Layout) -> list[str]:
    """Return the modules for multi-token prediction that a model or a pipeline stage has, by path."""
    if not getattr(model, layout.mtp_layers, None):
        return []
    return [layout.mtp_embed, layout.mtp_layers]


def _may_be_absent(pattern: str, optional: tuple[str, ...]) -> bool:
    return any(pattern == path or pattern.startswith(f"{path}.") for path in optional)


def check(layout: Layout, module_paths: Iterable[str], parameter_names: Iterable[str]) -> list[str]:
    """Return the problems of a layout, one sentence each. The list is empty if the layout fits the model.

    Each rule must match a module and have a known style. The modules of ``first``, ``layers`` and ``last`` must exist.
    Exactly one rule must match the module of each parameter.
    """
    modules = set(module_paths)
    problems = []

    # Each rule has a known style and matches a module.
    for pattern, style in layout.tensor.items():
        if style not in TENSOR_STYLES:
            problems.append(
                f"LAYOUT.tensor[{pattern!r}]={style!r} is not a known style; use one of {sorted(TENSOR_STYLES)}"
            )
        if not any(matches(module, pattern) for module in modules) and not _may_be_absent(
            pattern, layout.optional
        ):
            problems.append(
                f"LAYOUT.tensor[{pattern!r}] names no module; remove the rule or correct the path"
            )

    # The modules of the other roles exist.
    for role, names in (
        ("first", layout.first),
        ("layers", (layout.layers,)),
        ("last", layout.last),
    ):
        problems += [
            f"LAYOUT.{role} names {name!r}, which is not a module"
            for name in names
            if name not in modules
        ]
    cores = (
        ("context", layout.context),
        ("recurrence", layout.recurrence),
        ("expert", layout.expert),
    )
    for role, pattern in cores:
        absent = pattern and not any(matches(module, pattern) for module in modules)
        if absent and not _may_be_absent(pattern, layout.optional):
            problems.append(
                f"LAYOUT.{role}={pattern!r} names no module; remove it or correct the path"
            )

    # Each parameter has one rule: without one it would be replicated silently. Modules with the styles "gather",
    # "local" and "copy" have no weights.
    for name in parameter_names:
        owner = name.rpartition(".")[0]
        rules = [pattern for pattern in layout.tensor if matches(owner, pattern)]
        if len(rules) != 1:
            if rules:
                fix = f"leave one of {rules}"
            elif not owner:
                fix = "move it into a module of LAYOUT.first, layers or last"
            elif any(module.startswith(f"{owner}.") for module in modules):
                # A style for the container would also apply to its other modules.
                style = "sequence" if matches(owner, f"{layout.layers}.*") else "replicate"
                fix = f'move it into a child module, and add the rule "{owner}.CHILD": "{style}"'
            else:
                fix = (
                    f'add a rule for "{owner}" with a style of docs/own_model.md: "colwise" or "rowwise" for a linear, '
                    '"sequence" for a norm or a scale on the residual stream, "replicate" for one in a gathered module'
                )
            problems.append(f"parameter {name} matches {len(rules)} rules of LAYOUT.tensor; {fix}")
            continue
        style = layout.tensor[rules[0]]
        if style in ("gather", "local", "copy"):
            problems.append(
                f"parameter {name} belongs to a {style!r} module, which must not have parameters; move it into a child"
            )
    return problems
