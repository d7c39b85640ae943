"""Features that a case has on request: the options that each feature draws, and the rules that they add.

Features were added after many seeds had been searched, so ``search_space.draw`` keeps cases without features unchanged.
As in ``search_space``, the rules restate the documentation independently of the package's checks.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import search_architectures
from search_case import (
    AS_IS,
    CONSTANT,
    CP,
    DDP,
    DOCUMENTS,
    EP,
    FSDP,
    LESS,
    LOCAL,
    LOOPED,
    MICRO,
    MIXTURES,
    NEW_HEAD,
    OF_ANSWERS,
    PP,
    SCHEDULE,
    SEQ,
    SINGLE,
    SPLIT,
    TP,
    UNSET,
    V_SHAPED,
    WRITTEN,
    A,
    Broken,
    Case,
    M,
    P,
    T,
)

from shardtrain.facts.lr_schedules import SCHEDULES as RATE_SCHEDULES
from shardtrain.facts.lr_schedules import options_of

FIXTURES = "tests/fixtures/search"
LLAMA, EXPERTS, ADAPTER = (f"{FIXTURES}/{name}" for name in ("llama", "mixtral", "adapter"))
CHAT = f"{FIXTURES}/chat.jinja"
TALKS, TABLE, FEW, SOME_BAD = (
    f"{FIXTURES}/{name}"
    for name in ("conversations.jsonl", "texts.tsv", "few.jsonl", "some_bad.jsonl")
)
FEW_ROWS = 22
CSV = f"{P}pipeline_parallel_schedule_csv"
PARTS = f"{P}module_fqns_per_model_part"
LINEAR = "quantize.linear.float8"
GROUPED = "quantize.grouped_mm.float8"
QK_CLIP = "optimizer.qk_clip_threshold"
SCHEDULES = Path(tempfile.gettempdir()) / f"shardtrain-schedules-{os.getuid()}"
"""Folder of generated schedule files. The name of a file determines its content, see ``write_schedule``."""


@dataclass
class Draft:
    """A case under construction. ``moves`` is True if the run should resume on another mesh."""

    options: dict[str, str]
    accumulation: int
    moves: bool = False

    def number(self, option: str, default: int = 1) -> int:
        return int(self.options.get(option, str(default)))

    @property
    def num_ranks(self) -> int:
        return math.prod(self.number(degree) for degree in (PP, DDP, FSDP, CP, TP))

    @property
    def family(self) -> str:
        return self.options.get("model.name", "llama3")

    def drop(self, *starts: str) -> None:
        """Remove the options that begin with any of ``starts``."""
        for name in [name for name in self.options if name.startswith(starts)]:
            del self.options[name]

    def drop_pipeline(self) -> None:
        self.drop(f"{P}pipeline_", PARTS)


def some(rng: random.Random, chance: float, **values: Sequence[str]) -> dict[str, str]:
    """Draw options: each is included with this probability, with one of its values."""
    return {name: rng.choice(choices) for name, choices in values.items() if rng.random() < chance}


def within(section: str, drawn: dict[str, str]) -> dict[str, str]:
    return {f"{section}.{name}": value for name, value in drawn.items()}


def adapters(rng: random.Random, draft: Draft) -> None:
    """LoRA adapters of all kinds, with frozen weights of 32, 8 and 4 bits."""
    draft.drop("lora.", "model.converters", "quantize.")
    drawn = {"enable": "true", "rank": rng.choice(("1", "4", "8"))}
    if "checkpoint.initial_load_path" not in draft.options:
        drawn["random_base"] = "true"
    drawn["base_dtype"] = rng.choice(("training", "int8", "nf4", "nf4"))
    drawn |= some(rng, 0.3, use_dora=["true"], init=["gaussian"], rank_stabilized=["true"])
    # a scale alpha / rank of 32 would give gradients whose rounding errors exceed the tolerance
    drawn["alpha"] = rng.choice(("2", "4", "8"))
    drawn |= some(
        rng, 0.5, target_modules=["layers.*.attn.wo", "layers.*.attn.w[qkvo]", "all-linear"]
    )
    drawn |= some(rng, 0.3, modules_to_save=["embed", "head", "norm", "embed\nhead"])
    if draft.family in MIXTURES and "use_dora" not in drawn:
        drawn |= some(
            rng,
            0.6,
            target_parameters=["experts.gate_up_proj", "experts.gate_up_proj\nexperts.down_proj"],
        )
    if "checkpoint.initial_load_resize_embeddings" in draft.options:
        drawn["modules_to_save"] = "embed\nhead"
    draft.options |= within("lora", drawn)
    if drawn["base_dtype"] != "training":
        draft.drop(f"{T}enable_cpu_offload", "compile.")


def multi_token(rng: random.Random, draft: Draft) -> None:
    """Layers that predict one or two tokens further ahead."""
    is_language_model = draft.options.get("task.name", "language_model") == "language_model"
    if draft.family not in ("deepseek_v2", "deepseek_v3") or not is_language_model:
        return
    draft.options[f"{M}num_nextn_predict_layers"] = rng.choice(("1", "2"))
    draft.options |= within("training", some(rng, 0.5, mtp_loss_scaling_factor=["0.3", "1"]))


def distillation(rng: random.Random, draft: Draft) -> None:
    """A frozen teacher on the same mesh."""
    draft.drop_pipeline()
    draft.drop("task.")
    drawn = {
        "name": "distillation",
        "teacher_path": rng.choice((LLAMA, EXPERTS)),
        "divergence": rng.choice(("forward_kl", "reverse_kl", "jsd")),
    }
    drawn |= some(rng, 0.5, kd_ratio=["1", "0.25"], temperature=["2", "0.7"])
    if drawn["divergence"] == "jsd":
        drawn |= some(rng, 0.5, jsd_beta=["0.2"])
    draft.options |= within("task", drawn)


def mixture(rng: random.Random, draft: Draft) -> None:
    """Several sources. Their weights may change during the run, and a source may end."""
    draft.drop("data.format", "data.mode", "data.readers")
    draft.options |= {f"{T}dataset": UNSET, f"{T}dataset_path": UNSET}
    sources = {"web": ("jsonl", DOCUMENTS), "notes": ("tsv", TABLE), "few": ("jsonl", FEW)}
    names = rng.sample(list(sources), rng.choice((2, 2, 3, 1)))
    for name in names:
        kind, path = sources[name]
        drawn = {"dataset": kind, "dataset_path": path, **some(rng, 0.5, weight=["0.3", "3"])}
        if kind == "jsonl":
            drawn |= some(rng, 0.25, format=["prompt_completion"])
        if "format" not in drawn:
            is_tsv = kind == "tsv"
            drawn |= some(rng, 0.3, text_field=["note" if is_tsv else "completion"])
            field = drawn.get("text_field", "text")
            if rng.random() < 0.2:
                drawn[f"template.{field}"] = (
                    "<{{ note }}> {{ text }}" if is_tsv else "{{ prompt }}: {{ text }}"
                )
        if rng.random() < 0.15:
            drawn["epochs"] = "9"
            draft.options[f"{T}on_data_end"] = "stop"
        draft.options |= within(f"data.sources.{name}", drawn)
    if len(names) > 1 and rng.random() < 0.5:
        draft.options["data.stages.0.until_tokens"] = rng.choice(("100", "300", "1000"))
        for stage in range(2):
            for name in names[stage:]:
                draft.options[f"data.stages.{stage}.weights.{name}"] = rng.choice(("0.5", "1", "2"))


def chat(rng: random.Random, draft: Draft) -> None:
    """Conversations through a chat template, from message lists or from templates over columns."""
    draft.drop("data.separator", "data.add_")
    seq_len = int(draft.options.get(SEQ, "32"))
    # A question and an answer need 48 tokens. Round up to a multiple of the drawn length.
    draft.options[SEQ] = str(math.ceil(48 / seq_len) * seq_len)
    drawn = {
        "format": "chat",
        "chat_template": CHAT,
        **some(rng, 0.4, long_documents=["cut", "drop", "split"]),
    }
    drawn["packing"] = rng.choice(("auto", "concat", "first_fit", "best_fit", "padded"))
    if drawn["packing"] == "concat":
        drawn.pop("long_documents", None)
    if rng.random() < 0.5:
        draft.options |= {f"{T}dataset": "jsonl", f"{T}dataset_path": TALKS}
        drawn |= some(rng, 0.3, messages_field=["turns"], tools_field=["skills"])
    else:
        drawn |= {"template.user": "{{ prompt }}", "template.assistant": "{{ completion }}"}
        drawn |= some(rng, 0.3, **{"template.system": ["You know of {{ label }}."]})
    draft.drop("data.long_documents", "data.packing")
    draft.options |= within("data", drawn)


def columns(rng: random.Random, draft: Draft) -> None:
    """Other file formats, columns, templates, separators, bad rows and another tokenizer."""
    kind = rng.choice(("tsv", "template", "fields", "bad", "plain"))
    options = draft.options
    draft.drop("data.format")
    if kind == "tsv":
        options |= {f"{T}dataset": "tsv", f"{T}dataset_path": TABLE, "data.text_field": "note"}
    elif kind == "template":
        options["data.template.text"] = "{{ prompt }} and {{ completion }}"
    elif kind == "fields":
        options |= {
            "data.format": "prompt_completion",
            "data.prompt_field": "text",
            "data.completion_field": "chosen",
        }
    elif kind == "bad":
        draft.drop("data.mode", "data.readers")
        options |= {
            f"{T}dataset_path": SOME_BAD,
            "data.bad_rows": "skip",
            "data.bad_rows_max_fraction": "0.9",
        }
        options |= within("data", some(rng, 0.5, max_row_bytes=["1024"]))
    options |= within(
        "data", some(rng, 0.3, add_bos=["true", "false"], add_eos=["false"], separator=[" ; "])
    )
    if rng.random() < 0.2:
        tokenizer_option = rng.choice(("model.hf_assets_path", "model.tokenizer_path"))
        options |= {tokenizer_option: "python_bpe", f"{M}vocab_size": "2048"}


def validation(rng: random.Random, draft: Draft) -> None:
    """Validation losses and generated samples between steps, which must not affect training."""
    drawn = {
        "enable": "true",
        "dataset": "jsonl",
        "dataset_path": FEW,
        "seq_len": draft.options.get(SEQ, "32"),
    }
    # With these files, [data] names their columns, so validation must use the same files.
    if draft.options.get(f"{T}dataset_path") in (
        TABLE,
        TALKS,
    ):
        drawn["dataset"], drawn["dataset_path"] = (
            draft.options[f"{T}dataset"],
            draft.options[f"{T}dataset_path"],
        )
    drawn |= some(rng, 0.6, local_batch_size=["1", "2", "3"], seq_len=["16", "48", "96"])
    drawn |= some(rng, 0.25, steps=["1", "2"])
    drawn["freq"] = rng.choice(("1", "1", "2"))
    if rng.random() < 0.15:
        drawn["per_epoch"] = drawn.pop("freq")
    if draft.number(PP) > 1:
        drawn["seq_len"] = draft.options.get(SEQ, "32")
    if rng.random() < 0.2:
        drawn |= {
            "dataloader.num_workers": "1",
            **some(rng, 0.5, **{"dataloader.prefetch_factor": ["2"]}),
        }
        drawn |= some(rng, 0.5, **{"dataloader.persistent_workers": ["true"]})
    if draft.options.get("checkpoint.enable") == "true":
        drawn |= {"patience": "1"}
        draft.options["checkpoint.keep_best"] = "validation.loss"
        draft.options |= within("checkpoint", some(rng, 0.5, best_mode=["max"]))
    draft.options |= within("validation", drawn)
    if rng.random() < 0.3:
        draft.options |= {"metrics.sample_prompt": "the mesh", "metrics.sample_freq": "1"}
        if draft.number(PP) > 1 or draft.number(CP) > 1:
            draft.options["checkpoint.enable"] = "true"


def pipeline(rng: random.Random, draft: Draft, per_rank: int) -> int:
    """Add a pipeline of 2 ranks unless the case has a pipeline. Return the number of stages."""
    degree = draft.number(PP)
    if degree == 1:
        degree = 2
        if draft.num_ranks > 4:
            remaining_axis = rng.choice(
                [axis for axis in (DDP, FSDP, CP, TP) if draft.number(axis) > 1]
            )
            draft.drop(*{DDP, FSDP, CP, TP} - {remaining_axis}, EP)
            draft.options[remaining_axis] = "2"
        draft.options[PP] = "2"
    draft.drop("task.", f"{P}pipeline_parallel_layers_per_stage", f"{P}shard_optimizer_states")
    draft.options |= dict.fromkeys(LESS, "0")
    return degree * per_rank


def fill(rng: random.Random, draft: Draft, stages: int, layers: int) -> None:
    """Set the number of layers, and draw enough micro-batches for all stages."""
    draft.options[f"{M}num_layers"] = str(layers)
    size = rng.choice((1, 1, 2))
    draft.drop(MICRO)
    if size > 1:
        draft.options[MICRO] = str(size)
    draft.options[LOCAL] = str(size * stages * rng.choice((1, 1, 2)))
    draft.accumulation = 1


def written_schedule(rng: random.Random, draft: Draft) -> None:
    """A pipeline schedule from a file, with a random order of actions that respects their dependencies."""
    stages = pipeline(rng, draft, per_rank=2)
    fill(rng, draft, stages, stages + rng.choice((0, 0, 1)))
    microbatches = draft.number(LOCAL) // draft.number(MICRO)
    split = rng.choice(("whole", "split"))
    name = f"pp{draft.number(PP)}-stages{stages}-microbatches{microbatches}-{split}-{rng.randrange(10**6)}.csv"
    draft.options |= {SCHEDULE: WRITTEN, CSV: str(SCHEDULES / name)}
    if split == "split":
        draft.drop("compile.")
    if rng.random() < 0.3:
        named_parts(rng, draft, stages)


def write_schedule(path: Path) -> None:
    """Write the schedule that a file name of ``written_schedule`` describes, unless the file exists.

    In each column, every rank runs a random action whose dependencies are met. The last stage runs the forward passes
    of micro-batches in order, because PyTorch requires it to collect the losses. Other paths are ignored.
    """
    if path.parent != SCHEDULES or path.is_file():
        return
    *_, split, seed = path.stem.split("-")
    degree, stages, microbatches = (
        int("".join(filter(str.isdigit, part))) for part in path.stem.split("-")[:3]
    )
    rng = random.Random(f"schedule {seed}")
    done = set[tuple[int, str, int]]()
    rows: list[list[str]] = [[] for _ in range(degree)]
    # F is a forward pass and B a backward pass. A split backward has I for inputs and W for weights.
    has_split_backward = split == "split"
    backward = "I" if has_split_backward else "B"
    num_actions = stages * microbatches * (3 if has_split_backward else 2)

    def ready(rank: int) -> Iterator[tuple[int, str, int]]:
        for stage in range(rank, stages, degree):
            is_last = stage == stages - 1
            for n in range(microbatches):
                if (stage, "F", n) not in done:
                    in_order = n == 0 or not is_last or (stage, "F", n - 1) in done
                    if in_order and (stage == 0 or (stage - 1, "F", n) in done):
                        yield stage, "F", n
                elif (stage, backward, n) not in done:
                    if is_last or (stage + 1, backward, n) in done:
                        yield stage, backward, n
                elif has_split_backward and (stage, "W", n) not in done:
                    yield stage, "W", n

    while len(done) < num_actions:
        actions_of_ranks = [list(ready(rank)) for rank in range(degree)]
        for row, actions in zip(rows, actions_of_ranks, strict=True):
            if not actions:
                row.append("")
                continue
            action = rng.choice(actions)
            done.add(action)
            row.append("".join(map(str, action)))
    path.parent.mkdir(mode=0o700, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text("".join(",".join(row) + "\n" for row in rows))
    temporary.replace(path)


def named_parts(rng: random.Random, draft: Draft, stages: int) -> None:
    """Modules of each stage by name, split at random. The first and last stages may have no layer."""
    layers = [f"layers.{n}" for n in range(draft.number(f"{M}num_layers", 2))]
    # names of this package, or those of torchtitan
    first, last = ("embed", "head") if rng.random() < 0.7 else ("tok_embeddings", "output")
    names = [first, *layers, "norm", last]
    cuts = sorted(rng.sample(range(1, len(names)), stages - 1))
    bounds = itertools.pairwise([0, *cuts, len(names)])
    parts = [names[start:stop] for start, stop in bounds]
    draft.drop(*LESS)
    draft.options[PARTS] = str(parts).replace("'", '"')


def named_stages(rng: random.Random, draft: Draft) -> None:
    """A built-in schedule with an explicit list of modules per stage, also with fewer layers than stages."""
    schedule = rng.choice((*SINGLE, *LOOPED, *V_SHAPED))
    stages = pipeline(rng, draft, per_rank=1 if schedule in SINGLE else 2)
    draft.drop(CSV)
    draft.options[SCHEDULE] = schedule
    fill(rng, draft, stages, max(1, stages + rng.choice((-2, -1, -1, 0, 1, 2))))
    named_parts(rng, draft, stages)


def early_step(rng: random.Random, draft: Draft) -> None:
    """Optimizer steps during the backward pass."""
    draft.drop_pipeline()
    draft.accumulation = 1
    draft.drop(f"{P}shard_optimizer_states")
    draft.options |= {"optimizer.early_step_in_backward": "true", f"{T}max_norm": "inf"}
    if draft.options.get(f"{T}mixed_precision_param") == "float16":
        draft.drop(f"{T}mixed_precision_param", f"{T}initial_loss_scale")
    if draft.options.get("optimizer.name") == "Muon":
        draft.drop("optimizer.name", "optimizer.lr")


def low_bits(rng: random.Random, draft: Draft) -> None:
    """Optimizer state in 16 and 8 bits, and stochastic rounding."""
    draft.drop("optimizer.name", "optimizer.lr", "optimizer.muon_")
    kind = rng.choice(("8 bits", "bfloat16", "by chance", "all by chance"))
    if kind == "8 bits":
        draft.options["optimizer.name"] = "AdamW8bit"
    else:
        draft.options |= within("optimizer", some(rng, 0.4, name=["Adam"]))
    if kind in ("bfloat16", "by chance"):
        draft.options["optimizer.state_dtype"] = "bfloat16"
    if "chance" in kind:
        draft.options["optimizer.bf16_stochastic_round"] = "true"
    if kind == "all by chance":
        draft.drop(f"{T}mixed_precision", f"{T}initial_loss_scale", f"{T}loss_scale")
        draft.options |= {f"{T}dtype": "bfloat16", f"{T}mixed_precision_param": UNSET}


def float8(rng: random.Random, draft: Draft) -> None:
    """Emulated float8 matrix products."""
    draft.drop("lora.")
    if draft.options.get(f"{T}mixed_precision_param") == "float16":
        draft.drop(f"{T}mixed_precision_param", f"{T}initial_loss_scale", f"{T}loss_scale")
    grouped = draft.family in MIXTURES and rng.random() < 0.5
    draft.options["model.converters"] = f"{LINEAR}\n{GROUPED}" if grouped else LINEAR
    drawn = {
        "emulate": "true",
        **some(rng, 0.7, recipe_name=["tensorwise", "rowwise", "rowwise_with_gw_hp"]),
    }
    drawn |= some(rng, 0.4, filter_fqns=["output", "attn.wo", "attention", "layers.0"])
    if (
        drawn.get("recipe_name", "tensorwise") == "tensorwise"
        and f"{T}enable_cpu_offload" not in draft.options
    ):
        drawn |= some(rng, 0.5, enable_fsdp_float8_all_gather=["true"])
        if "enable_fsdp_float8_all_gather" in drawn:
            drawn |= some(rng, 0.5, precompute_float8_dynamic_scale_for_fsdp=["true"])
    draft.options |= within(LINEAR, drawn)
    if grouped:
        draft.options |= within(GROUPED, {"emulate": "true", "fqns": "experts"})
        if rng.random() < 0.9:
            draft.options[f"{M}moe_ffn_dim"] = "32"


def memory_budget(rng: random.Random, draft: Draft) -> None:
    """Activation checkpointing by the compiler's memory budget."""
    draft.drop(A, "compile.", "lora.base_dtype")
    draft.options |= {f"{A}mode": "memory_budget", "compile.enable": "true"}
    draft.options |= {"compile.backend": rng.choice(("aot_eager", "aot_eager_decomp_partition"))}
    draft.options |= within(A[:-1], some(rng, 0.8, memory_budget=["0", "0.1", "0.9", "1"]))
    draft.options |= within("compile", some(rng, 0.3, components=["model", "model\nloss"]))


