"""Names of a model's tensors in a folder: torchtitan's or this project's.

Rotary embeddings of torchtitan's Llama 2 and 3 rotate pairs (x_2i, x_2i+1) of a head, as Meta's weights
do. Ours rotate (x_i, x_{i+H/2}), as those of Hugging Face do. So the rows of wq and wk are in another
order. Other families have the same order in both: Llama 4 rotates neighbors.
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
        # Without a low-rank projection, torchtitan calls the only projection of queries wq.
        if self.family in ("deepseek_v2", "deepseek_v3") and not self.config.q_lora_rank:
            name = name.replace(".attn.wq_b.", ".attn.wq.")
        for ours, theirs in _TITAN:
            pattern = re.escape(ours).replace(r"\*", r"(\d+)").replace(r"\+", r"(.+)")
            match = re.fullmatch(pattern, name)
            if match:
                # Both names have the same placeholders in the same order.
                for part in match.groups():
                    theirs = re.sub(r"[*+]", part, theirs, count=1)
                return theirs
        raise CheckpointError(f"torchtitan has no name for {name}; use --names={OWN}")

    def to_ours(self, name: str, tensor: Tensor) -> Tensor:
        """Return a tensor of the folder in our order of rows. ``name`` is our name of it."""
        if not self._is_paired(name, tensor):
            return tensor
        pairs = tensor.unflatten(0, (-1, self.config.head_dim // 2, 2))
        return pairs.transpose(1, 2).flatten(0, 2)

    def to_theirs(self, name: str, tensor: Tensor) -> Tensor:
        """Return one of our tensors in the folder's order of rows."""
        if not self._is_paired(name, tensor):
            return tensor
        halves = tensor.unflatten(0, (-1, 2, self.config.head_dim // 2))
        return halves.transpose(1, 2).flatten(0, 2)

    def _is_paired(self, name: str, tensor: Tensor) -> bool:
        """True if the rows of a tensor have another order in torchtitan.

        Scalars are counts of the optimizer.
        """
        is_llama = self.kind == TORCHTITAN and self.family in ("llama2", "llama3")
        return is_llama and tensor.dim() > 0 and _PAIRED.fullmatch(name) is not None


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
    rule = "has no torchtitan counterpart"
    if family in _OTHERWISE:
        rule = f"cannot be converted from or to torchtitan, {_OTHERWISE[family]}"
    return f"{rule}; its models are {', '.join(_FAMILIES)}"


def recognise(
    family: str, config: Any, ours: Iterable[str], tensors: Mapping[str, Any]
) -> tuple[
    Naming,
    str,
]:
    """Return the naming and the prefix of names with which most of our tensors are in the folder.

    Raises:
        ConfigError: the folder has torchtitan's names, but torchtitan's weights have another layout.
    """
    is_titan = any(name == _MARK or name.endswith(f".{_MARK}") for name in tensors)
    if family in _OTHERWISE and is_titan:
        raise ConfigError(
            Problem(
                "model.name",
                family,
                rule=_refusal(family),
                fix="take its weights from a Hugging Face folder: shardtrain import",
                where="command line",
            )
        )
    kinds: tuple[str, ...] = NAMINGS
    if family not in _FAMILIES:
        kinds = (OWN,)

    # Of equally good namings, the first counts. Wrappers such as DistributedDataParallel add prefixes.
    best = (Naming(OWN, family, config), "")
    most = -1
    for kind in kinds:
        naming = Naming(kind, family, config)
        names = [naming.theirs(name) for name in ours]
        for prefix in ("", "model.", "module.", "model.module."):
            num_matches = 0
            for name in names:
                if prefix + name in tensors:
                    num_matches += 1
            if num_matches > most:
                most = num_matches
                best = (naming, prefix)
    return best


def listed(names: Iterable[str]) -> str:
    """Return the first names, and the number of others, as text."""
    all_names = list(names)
    text = ", ".join(all_names[:_SHOWN])
    if len(all_names) > _SHOWN:
        text += f" and {len(all_names) - _SHOWN} more"
    return text
