"""Reader of torchtune's YAML, which names components by Python path and contains ``${name}`` references."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.compat.migrate.migration_report import (
    JOINED,
    Cannot,
    FileMigration,
    Idle,
    Rule,
    To,
    default_to_constant_rate,
)
from shardtrain.compat.migrate.training_arguments import accumulate, model_folder

SYSTEM = "torchtune"
OPEN = "this recipe argument has no counterpart"
LEAVES: frozenset[str] = frozenset()
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_PROFILER = Idle("only affects the content of a trace, not numbers")
_GENERATION = Idle("only used for generation: see `shardtrain generate --help`")

KEYS: Mapping[str, Rule] = {
    "output_dir": To("job.dump_folder", str),
    "log_dir": Idle("files are written below job.dump_folder"),
    "profiling_dir": Idle("files are written below job.dump_folder"),
    "checkpoint_dir": Idle("only used in references"),
    # The folder's config.json determines the model. These only matter for adapters.
    "model._component_": JOINED,
    "model.lora_attn_modules": JOINED,
    "model.apply_lora_to_mlp": JOINED,
    "model.apply_lora_to_output": Cannot("the head stays frozen while adapters are trained"),
    "model.lora_rank": To("lora.rank", int),
    "model.lora_alpha": To("lora.alpha", float),
    "model.lora_dropout": To("lora.dropout", float),
    "model.use_dora": To("lora.use_dora", bool),
    "model.quantize_base": JOINED,
    # A Hugging Face folder contains its tokenizer.
    "tokenizer._component_": Idle("the tokenizer comes from model.hf_assets_path"),
    "tokenizer.path": Idle("the tokenizer comes from model.hf_assets_path"),
    "tokenizer.merges_file": Idle("the tokenizer comes from model.hf_assets_path"),
    "tokenizer.max_seq_len": JOINED,
    "tokenizer.prompt_template": Cannot(
        "save it as a chat template file, and set data.chat_template to its path"
    ),
    "checkpointer._component_": Idle("weights come from a Hugging Face folder"),
    "checkpointer.checkpoint_dir": JOINED,
    "checkpointer.checkpoint_files": Idle("the folder's index lists its files"),
    "checkpointer.checkpoint_files.*": Idle("the folder's index lists its files"),
    "checkpointer.adapter_checkpoint": To("lora.initial_load_path", str),
    "checkpointer.recipe_checkpoint": Idle(
        "a run resumes automatically from the newest checkpoint in its folder"
    ),
    "checkpointer.output_dir": Idle("checkpoints are written below job.dump_folder"),
    "checkpointer.model_type": Idle("the folder's config.json determines the model"),
    "resume_from_checkpoint": Idle(
        "a run resumes automatically from the newest checkpoint in its folder"
    ),
    "save_adapter_weights_only": Idle("checkpoints of adapter training contain only adapters"),
    # Each builder has its own arguments, which map to one dataset here.
    "dataset._component_": JOINED,
    "dataset.source": JOINED,
    "dataset.path": JOINED,
    "dataset.data_files": JOINED,
    "dataset.split": JOINED,
    "dataset.packed": JOINED,
    "dataset.train_on_input": JOINED,
    "dataset.column": JOINED,
    "dataset.column_map.*": Cannot(
        "set the columns in data.prompt_field and data.completion_field, or in data.template"
    ),
    "dataset.conversation_column": To("data.messages_field", str),
    "dataset.conversation_style": Cannot(
        "rows must be {role, content} objects; data.template converts other formats"
    ),
    "dataset.new_system_prompt": Cannot("the chat template contains the system message"),
    "seed": JOINED,
    "shuffle": Cannot("rows are always shuffled", off=(None, True)),
    "batch_size": JOINED,
    "epochs": To("training.epochs", int),
    "max_steps_per_epoch": JOINED,
    "gradient_accumulation_steps": JOINED,
    "clip_grad_norm": JOINED,
    "optimizer._component_": JOINED,
    "optimizer.lr": To("optimizer.lr", float),
    "optimizer.weight_decay": To("optimizer.weight_decay", float),
    "optimizer.eps": To("optimizer.eps", float),
    "optimizer.betas": JOINED,
    "optimizer.fused": To(
        "optimizer.implementation", bool, lambda on: "fused" if on else "foreach"
    ),
    "optimizer.foreach": Idle("only selects a kernel for the same update"),
    "optimizer_in_bwd": Cannot(
        "parameters are updated after gradients are clipped, not during the backward pass"
    ),
    "lr_scheduler._component_": JOINED,
    "lr_scheduler.num_warmup_steps": JOINED,
    "lr_scheduler.num_cycles": Cannot("the cosine always has half a cycle", off=(None, 0.5)),
    "loss._component_": JOINED,
    "loss.num_output_chunks": Idle("the loss is always computed in chunks"),
    "loss.ignore_index": Idle("tokens without loss have no target"),
    "compile": To("compile.enable", bool),
    "device": JOINED,
    "dtype": JOINED,
    "enable_activation_checkpointing": To(
        "activation_checkpoint.mode", bool, lambda on: "full" if on else "none"
    ),
    "enable_activation_offloading": JOINED,
    "activation_offloading_use_streams": Idle(
        "only affects how activations are offloaded, not numbers"
    ),
    "low_cpu_ram": Idle("each rank reads only its shards"),
    "fsdp_cpu_offload": To("training.enable_cpu_offload", bool),
    "tensor_parallel_dim": To("parallelism.tensor_parallel_degree", int),
    "context_parallel_dim": To("parallelism.context_parallel_degree", int),
    "data_parallel_replicate_dim": To("parallelism.data_parallel_replicate_degree", int),
    "data_parallel_shard_dim": To("parallelism.data_parallel_shard_degree", int),
    "custom_sharded_layers": Idle("the embedding and the head are always sharded"),
    "metric_logger._component_": JOINED,
    "metric_logger.log_dir": Idle("files are written below job.dump_folder"),
    "metric_logger.*": Idle("set WANDB_PROJECT and similar environment variables"),
    "log_every_n_steps": To("metrics.log_freq", int),
    "log_peak_memory_stats": Idle("memory is always logged"),
    "log_level": Idle("only affects output, not numbers"),
    "profiler.enabled": To("profiling.enable_profiling", bool),
    # Here the interval between profiles includes these three.
    "profiler.warmup_steps": JOINED,
    "profiler.active_steps": JOINED,
    "profiler.wait_steps": JOINED,
    "profiler.*": _PROFILER,
    "enable_kv_cache": _GENERATION,
    "max_new_tokens": _GENERATION,
    "temperature": _GENERATION,
    "top_k": _GENERATION,
    "prompt.*": _GENERATION,
    "quantizer": Cannot("weights are not quantized after training"),
    "quantizer.*": Cannot("weights are not quantized after training"),
}


def looks(values: Mapping[str, Any]) -> bool:
    """True if any top-level table names a component."""
    # Only torchtune names components this way.
    return any(isinstance(part, dict) and "_component_" in part for part in values.values())


def prepare(migration: FileMigration) -> None:
    """Replace references with their values.

    Record a key that has no rule, and is only used in references, as honoured.
    """
    used: set[str] = set()

    def value_of(match: re.Match[str]) -> str:
        name = match[1].replace(".", "\0")
        used.add(name)
        return str(migration.values.get(name, match[0]))

    # A value may refer to another reference. Five levels are enough, and cycles end.
    for _ in range(5):
        for key, value in migration.values.items():
            if isinstance(value, str) and "${" in value and len(value) < 4096:
                migration.values[key] = _REFERENCE.sub(value_of, value)
    for key in used:
        # A key with a rule gets its result from the rule.
        if key.replace("\0", ".") not in KEYS:
            migration.record(key, "honoured", "its value replaces the references to it")


def finish(migration: FileMigration) -> None:
    """Translate the keys that depend on each other, and set torchtune's defaults."""
    # A key keeps its first result. So special values come first, and the general case needs no condition.
    get = migration.get
    _model(migration)
    _data(migration)
    rows = get("batch_size", int, 1)
    migration.set("batch_size", "training.local_batch_size", rows)
    accumulate(migration, rows)
    limit = get("max_steps_per_epoch", int)
    # The limit makes the length of the run independent of the data, so replace the epochs by steps.
    if limit:
        epochs = get("epochs", int, 1)
        migration.settings = [s for s in migration.settings if s.option != "training.epochs"]
        migration.entries = [e for e in migration.entries if e.key != "epochs"]
        migration.set(
            "max_steps_per_epoch",
            "training.steps",
            limit * epochs,
            f"{epochs} epochs of {limit} steps",
        )
        migration.default("training.on_data_end", "repeat")
        migration.record("epochs", "honoured", "part of training.steps")
    migration.record("max_steps_per_epoch", "ignored", "every epoch uses all the data")
    seed = get("seed", int)
    if seed is not None:
        migration.set("seed", "debug.seed", seed)
    migration.record(
        "seed", "ignored", "debug.seed has a fixed default, which makes runs repeatable"
    )
    _optimizer(migration)
    clip = get("clip_grad_norm", float)
    # torchtune does not clip without this key.
    if clip:
        migration.set("clip_grad_norm", "training.max_norm", clip)
    else:
        migration.set(
            "clip_grad_norm", "training.max_norm", float("inf"), "gradients are not clipped"
        )
    # torchtune computes in the dtype of its parameters, so both options get the same value.
    kinds = {"bf16": "bfloat16", "fp32": "float32"}
    kind = get("dtype", str, "fp32")
    if kind in kinds:
        migration.set(
            "dtype",
            "training.dtype",
            kinds[kind],
            "parameters use the compute dtype, as in torchtune",
        )
        migration.default("training.mixed_precision_param", kinds[kind])
    else:
        migration.record("dtype", "unsupported", "training.dtype must be float32 or bfloat16")
    # torchtune rejects offloading without recomputation.
    if get("enable_activation_offloading", bool, False):
        if get("enable_activation_checkpointing", bool, False):
            migration.set("enable_activation_offloading", "activation_checkpoint.cpu_offload", True)
        migration.record(
            "enable_activation_offloading",
            "ignored",
            "offloading requires enable_activation_checkpointing",
        )
    migration.record("enable_activation_offloading", "ignored", "it is off")
    # Our "auto" selects CUDA if it is available. An index such as cuda:0 depends on the launcher.
    device = get("device", str, "cuda").partition(":")[0]
    if device in ("cuda", "cpu"):
        migration.set("device", "training.device", "auto" if device == "cuda" else "cpu")
    migration.record("device", "unsupported", "the device must be cuda or cpu")
    logger = get("metric_logger\0_component_", str, "").rpartition(".")[2]
    options = {
        "TensorBoardLogger": "metrics.enable_tensorboard",
        "WandBLogger": "metrics.enable_wandb",
    }
    if logger in options:
        migration.set("metric_logger\0_component_", options[logger], True)
    migration.record("metric_logger\0_component_", "ignored", "metrics.jsonl is always written")
    # All of torchtune's cross-entropy variants compute the same number.
    loss = get("loss\0_component_", str, "").rpartition(".")[2]
    is_cross_entropy = "CrossEntropy" in loss or loss.startswith("CE") or not loss
    if is_cross_entropy:
        migration.record("loss\0_component_", "honoured", "cross-entropy over the tokens with loss")
    migration.record("loss\0_component_", "unsupported", "the task determines the loss: task.name")
    # Checkpoints are off by default, but torchtune always saves.
    why = "torchtune saves after each epoch; the last step is always saved"
    migration.default("checkpoint.enable", True, why)
    if get("profiler\0enabled", bool, False):
        warm = get("profiler\0warmup_steps", int, 5)
        active = get("profiler\0active_steps", int, 2)
        wait = get("profiler\0wait_steps", int, 5)
        migration.set("profiler\0warmup_steps", "profiling.profiler_warmup", warm)
        migration.set("profiler\0active_steps", "profiling.profiler_active", active)
        migration.set(
            "profiler\0wait_steps",
            "profiling.profile_freq",
            warm + active + wait,
            "wait, warmup and active steps together",
        )
    for name in ("warmup_steps", "active_steps", "wait_steps"):
        migration.record(f"profiler\0{name}", "ignored", "the profiler is off")