def chunks(rng: random.Random, draft: Draft) -> None:
    """Module constants for chunk sizes and thresholds, small enough that tiny models exceed them."""
    drawn = some(
        rng,
        0.6,
        **{
            "shardtrain.distributed.loss_at_head.WORTH_IT_BYTES": ["0"],
            "shardtrain.ops.cross_entropy.CPU_CHUNK_NUMEL": ["700", "2000"],
            "shardtrain.ops.cross_entropy.CHUNK_NUMEL": ["700", "2000"],
            "shardtrain.ops.distillation_loss.CHUNK_NUMEL": ["700", "2000"],
            "shardtrain.ops.cpu.rms_norm._CHUNK_NUMEL": ["100"],
            "shardtrain.ops.dtensor.NORM_CHUNK_NUMEL": ["1000"],
            "shardtrain.optim.low_bits._CHUNK": ["100", "3000"],
        },
    )
    draft.options |= {f"{CONSTANT}{name}": value for name, value in drawn.items()}


def saving(rng: random.Random, draft: Draft) -> None:
    """Checkpoints of all kinds between steps. Most of these runs resume on another mesh."""
    draft.moves = rng.random() < 0.8
    drawn = {
        "enable": "true",
        "interval": "1",
        "async_mode": rng.choice(("async", "async", "disabled")),
    }
    drawn |= some(
        rng,
        0.3,
        compare_replicas=["false"],
        storage=["first_node"],
        enable_first_step_checkpoint=["true"],
    )
    drawn |= some(
        rng,
        0.2,
        keep_latest_k=["2", "0"],
        last_save_model_only=["true"],
        on_save_error=["continue"],
    )
    # the Hugging Face format does not support all options of other families
    unsupported = {"model.norm_type", f"{M}sliding_window"} & draft.options.keys()
    if draft.family in ("llama3", "qwen2", "qwen3") and not unsupported:
        drawn |= some(rng, 0.3, last_save_in_hf=["true"], hf_interval=["1"])
    drawn |= some(rng, 0.2, export_dtype=["bfloat16"])
    drawn |= some(rng, 0.15, keep_every_n_steps=["1"], exclude_from_loading=["lr_scheduler"])
    if drawn.get("storage") == "first_node":
        drawn["async_mode"] = "disabled"
    draft.options |= within("checkpoint", drawn)
    draft.options |= within("training", some(rng, 0.3, replica_check_interval=["1"]))


