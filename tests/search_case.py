"""A case of the search: what it says beside a tiny base, what it must be equal to, and the shapes of the families."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

DOCUMENTS = "tests/fixtures/search/documents.jsonl"
STEPS = 2
P, T, A, M = "parallelism.", "training.", "activation_checkpoint.", "model.overrides."
DEGREES = ("pipeline_parallel", "data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
PP, DDP, FSDP, CP, TP = (f"{P}{axis}_degree" for axis in DEGREES)
EP, SCHEDULE = f"{P}expert_parallel_degree", f"{P}pipeline_parallel_schedule"
MICRO, LOCAL, SEQ = f"{P}pipeline_parallel_microbatch_size", f"{T}local_batch_size", f"{T}seq_len"
CONSTANT = "constant."
"""Begins what is no option but a number in a file of the package, by its dotted name, which ranks have another for."""
LESS = tuple(f"{P}pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
SINGLE, V_SHAPED = ("1F1B", "GPipe"), ("ZBVZeroBubble", "DualPipeV")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
WRITTEN = "PipelineScheduleMulti"
SPLIT = ("InterleavedZeroBubble", *V_SHAPED)
NEWER = ("llama4", "gpt_oss", "deepseek_v2")
"""Families that came after most seeds had been searched: drawn where asked for, so that cases stay the same."""
MIXTURES = ("qwen3_moe", "mixtral", "deepseek_v3", *NEWER)
AS_IS = "transformers"
"""The family of networks that are taken from a folder as they are; their sizes are those of its config.json."""
OF_ANSWERS = ("preference", "simpo", "orpo", "kto")
NEW_HEAD = ("classification", "reward_model")
"""Tasks whose head takes the place of that to the vocabulary."""

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
}  # fmt: skip
"""Of each family the fields that make it tiny, but the number of layers and the vocabulary, which all have."""
FLAVORS = {"qwen3_moe": "debugmodel_moe"}
FAMILIES = (
    *("llama3", "llama3", "mistral", "qwen2", "qwen3", "neox", "encoder"),
    *(2 * ("qwen3_moe", "mixtral", "deepseek_v3")),
)
"""What a case's family is drawn from, each as often as it stands here."""

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
"""What a case starts from: a shorter case is one that says less beside it. AdamW's eps is large, because a small one
turns rounding of 1e-8 in a gradient into 1e-4 in a weight."""
UNSET = "unset"
"""The value that takes an option of BASE away."""


@dataclass(frozen=True)
class Case:
    """A configuration: what it says beside BASE, passes per step and data rank, and a second mesh or none.

    ``then`` are options that the second half of the run, continued from its checkpoint, has instead of those of
    ``options`` that are about the mesh.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    accumulation: int = 1
    then: Mapping[str, str] | None = None

    def value(self, option: str, default: str = "") -> str:
        """What an option is set to."""
        found = self.options.get(option, BASE.get(option, default))
        return default if found == UNSET else found

    def number(self, option: str, default: int = 1) -> int:
        """The same of a whole number."""
        text = self.value(option, str(default))
        return int(text) if text.lstrip("-").isdigit() else default

    @property
    def num_ranks(self) -> int:
        """Ranks that the mesh has."""
        return math.prod(self.number(degree) for degree in (PP, DDP, FSDP, CP, TP))

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows."""
        return self.number(DDP) * self.number(FSDP)

    @property
    def global_batch(self) -> int:
        """Rows of a step."""
        return self.number(LOCAL) * self.data_ranks * self.accumulation

    @property
    def is_exact(self) -> bool:
        """Whether all numbers are float32."""
        types = [self.value(f"{T}{name}", "float32") for name in ("dtype", "mixed_precision_param")]
        return {*types, self.value(f"{T}mixed_precision_reduce", "float32")} == {"float32"}

    def resolved(self) -> dict[str, str]:
        """All options, those of BASE too."""
        family = self.value("model.name")
        shape = {f"{M}{name}": value for name, value in SHAPES.get(family, {}).items()}
        flavor = {"model.flavor": FLAVORS[family]} if family in FLAVORS else {}
        batch = {f"{T}global_batch_size": str(self.global_batch)}
        merged = {**BASE, **shape, **flavor, **batch, **self.options}
        return {name: value for name, value in merged.items() if value != UNSET and not name.startswith(CONSTANT)}

    @property
    def constants(self) -> dict[str, int]:
        """Numbers in files of the package that its ranks have others for, by their dotted names."""
        found = [(name, value) for name, value in self.options.items() if name.startswith(CONSTANT)]
        return {name.removeprefix(CONSTANT): int(value) for name, value in found}

    def words(self) -> list[str]:
        """The command line, without the number of ranks."""
        return [word for name, value in self.resolved().items() for word in (f"--{name}", *value.split("\n"))]

    def moved(self) -> Case:
        """The second half, with the rows per step of the first."""
        assert self.then is not None
        kept = {name: value for name, value in self.options.items() if not is_of_mesh(name)}
        second = Case({**kept, **self.then})
        passes, rest = divmod(self.global_batch, second.number(LOCAL) * second.data_ranks)
        return dataclasses.replace(second, accumulation=passes if not rest else 0)

    def one_process(self) -> Case:
        """What it must be equal to: the same model, data and optimizer, in one pass on one rank."""
        kept = {name: value for name, value in self.options.items() if not is_of_mesh(name)}
        if "validation.steps" in kept:  # counts batches
            piped, rows = self.number(PP) > 1, self.number("validation.local_batch_size", 8) * self.data_ranks
            kept["validation.local_batch_size"] = str(self.global_batch if piped else rows)
        return Case({**kept, LOCAL: str(self.global_batch)})


OF_MESH = (
    LOCAL,
    f"{T}enable_cpu_offload",
    f"{T}replica_check_interval",
    "optimizer.early_step_in_backward",
    "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp",
)
"""Options that say how something is computed, and lie among others."""
SAID = ("checkpoint.enable", "checkpoint.initial_load")
"""Options of checkpoints that say what is computed, or begin their names."""


def is_of_mesh(option: str) -> bool:
    """Whether an option says how something is computed, and not what."""
    if option.startswith("checkpoint."):
        return not option.startswith(SAID)
    ways = (P, A, "compile.", "training.dataloader", "validation.local", "metrics.", CONSTANT)
    return option.startswith(ways) or option in OF_MESH


@dataclass(frozen=True)
class Broken:
    """A rule that a case breaks, and the options of which a refusal may name any."""

    rule: str
    options: tuple[str, ...]
