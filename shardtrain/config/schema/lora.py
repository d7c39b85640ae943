"""The options of low-rank adapters: part of ``schema.py``, whose rules hold here too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Lora:
    """Train low-rank adapters beside frozen weights (LoRA, Hu et al. 2021); the weights come from
    checkpoint.initial_load_path."""

    enable: bool = False
    """Freeze the model and train adapters alone; checkpoints hold them and not the model (shardtrain)."""
    rank: int = 16
    """Rows of lora_a and columns of lora_b: the rank of what is added to a weight (shardtrain)."""
    alpha: float = 32.0
    """What is added is scaled by alpha / rank (shardtrain)."""
    rank_stabilized: bool = False
    """Scale by alpha / sqrt(rank) instead (Kalajdzievski 2023) (shardtrain)."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training, 0 or above and below 1 (shardtrain)."""
    target_modules: list[str] = field(default_factory=list)
    """Linear modules that get an adapter, as globs of their paths ("layers.*.attn.w[qv]") or names of the Hugging Face
    format ("q_proj"), or "all-linear", which leaves out the head; empty is each linear of every attention, and
    "all-linear" with model.name = "transformers" (shardtrain)."""
    target_parameters: list[str] = field(default_factory=list)
    """Stacks of experts' weights that get adapters, as PEFT names them: "experts.gate_up_proj", "experts.down_proj"
    (shardtrain)."""
    modules_to_save: list[str] = field(default_factory=list)
    """Modules that are trained whole and saved beside the adapters, by path or name of the Hugging Face format
    ("embed_tokens", "lm_head"); a head that classifies is one always (shardtrain)."""
    use_dora: bool = False
    """Train the length of each weight's rows apart from their direction (DoRA, Liu et al. 2024) (shardtrain)."""
    init: Literal["kaiming", "gaussian"] = "kaiming"
    """How lora_a starts: uniform within 1 / sqrt(inputs), or normal with standard deviation 1 / rank; lora_b starts at
    zero (shardtrain)."""
    initial_load_path: str | None = None
    """Adapters to start from: a checkpoint of an adapter run, or a folder in the format of PEFT (shardtrain)."""
    base_dtype: Literal["training", "int8", "nf4"] = "training"
    """How the frozen weights of the layers' linear modules are held: as training.dtype says, or in 8 or 4 bits (QLoRA,
    Dettmers et al. 2023), each rank's layers whole; needs the qlora extra (shardtrain)."""
    random_base: bool = False
    """Freeze the model as it is initialised, without checkpoint.initial_load_path, to try the rest (shardtrain)."""