RATES: dict[str, Sequence[str]] = {
    "decay_ratio": ["0.5"],
    "decay_type": ["sqrt", "cosine"],
    "min_lr_factor": ["0.3"],
    "total_steps": ["5"],
    "warmup_proportion": ["0.5"],
    "warmup_type": ["linear"],
}


def rates(rng: random.Random, draft: Draft) -> None:
    """Every learning-rate schedule with its options, and the hyperparameters of the optimizers."""
    name = rng.choice(list(RATE_SCHEDULES))
    supported = (*options_of(RATE_SCHEDULES[name]), "total_steps")
    values = {option: RATES[option] for option in supported if option != "warmup_steps"}
    drawn = {"name": name, **some(rng, 0.5, **values)}
    drawn["warmup_steps"] = rng.choice(("0", "1", "2", "3"))
    if "warmup_proportion" in supported:  # warmup_steps would override it, or has no effect
        drawn["warmup_steps"] = "0" if "warmup_steps" in supported else UNSET
    draft.options |= within("lr_scheduler", drawn)
    constants = some(
        rng, 0.4, beta1=["0.5", "0"], beta2=["0.999"], weight_decay=["0", "0.5"], eps=["1e-2"]
    )
    constants |= some(rng, 0.2, no_weight_decay=["*attn*", "*norm*\n*attn*"])
    excludes_muon = {
        "optimizer.name",
        "optimizer.state_dtype",
        "optimizer.bf16_stochastic_round",
        "optimizer.early_step_in_backward",
    }
    if rng.random() < 0.3 and not excludes_muon & draft.options.keys():
        draft.options |= {"optimizer.name": "Muon", "optimizer.lr": "1e-3"}
    if draft.options.get("optimizer.name") == "Muon":
        constants |= some(
            rng, 0.4, muon_momentum=["0.5"], muon_nesterov=["false"], muon_steps=["3"]
        )
        constants |= some(
            rng, 0.4, muon_update_rms=["0.1"], muon_adamw_patterns=["embed*\nhead*\n*norm*\n*attn*"]
        )
        constants |= some(rng, 0.3, muon_dtype=["float32"])
        constants |= some(rng, 0.3, qk_clip_threshold=["0.05"])
    draft.options |= within("optimizer", constants)


