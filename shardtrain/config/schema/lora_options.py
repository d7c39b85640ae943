"""Options of low-rank adapters. The docstring of the package explains the conventions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Lora:
    """Train low-rank adapters of frozen weights (LoRA, Hu et al. 2021). checkpoint.initial_load_path names the frozen
    weights."""

    enable: bool = False
    """Freeze the model and train only adapters; checkpoints have the adapters and not the model (shardtrain)."""
    rank: int = 16
    """Rank of the update of a weight: rows of lora_a, columns of lora_b (shardtrain)."""
    alpha: float = 32.0
    """The update is scaled by alpha / rank (shardtrain)."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023) (shardtrain)."""
    dropout: float = 0.0
    """Dropout on the input of an adapter, 0 or above and below 1 (shardtrain)."""
    target_modules: list[str] = field(default_factory=list)
    """Linear modules with an adapter: globs of their paths ("layers.*.attn.w[qv]"), names of the
    Hugging Face format ("q_proj"), or "all-linear", which leaves out the head. Empty: each linear
    of every attention; "all-linear" with model.name = "transformers" (shardtrain).
    """
    target_parameters: list[str] = field(default_factory=list)
    """Stacks of expert weights with adapters, by PEFT's names: "experts.gate_up_proj", "experts.down_proj"
    (shardtrain)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules whose full weights are trained and saved with the adapters, by path or by
    name of the Hugging Face format ("embed_tokens", "lm_head"). A classification head is
    always included (shardtrain).
    """
    use_dora: bool = False
    """Train the norm and the direction of each row of a weight separately (DoRA, Liu et al.
    2024) (shardtrain).
    """
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """Initial distribution of lora_a: uniform within 1 / sqrt(inputs), or normal with standard
    deviation 1 / rank. lora_b starts at zero (shardtrain).
    """
    initial_load_path: str | None = None
    """Adapters to start from: a checkpoint of an adapter run, or a PEFT folder (shardtrain)."""
    base_dtype: Literal["training", "int8", "nf4"] = "training"
    """dtype of the frozen linear modules of the layers: training.dtype, or 8 or 4 bits (QLoRA,
    Dettmers et al. 2023), with unsharded layers. Requires the qlora extra (shardtrain).
    """
    random_base: bool = False
    """Train adapters of random weights, without checkpoint.initial_load_path, for a test (shardtrain)."""
