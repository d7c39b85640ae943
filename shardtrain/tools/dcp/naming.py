"""What a model's tensors are called in a folder: as torchtitan calls them, or as this project does.

torchtitan's Llama 2 and 3 pair the numbers of a head for rotary angles as (x_2i, x_2i+1), as Meta's weights do, and
ours as (x_i, x_{i+H/2}), as those of Hugging Face do: the rows of its wq and wk are in another order. Its other
families have the order of ours: Llama 4 turns neighbours in both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardtrain.utils.errors import CheckpointError, ConfigError, Problem

TORCHTITAN = "torchtitan"
OWN = "shardtrain"
NAMINGS = (TORCHTITAN, OWN)
_SHOWN = 8
_TITAN = (
    ("embed.weight", "tok_embeddings.weight"),
    ("norm.weight", "norm.weight"),
    ("norm.bias", "norm.bias"),
    ("head.weight", "output.weight"),
    ("layers.*.attn_norm.+", "layers.*.attention_norm.+"),
    ("layers.*.ffn_norm.+", "layers.*.ffn_norm.+"),
    ("layers.*.moe.router.expert_bias", "layers.*.moe.expert_bias"),
    ("layers.*.moe.shared.+", "layers.*.moe.shared_experts.+"),
    ("layers.*.moe.+", "layers.*.moe.+"),
    ("layers.*.attn.+", "layers.*.attention.+"),
    ("layers.*.ffn.+", "layers.*.feed_forward.+"),
)
"""Ours and theirs; the first that fits holds. ``*`` is the number of a layer, ``+`` the rest of the name."""
_FAMILIES = ("llama2", "llama3", "llama4", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_OTHERWISE = {"gpt_oss": "whose experts have w1 and w3 as one matrix there, row by row in turn"}
_MARK = "tok_embeddings.weight"
_PAIRED = re.compile(r"layers\.\d+\.attn\.w[qk]\.(weight|bias)")


@dataclass(frozen=True)
class Naming:
    """How one model's tensors are called."""

    kind: str
    family: str
    config: Any
    """The model's Config."""

    def theirs(self, name: str) -> str:
        """What one of our tensors is called."""
        if self.kind == OWN:
            return name
        if self.family in ("deepseek_v2", "deepseek_v3") and not self.config.q_lora_rank:
            name = name.replace(".attn.wq_b.", ".attn.wq.")
        for ours, theirs in _TITAN:
            found = re.fullmatch(re.escape(ours).replace(r"\*", r"(\d+)").replace(r"\+", r"(.+)"), name)
            if found:
                parts = iter(found.groups())
                return re.sub(r"[*+]", lambda _: next(parts), theirs)  # noqa: B023
        raise CheckpointError(f"torchtitan has no name for {name}; use --names={OWN}")

    def to_ours(self, name: str, tensor: Tensor) -> Tensor:
        """One of their tensors, of which ``name`` is our name, in our order of rows."""
        if not self._is_paired(name, tensor):
            return tensor
        return tensor.unflatten(0, (-1, self.config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    def to_theirs(self, name: str, tensor: Tensor) -> Tensor:
        """The opposite of ``to_ours``."""
        if not self._is_paired(name, tensor):
            return tensor
        return tensor.unflatten(0, (-1, 2, self.config.head_dim // 2)).transpose(1, 2).flatten(0, 2)

    def _is_paired(self, name: str, tensor: Tensor) -> bool:
        is_llama = self.kind == TORCHTITAN and self.family in ("llama2", "llama3")
        return is_llama and bool(tensor.dim() and _PAIRED.fullmatch(name))


def naming(kind: str, family: str, config: Any) -> Naming:
    """A naming of a model; raises ConfigError where torchtitan has no such model."""
    if kind == TORCHTITAN and (family not in _FAMILIES or getattr(config, "qkv_bias", False)):
        raise ConfigError(Problem("model.name", family, _refusal(family), f"use --names={OWN}", "command line"))
    return Naming(kind, family, config)


def _refusal(family: str) -> str:
    what = "is not written and read as torchtitan has it, " + _OTHERWISE[family] if family in _OTHERWISE else ""
    return f"{what or 'has no torchtitan counterpart'}; its models are {', '.join(_FAMILIES)}"


def recognise(family: str, config: Any, ours: Iterable[str], there: Mapping[str, Any]) -> tuple[Naming, str]:
    """The naming, and the prefix of all names of the model, under which most of our tensors are ``there``.

    Raises:
        ConfigError: for names of torchtitan's, where it lays the model out otherwise.
    """
    if family in _OTHERWISE and any(name == _MARK or name.endswith(f".{_MARK}") for name in there):
        fix = "take its weights from a Hugging Face folder: shardtrain import"
        raise ConfigError(Problem("model.name", family, _refusal(family), fix, "command line"))
    found = []
    for kind in NAMINGS:
        if kind == TORCHTITAN and family not in _FAMILIES:
            continue
        one = Naming(kind, family, config)
        for prefix in ("", "model.", "module.", "model.module."):
            found.append((sum(prefix + one.theirs(name) in there for name in ours), one, prefix))
    _, best, prefix = max(found, key=lambda entry: entry[0])
    return best, prefix


def listed(names: Iterable[str]) -> str:
    """Some names, and how many more there are."""
    every = list(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