def rows(rng: random.Random, draft: Draft) -> None:
    """Row tasks with their options, often on a small dataset that ends."""
    draft.drop_pipeline()
    draft.drop("data.", "task.", CP, f"{P}context", f"{T}on_data_end")
    draft.options |= {
        f"{T}dataset": "jsonl",
        f"{T}dataset_path": rng.choice((DOCUMENTS, FEW, FEW)),
        SEQ: "32",
    }
    name = rng.choice(("classification", "reward_model", *OF_ANSWERS))
    drawn = {"name": name}
    if name == "classification":
        drawn |= rng.choice(
            ({"num_labels": "4"}, {"labels": "0\n1\n2\n3"}, {"labels": "3\n1\n0\n2"})
        )
        drawn |= some(rng, 0.4, pair_field=["prompt", "completion"])
    elif name == "kto":
        drawn |= {"label_field": "is_good", **some(rng, 0.5, group_size=["2", "3"], beta=["0.5"])}
        drawn |= some(rng, 0.4, desirable_weight=["2"], undesirable_weight=["0.5"])
    else:
        drawn |= some(rng, 0.3, chosen_field=["rejected"])
        if "chosen_field" in drawn:
            drawn["rejected_field"] = "chosen"
        if name != "reward_model":
            drawn |= some(rng, 0.5, beta=["0.5"])
        if name == "simpo":
            drawn |= some(rng, 0.5, gamma=["1.5"])
    draft.options |= within("task", drawn)
    if draft.options[f"{T}dataset_path"] == FEW:
        if rng.random() < 0.7:
            draft.options |= {f"{T}epochs": "1", f"{T}steps": UNSET}
        else:
            draft.options[f"{T}on_data_end"] = "repeat"
        if name != "kto":
            draft.options |= within("training", some(rng, 0.6, last_batch=["keep", "discard"]))
    rows_per_step = (
        draft.number(LOCAL) * draft.number(DDP) * draft.number(FSDP) * draft.accumulation
    )
    if draft.options.get(f"{T}last_batch") == "discard" and rows_per_step > FEW_ROWS:
        # Without a full batch the run would have no step, which is only refused after rows are read.
        draft.drop(f"{T}last_batch")
    if TP in draft.options:
        draft.options[f"{P}disable_loss_parallel"] = "true"


