"""A small copy of a model file whose author's names of sizes nobody knows: which fields are smaller, and does it run.

Widths are divided by one power of two, so that what they promise each other holds (heads times the width of a head are
the model's width). Each candidate is built and run; the smallest that runs is taken.
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardtrain import models
from shardtrain.config import Config
from shardtrain.tools.verify import dropout
from shardtrain.tools.verify.probes import fill

SMALL = 2_000_000
"""Parameters of a model that is tried as it is."""
LARGEST = 50_000_000
"""Parameters of a copy that is still tried: some seconds and 200 MB on each rank."""
MOST_LAYERS = 8
TOKENS = 32

_COUNT = re.compile(r"(^|_)(n|num|number)_|(heads|layers|groups|experts|top_k|topk)$")
_LENGTH = re.compile(r"seq|ctx|context|block_size|position|max_tokens|max_len")
_NOT_A_SIZE = re.compile(r"theta|base|window|_id$|rope|orig|seed|period|interval|every|stride|kernel")
_MOST_POSITIONS = 256
_EXPERTS = 16


def smaller(_rank: int, _num: int, config: Config, layers: int, tp: int) -> dict[str, Any]:
    """Fields to override, what they were, and the flavor to take them from; ``why`` says why there is no copy.

    ``layers`` is the least number of layers that the meshes need; ``tp`` divides the widths that it divides now.

    Raises:
        ConfigError: the model cannot be built, or its layout does not cover it.
    """
    dropout.switch_off()
    module = models.find(config.model.name)
    overrides = dict(config.model.overrides)
    shape = _shape(module, config, overrides)
    whole = models.build(module, shape)
    sizes = {name: value for name, value in vars(shape).items() if type(value) is int and value > 0}
    notes: list[str] = []

    def answer(given: Mapping[str, int], why: str = "") -> dict[str, Any]:
        return {"given": given, "sizes": {name: sizes[name] for name in given}, "notes": notes, "why": why}

    def failure(model: nn.Module, given: Mapping[str, int]) -> str:
        return _failure(model, _shape(module, config, {**overrides, **given}))

    # First fewer layers. That is all there is to do for a model that is small then.
    depth, missing = _depth(module, config, overrides, whole, sizes, layers)
    if missing:
        notes.append(f"layers of the kinds {', '.join(missing)} are not in the small copy")
    cut = _build(module, config, overrides | depth)
    if cut is None:
        depth = {}
        cut = whole
    if _count(cut) <= SMALL:
        error = failure(cut, depth)
        return answer(depth, f"it does not run on {TOKENS} tokens on one process: {error}" if error else "")

    # Then smaller widths, the smallest first, until a copy is built and runs; else the model as wide as it is.
    for change in _candidates({name: value for name, value in sizes.items() if name not in depth}, tp):
        given = depth | change
        small = _build(module, config, overrides | given)
        if small is not None and _count(small) <= LARGEST and not failure(small, given):
            return answer(given)
    if _count(cut) <= LARGEST and not failure(cut, depth):
        return answer(depth)
    num_layers = len(_layers(module, cut))
    return answer(depth, f"its sizes cannot be made smaller: {_count(cut):,} parameters in {num_layers} layers")


def _shape(module: Any, config: Config, overrides: Mapping[str, Any]) -> Any:
    return models.shape_of(module, config.model.flavor, overrides, config.model.norm_type)


def _build(module: Any, config: Config, overrides: Mapping[str, Any]) -> nn.Module | None:
    """The model with other sizes, on the meta device; None where its author's own checks refuse them."""
    try:
        return models.build(module, _shape(module, config, overrides))
    except Exception:  # whatever it is: other sizes are tried
        return None


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _layers(module: Any, model: nn.Module) -> list[nn.Module]:
    return list(getattr(model, module.LAYOUT.layers).values())


def _kinds(module: Any, model: nn.Module) -> set[str]:
    """What distinguishes layers beside numbers: their modules, and what is on or off in them."""
    found = set()
    for layer in _layers(module, model):
        parts = []
        for path, part in layer.named_modules():
            flags = [
                f"{name}={bool(value)}"
                for name, value in sorted(vars(part).items())
                if type(value) in (bool, int, float, type(None)) and name != "training"
            ]
            parts.append(f"{path}:{type(part).__name__}({','.join(flags)})")
        found.add(";".join(parts))
    return found


