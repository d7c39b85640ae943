"""Find out if a ``transformers`` network supports sequences of the configured length.

Networks with learned positions have a table with a row per position, and others have a table of angles or
a mask of a fixed size. A longer sequence fails in the first step. Some tables grow, and some have more rows than
positions, so config.json does not contain the limit. Therefore this module runs the network's own forward:
activations are on the meta device, and positions and other small tensors have values on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardtrain.config.schema import Config
from shardtrain.utils.errors import ConfigError, Problem

_SHORT = 4
"""Tokens of a sequence that every network supports."""
_LONG = 8192
"""Longest sequence to run, because masks of its square have values."""
_MARGIN = 8
"""A table of positions may have some more rows than positions, and config.json may count them or not."""
_MAX_NUMEL = 1 << 20
"""Maximum size of a new tensor with values, except for masks."""
_KEYS = ("position", "n_ctx", "max_seq")
"""Parts of the keys of config.json with a maximum length."""
_FACTORIES = (torch.arange, torch.ones, torch.zeros, torch.full, torch.tensor)


def check(model: Any, config: Config) -> None:
    """Raise ConfigError if a sequence of the configured length fails, and shorter sequences do not."""
    network = getattr(model, "hf", None)
    if network is None:
        return
    lengths = {"training.seq_len": config.training.seq_len}
    if config.validation.enable:
        lengths["validation.seq_len"] = config.validation.seq_len
    declared = sorted(set(_declared(network.config.to_dict())))
    for option, length in lengths.items():
        limits = [limit for limit in declared if limit - _MARGIN < length]
        if not limits:
            continue
        tried = length
        if length > _LONG:
            tried = min(length, limits[0] + _MARGIN)
        if _fits(model, tried) or not _fits(model, _SHORT):
            continue
        most = _most(model, _SHORT, tried)
        name = type(network).__name__
        rule = f"exceeds the {most} positions of {name}, which its config.json limits"
        raise ConfigError(Problem(option, length, rule, f"use at most {most}, or another model"))


def _declared(content: Any) -> Iterator[int]:
    """Yield the maximum lengths in config.json, also in the parts of a config with several models."""
    for key, value in content.items():
        if isinstance(value, dict):
            yield from _declared(value)
        elif type(value) is int and value > 0 and any(part in str(key) for part in _KEYS):
            yield value


def _most(model: Any, fits: int, fails: int) -> int:
    """Return the longest sequence that a network supports, by bisection."""
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if _fits(model, middle):
            fits = middle
        else:
            fails = middle
    return fits


def _fits(model: Any, num_tokens: int) -> bool:
    """True if the forward pass of one sequence succeeds."""
    # RoBERTa gives padding the same position, so the tokens are no padding.
    token = 1
    if getattr(model.hf.config, "pad_token_id", None) == token:
        token = 2
    tokens_BT = torch.full((1, num_tokens), token, device="cpu")
    arguments: dict[str, Any] = {}
    if model.kind == "sequence_to_sequence":
        arguments = {
            "decoded_BS": tokens_BT,
            "lengths_B": torch.full((1,), num_tokens, device="cpu"),
        }
    try:
        with torch.no_grad(), _PositionValues():
            model(tokens_BT, **arguments)
    except Exception:  # a network may fail in any way
        return False
    return True


class _PositionValues(TorchFunctionMode):
    """Keep small tensors, such as positions, on the CPU with their values. Results of meta tensors stay on meta."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function in _FACTORIES and _is_meta(kwargs.get("device")):
            out = function(*args, **{**kwargs, "device": "meta"})
            if out.numel() > _MAX_NUMEL:
                return out
            return function(*args, **{**kwargs, "device": "cpu"})
        if function is Tensor.to:
            return self._to(args, kwargs)
        tensors = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        has_meta = any(tensor.is_meta for tensor in tensors)
        has_values = any(not tensor.is_meta and tensor.dim() > 0 for tensor in tensors)
        if not (has_meta and has_values):
            return function(*args, **kwargs)
        _check_bounds(function, args)
        args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        return function(*args, **kwargs)

    def _to(self, args: Any, kwargs: Any) -> Any:
        """Move a tensor, except that values stay on the CPU."""
        tensor, *rest = args
        if tensor.is_meta:
            return Tensor.to(*args, **kwargs)
        kept = [value for value in rest if not _is_meta(value)]
        if any(isinstance(value, Tensor) for value in kept):
            kept = [value.dtype if isinstance(value, Tensor) else value for value in kept]
        named = {name: value for name, value in kwargs.items() if not _is_meta(value)}
        return Tensor.to(tensor, *kept, **named) if kept or named else tensor


def _is_meta(value: Any) -> bool:
    """True if a value names the meta device."""
    if isinstance(value, Tensor):
        return value.is_meta
    if isinstance(value, str | torch.device):
        return torch.device(value).type == "meta"
    return False


def _check_bounds(function: Any, args: Any) -> None:
    """Raise IndexError if an index with values exceeds a table on the meta device."""
    if function is F.embedding:
        index, table = args[:2]
        size = table.size(0)
    elif function in (torch.index_select, Tensor.index_select):
        table, dim, index = args[:3]
        size = table.size(dim)
    else:
        return
    if not index.is_meta and index.numel() and int(index.max()) >= size:
        raise IndexError(f"index {int(index.max())} of {size}")