def given_weights(rng: random.Random, draft: Draft) -> None:
    """Initial weights from a Hugging Face folder, with resized embeddings or existing adapters."""
    draft.drop(M, "model.", "task.", "debug.moe", EP)
    drawn = {"enable": "true", "initial_load_path": LLAMA, "initial_load_in_hf": "true"}
    draft.options |= {f"{M}num_layers": "2", f"{M}vocab_size": "320"}
    if rng.random() < 0.3:
        drawn["initial_load_resize_embeddings"] = "true"
        draft.options[f"{M}vocab_size"] = "336"
    draft.drop("lora.")
    if rng.random() < 0.4:
        draft.drop("model.converters", "quantize.")
        draft.options |= within(
            "lora", {"enable": "true", "rank": "4", **some(rng, 0.5, base_dtype=["nf4", "int8"])}
        )
        if "initial_load_resize_embeddings" in drawn:
            draft.options["lora.modules_to_save"] = "embed_tokens\nlm_head"
        elif rng.random() < 0.5:
            draft.options |= {
                "lora.initial_load_path": ADAPTER,
                "lora.target_modules": "q_proj\nv_proj",
            }
            draft.options["lora.alpha"] = "8"
    draft.options |= within("checkpoint", drawn)


NETWORKS = {
    LLAMA: "language_model",
    f"{FIXTURES}/gpt2": "language_model",
    f"{FIXTURES}/bert": "masked_language_model",
    f"{FIXTURES}/t5": "sequence_to_sequence",
    f"{FIXTURES}/bart": "sequence_to_sequence",
}
"""Folders of ``transformers`` networks, with their tasks."""


def as_is(rng: random.Random, draft: Draft) -> None:
    """A ``transformers`` network of any kind, built from its config.json.

    Of these, only Llama has a tensor-parallel plan and supports context parallelism.
    """
    folder, task = rng.choice(list(NETWORKS.items()))
    draft.drop_pipeline()
    draft.drop(M, "model.", "task.", "debug.moe", "lora.", "optimizer.no_weight_decay", PP, EP)
    if folder != LLAMA:
        draft.drop(CP, f"{P}context")
    if draft.options.get("optimizer.name") == "Muon":
        draft.drop("optimizer.name", "optimizer.lr", "optimizer.muon_")
    if folder != LLAMA:
        draft.drop(TP, f"{P}disable_loss")
    elif TP in draft.options:
        draft.drop("compile.")
    draft.options |= {
        "model.name": AS_IS,
        f"{M}path": folder,
        f"{M}num_layers": UNSET,
        f"{M}vocab_size": UNSET,
    }
    draft.options |= within(M[:-1], some(rng, 0.3, attention=["eager", "sdpa"]))
    draft.options[SEQ] = rng.choice(("16", "24", "40"))
    if folder == LLAMA and rng.random() < 0.5:
        draft.options |= within("checkpoint", {"enable": "true", "initial_load_path": LLAMA})
        draft.options["checkpoint.initial_load_in_hf"] = "true"
    if task != "language_model":
        draft.drop("data.")
        draft.options |= {"task.name": task, SEQ: "32"}
    if task == "masked_language_model":
        draft.options |= {"task.options.mask_token_id": "259", "task.options.mask_fraction": "0.3"}


def recomputation(rng: random.Random, draft: Draft) -> None:
    """Options of activation recomputation."""
    draft.drop(A, "compile.")
    draft.options[f"{A}mode"] = rng.choice(("selective", "selective", "full"))
    drawn = some(
        rng, 0.5, early_stop=["true"], determinism_check=["none"], preserve_rng_state=["false"]
    )
    if draft.options[f"{A}mode"] == "selective":
        drawn["selective_ac_option"] = rng.choice(("op", "op", "1", "3"))
        if drawn["selective_ac_option"] == "op":
            shapes = ["attn.wq", "ffn.w2\nmoe.router.gate", "head"]
            drawn |= some(rng, 0.6, per_op_sac_force_recompute_mm_shapes_by_fqns=shapes)
    drawn |= some(rng, 0.2, cpu_offload=["true"], debug=["true"])
    draft.options |= within(A[:-1], drawn)


def workers(rng: random.Random, draft: Draft) -> None:
    """Data loader workers."""
    draft.options |= within(f"{T}dataloader", {"num_workers": rng.choice(("1", "2"))})
    draft.options |= within(
        f"{T}dataloader", some(rng, 0.5, persistent_workers=["true"], prefetch_factor=["1", "3"])
    )


def guards(rng: random.Random, draft: Draft) -> None:
    """Guards against bad values, and options that are documented to have no effect on the result."""
    drawn = some(
        rng,
        0.4,
        nonfinite_policy=["skip"],
        spike_policy=["off", "skip"],
        replica_check_interval=["1"],
    )
    drawn |= some(rng, 0.3, cpu_kernels=["pytorch"], gc_freq=["1"])
    if f"{T}on_data_end" not in draft.options and f"{T}epochs" not in draft.options:
        drawn |= some(rng, 0.3, on_data_end=["repeat"])
    draft.options |= within("training", drawn)
    if draft.options.get(f"{T}mixed_precision_param") == "float16":
        draft.options |= within("training", some(rng, 0.7, loss_scale_growth_interval=["1"]))
    if rng.random() < 0.3:
        draft.options["debug.deterministic"] = "true"
    if "debug.deterministic" in draft.options:
        draft.options |= within("debug", some(rng, 0.5, deterministic_warn_only=["true"]))
    if TP in draft.options:
        draft.options[f"{P}expert_tensor_parallel_degree"] = draft.options[TP]
    draft.options |= within(
        P[:-1], some(rng, 0.3, pipeline_parallel_expert_parallel_overlap=["false"])
    )


