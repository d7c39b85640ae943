"""Shrink a user's model file, whose size fields have unknown names: choose smaller values and check
that it runs.

All widths are divided by one power of two, which preserves relations such as model width = heads x head
width. Candidates are built and run from small to large, and the first candidate that runs is used.
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
from shardtrain.tools.verify.probe_inputs import fill

SMALL = 2_000_000
"""Number of parameters up to which a model keeps its widths."""
LARGEST = 50_000_000
"""Maximum number of parameters of a copy. Such a copy takes some seconds, and 200 MB on each rank."""
MOST_LAYERS = 8
TOKENS = 32

_COUNT = re.compile(r"(^|_)(n|num|number)_|(heads|layers|groups|experts|top_k|topk)$")
_LENGTH = re.compile(r"seq|ctx|context|block_size|position|max_tokens|max_len")
_NOT_A_SIZE = re.compile(
    r"theta|base|window|_id$|rope|orig|seed|period|interval|every|stride|kernel"
)
_MOST_POSITIONS = 256
_EXPERTS = 16


def smaller(_rank: int, _num: int, config: Config, layers: int, tp: int) -> dict[str, Any]:
    """Find a small copy of a user's model file.

    Args:
        config: Configuration of the model.
        layers: Minimum number of layers that the meshes require.
        tp: A width that is divisible by it stays divisible by it in the copy.

        Returns:
            A dictionary with ``given``, the new values by field; ``sizes``, the old values; ``notes``,
                messages; and ``why``, the reason why there is no copy, or "".

    Raises:
        ConfigError: the model cannot be built, or its layout does not cover it.
    """
    dropout.switch_off()
    module = models.find(config.model.name)
    overrides = dict(config.model.overrides)
    shape = _shape(module, config, overrides)
    full = models.build(module, shape)
    # Positive integers may be sizes. The type of a flag is bool, which is a subclass of int.
    sizes = {}
    for name, value in vars(shape).items():
        if type(value) is int and value > 0:
            sizes[name] = value
    notes: list[str] = []

    def answer(given: Mapping[str, int], why: str = "") -> dict[str, Any]:
        return {
            "given": given,
            "sizes": {name: sizes[name] for name in given},
            "notes": notes,
            "why": why,
        }

    def failure(model: nn.Module, given: Mapping[str, int]) -> str:
        return _failure(model, _shape(module, config, {**overrides, **given}))

    # First try fewer layers. A model that is then small keeps its widths.
    depth, missing = _depth(module, config, overrides, full, sizes, layers)
    if missing:
        notes.append(f"layers of the kinds {', '.join(missing)} are not in the small copy")
    shallow = _build(module, config, overrides | depth)
    if shallow is None:
        depth = {}
        shallow = full
    if _count(shallow) <= SMALL:
        error = failure(shallow, depth)
        problem = ""
        if error:
            problem = f"it does not run on {TOKENS} tokens on one process: {error}"
        return answer(depth, problem)

    # Then try smaller widths, from the smallest. If none can be built and run, keep the widths.
    other_sizes = {name: value for name, value in sizes.items() if name not in depth}
    for change in _candidates(other_sizes, tp):
        given = depth | change
        candidate = _build(module, config, overrides | given)
        if candidate is not None and _count(candidate) <= LARGEST and not failure(candidate, given):
            return answer(given)
    if _count(shallow) <= LARGEST and not failure(shallow, depth):
        return answer(depth)
    num_layers = len(_layers(module, shallow))
    return answer(
        depth,
        f"its sizes cannot be made smaller: {_count(shallow):,} parameters in {num_layers} layers",
    )


def _shape(module: Any, config: Config, overrides: Mapping[str, Any]) -> Any:
    return models.shape_of(module, config.model.flavor, overrides, config.model.norm_type)


def _build(module: Any, config: Config, overrides: Mapping[str, Any]) -> nn.Module | None:
    """Build the model with other sizes on the meta device, or return None if the model file raises
    an exception.
    """
    try:
        return models.build(module, _shape(module, config, overrides))
    except Exception:  # a user's file may raise anything
        return None


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _layers(module: Any, model: nn.Module) -> list[nn.Module]:
    return list(getattr(model, module.LAYOUT.layers).values())


def _kinds(module: Any, model: nn.Module) -> set[str]:
    """Return the distinct kinds of layers.

    A kind is the set of module classes of a layer, with options on or off.
    """
    kinds = set()
    for layer in _layers(module, model):
        parts = []
        for path, part in layer.named_modules():
            flags = []
            for name, value in sorted(vars(part).items()):
                if type(value) in (bool, int, float, type(None)) and name != "training":
                    flags.append(f"{name}={bool(value)}")
            parts.append(f"{path}:{type(part).__name__}({','.join(flags)})")
        kinds.add(";".join(parts))
    return kinds


def _depth(
    module: Any,
    config: Config,
    overrides: Mapping[str, Any],
    full: nn.Module,
    sizes: Mapping[str, int],
    least: int,
) -> tuple[dict[str, int], list[str]]:
    """Find the field with the number of layers, and its smallest value of at least ``least`` with
    every kind of layer.

    Return the field with this value and, if some kinds of layers are missing, their number as text,
    such as "1 of 3".
    """
    depth = len(_layers(module, full))
    kinds = _kinds(module, full)
    numbers = range(max(1, least), min(depth, max(least, MOST_LAYERS) + 1))
    # Any field with this value may be the number of layers. Try fields with "layer" in their name first.
    fields = [name for name, value in sizes.items() if value == depth]
    fields.sort(key=lambda name: "layer" not in name)
    for name in fields:
        # Some kinds may only exist in deeper layers, so keep the number of layers that misses the fewest.
        best: dict[str, int] = {}
        fewest_missing = len(kinds)
        for number in numbers:
            # Some numbers may be invalid, for example if layers alternate.
            shallow = _build(module, config, {**overrides, name: number})
            if shallow is None:
                continue
            # The field has another meaning.
            if len(_layers(module, shallow)) != number:
                break
            missing = len(kinds - _kinds(module, shallow))
            if not missing:
                return {name: number}, []
            if not best or missing < fewest_missing:
                best = {name: number}
                fewest_missing = missing
        if best:
            return best, [f"{fewest_missing} of {len(kinds)}"]
    return {}, []


def _candidates(sizes: Mapping[str, int], tp: int) -> Iterator[dict[str, int]]:
    """Yield smaller sizes, starting with the smallest. All widths are divided by one number."""
    heads = {}
    for name, value in sizes.items():
        if _COUNT.search(name) and "head" in name and "dim" not in name and value > 1:
            heads[name] = value
    # Heads are divided among the ranks of tp, so their number must be divisible by tp.
    divisors = []
    for number in (1, 2, 4, 8, 16):
        is_divisor = True
        for value in heads.values():
            if value % number or value // number % min(tp, value):
                is_divisor = False
        if is_divisor:
            divisors.append(number)

    seen: list[dict[str, int]] = []
    for clamp, factor, head_divisor in itertools.product(
        (True, False), (64, 32, 16, 8, 4, 2), divisors
    ):
        if head_divisor > factor:
            continue
        change = {}
        if head_divisor > 1:
            change = {name: value // head_divisor for name, value in heads.items()}
        for name, value in sizes.items():
            if name not in heads:
                change |= _smaller_size(name, value, factor, head_divisor, tp, heads, clamp)
        # Each head keeps at least 4 features.
        has_narrow_heads = False
        for name, width in change.items():
            if "head" in name and name not in heads and width < 4:
                has_narrow_heads = True
        if change and change not in seen and not has_narrow_heads:
            seen.append(change)
            yield change


def _smaller_size(
    name: str,
    value: int,
    factor: int,
    head_divisor: int,
    tp: int,
    heads: Mapping[str, int],
    clamp: bool,
) -> dict[str, int]:
    """Return {name: reduced value} for a field that is not a number of heads, or {} if it does not change.

    The meaning of a field is guessed from its name. ``clamp`` also reduces lengths and numbers of experts.
    """
    # First handle fields that must not be divided: a base of rotary angles, a length, a vocabulary, a count.
    if _NOT_A_SIZE.search(name) or value < 16:
        return {}
    if _LENGTH.search(name):
        if clamp and value > _MOST_POSITIONS:
            return {name: _MOST_POSITIONS}
        return {}
    if "vocab" in name:
        return {name: min(value, 64 * tp)}  # no other size is a multiple of the vocabulary
    if "expert" in name and _COUNT.search(name) and "dim" not in name:
        if clamp and value > _EXPERTS and value % _EXPERTS == 0:
            return {name: _EXPERTS}
        return {}
    if _COUNT.search(name) and not name.endswith(("dim", "size", "embd", "inner")):
        return {}

    # A head width. If there are fewer heads, each is wider.
    if "head" in name:
        return {name: value * head_divisor // factor}
    # Any other width stays divisible by the number of heads and by tp. Each head keeps at least 4 features.
    multiples = [8]
    for count in heads.values():
        if value % count == 0:
            multiples.append(4 * count // head_divisor)
    if value % tp == 0:
        multiples.append(tp)
    step = math.lcm(*multiples)
    return {name: -(-value // (factor * step)) * step}


def _failure(model: nn.Module, shape: Any) -> str:
    """Run a copy. Return the reason why it does not compute logits, or ""."""
    vocabulary = shape.vocab_size
    fill(model)
    tokens_BT = torch.randint(
        0, vocabulary, (2, TOKENS), generator=torch.Generator().manual_seed(0)
    )
    positions_BT = torch.arange(TOKENS).expand(2, TOKENS).contiguous()
    if len(inspect.signature(model.forward).parameters) < 2:
        return ""  # promises.py reports this
    try:
        with torch.no_grad():
            out = model(tokens_BT, positions_BT)
    except Exception as error:  # a user's file may raise anything
        lines = str(error).splitlines() or [""]
        return f"{type(error).__name__}: {lines[0]}"
    if isinstance(out, torch.Tensor):
        return ""
    return f"it returns {type(out).__name__}"
