"""A case of the search: its options on top of a tiny base, its reference run, and the shapes of the families."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DOCUMENTS = "tests/fixtures/search/documents.jsonl"
STEPS = 2
P = "parallelism."
T = "training."
A = "activation_checkpoint."
M = "model.overrides."
DEGREES = (
    "pipeline_parallel",
    "data_parallel_replicate",
    "data_parallel_shard",
    "context_parallel",
    "tensor_parallel",
)
PP, DDP, FSDP, CP, TP = (f"{P}{axis}_degree" for axis in DEGREES)
EP = f"{P}expert_parallel_degree"
SCHEDULE = f"{P}pipeline_parallel_schedule"
MICRO = f"{P}pipeline_parallel_microbatch_size"
LOCAL = f"{T}local_batch_size"
SEQ = f"{T}seq_len"
CONSTANT = "constant."
"""Prefix of a pseudo option that overrides a module constant of the package, given by its dotted name."""
LESS = tuple(f"{P}pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
SINGLE = ("1F1B", "GPipe")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
WRITTEN = "PipelineScheduleMulti"
SPLIT = ("InterleavedZeroBubble", *V_SHAPED)
NEWER = ("llama4", "gpt_oss", "deepseek_v2", "qwen3_next")
"""Families added after most seeds had been searched. They are drawn only on request, to keep older cases unchanged."""
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", *NEWER)
AS_IS = "transformers"
"""The family of ``transformers`` networks loaded from a folder, with the sizes of its config.json."""
OF_ANSWERS = ("preference", "simpo", "orpo", "kto")
NEW_HEAD = ("classification", "reward_model")
"""Tasks whose head replaces the vocabulary projection."""

ATTENTION = {"dim": "32", "num_heads": "4", "head_dim": "8"}
SHAPES: dict[str, dict[str, str]] = {
    "llama3": {**ATTENTION, "num_kv_heads": "2", "ffn_dim": "64"},
    "mistral": {**ATTENTION, "num_kv_heads": "2", "ffn_dim": "64", "sliding_window": "0"},
    "qwen2": {**ATTENTION, "num_kv_heads": "2", "ffn_dim": "64", "tied_embeddings": "false"},
    "qwen3": {**ATTENTION, "num_kv_heads": "2", "ffn_dim": "64", "tied_embeddings": "false"},
    "neox": {**ATTENTION, "ffn_dim": "64", "rotary_pct": "0.5"},
    "encoder": {**ATTENTION, "num_kv_heads": "2", "ffn_dim": "64", "dropout": "0"},
    "qwen3_moe": {**ATTENTION, "num_kv_heads": "2", "moe_ffn_dim": "24", "num_experts": "8", "top_k": "2"},
    "mixtral": {**ATTENTION, "num_kv_heads": "2", "moe_ffn_dim": "24", "num_experts": "4"},
    "deepseek_v3": {
        "dim": "32", "num_heads": "4", "q_lora_rank": "16", "kv_lora_rank": "12", "qk_nope_head_dim": "8",
        "qk_rope_head_dim": "4", "v_head_dim": "8", "num_dense_layers": "1", "ffn_dim": "64", "moe_ffn_dim": "16",
        "num_experts": "8", "num_shared_experts": "1", "top_k": "2", "num_groups": "4", "top_groups": "2",
        "init_std": "0.1",
    },
    "llama4": {
        **ATTENTION, "num_kv_heads": "2", "ffn_dim": "64", "moe_ffn_dim": "24", "num_experts": "8", "top_k": "1",
        "num_shared_experts": "1", "interleave_moe_layer_step": "2", "no_rope_layer_interval": "2",
        "attention_chunk_size": "11", "floor_scale": "9",
    },
    "gpt_oss": {
        **ATTENTION, "num_kv_heads": "2", "moe_ffn_dim": "24", "num_experts": "8", "top_k": "2",
        "sliding_window": "11", "init_std": "0.1",
    },
    "deepseek_v2": {
        "dim": "32", "num_heads": "4", "q_lora_rank": "0", "kv_lora_rank": "12", "qk_nope_head_dim": "8",
        "qk_rope_head_dim": "4", "v_head_dim": "8", "num_dense_layers": "1", "ffn_dim": "64", "moe_ffn_dim": "16",
        "num_experts": "8", "num_shared_experts": "2", "top_k": "2", "init_std": "0.1",
    },
    "qwen3_next": {
        **ATTENTION, "num_kv_heads": "2", "rotary_pct": "0.5", "moe_ffn_dim": "24", "shared_ffn_dim": "16",
        "num_experts": "8", "top_k": "2", "linear_key_heads": "2", "linear_value_heads": "4",
        "linear_key_head_dim": "12", "linear_value_head_dim": "10",
    },
}  # fmt: skip
"""The fields that make each family tiny. BASE sets the number of layers and the vocabulary size for all of them."""
FLAVORS = {"qwen3_moe": "debugmodel_moe"}
FAMILIES = (
    *("llama3", "llama3", "mistral", "qwen2", "qwen3", "neox", "encoder"),
    *(2 * ("qwen3_moe", "mixtral", "deepseek_v3")),
)
"""Families to draw from. A family that is listed several times is drawn more often."""

BASE = {
    f"{T}dataset": "jsonl",
    f"{T}dataset_path": DOCUMENTS,
    f"{T}device": "cpu",
    f"{T}steps": str(STEPS),
    SEQ: "32",
    LOCAL: "1",
    f"{T}mixed_precision_param": "float32",
    f"{A}mode": "none",
    "optimizer.lr": "1e-2",
    "optimizer.eps": "1e-3",
    "lr_scheduler.warmup_steps": "1",
    "model.name": "llama3",
    f"{M}num_layers": "2",
    f"{M}vocab_size": "320",
    FSDP: "1",
}
"""Options of every case, unless the case overrides them. AdamW's eps is large, because a small eps turns a rounding
error of 1e-8 in a gradient into 1e-4 in a weight."""
UNSET = "unset"
"""Value that removes an option of BASE."""


@dataclass(frozen=True)
class Case:
    """A configuration to judge.

    Attributes:
        options: Options that differ from BASE.
        accumulation: Forward passes per step and data rank.
        then: Options of the mesh on which the second half of the run resumes from its checkpoint. They replace the
            mesh options of ``options``. None if the run does not change its mesh.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    accumulation: int = 1
    then: Mapping[str, str] | None = None

    def value(self, option: str, default: str = "") -> str:
        """Return the text value of an option."""
        text = self.options.get(option, BASE.get(option, default))
        return default if text == UNSET else text

    def number(self, option: str, default: int = 1) -> int:
        """Return the value of an integer option, or ``default`` if it is not an integer."""
        text = self.value(option, str(default))
        return int(text) if text.lstrip("-").isdigit() else default

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the mesh."""
        return math.prod(self.number(degree) for degree in (PP, DDP, FSDP, CP, TP))

    @property
    def data_ranks(self) -> int:
        """Number of ranks that read different rows."""
        return self.number(DDP) * self.number(FSDP)

    @property
    def global_batch(self) -> int:
        """Rows per step."""
        return self.number(LOCAL) * self.data_ranks * self.accumulation

    @property
    def is_exact(self) -> bool:
        """True if all computation is in float32."""
        names = ("dtype", "mixed_precision_param", "mixed_precision_reduce")
        return all(self.value(f"{T}{name}", "float32") == "float32" for name in names)

    def resolved(self) -> dict[str, str]:
        """Return all options, including those of BASE and of the family's shape."""
        family = self.value("model.name")
        shape = {f"{M}{name}": value for name, value in SHAPES.get(family, {}).items()}
        flavor = {"model.flavor": FLAVORS[family]} if family in FLAVORS else {}
        batch = {f"{T}global_batch_size": str(self.global_batch)}
        merged = {**BASE, **shape, **flavor, **batch, **self.options}
        return {
            name: value
            for name, value in merged.items()
            if value != UNSET and not name.startswith(CONSTANT)
        }

    @property
    def constants(self) -> dict[str, int]:
        """Overridden module constants, by dotted name."""
        return {
            name.removeprefix(CONSTANT): int(value)
            for name, value in self.options.items()
            if name.startswith(CONSTANT)
        }

    def arguments(self) -> list[str]:
        """Return the command line arguments, without the number of ranks."""
        arguments: list[str] = []
        for name, value in self.resolved().items():
            arguments += [f"--{name}", *value.split("\n")]
        return arguments

    def moved(self) -> Case:
        """Return the second half of the run on its new mesh, with the same rows per step.

        Its ``accumulation`` is 0 if the new mesh cannot divide the global batch.
        """
        assert self.then is not None
        second = Case({**self._options_of_numbers(), **self.then})
        passes, remainder = divmod(self.global_batch, second.number(LOCAL) * second.data_ranks)
        return dataclasses.replace(second, accumulation=0 if remainder else passes)

    def one_process(self) -> Case:
        """Return the reference run: the same model, data and optimizer, in one pass on one rank."""
        kept = self._options_of_numbers()
        # validation.steps counts batches, so validation batches must have the same number of rows.
        if "validation.steps" in kept:
            rows = self.number("validation.local_batch_size", 8) * self.data_ranks
            has_pipeline = self.number(PP) > 1
            kept["validation.local_batch_size"] = str(self.global_batch if has_pipeline else rows)
        return Case({**kept, LOCAL: str(self.global_batch)})

    def _options_of_numbers(self) -> dict[str, str]:
        return {name: value for name, value in self.options.items() if not is_of_mesh(name)}


OF_MESH = (
    LOCAL,
    f"{T}enable_cpu_offload",
    f"{T}replica_check_interval",
    "optimizer.early_step_in_backward",
    "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
)
"""Options that do not change the result, in sections whose other options do."""
CHECKPOINT_OPTIONS_OF_NUMBERS = ("checkpoint.enable", "checkpoint.initial_load")
"""Names, and prefixes of names, of the checkpoint options that change the result."""


def is_of_mesh(option: str) -> bool:
    """True if an option selects how the result is computed and must not change it."""
    if option.startswith("checkpoint."):
        return not option.startswith(CHECKPOINT_OPTIONS_OF_NUMBERS)
    prefixes = (P, A, "compile.", "training.dataloader", "validation.local", "metrics.", CONSTANT)
    return option.startswith(prefixes) or option in OF_MESH


@dataclass(frozen=True)
class Broken:
    """A rule that a case breaks. A refusal must name at least one of ``options``."""

    rule: str
    options: tuple[str, ...]
