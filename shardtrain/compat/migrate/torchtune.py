"""torchtune's YAML: components by their Python names, and ``${name}`` references."""

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
OPEN = "an argument of its recipe that has no counterpart here"
LEAVES: frozenset[str] = frozenset()
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_PROFILER = Idle("what a trace holds, which changes no number")
_GENERATION = Idle("it is read in generation alone: `shardtrain generate --help`")

KEYS: Mapping[str, Rule] = {
    "output_dir": To("job.dump_folder", str),
    "log_dir": Idle("files go below job.dump_folder"),
    "profiling_dir": Idle("files go below job.dump_folder"),
    "checkpoint_dir": Idle("it is read where it is referred to"),
    "model._component_": JOINED,
    "model.lora_attn_modules": JOINED,
    "model.apply_lora_to_mlp": JOINED,
    "model.apply_lora_to_output": Cannot("the head stays frozen beside adapters"),
    "model.lora_rank": To("lora.rank", int),
    "model.lora_alpha": To("lora.alpha", float),
    "model.lora_dropout": To("lora.dropout", float),
    "model.use_dora": To("lora.use_dora", bool),
    "model.quantize_base": JOINED,
    "tokenizer._component_": Idle("the tokenizer is that of model.hf_assets_path"),
    "tokenizer.path": Idle("the tokenizer is that of model.hf_assets_path"),
    "tokenizer.merges_file": Idle("the tokenizer is that of model.hf_assets_path"),
    "tokenizer.max_seq_len": JOINED,
    "tokenizer.prompt_template": Cannot("save it as a chat template, and name the file in data.chat_template"),
    "checkpointer._component_": Idle("weights come from a Hugging Face folder"),
    "checkpointer.checkpoint_dir": JOINED,
    "checkpointer.checkpoint_files": Idle("the folder's index names its files"),
    "checkpointer.checkpoint_files.*": Idle("the folder's index names its files"),
    "checkpointer.adapter_checkpoint": To("lora.initial_load_path", str),
    "checkpointer.recipe_checkpoint": Idle("a run continues by itself from the newest checkpoint of its folder"),
    "checkpointer.output_dir": Idle("checkpoints are below job.dump_folder"),
    "checkpointer.model_type": Idle("the folder says which model it holds"),
    "resume_from_checkpoint": Idle("a run continues by itself from the newest checkpoint of its folder"),
    "save_adapter_weights_only": Idle("checkpoints of adapters hold them alone"),
    "dataset._component_": JOINED,
    "dataset.source": JOINED,
    "dataset.path": JOINED,
    "dataset.data_files": JOINED,
    "dataset.split": JOINED,
    "dataset.packed": JOINED,
    "dataset.train_on_input": JOINED,
    "dataset.column": JOINED,
    "dataset.column_map.*": Cannot("name columns in data.prompt_field and data.completion_field, or data.template"),
    "dataset.conversation_column": To("data.messages_field", str),
    "dataset.conversation_style": Cannot("rows are {role, content} objects; data.template writes others so"),
    "dataset.new_system_prompt": Cannot("the chat template has the words of the system"),
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
    "optimizer.fused": To("optimizer.implementation", bool, lambda on: "fused" if on else "foreach"),
    "optimizer.foreach": Idle("which kernel computes the same update"),
    "optimizer_in_bwd": Cannot("parameters are updated after the gradients were clipped"),
    "lr_scheduler._component_": JOINED,
    "lr_scheduler.num_warmup_steps": JOINED,
    "lr_scheduler.num_cycles": Cannot("the cosine has half a cycle", off=(None, 0.5)),
    "loss._component_": JOINED,
    "loss.num_output_chunks": Idle("the loss is computed in chunks anyway"),
    "loss.ignore_index": Idle("tokens without loss have no target"),
    "compile": To("compile.enable", bool),
    "device": JOINED,
    "dtype": JOINED,
    "enable_activation_checkpointing": To("activation_checkpoint.mode", bool, lambda on: "full" if on else "none"),
    "enable_activation_offloading": JOINED,
    "activation_offloading_use_streams": Idle("how offloading is carried out"),
    "low_cpu_ram": Idle("weights are read shard by shard"),
    "fsdp_cpu_offload": To("training.enable_cpu_offload", bool),
    "tensor_parallel_dim": To("parallelism.tensor_parallel_degree", int),
    "context_parallel_dim": To("parallelism.context_parallel_degree", int),
    "data_parallel_replicate_dim": To("parallelism.data_parallel_replicate_degree", int),
    "data_parallel_shard_dim": To("parallelism.data_parallel_shard_degree", int),
    "custom_sharded_layers": Idle("embedding and head are sharded too"),
    "metric_logger._component_": JOINED,
    "metric_logger.log_dir": Idle("files go below job.dump_folder"),
    "metric_logger.*": Idle("set WANDB_PROJECT and the like in the environment"),
    "log_every_n_steps": To("metrics.log_freq", int),
    "log_peak_memory_stats": Idle("memory is always logged"),
    "log_level": Idle("what is printed, which changes no number"),
    "profiler.enabled": To("profiling.enable_profiling", bool),
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
    """True if the keys are those of this system."""
    return any(isinstance(part, dict) and "_component_" in part for part in values.values())


def prepare(found: FileMigration) -> None:
    """Replace references by their values.

    A key that is only used in references gets the result of its users.
    """
    used: set[str] = set()

    def value_of(match: re.Match[str]) -> str:
        name = match[1].replace(".", "\0")
        used.add(name)
        return str(found.values.get(name, match[0]))

    for _ in range(5):
        for key, value in found.values.items():
            if isinstance(value, str) and "${" in value and len(value) < 4096:
                found.values[key] = _REFERENCE.sub(value_of, value)
    for key in used:
        if key.replace("\0", ".") not in KEYS:
            found.answer(key, "honoured", "its value is used where it is referred to")


def finish(found: FileMigration) -> None:
    """Translate keys that depend on each other, and set the defaults of torchtune."""
    get = found.get
    _model(found)
    _data(found)
    rows = get("batch_size", int, 1)
    found.set("batch_size", "training.local_batch_size", rows)
    accumulate(found, rows)
    limit = get("max_steps_per_epoch", int)
    if limit:
        epochs = get("epochs", int, 1)
        found.settings = [s for s in found.settings if s.option != "training.epochs"]
        found.entries = [e for e in found.entries if e.key != "epochs"]
        found.set("max_steps_per_epoch", "training.steps", limit * epochs, f"{epochs} times {limit}")
        found.default("training.on_data_end", "repeat")
        found.answer("epochs", "honoured", "in training.steps")
    found.answer("max_steps_per_epoch", "ignored", "epochs are whole")
    seed = get("seed", int)
    if seed is not None:
        found.set("seed", "debug.seed", seed)
    found.answer("seed", "ignored", "debug.seed has a default, so that each run can be repeated")
    _optimizer(found)
    clip = get("clip_grad_norm", float)
    found.set("clip_grad_norm", "training.max_norm", clip or float("inf"), "" if clip else "nothing is clipped")
    kinds = {"bf16": "bfloat16", "fp32": "float32"}
    kind = get("dtype", str, "fp32")
    if kind in kinds:
        found.set("dtype", "training.dtype", kinds[kind], "parameters too, as torchtune has them")
        found.default("training.mixed_precision_param", kinds[kind])
    else:
        found.answer("dtype", "unsupported", "parameters are stored in float32 or bfloat16: training.dtype")
    if get("enable_activation_offloading", bool, False):
        if get("enable_activation_checkpointing", bool, False):
            found.set("enable_activation_offloading", "activation_checkpoint.cpu_offload", True)
        found.answer("enable_activation_offloading", "ignored", "without recomputation activations stay on the device")
    found.answer("enable_activation_offloading", "ignored", "it is off")
    device = get("device", str, "cuda").partition(":")[0]
    if device in ("cuda", "cpu"):
        found.set("device", "training.device", "auto" if device == "cuda" else "cpu")
    found.answer("device", "unsupported", "devices are cuda and cpu")
    logger = get("metric_logger\0_component_", str, "").rpartition(".")[2]
    options = {"TensorBoardLogger": "metrics.enable_tensorboard", "WandBLogger": "metrics.enable_wandb"}
    if logger in options:
        found.set("metric_logger\0_component_", options[logger], True)
    found.answer("metric_logger\0_component_", "ignored", "metrics.jsonl is always written")
    loss = get("loss\0_component_", str, "").rpartition(".")[2]
    known = "CrossEntropy" in loss or loss.startswith("CE") or not loss
    if known:
        found.answer("loss\0_component_", "honoured", "cross-entropy over the tokens with loss")
    found.answer("loss\0_component_", "unsupported", "losses belong to tasks: task.name")
    found.default("checkpoint.enable", True, "each epoch ended with a save; the last step is always saved")
    if get("profiler\0enabled", bool, False):
        warm = get("profiler\0warmup_steps", int, 5)
        active = get("profiler\0active_steps", int, 2)
        wait = get("profiler\0wait_steps", int, 5)
        found.set("profiler\0warmup_steps", "profiling.profiler_warmup", warm)
        found.set("profiler\0active_steps", "profiling.profiler_active", active)
        found.set(
            "profiler\0wait_steps", "profiling.profile_freq", warm + active + wait, "wait, warmup and active together"
        )
    for name in ("warmup_steps", "active_steps", "wait_steps"):
        found.answer(f"profiler\0{name}", "ignored", "nothing is profiled")


def _model(found: FileMigration) -> None:
    """Set the model from its folder, and adapters and quantized weights from its builder."""
    key = "model\0_component_"
    component = found.get(key, str, "")
    folder = found.get("checkpointer\0checkpoint_dir", str)
    if folder:
        path, how = model_folder(folder if folder.startswith((".", "/", "~")) else f"./{folder}")
        found.set("checkpointer\0checkpoint_dir", "model.hf_assets_path", str(Path(path)), how)
        found.default("model.flavor", "from_folder", "the folder says which model it holds")
        found.default("checkpoint.initial_load_in_hf", True, "training begins with its weights")
    builder = component.rpartition(".")[2]
    if builder.startswith(("lora_", "qlora_")):
        found.set(key, "lora.enable", True, f"{builder}; the folder says which model it holds")
    found.answer(key, "honoured", "the folder says which model it holds")
    modules = found.get("model\0lora_attn_modules", list)
    if modules is not None:
        names = ["o_proj" if name == "output_proj" else str(name) for name in modules]
        if found.get("model\0apply_lora_to_mlp", bool, False):
            names += ["gate_proj", "up_proj", "down_proj"]
        found.set("model\0lora_attn_modules", "lora.target_modules", names, "with apply_lora_to_mlp")
    found.answer("model\0apply_lora_to_mlp", "honoured", "in lora.target_modules")
    if builder.startswith("qlora_") or found.get("model\0quantize_base", bool, False):
        found.set("model\0quantize_base", "lora.base_dtype", "nf4")
    found.answer("model\0quantize_base", "ignored", "it is off")


def _data(found: FileMigration) -> None:
    """Set a dataset from its builder: files, a dataset of the hub, or a dataset that the builder determines."""
    key = "dataset\0_component_"
    builder = found.get(key, str, "").rpartition(".")[2]
    forms = {
        "alpaca_dataset": ("alpaca", "prompt_completion", "tatsu-lab/alpaca"),
        "alpaca_cleaned_dataset": ("alpaca", "prompt_completion", "yahma/alpaca-cleaned"),
        "instruct_dataset": ("jsonl", "prompt_completion", None),
        "chat_dataset": ("jsonl", "chat", None),
        "text_completion_dataset": ("jsonl", "text", None),
    }
    files = found.values.get("dataset\0data_files")
    source = found.get("dataset\0source", str, found.get("dataset\0path", str))
    place = "dataset\0source" if "dataset\0source" in found.values else "dataset\0path"
    if builder in forms:
        dataset, form, hub = forms[builder]
        path = source or hub
        if files:
            path = str(files[0] if isinstance(files, list) else files)
        if files or source in ("json", "parquet", "csv", "text"):
            kinds = {"json": "jsonl", "csv": "tsv", "parquet": "parquet", "text": "text"}
            dataset = dataset if dataset == "alpaca" else kinds.get(source or "json", "jsonl")
        elif dataset != "alpaca":
            dataset = "huggingface"
        found.set(key, "training.dataset", dataset, builder)
        found.set("dataset\0data_files" if files else place, "training.dataset_path", path)
        found.default("data.format", form)
        if form == "prompt_completion" and dataset != "alpaca":
            found.default("data.prompt_field", "input", "torchtune's names of columns")
            found.default("data.completion_field", "output", "torchtune's names of columns")
        column = found.get("dataset\0column", str)
        if column:
            found.set("dataset\0column", "data.text_field", column)
        answer_alone = form != "text" and not found.get("dataset\0train_on_input", bool, builder.startswith("alpaca"))
        if form != "text" and not answer_alone and dataset == "alpaca":
            found.settings = [s for s in found.settings if s.option != "data.format"]
            found.set("dataset\0train_on_input", "data.format", "text", "the prompt has loss too")
        elif form != "text" and not answer_alone:
            found.answer(
                "dataset\0train_on_input", "unsupported", 'the answer alone has loss; data.format = "text" has one text'
            )
        found.answer("dataset\0train_on_input", "honoured", "the answer alone has loss")
    elif builder:
        found.answer(key, "unsupported", "datasets are those of training.dataset, and columns those of [data]")
    for name in (place, "dataset\0data_files"):
        found.answer(name, "honoured", "in training.dataset")

    split = found.get("dataset\0split", str)
    if split and re.fullmatch(r"[\w-]+", split):
        found.set("dataset\0split", "data.split", split)
    elif split:
        found.answer("dataset\0split", "unsupported", "a part of a split is a file of its own")
    length = found.get("tokenizer\0max_seq_len", int)
    if length:
        found.set("tokenizer\0max_seq_len", "training.seq_len", length)
    elif builder:
        found.default("training.seq_len", 2048, "sequences have a length here")
        found.answer(
            "tokenizer\0max_seq_len", "unsupported", "rows are cut at training.seq_len: 2048 is written, set your own"
        )
    found.answer("tokenizer\0max_seq_len", "ignored", "it is read with a dataset alone")
    packed = found.get("dataset\0packed", bool, False)
    if builder:
        found.set("dataset\0packed", "data.packing", "first_fit" if packed else "padded")


def _optimizer(found: FileMigration) -> None:
    """Set AdamW or Adam with its options, and the schedule."""
    key = "optimizer\0_component_"
    kind = found.get(key, str, "torch.optim.AdamW").rpartition(".")[2]
    if kind in ("AdamW", "Adam"):
        found.set(key, "optimizer.name", kind)
    elif kind in ("AdamW8bit", "PagedAdamW8bit"):  # of bitsandbytes and torchao
        found.set(key, "optimizer.name", "AdamW8bit")
    elif "AdamW" in kind:
        found.answer(key, "unsupported", 'the nearest is optimizer.name = "AdamW" or "AdamW8bit"')
    else:
        found.answer(key, "unsupported", "there are AdamW, Adam and Muon, in optimizer.name")
    betas = found.get("optimizer\0betas", list)
    if betas is not None and len(betas) == 2 and all(isinstance(beta, int | float) for beta in betas):
        found.default("optimizer.beta1", float(betas[0]), "the first of betas")
        found.set("optimizer\0betas", "optimizer.beta2", float(betas[1]), "and optimizer.beta1 the first")
    else:
        found.answer("optimizer\0betas", "unsupported", "AdamW has two: optimizer.beta1 and optimizer.beta2")
        found.default("optimizer.beta2", 0.999)
    if "optimizer\0weight_decay" not in found.values:
        found.default("optimizer.weight_decay", 0.01 if kind == "AdamW" else 0.0)
    name = found.get("lr_scheduler\0_component_", str)
    if name is not None and name.endswith("get_cosine_schedule_with_warmup"):
        found.set("lr_scheduler\0_component_", "lr_scheduler.name", "transformers")
        found.default("lr_scheduler.decay_type", "cosine")
        warmup = found.get("lr_scheduler\0num_warmup_steps", int, 100)
        found.set("lr_scheduler\0num_warmup_steps", "lr_scheduler.warmup_steps", warmup)
        found.default("lr_scheduler.warmup_proportion", 0.0)
    elif name is not None:
        found.answer("lr_scheduler\0_component_", "unsupported", "schedules are those of lr_scheduler.name")
    else:
        default_to_constant_rate(found, "without a schedule the rate stays as it is")