NOT_DRAWN: dict[str, tuple[str, ...]] = {
    "names and paths of output files": (
        "job.config_file", "job.dump_folder", "job.description", "job.print_config", "job.save_config_file",
        "checkpoint.folder", "checkpoint.allow_shared_writable", "comm.save_traces_folder",
        "comm.save_traces_file_prefix", "metrics.save_tb_folder", "metrics.save_log_file",
        "profiling.save_traces_folder", "profiling.save_memory_snapshot_folder",
    ),
    "reporting of values that are computed anyway": (
        "metrics.log_freq", "metrics.enable_tensorboard", "metrics.disable_color_printing",
        "metrics.save_for_all_ranks", "metrics.enable_wandb", "metrics.enable_mlflow", "metrics.enable_trackio",
        "metrics.prometheus_port", "metrics.prometheus_address", "metrics.sinks", "metrics.peak_flops",
        "metrics.token_metrics", "metrics.per_source_loss",
        "metrics.legacy_tags", "model.print_after_conversion", "training.gc_debug",
        "activation_checkpoint.visualize_memory_budget_pareto",
    ),
    "a cache of tokens for the next start: tests/data/documents/test_token_cache.py": ("data.cache_tokens",),
    "selects the target tokens of a turn, row by row: tests/data/chat/test_conversations.py": (
        "data.learn_turn_separator", "data.turn_end",
    ),
    "a profiler, which only observes": (
        "profiling.enable_profiling", "profiling.profile_freq", "profiling.profiler_active",
        "profiling.profiler_warmup", "profiling.profile_memory", "profiling.enable_memory_snapshot",
    ),
    "names a file that adds options and changes no number: tests/config/test_custom_sections.py": (
        "job.custom_config_module",
    ),
    "not available: refused before a rank starts": (
        "parallelism.expert_parallel_comm_backend", "quantize.grouped_mm.mx.",
        "memory_estimation.", "experimental.", "fault_tolerance.",
    ),
    "requires sizes divisible by 32, larger than those here: tests/distributed/test_float8_mx.py": (
        "quantize.linear.mx.",
    ),
    "the exit status of a stopped command: tests/launch": ("checkpoint.stop_exit_code",),
    "only used by shardtrain launch": ("launch.",),
    "only used by shardtrain test": ("task.test_dataset_path", "task.test_split"),
    "for accelerators: refused or without effect on a CPU": (
        "training.flash_attention", "parallelism.enable_async_tensor_parallel", "training.dataloader.pin_memory",
        "validation.dataloader.pin_memory",
    ),
    "accepted without effect": ("checkpoint.enable_ft_dataloader_checkpoints",),
    "timeouts, memory limits and diagnostics of failed runs": (
        "comm.init_timeout_seconds", "comm.train_timeout_seconds", "comm.hang_timeout_seconds",
        "comm.straggler_window_steps", "comm.trace_buf_size", "checkpoint.grace_seconds",
        "checkpoint.max_stall_seconds", "data.artefact_memory_bytes", "data.artefact_seconds",
    ),
    "builds a mesh in one process without training": ("comm.mode",),
    "times of saves by the clock; saves themselves are drawn": (
        "checkpoint.interval_type", "checkpoint.mean_time_to_failure_hours",
    ),
    "copies for restarts of a launcher: tests/checkpoint/test_snapshots.py": (
        "checkpoint.snapshot_interval",
    ),
    "selects the checkpoint to resume from; resuming itself is drawn": (
        "checkpoint.load_step", "checkpoint.load_only", "checkpoint.create_seed_checkpoint",
        "checkpoint.accept_changes", "checkpoint.initial_load_model_only",
    ),
    "formats of weight files: tests/hf compares their tensors": (
        "checkpoint.initial_load_in_hf_quantized", "checkpoint.initial_load_legacy_bin",
    ),
    "datasets of the Hugging Face hub, which tests cannot reach": (
        "data.split", "data.subset", "data.streaming", "data.sources.NAME.split", "data.sources.NAME.subset",
        "validation.split",
    ),
    "random masks that depend on the mesh by definition: tests/test_dropout.py": ("lora.dropout",),
    "handles non-finite values, which these runs do not have: tests/resilience/guards": (
        "training.nonfinite_max_skips", "training.nonfinite_max_skip_fraction",
    ),
    "compares a loss with the previous 20 steps, and these runs have 2: tests/resilience/guards": (
        "training.spike_window", "training.spike_sigmas", "training.spike_rewind_steps", "training.spike_skip_steps",
        "training.max_rewinds",
    ),
    "checks a user's model file before the run: tests/train/preflight": ("model.check",),
    "compares a configuration with a file: tests/config/test_certificate.py": ("job.certificate",),
    "losses that tests/tasks/test_preference.py and tests/distributed/test_loss_terms_on_meshes.py compare": (
        "task.loss_type", "task.label_smoothing", "task.nll_weight", "task.reference_free", "task.reference_path",
        "training.label_smoothing", "training.z_loss_weight",
    ),
    "an average of weights, which training does not read: tests/train/test_moving_average.py": (
        "training.ema_decay", "validation.use_ema",
    ),
    "replayed by a plain loop on several meshes: tests/train/test_ramps.py": (
        "training.batch_ramp", "training.sequence_ramp",
    ),
    "noise that tests/distributed/test_embedding_noise.py compares on meshes": ("training.neftune_noise_alpha",),
    "used by the task image_text: tests/tasks/test_image_text.py": (
        "data.images_field", "data.image_folder", "data.max_image_pixels", "data.max_image_bytes",
        "task.frozen_modules", "task.planned_images",
    ),
}  # fmt: skip
"""Options that no case draws, by the reason why they cannot change a result. A name that ends in a dot is a section."""


Feature = Callable[[random.Random, Draft], None]
FIRST: dict[str, Feature] = {
    "written_schedule": written_schedule,
    "named_stages": named_stages,
    "rows": rows,
    "distillation": distillation,
    "given_weights": given_weights,
    "as_is": as_is,
}
"""Features that choose the mesh, the task or the model. A case has at most one of them, and draws it first."""
OTHERS: dict[str, Feature] = {
    "adapters": adapters,
    "mixture": mixture,
    "chat": chat,
    "columns": columns,
    "early_step": early_step,
    "low_bits": low_bits,
    "float8": float8,
    "memory_budget": memory_budget,
    "saving": saving,
    "rates": rates,
    "recomputation": recomputation,
    "workers": workers,
    "guards": guards,
    "validation": validation,
    "chunks": chunks,
    "multi_token": multi_token,
}
FEATURES = (*FIRST, *OTHERS)
ARCHITECTURES = "architectures"
"""Feature that is drawn only on request, to keep older cases unchanged."""
_OF_DOCUMENTS = ("mixture", "chat", "columns")
"""Features of document data. They exclude each other, and row tasks support none of them."""


def add(rng: random.Random, draft: Draft, features: Sequence[str]) -> None:
    """Add one to three of the features, without those that exclude each other."""
    if ARCHITECTURES in features:
        search_architectures.add(rng, draft)
        if not {f"{T}epochs", f"{T}on_data_end"} & draft.options.keys():
            draft.options[f"{T}on_data_end"] = "repeat"
        return
    chosen = rng.sample(features, min(len(features), rng.choice((1, 2, 2, 3))))
    first = [name for name in chosen if name in FIRST][:1]
    if draft.family == "encoder":  # other features do not support bidirectional attention
        first = [name for name in first if name in ("given_weights", "as_is")]
    for name in first:
        FIRST[name](rng, draft)
    keeps_task = first in (["rows"], ["as_is"]) or draft.family == "encoder"
    if not keeps_task and draft.options.get("task.name") != "distillation":
        draft.drop("task.")
    excluded = [name for name in chosen if name in _OF_DOCUMENTS]
    if draft.options.get("task.name") in (None, "distillation"):
        excluded = excluded[1:]
    if draft.family in ("encoder", AS_IS):
        excluded += ["adapters", "float8"]
    for name, feature in OTHERS.items():
        if name in chosen and name not in excluded:
            feature(rng, draft)
    # Features may drop documents. Define what happens if too few rows remain for all steps.
    if not {f"{T}epochs", f"{T}on_data_end"} & draft.options.keys():
        draft.options[f"{T}on_data_end"] = rng.choice(("repeat", "repeat", "repeat", "stop"))


