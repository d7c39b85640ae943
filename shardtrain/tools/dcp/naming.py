"""Names of a model's tensors in a folder: torchtitan's or this project's.

Rotary embeddings of torchtitan's Llama 2 and 3 rotate pairs (x_2i, x_2i+1) of a head, as Meta's weights do. Ours rotate
(x_i, x_{i+H/2}), as those of Hugging Face do. So the rows of wq and wk are in another order. Other families have the
same order in both: Llama 4 rotates neighbors.
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
"""Patterns of our names and theirs.

The first match counts. ``*`` is a layer number, ``+`` the rest of the name.
"""
_FAMILIES = ("llama2", "llama3", "llama4", "qwen3", "qwen3_moe", "deepseek_v2", "deepseek_v3")
_OTHERWISE = {"gpt_oss": "which stores w1 and w3 of experts in one matrix, in alternating rows"}
_MARK = "tok_embeddings.weight"
_PAIRED = re.compile(r"layers\.\d+\.attn\.w[qk]\.(weight|bias)")


@dataclass(frozen=True)
class Naming:
    """Names of one model's tensors. ``config`` is the model's Config."""

    kind: str
    family: str
    config: Any

    def theirs(self, name: str) -> str:
        """Return the name in the folder of one of our tensors."""
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
        """Return a tensor of the folder in our order of rows. ``name`` is our name of it."""
        if not self._is_paired(name, tensor):
            return tensor
        return tensor.unflatten(0, (-1, self.config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)

    def to_theirs(self, name: str, tensor: Tensor) -> Tensor:
        """Return one of our tensors in the folder's order of rows."""
        if not self._is_paired(name, tensor):
            return tensor
        return tensor.unflatten(0, (-1, 2, self.config.head_dim // 2)).transpose(1, 2).flatten(0, 2)

    def _is_paired(self, name: str, tensor: Tensor) -> bool:
        is_llama = self.kind == TORCHTITAN and self.family in ("llama2", "llama3")
        return is_llama and bool(tensor.dim() and _PAIRED.fullmatch(name))


def naming(kind: str, family: str, config: Any) -> Naming:
    """Return a naming of a model.

    Raises:
        ConfigError: torchtitan does not have the model.
    """
    if kind == TORCHTITAN and (family not in _FAMILIES or getattr(config, "qkv_bias", False)):
        raise ConfigError(
            Problem(
                "model.name",
                family,
                rule=_refusal(family),
                fix=f"use --names={OWN}",
                where="command line",
            )
        )
    return Naming(kind, family, config)


def _refusal(family: str) -> str:
    what = "cannot be converted from or to torchtitan, " + _OTHERWISE[family] if family in _OTHERWISE else ""
    return f"{what or 'has no torchtitan counterpart'}; its models are {', '.join(_FAMILIES)}"


def recognise(family: str, config: Any, ours: Iterable[str], there: Mapping[str, Any]) -> tuple[Naming, str]:
    """Return the naming and the prefix of names with which most of our tensors are in the folder.

    Raises:
        ConfigError: the folder has torchtitan's names, but torchtitan's weights have another layout.
    """
    if family in _OTHERWISE and any(name == _MARK or name.endswith(f".{_MARK}") for name in there):
        raise ConfigError(
            Problem(
                "model.name",
                family,
                rule=_refusal(family),
                fix="take its weights from a Hugging Face folder: shardtrain import",
                where="command line",
            )
        )
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
    """Return the first names, and the number of others, as text."""
    every = list(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