def _model(migration: FileMigration) -> None:
    """Set the model from its folder. The name of its builder determines adapters and quantized weights."""
    key = "model\0_component_"
    component = migration.get(key, str, "")
    folder = migration.get("checkpointer\0checkpoint_dir", str)
    if folder:
        # torchtune takes a path without "./" as a folder, never as a repository of the Hub.
        is_path = folder.startswith((".", "/", "~"))
        path, how = model_folder(folder if is_path else f"./{folder}")
        migration.set("checkpointer\0checkpoint_dir", "model.hf_assets_path", str(Path(path)), how)
        migration.default(
            "model.flavor", "from_folder", "the folder's config.json determines the model"
        )
        migration.default(
            "checkpoint.initial_load_in_hf", True, "training starts from the folder's weights"
        )
    # The builder's name is the only place where torchtune files enable adapters.
    builder = component.rpartition(".")[2]
    if builder.startswith(("lora_", "qlora_")):
        migration.set(
            key, "lora.enable", True, f"{builder}; the folder's config.json determines the model"
        )
    migration.record(key, "honoured", "the folder's config.json determines the model")
    modules = migration.get("model\0lora_attn_modules", list)
    # torchtune has its own name for the output projection.
    if modules is not None:
        names = ["o_proj" if name == "output_proj" else str(name) for name in modules]
        if migration.get("model\0apply_lora_to_mlp", bool, False):
            names += ["gate_proj", "up_proj", "down_proj"]
        migration.set(
            "model\0lora_attn_modules",
            "lora.target_modules",
            names,
            "together with apply_lora_to_mlp",
        )
    migration.record("model\0apply_lora_to_mlp", "honoured", "part of lora.target_modules")
    if builder.startswith("qlora_") or migration.get("model\0quantize_base", bool, False):
        migration.set("model\0quantize_base", "lora.base_dtype", "nf4")
    migration.record("model\0quantize_base", "ignored", "it is off")