def tolerance(case: Case) -> str:
    """Return the key in ``search.TOLERANCES`` for a case."""
    if not case.is_exact:
        return "reduced"
    if case.value("model.converters"):
        # a different rounding can route a token to another expert, and errors accumulate over the layers
        return "reduced" if case.value("model.name") in MIXTURES else "float8"
    if case.value("optimizer.name") == "AdamW8bit":
        return "8 bits"
    if case.value("optimizer.state_dtype") == "bfloat16":
        return "16 bits"
    if case.value("optimizer.name") == "Muon":
        return "Muon"
    if case.value("task.name") in NEW_HEAD:
        return "steep"
    return "clamped" if case.value(f"{M}swiglu_limit") else "float32"


def broken(case: Case) -> Iterator[Broken]:
    """Yield the documented rules of features that a case breaks."""
    yield from _of_stages(case)
    yield from _of_ranks(case)
    yield from _of_networks(case)
    yield from _of_learning(case)
    yield from _of_recomputation(case)
    yield from _of_teacher(case)
    yield from _of_data(case)
    yield from _of_validation(case)


def is_on(case: Case, option: str) -> bool:
    """True if a boolean option is set."""
    return case.value(option) == "true"


def has_compiled_layers(case: Case) -> bool:
    """True if the model, and not only the loss, is compiled."""
    return is_on(case, "compile.enable") and case.value("compile.components", "model") != "loss"


def _of_stages(case: Case) -> Iterator[Broken]:
    if case.number(PP) == 1:
        return
    layers_per_stage = f"{P}pipeline_parallel_layers_per_stage"
    if case.value(PARTS) and layers_per_stage in case.options:
        yield Broken(
            "a list of modules per stage excludes a number of layers per stage", (layers_per_stage,)
        )
    if has_compiled_layers(case) and "-split-" in case.value(CSV):
        yield Broken("compiled layers do not support a split backward pass", (CSV,))


def _of_learning(case: Case) -> Iterator[Broken]:
    yield from _of_early_step(case)
    yield from _of_qk_clip(case)
    yield from _of_adapters(case)
    yield from _of_float8(case)
    if case.value(f"{A}mode") == "memory_budget" and not has_compiled_layers(case):
        yield Broken("a memory budget requires compilation", (f"{A}mode",))
    if case.value(f"{A}mode") == "memory_budget" and is_on(case, f"{A}cpu_offload"):
        yield Broken("a memory budget does not support offloading of inputs", (f"{A}cpu_offload",))


def _of_qk_clip(case: Case) -> Iterator[Broken]:
    if not case.value(QK_CLIP):
        return
    is_unsupported = (
        case.value("optimizer.name") != "Muon",
        is_on(case, "optimizer.early_step_in_backward"),
        is_on(case, "lora.enable"),
        case.value("model.name") == AS_IS,
        case.value("task.name", "language_model") not in ("language_model", "distillation"),
    )
    if any(is_unsupported):
        yield Broken("only Muon clips, and only trained weights of known models", (QK_CLIP,))
    if case.value("model.name") in ("qwen3", "qwen3_moe", "qwen3_next"):
        yield Broken("weights do not scale the logits of normalized queries", (QK_CLIP,))


def _of_early_step(case: Case) -> Iterator[Broken]:
    if not is_on(case, "optimizer.early_step_in_backward"):
        return
    needs_all_gradients = (
        case.number(PP) > 1,
        is_on(case, f"{P}shard_optimizer_states"),
        case.value(f"{T}mixed_precision_param") == "float16",
        case.accumulation > 1,
        case.value(f"{T}max_norm", "1") != "inf",
        case.value("optimizer.name") == "Muon",
        case.value(f"{T}nonfinite_policy") == "skip",
        case.value(f"{T}spike_policy") == "skip",
    )
    if any(needs_all_gradients):
        rule = "a step in backward frees gradients, so nothing may need all of them"
        yield Broken(rule, ("optimizer.early_step_in_backward",))


def _of_adapters(case: Case) -> Iterator[Broken]:
    has_adapters = is_on(case, "lora.enable")
    if case.value("lora.base_dtype", "training") != "training":
        excludes_packed_weights = (
            case.number(TP) > 1,
            has_compiled_layers(case),
            is_on(case, f"{T}enable_cpu_offload"),
            case.value("checkpoint.storage") == "first_node",
        )
        if any(excludes_packed_weights):
            yield Broken(
                "packed weights must stay unsharded and on the device", ("lora.base_dtype",)
            )
        if case.value("task.name") in ("preference", "kto"):
            yield Broken(
                "the reference model of these tasks must not be rounded", ("lora.base_dtype",)
            )
    for option in ("checkpoint.last_save_in_hf", "checkpoint.hf_interval"):
        if option in case.options and has_adapters:
            yield Broken("a run with adapters saves only the adapters", (option,))
    if has_adapters and case.value("model.converters"):
        yield Broken("float8 does not support frozen weights", ("model.converters",))
    fully_trained = case.value("lora.modules_to_save").split("\n")
    if "norm" in fully_trained and case.value("model.norm_type") == "np_layernorm":
        yield Broken("modules_to_save must have parameters", ("lora.modules_to_save",))
    if case.value("task.name") in NEW_HEAD:
        fully_trained.append("head")
    if "head" in fully_trained and "head" in case.value("lora.target_modules").split(","):
        yield Broken("a fully trained module must not have an adapter", ("lora.target_modules",))


def _of_float8(case: Case) -> Iterator[Broken]:
    options = case.resolved()
    all_gather = f"{LINEAR}.enable_fsdp_float8_all_gather"
    if is_on(case, all_gather) and is_on(case, f"{T}enable_cpu_offload"):
        yield Broken("float8 all-gather requires weights on the device", (all_gather,))
    only_head_is_left = (
        case.value("model.name") == "gpt_oss" and case.value(f"{LINEAR}.filter_fqns") == "attention"
    )
    if only_head_is_left and int(options[f"{M}vocab_size"]) % 16:
        yield Broken(
            "float8 needs a layer whose sizes are multiples of 16", (f"{LINEAR}.filter_fqns",)
        )
    if GROUPED not in case.value("model.converters").split("\n"):
        return
    if int(options[f"{M}moe_ffn_dim"]) % 16:
        yield Broken("float8 experts require sizes that are multiples of 16", (f"{GROUPED}.fqns",))
    interval = int(options.get(f"{M}interleave_moe_layer_step", "1"))
    num_dense_layers = int(options.get(f"{M}num_dense_layers", "0"))
    first_expert_layer = max(interval, num_dense_layers + 1)
    if first_expert_layer > case.number(f"{M}num_layers", 2):
        yield Broken("float8 experts require a layer with experts", (f"{GROUPED}.fqns",))