def _depth(
    module: Any, config: Config, overrides: Mapping[str, Any], whole: nn.Module, sizes: Mapping[str, int], least: int
) -> tuple[dict[str, int], list[str]]:
    """The field that counts layers with a smaller number, in which each kind of layer occurs, and kinds that do not."""
    depth = len(_layers(module, whole))
    kinds = _kinds(module, whole)
    # Any field with this value may count the layers; those called a layer are tried first.
    fields = [name for name, value in sizes.items() if value == depth]
    for name in sorted(fields, key=lambda name: "layer" not in name):
        fewest: dict[str, int] = {}
        left = len(kinds)
        for number in range(max(1, least), min(depth, max(least, MOST_LAYERS) + 1)):
            cut = _build(module, config, {**overrides, name: number})
            if cut is None:
                continue
            if len(_layers(module, cut)) != number:
                break  # this field counts something else
            missing = len(kinds - _kinds(module, cut))
            if not fewest or missing < left:
                fewest = {name: number}
                left = missing
            if not left:
                return fewest, []
        if fewest:
            return fewest, [f"{left} of {len(kinds)}"]
    return {}, []


def _candidates(sizes: Mapping[str, int], tp: int) -> Iterator[dict[str, int]]:
    """Smaller sizes, the smallest first: widths divided by one number, which heads and their width share."""
    # Heads are dealt to the ranks of tp: a divisor must leave a number of them that tp divides.
    seen: list[dict[str, int]] = []
    heads = {
        name: value
        for name, value in sizes.items()
        if _COUNT.search(name) and "head" in name and "dim" not in name and value > 1
    }
    divisors = [
        number
        for number in (1, 2, 4, 8, 16)
        if all(value % number == 0 and value // number % min(tp, value) == 0 for value in heads.values())
    ]
    for clamp, factor, fewer in itertools.product((True, False), (64, 32, 16, 8, 4, 2), divisors):
        if fewer > factor:
            continue
        change = {name: value // fewer for name, value in heads.items() if fewer > 1}
        for name, value in sizes.items():
            if name not in heads:
                change |= _smaller_size(name, value, factor, fewer, tp, heads, clamp)
        narrow = any("head" in name and name not in heads and width < 4 for name, width in change.items())
        if change and change not in seen and not narrow:
            seen.append(change)
            yield change


def _smaller_size(
    name: str, value: int, factor: int, fewer: int, tp: int, heads: Mapping[str, int], clamp: bool
) -> dict[str, int]:
    """One field with its smaller value; nothing where it stays."""
    # Names that say what is not to be divided come first: a base of rotary angles, a length, a vocabulary, a count.
    if _NOT_A_SIZE.search(name) or value < 16:
        return {}
    if _LENGTH.search(name):
        return {name: _MOST_POSITIONS} if clamp and value > _MOST_POSITIONS else {}
    if "vocab" in name:
        return {name: min(value, 64 * tp)}  # rows of a table, of which nothing else is a multiple
    if "expert" in name and _COUNT.search(name) and "dim" not in name:
        return {name: _EXPERTS} if clamp and value > _EXPERTS and value % _EXPERTS == 0 else {}
    if _COUNT.search(name) and not name.endswith(("dim", "size", "embd", "inner")):
        return {}

    # A width. With fewer heads each keeps more of it; what heads divide, and what tp divides, they still divide.
    if "head" in name:
        return {name: value * fewer // factor}
    dealt = [4 * count // fewer for count in heads.values() if value % count == 0]  # a head keeps 4 features or more
    step = math.lcm(8, *dealt, *([tp] if value % tp == 0 else []))
    return {name: -(-value // (factor * step)) * step}


def _failure(model: nn.Module, shape: Any) -> str:
    """Why a copy does not compute logits; empty where it does."""
    vocabulary = shape.vocab_size
    fill(model)
    tokens_BT = torch.randint(0, vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(0))
    positions_BT = torch.arange(TOKENS).expand(2, TOKENS).contiguous()
    if len(inspect.signature(model.forward).parameters) < 2:
        return ""  # said as a broken promise
    try:
        with torch.no_grad():
            out = model(tokens_BT, positions_BT)
    except Exception as error:  # whatever it is: other sizes are tried
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return "" if isinstance(out, torch.Tensor) else f"it gives {type(out).__name__}"