def _data(migration: FileMigration) -> None:
    """Set the dataset: local files, a dataset of the Hub, or the dataset that the builder's name implies."""
    key = "dataset\0_component_"
    builder = migration.get(key, str, "").rpartition(".")[2]
    # Builder -> our dataset, the format of its rows, and its default dataset of the Hub.
    forms = {
        "alpaca_dataset": ("alpaca", "prompt_completion", "tatsu-lab/alpaca"),
        "alpaca_cleaned_dataset": ("alpaca", "prompt_completion", "yahma/alpaca-cleaned"),
        "instruct_dataset": ("jsonl", "prompt_completion", None),
        "chat_dataset": ("jsonl", "chat", None),
        "text_completion_dataset": ("jsonl", "text", None),
    }
    files = migration.values.get("dataset\0data_files")
    source = migration.get("dataset\0source", str, migration.get("dataset\0path", str))
    place = "dataset\0source" if "dataset\0source" in migration.values else "dataset\0path"
    if builder in forms:
        dataset, form, hub = forms[builder]
        path = source or hub
        # Local files take precedence: the builder's "source" is then the name of a file format.
        if files:
            path = str(files[0] if isinstance(files, list) else files)
        if files or source in ("json", "parquet", "csv", "text"):
            kinds = {"json": "jsonl", "csv": "tsv", "parquet": "parquet", "text": "text"}
            dataset = dataset if dataset == "alpaca" else kinds.get(source or "json", "jsonl")
        elif dataset != "alpaca":
            dataset = "huggingface"
        migration.set(key, "training.dataset", dataset, builder)
        migration.set("dataset\0data_files" if files else place, "training.dataset_path", path)
        migration.default("data.format", form)
        # torchtune's instruct_dataset expects these columns.
        if form == "prompt_completion" and dataset != "alpaca":
            migration.default("data.prompt_field", "input", "torchtune's column name")
            migration.default("data.completion_field", "output", "torchtune's column name")
        column = migration.get("dataset\0column", str)
        if column:
            migration.set("dataset\0column", "data.text_field", column)

        # Prompts of instructions and chats only count in the loss in the text format.
        trains_on_prompt = "dataset\0train_on_input"
        if form != "text" and migration.get(trains_on_prompt, bool, builder.startswith("alpaca")):
            if dataset == "alpaca":
                migration.settings = [s for s in migration.settings if s.option != "data.format"]
                migration.set(trains_on_prompt, "data.format", "text", "the prompt has loss too")
            else:
                text = 'only answers count in the loss; with data.format = "text" entire rows do'
                migration.record(trains_on_prompt, "unsupported", text)
        migration.record(trains_on_prompt, "honoured", "only answers count in the loss")
    elif builder:
        text = "choose a dataset in training.dataset, and its columns in [data]"
        migration.record(key, "unsupported", text)
    for name in (place, "dataset\0data_files"):
        migration.record(name, "honoured", "part of training.dataset")

    # Slices such as train[:10%] have the syntax of the datasets library, and are not parsed here.
    split = migration.get("dataset\0split", str)
    if split and re.fullmatch(r"[\w-]+", split):
        migration.set("dataset\0split", "data.split", split)
    elif split:
        migration.record(
            "dataset\0split",
            "unsupported",
            "slices of a split are not supported; write the slice to a file",
        )
    # torchtune accepts rows of any length, but training.seq_len is required here.
    length = migration.get("tokenizer\0max_seq_len", int)
    if length:
        migration.set("tokenizer\0max_seq_len", "training.seq_len", length)
    elif builder:
        migration.default("training.seq_len", 2048, "a sequence length is required")
        text = "a sequence length is required; training.seq_len is set to 2048, correct it"
        migration.record("tokenizer\0max_seq_len", "unsupported", text)
    migration.record("tokenizer\0max_seq_len", "ignored", "only used with a dataset")
    packed = migration.get("dataset\0packed", bool, False)
    if builder:
        migration.set("dataset\0packed", "data.packing", "first_fit" if packed else "padded")