def _of_recomputation(case: Case) -> Iterator[Broken]:
    """Rules of PyTorch's debug mode, which checks that recomputation repeats the same operations."""
    if not is_on(case, f"{A}debug"):
        return
    may_split_backward = case.value(SCHEDULE) in SPLIT or bool(case.value(CSV))
    has_split_backward = case.number(PP) > 1 and may_split_backward
    is_selective = case.value(f"{A}mode") == "selective"
    is_per_op = is_selective and case.value(f"{A}selective_ac_option", "2") == "op"
    if has_split_backward or is_per_op:
        yield Broken(
            "PyTorch can only debug a single recomputation of entire layers", (f"{A}debug",)
        )
    if has_compiled_layers(case) and case.value(f"{A}mode") in ("full", "selective"):
        yield Broken("PyTorch cannot debug the recomputation of compiled layers", (f"{A}debug",))


def _of_ranks(case: Case) -> Iterator[Broken]:
    """Each rank needs a trainable parameter.

    A named stage without layers has none if adapters are only on layers.
    """
    if case.number(PP) == 1 or case.value("lora.enable") != "true" or not case.value(PARTS):
        return
    stages = [list(part) for part in json.loads(case.value(PARTS))]
    degree = case.number(PP)
    schedule = case.value(SCHEDULE, "1F1B")
    trained = set(case.value("lora.modules_to_save").split("\n"))
    if "head" in case.value("lora.target_modules").split(","):
        trained.add("head")
    aliases = {"embed": "tok_embeddings", "head": "output"}
    trained |= {aliases[name] for name in trained if name in aliases}
    for rank in range(degree):
        stages_of_rank: Sequence[int] = range(rank, len(stages), degree)
        if schedule in V_SHAPED:
            stages_of_rank = [2 * degree - 1 - rank, rank]
        names: set[str] = set()
        for stage in stages_of_rank:
            if stage < len(stages):
                names |= set(stages[stage])
        has_layers = any(name.startswith("layers.") for name in names)
        if not has_layers and not names & trained:
            yield Broken("each rank must have a trainable parameter", ("lora.target_modules",))
            return


def _of_networks(case: Case) -> Iterator[Broken]:
    """Rules of ``transformers`` networks: which axes they support.

    They support context parallelism, and tensor parallelism by their own plan.
    """
    if case.value("model.name") != AS_IS:
        return
    if search_architectures.name_of(case):
        yield from search_architectures.broken(case)
        yield from _of_parts(case)
        return
    for option in (PP, EP):
        if case.number(option) > 1:
            yield Broken("transformers networks do not support this axis", (option,))
    tp = case.number(TP)
    cp = case.number(CP)
    if cp > 1 and case.value(f"{M}path") != LLAMA:
        yield Broken("only causal language models split sequences", (CP,))
    yield from _of_parts(case)
    if tp > 1 and (case.value(f"{M}path") != LLAMA or 2 % tp):
        yield Broken("the tensor-parallel plan of a network must divide its heads", (TP,))
    if tp > 1 and has_compiled_layers(case):
        yield Broken("compiled blocks do not support tensor parallelism", ("compile.enable",))
    if case.value("optimizer.name") == "Muon":
        yield Broken(
            "patterns must match the network's parameter names", ("optimizer.muon_adamw_patterns",)
        )


def _of_parts(case: Case) -> Iterator[Broken]:
    """Rules of context parallelism: ranks must divide the sequence and, with Ulysses, the 2 KV heads."""
    tp = case.number(TP)
    cp = case.number(CP)
    seq_len = case.number(SEQ)
    chunks = context_chunks(case)
    if seq_len % chunks or seq_len // cp % tp:
        yield Broken(
            f"{seq_len} tokens must be divisible into {chunks} chunks, and {tp} parts per rank",
            (SEQ,),
        )
    if cp > 1 and case.value(f"{P}context_parallel_method") == "ulysses" and 2 % (tp * cp):
        yield Broken(f"ulysses must divide the 2 KV heads by {tp * cp}", (CP,))


def _of_teacher(case: Case) -> Iterator[Broken]:
    if case.value("task.name") != "distillation":
        return
    tp = case.number(TP)
    cp = case.number(CP)
    if case.number(PP) > 1:
        yield Broken("distillation does not support pipelines", (PP,))
    if 2 % tp:
        yield Broken("tensor parallelism must divide the 2 KV heads of the teacher", (TP,))
    if cp > 1 and case.value(f"{P}context_parallel_method") == "ulysses" and 2 % (tp * cp):
        yield Broken("ulysses must divide the 2 KV heads of the teacher", (CP,))
    if (
        tp > 1
        and not is_on(case, f"{P}disable_loss_parallel")
        and case.number(f"{M}vocab_size") != 320
    ):
        yield Broken("both vocabularies must be sharded in the same way", ("task.teacher_path",))
    if "python_bpe" in (case.value("model.hf_assets_path"), case.value("model.tokenizer_path")):
        yield Broken(
            "the teacher has 320 rows, and the tokenizer 2,048 ids", ("task.teacher_path",)
        )


def _of_data(case: Case) -> Iterator[Broken]:
    epochs = tuple(name for name in case.options if name.endswith(".epochs"))
    if case.value("data.mode") == "stream" and epochs:
        yield Broken("a stream does not support epochs", epochs)
    if case.value(f"{T}epochs") and case.value(f"{T}on_data_end"):
        yield Broken("epochs exclude on_data_end", (f"{T}on_data_end",))


def _of_validation(case: Case) -> Iterator[Broken]:
    if case.value("validation.enable") != "true":
        return
    option = "validation.seq_len"
    seq_len = case.number("validation.seq_len", 2048)
    chunks = context_chunks(case)
    if seq_len % chunks or seq_len // case.number(CP) % case.number(TP):
        yield Broken(f"context and tensor parallelism must divide {seq_len} tokens", (option,))
    if case.number(PP) > 1 and seq_len != case.number(SEQ):
        yield Broken("a pipeline supports only one sequence length", (option,))
    if case.value("validation.per_epoch") and case.value("data.mode") == "stream":
        yield Broken("a stream does not support epochs", ("validation.per_epoch",))
    if case.value("validation.per_epoch") and any(
        name.startswith("data.sources") for name in case.options
    ):
        yield Broken("a mixture does not support epochs", ("validation.per_epoch",))


def context_chunks(case: Case) -> int:
    """Number of chunks into which context parallelism divides a sequence."""
    cp = case.number(CP)
    is_ring = case.value(f"{P}context_parallel_method", "ring") == "ring"
    is_balanced = (
        is_ring and case.value(f"{P}context_parallel_load_balancer", "headtail") == "headtail"
    )
    return 2 * cp if cp > 1 and is_balanced else cp
