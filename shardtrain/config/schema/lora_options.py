"""The options of low-rank adapters. The package's docstring has the rules for options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Lora:
    """Train low-rank adapters beside frozen weights (LoRA, Hu et al. 2021); the weights come from
    checkpoint.initial_load_path."""

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
    """Linear modules with an adapter: globs of their paths ("layers.*.attn.w[qv]"), names of the Hugging Face format
    ("q_proj"), or "all-linear", which leaves out the head. Empty: each linear of every attention; "all-linear" with
    model.name = "transformers" (shardtrain)."""
    target_parameters: list[str] = field(default_factory=list)
    """Stacks of expert weights with adapters, by PEFT's names: "experts.gate_up_proj", "experts.down_proj"
    (shardtrain)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole and saved with the adapters, by path or name of the Hugging Face format
    ("embed_tokens", "lm_head"); a classification head always is (shardtrain)."""
    use_dora: bool = False
    """Train the length of each row of a weight apart from its direction (DoRA, Liu et al. 2024) (shardtrain)."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How lora_a starts: uniform within 1 / sqrt(inputs), or normal with standard deviation 1 / rank; lora_b starts at
    zero (shardtrain)."""
    initial_load_path: str | None = None
    """Adapters to start from: a checkpoint of an adapter run, or a PEFT folder (shardtrain)."""
    base_dtype: Literal["training", "int8", "nf4"] = "training"
    """Type of the layers' frozen linear modules: training.dtype, or 8 or 4 bits (QLoRA, Dettmers et al. 2023), with the
    layers of each rank whole; needs the qlora extra (shardtrain)."""
    random_base: bool = False
    """Train adapters beside random weights, without checkpoint.initial_load_path, to try them out (shardtrain)."""