def _optimizer(migration: FileMigration) -> None:
    """Set AdamW or Adam with its options, and the schedule."""
    key = "optimizer\0_component_"
    kind = migration.get(key, str, "torch.optim.AdamW").rpartition(".")[2]
    if kind in ("AdamW", "Adam"):
        migration.set(key, "optimizer.name", kind)
    elif kind in ("AdamW8bit", "PagedAdamW8bit"):  # from bitsandbytes and torchao
        migration.set(key, "optimizer.name", "AdamW8bit")
    elif "AdamW" in kind:
        migration.record(key, "unsupported", 'use optimizer.name = "AdamW" or "AdamW8bit"')
    else:
        migration.record(
            key, "unsupported", "optimizer.name supports AdamW, Adam, AdamW8bit and Muon"
        )
    # torchtune's optimizers are PyTorch's, whose defaults differ from ours.
    betas = migration.get("optimizer\0betas", list, [])
    if len(betas) == 2 and all(isinstance(beta, int | float) for beta in betas):
        migration.default("optimizer.beta1", float(betas[0]), "the first value of betas")
        why = "the second value; the first is optimizer.beta1"
        migration.set("optimizer\0betas", "optimizer.beta2", float(betas[1]), why)
    else:
        text = "it must be two numbers: optimizer.beta1 and optimizer.beta2"
        migration.record("optimizer\0betas", "unsupported", text)
        migration.default("optimizer.beta2", 0.999)
    if "optimizer\0weight_decay" not in migration.values:
        migration.default("optimizer.weight_decay", 0.01 if kind == "AdamW" else 0.0)
    # torchtune's own schedule. Others are classes of PyTorch.
    name = migration.get("lr_scheduler\0_component_", str)
    if name is not None and name.endswith("get_cosine_schedule_with_warmup"):
        migration.set("lr_scheduler\0_component_", "lr_scheduler.name", "transformers")
        migration.default("lr_scheduler.decay_type", "cosine")
        warmup = migration.get("lr_scheduler\0num_warmup_steps", int, 100)
        migration.set("lr_scheduler\0num_warmup_steps", "lr_scheduler.warmup_steps", warmup)
        migration.default("lr_scheduler.warmup_proportion", 0.0)
    elif name is not None:
        migration.record(
            "lr_scheduler\0_component_",
            "unsupported",
            "it has no counterpart; choose a schedule in lr_scheduler.name",
        )
    else:
        default_to_constant_rate(migration, "without a schedule the learning rate is constant")
