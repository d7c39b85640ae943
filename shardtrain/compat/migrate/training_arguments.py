"""Reader of Hugging Face ``TrainingArguments``, SFTConfig and arguments of their example scripts (JSON or YAML)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

from shardtrain.compat.migrate.migration_report import JOINED, Cannot, FileMigration, Idle, Rule, To
from shardtrain.config.schema.task_options import Task
from shardtrain.facts.file_kinds import dataset_of

SYSTEM = "Hugging Face TrainingArguments"
OPEN = "it is not in TrainingArguments, but defined by the program that reads this file"
# Keys whose value is an entire table, which has no rules of its own.
LEAVES = frozenset(
    {
        "dataset_mixture",
        "gradient_checkpointing_kwargs",
        "lr_scheduler_kwargs",
        "fsdp_config",
        "accelerator_config",
    }
)
_HUB = Cannot("uploads are a separate command: `shardtrain export RUN --to HF_DIR --push ORG/NAME`")
_WATCH = Idle("only affects output, not numbers")
_LOADER = Idle("only affects how batches are loaded, not numbers")


def looks(values: Mapping[str, Any]) -> bool:
    """True if at least two top-level keys are well-known training arguments."""
    marks = {
        "per_device_train_batch_size",
        "num_train_epochs",
        "learning_rate",
        "gradient_accumulation_steps",
        "output_dir",
        "lr_scheduler_type",
        "save_steps",
        "logging_steps",
        "max_steps",
        "warmup_ratio",
    }
    return len(marks & values.keys()) >= 2


def model_folder(name: str) -> tuple[str, str]:
    """Return the local folder of a model, and a note.

    For a Hub repository, the note is the download command.
    """
    path = Path(name).expanduser()
    # A Hub repository is OWNER/NAME. Other names, and paths, are local.
    if path.is_dir() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        return str(path), "a local folder"
    local = f"./assets/hf/{name.rpartition('/')[2]}"
    return (
        local,
        f"download it with `shardtrain data download --repo_id {name} --all --local_dir ./assets/hf`",
    )


KEYS: Mapping[str, Rule] = {
    # The run.
    "output_dir": To("job.dump_folder", str),
    "run_name": To("job.description", str),
    "overwrite_output_dir": Cannot(
        "a run resumes in its folder; choose another folder", off=(None, False, True)
    ),
    "do_train": Idle("`shardtrain train` always trains"),
    "do_eval": Idle("eval_strategy determines when"),
    "do_predict": Idle("use `shardtrain test`"),
    "evaluate_during_training": Idle("eval_strategy determines when"),
    "eval_strategy": JOINED,
    "evaluation_strategy": JOINED,
    "eval_steps": JOINED,
    "eval_on_start": Idle("the first validation is after validation.freq steps"),
    # Batches and the optimizer.
    "per_device_train_batch_size": JOINED,
    "per_device_eval_batch_size": To("validation.local_batch_size", int),
    "gradient_accumulation_steps": JOINED,
    "learning_rate": To("optimizer.lr", float),
    "weight_decay": To("optimizer.weight_decay", float),
    "adam_beta1": To("optimizer.beta1", float),
    "adam_beta2": To("optimizer.beta2", float),
    "adam_epsilon": To("optimizer.eps", float),
    "adam_eps": To("optimizer.eps", float),
    "max_grad_norm": JOINED,
    # Length and schedule.
    "num_train_epochs": JOINED,
    "max_steps": JOINED,
    "lr_scheduler_type": JOINED,
    "lr_scheduler_kwargs": Cannot("use the options of [lr_scheduler]"),
    "warmup_ratio": JOINED,
    "warmup_steps": JOINED,
    # Precision.
    "bf16": JOINED,
    "fp16": JOINED,
    "tf32": Idle("PyTorch's setting for float32 matmuls applies"),
    "bf16_full_eval": Idle("validation uses the precision of training"),
    "fp16_full_eval": Idle("validation uses the precision of training"),
    "torch_dtype": JOINED,
    "dtype": JOINED,
    "seed": To("debug.seed", int),
    "data_seed": Idle("debug.seed determines the order of the data"),
    "gradient_checkpointing": JOINED,
    "gradient_checkpointing_kwargs": Idle("recomputation never re-enters autograd"),
    # The kind of optimizer, and terms of the loss.
    "optim": JOINED,
    "adafactor": Cannot("optimizer.name supports AdamW, Adam, AdamW8bit and Muon"),
    "optim_args": Cannot("use the options of [optimizer]"),
    "label_smoothing_factor": To("training.label_smoothing", float),
    "neftune_noise_alpha": To("training.neftune_noise_alpha", float),
    "torch_compile": To("compile.enable", bool),
    "torch_compile_backend": To("compile.backend", str),
    "torch_compile_mode": Idle("each layer is compiled separately"),
    # Checkpoints and logging.
    "save_strategy": JOINED,
    "save_steps": JOINED,
    "save_total_limit": JOINED,
    "save_only_model": Cannot(
        "checkpoints contain the full training state; checkpoint.last_save_model_only reduces the last one"
    ),
    "save_safetensors": Idle("weights are never pickled"),
    "load_best_model_at_end": JOINED,
    "metric_for_best_model": JOINED,
    "greater_is_better": JOINED,
    "resume_from_checkpoint": Idle(
        "a run resumes automatically from the newest checkpoint in its folder"
    ),
    "logging_steps": JOINED,
    "logging_strategy": Idle("metrics.log_freq counts steps"),
    "logging_first_step": Idle("the first step is always logged"),
    "logging_dir": Idle("files are written below job.dump_folder"),
    "logging_nan_inf_filter": Idle("training.nonfinite_policy handles losses that are not finite"),
    "log_level": _WATCH,
    "log_level_replica": _WATCH,
    "disable_tqdm": _WATCH,
    "report_to": JOINED,
    # Data loading.
    "dataloader_num_workers": To("training.dataloader.num_workers", int),
    "dataloader_prefetch_factor": JOINED,
    "dataloader_pin_memory": To("training.dataloader.pin_memory", bool),
    "dataloader_persistent_workers": JOINED,
    "dataloader_drop_last": Idle("an epoch contains every sample once"),
    "dataset_num_proc": _LOADER,
    "preprocessing_num_workers": _LOADER,
    "remove_unused_columns": _LOADER,
    "group_by_length": Cannot(
        "rows are shuffled over the full data set; data.packing avoids padding instead"
    ),
    # Distributed training.
    "ddp_find_unused_parameters": Idle("every parameter receives a gradient"),
    "ddp_timeout": To("comm.train_timeout_seconds", int),
    "ddp_backend": Idle("the backend is nccl on CUDA and gloo on CPUs"),
    "local_rank": Idle("the launcher sets the local rank"),
    "deepspeed": JOINED,
    "fsdp": JOINED,
    "fsdp_config": Idle("each layer is sharded separately"),
    "accelerator_config": _LOADER,
    "use_cpu": To("training.device", bool, lambda on: "cpu" if on else "auto"),
    "no_cuda": To("training.device", bool, lambda on: "cpu" if on else "auto"),
    "push_to_hub": _HUB,
    "hub_model_id": Idle("only used with push_to_hub"),
    "hub_strategy": Idle("only used with push_to_hub"),
    "hub_token": Idle("only used with push_to_hub"),
    "prediction_loss_only": _WATCH,
    "include_num_input_tokens_seen": _WATCH,
    "full_determinism": To("debug.deterministic", bool),
    "auto_find_batch_size": Cannot(
        "`shardtrain train --comm.mode fake_backend` reports the memory of a batch size"
    ),
    "use_liger_kernel": Idle("only selects kernels for the same computation"),
    "eval_accumulation_steps": _LOADER,
    # Arguments of the Trainer's example scripts and of TRL: models, data, adapters.
    "model_name_or_path": JOINED,
    "model_name": JOINED,
    "model_revision": Idle(
        "only selects the files to download: `shardtrain data download --revision`"
    ),
    "tokenizer_name": Idle("the tokenizer comes from model.hf_assets_path"),
    "tokenizer_name_or_path": Idle("the tokenizer comes from model.hf_assets_path"),
    "config_name": Idle("the sizes come from model.hf_assets_path"),
    "model_type": Idle("config.json in model.hf_assets_path determines the model"),
    "cache_dir": Idle("HF_HOME sets the folder of downloads"),
    "trust_remote_code": Cannot("code from a repository is never run; write a model file"),
    "attn_implementation": Idle("attention uses the fastest available kernel"),
    "dataset_name": JOINED,
    "dataset_config_name": To("data.subset", str),
    "dataset_train_split": To("data.split", str),
    "dataset_test_split": JOINED,
    "dataset_mixture": Cannot("add a table [data.sources.NAME] with a weight for each dataset"),
    "train_file": To("training.dataset_path", str),
    "validation_file": JOINED,
    "block_size": To("training.seq_len", int),
    "model_max_length": To("training.seq_len", int),
    "max_seq_length": To("training.seq_len", int),
    "max_length": To("training.seq_len", int),
    "max_prompt_length": Idle("prompt and answer together are cut at training.seq_len"),
    # TRL: packing and preference losses.
    "packing": JOINED,
    "chat_template": Cannot("save it to a file, and set data.chat_template to its path"),
    "beta": JOINED,
    "loss_type": JOINED,
    "label_smoothing": JOINED,
    "reference_free": JOINED,
    "rpo_alpha": JOINED,
    "cpo_alpha": JOINED,
    "packing_strategy": JOINED,
    # PEFT.
    "use_peft": To("lora.enable", bool),
    "lora_r": To("lora.rank", int),
    "lora_alpha": To("lora.alpha", float),
    "lora_dropout": To("lora.dropout", float),
    "lora_target_modules": JOINED,
    "lora_modules_to_save": JOINED,
    "use_rslora": To("lora.rank_stabilized", bool),
    "use_dora": To("lora.use_dora", bool),
    "load_in_4bit": JOINED,
    "load_in_8bit": JOINED,
}


def modules(migration: FileMigration, key: str, option: str) -> None:
    """Set an option for modules of adapters from a list of names, or from one name such as "all-linear"."""
    value = migration.values.get(key)
    names = [value] if isinstance(value, str) and value else migration.get(key, list)
    if names:
        migration.set(key, option, [str(name) for name in names])
    migration.record(key, "ignored", "it is empty")


def finish(migration: FileMigration) -> None:
    """Translate the keys that depend on each other, and set the Trainer's defaults."""
    _length(migration)
    rows = migration.get("per_device_train_batch_size", int, 8)
    migration.set("per_device_train_batch_size", "training.local_batch_size", rows)
    accumulate(migration, rows)
    schedule(migration, str(migration.get("lr_scheduler_type", str, "linear")), "lr_scheduler_type")
    precision(migration)
    migration.default("optimizer.lr", 5e-5)
    migration.default("optimizer.beta2", 0.999)
    # Unlike here, the Trainer's default is no weight decay.
    migration.default("optimizer.weight_decay", 0.0)
    optimizer(migration, migration.get("optim", str, "adamw_torch"), "optim")
    if migration.get("weight_decay", float, 0.0):
        migration.default(
            "optimizer.no_weight_decay",
            ["*.bias", "*norm*"],
            "the Trainer decays neither biases nor norms",
        )
    _saving(migration)
    _validation(migration)
    _model_and_data(migration)
    # 0 disables clipping in the Trainer.
    clip = migration.get("max_grad_norm", float, 1.0)
    migration.set("max_grad_norm", "training.max_norm", clip or float("inf"))
    recomputes = migration.get("gradient_checkpointing", bool, False)
    migration.set(
        "gradient_checkpointing", "activation_checkpoint.mode", "full" if recomputes else "none"
    )
    # A value below 1 is a fraction of the run in the Trainer.
    steps = migration.get("logging_steps", float, 500.0)
    if steps >= 1:
        migration.set("logging_steps", "metrics.log_freq", int(steps))
    else:
        migration.record(
            "logging_steps",
            "ignored",
            "it is a fraction of the run; metrics.log_freq is a number of steps",
        )
    _reports(migration)

    # The DataLoader rejects these options without workers.
    workers = migration.get("dataloader_num_workers", int, 0)
    prefetch = migration.get("dataloader_prefetch_factor", int)
    persistent = migration.get("dataloader_persistent_workers", bool, False)
    if workers and prefetch is not None:
        migration.set("dataloader_prefetch_factor", "training.dataloader.prefetch_factor", prefetch)
    if workers and persistent:
        migration.set(
            "dataloader_persistent_workers", "training.dataloader.persistent_workers", True
        )
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        migration.record(name, "ignored", "it has no effect without workers")
    if migration.values.get("deepspeed"):
        migration.record("deepspeed", "honoured", "add that file to the command to translate both")
    migration.record("deepspeed", "ignored", "it is empty")
    migration.record("fsdp", "honoured", "parameters are always sharded over the ranks")


def _length(migration: FileMigration) -> None:
    """Set the length of the run. Steps take precedence over epochs."""
    steps = migration.get("max_steps", int, -1)
    epochs = migration.get("num_train_epochs", float, 3.0)
    if steps > 0:
        migration.set("max_steps", "training.steps", steps)
        migration.default("training.on_data_end", "repeat", "the data repeat until max_steps")
        migration.record("num_train_epochs", "ignored", "max_steps takes precedence")
    elif epochs == int(epochs) and epochs >= 1:
        migration.set("num_train_epochs", "training.epochs", int(epochs))
        migration.record("max_steps", "ignored", "it is not positive, so it sets no limit")
    else:
        migration.record(
            "num_train_epochs",
            "unsupported",
            "training.epochs must be an integer; use training.steps for another length",
        )


def accumulate(migration: FileMigration, rows: int) -> None:
    """Set the global batch: the batch per device times accumulation steps and devices."""
    accumulated = migration.get("gradient_accumulation_steps", int, 1)
    world = migration.num_processes
    # Without accumulation, the default of the option is the same batch.
    if accumulated > 1:
        why = "for 1 process: for several, add --nproc N"
        if world:
            why = f"for {world} processes"
        total = rows * accumulated * (world or 1)
        migration.set("gradient_accumulation_steps", "training.global_batch_size", total, why)
    migration.record("gradient_accumulation_steps", "honoured", "no gradients are accumulated")


def schedule(migration: FileMigration, kind: str, key: str) -> None:
    """Set a schedule of the transformers library. Its learning rate is 0 at the first step.

    Args:
        migration: The file.
        kind: Name of the schedule in the transformers library.
        key: Key of the file with that name.
    """
    steps = migration.get("warmup_steps", float, 0.0)
    ratio = migration.get("warmup_ratio", float, 0.0)
    # transformers 5 reads warmup_steps below 1 as a fraction of the run.
    if 0 < steps < 1:
        ratio = steps
        steps = 0.0
    # For each name: the shape of the decay, the last rate as a fraction of the peak, and the
    # number of warmup steps if the name determines it.
    known = {
        "linear": ("linear", 0.0, None),
        "cosine": ("cosine", 0.0, None),
        "constant_with_warmup": ("linear", 1.0, None),
        "constant": ("linear", 1.0, 0),
    }
    if kind not in known:
        migration.record(key, "unsupported", f"supported schedules are {', '.join(known)}")
        return
    shape, least, warmup = known[kind]
    migration.set(
        key,
        "lr_scheduler.decay_type",
        shape,
        "" if kind == shape else f"with min_lr_factor = {least}",
    )
    migration.default("lr_scheduler.name", "transformers")
    if least:
        migration.default("lr_scheduler.min_lr_factor", least)
    # A schedule with this name has no warmup, whatever the other keys are.
    if warmup == 0:
        steps = ratio = 0.0
        for name in ("warmup_steps", "warmup_ratio"):
            migration.record(name, "ignored", "a constant schedule has no warmup")
    migration.set("warmup_steps", "lr_scheduler.warmup_steps", int(steps))
    # transformers ignores the ratio if there is a number of steps.
    if steps >= 1:
        migration.record("warmup_ratio", "ignored", "warmup_steps takes precedence")
        migration.set("", "lr_scheduler.warmup_proportion", 0.0)
    else:
        migration.set("warmup_ratio", "lr_scheduler.warmup_proportion", ratio)


def precision(migration: FileMigration) -> None:
    """Set the compute dtype from bf16 and fp16. Parameters stay float32 unless a key sets their dtype."""
    bf16 = migration.values.get("bf16") == "auto" or migration.get("bf16", bool, False)
    # "auto" counts as bf16.
    fp16 = migration.get("fp16", bool, False)
    if bf16 and fp16 and migration.values.get("bf16") != "auto":
        migration.record("fp16", "unsupported", "bf16 is set too; keep only one of them")
    name = "bf16" if bf16 else "fp16"
    dtype = "float32"
    if bf16:
        dtype = "bfloat16"
    elif fp16:
        dtype = "float16"

    # If neither is set, a DeepSpeed file may set the precision.
    if bf16 or fp16:
        migration.set(name, "training.mixed_precision_param", dtype)
    elif not migration.document.values.get("deepspeed"):
        migration.set(name, "training.mixed_precision_param", dtype, "the default is float32")
    for other in ("bf16", "fp16"):
        is_off = not migration.values.get(other)
        migration.record(
            other, "ignored", "it is off" if is_off else f"the compute dtype is {dtype}"
        )
    # dtype of the stored weights, which older versions of transformers call torch_dtype.
    for name in ("torch_dtype", "dtype"):
        kind = migration.get(name, str)
        if kind in ("bfloat16", "bf16") and migration.system == SYSTEM:
            migration.set(
                name,
                "training.dtype",
                "bfloat16",
                "parameters and their updates also use this dtype",
            )
        elif kind in ("float16", "fp16", "half"):
            migration.record(name, "unsupported", "training.dtype must be float32 or bfloat16")
        migration.record(name, "ignored", "parameters are stored in float32")


def optimizer(migration: FileMigration, kind: str, key: str) -> None:
    """Set the optimizer from the Trainer's names for AdamW, including variants with 8-bit states."""
    is_plain_adamw = kind.startswith(("adamw_torch", "adamw_hf", "adamw_apex"))
    has_few_bits = kind.endswith(("8bit", "4bit", "fp8"))
    if is_plain_adamw and not has_few_bits:
        migration.set(key, "optimizer.name", "AdamW")
    elif "adamw" in kind and kind.endswith("8bit"):  # from bitsandbytes or torchao, paged or not
        migration.set(key, "optimizer.name", "AdamW8bit")
    elif "adamw" in kind:
        # The update is AdamW's, so use it, but report that its states need more memory.
        migration.set(key, "optimizer.name", "AdamW")
        migration.entries = [e for e in migration.entries if e.key != key]
        migration.record(
            key,
            "unsupported",
            'this precision of the state is not supported; optimizer.name is set to "AdamW"',
        )
    else:
        migration.record(
            key, "unsupported", "optimizer.name supports AdamW, Adam, AdamW8bit and Muon"
        )


def _saving(migration: FileMigration) -> None:
    """Set the interval and number of checkpoints. YAML reads an unquoted ``no`` as false."""
    strategy = "no"
    if migration.values.get("save_strategy") is not False:
        strategy = str(migration.get("save_strategy", str, "steps"))
    migration.default("checkpoint.enable", True, "the last step is always saved")

    # The interval. checkpoint.interval is a number of steps, so only this strategy can be translated.
    steps = migration.get("save_steps", float, 500.0)
    if strategy == "steps" and steps >= 1:
        migration.set("save_steps", "checkpoint.interval", int(steps))
        migration.record("save_strategy", "honoured", "checkpoint.interval is a number of steps")
    elif strategy == "steps":
        migration.record(
            "save_steps",
            "unsupported",
            "it is a fraction of the run; checkpoint.interval is a number of steps",
        )
    elif strategy == "no":
        migration.record(
            "save_strategy",
            "honoured",
            "the last step and every 500th step are saved: checkpoint.interval",
        )
    else:
        migration.record(
            "save_strategy",
            "ignored",
            f"{strategy} has no counterpart; set checkpoint.interval to a number of steps, or use "
            "checkpoint.keep_best to keep the best checkpoint",
        )
    # record() keeps the first entry of a key, so these only apply to keys without an entry so far.
    migration.record("save_strategy", "honoured", "checkpoint.interval is a number of steps")
    migration.record("save_steps", "ignored", "save_strategy is not steps")

    # The number of checkpoints.
    limit = migration.get("save_total_limit", int)
    if limit is not None and limit > 0:
        # Keep at least two, because the newest checkpoint must exist until the next one is complete.
        why = "the previous checkpoint is kept until the next is complete" if limit == 1 else ""
        migration.set("save_total_limit", "checkpoint.keep_latest_k", max(2, limit), why)
    else:
        migration.default("checkpoint.keep_latest_k", 0, "all checkpoints are kept")
    migration.record("save_total_limit", "ignored", "all checkpoints are kept")


def _validation(migration: FileMigration) -> None:
    """Set the interval and data of validation, and the metric of the best checkpoint.

    ``migration.record`` has no effect on a key that has a result already.
    """
    # Older versions of transformers use the second name.
    key = "eval_strategy" if migration.has("eval_strategy") else "evaluation_strategy"
    strategy = "no"
    if migration.values.get(key) is not False:
        strategy = str(migration.get(key, str, "no"))
    file = migration.get("validation_file", str)
    split = migration.get("dataset_test_split", str)
    has_data = bool(file or split)
    on = strategy in ("steps", "epoch") and has_data
    # Without data there is nothing to validate on.
    if strategy in ("steps", "epoch") and not has_data:
        text = "the file names no validation data; set validation.enable, validation.dataset and its path"
        migration.record(key, "ignored", text)
    elif on:
        migration.set(key, "validation.enable", True)
        if strategy == "epoch":
            migration.default("validation.per_epoch", 1)
        else:
            # As in the Trainer, eval_steps defaults to logging_steps.
            steps = migration.get("eval_steps", float, migration.get("logging_steps", float, 500.0))
            migration.set("eval_steps", "validation.freq", int(max(1, steps)))
    for name in ("eval_strategy", "evaluation_strategy"):
        migration.record(name, "ignored", "validation is off")
    migration.record("eval_steps", "ignored", "validation is not counted in steps")
    if file and on:
        migration.set("validation_file", "validation.dataset_path", file)
    if split and on:
        migration.set("dataset_test_split", "validation.split", split)
    for name in ("validation_file", "dataset_test_split"):
        migration.record(name, "ignored", "validation is off")
    _best_checkpoint(migration, is_validated=on)


def _best_checkpoint(migration: FileMigration, is_validated: bool) -> None:
    """Set the metric of the best checkpoint, if validation reports it."""
    best = migration.get("load_best_model_at_end", bool, False)
    metric = str(migration.get("metric_for_best_model", str, "loss"))
    metric = metric.removeprefix("eval_")
    if is_validated and best and metric in ("loss", "accuracy"):
        name = f"validation.{metric}"
        migration.set(
            "load_best_model_at_end",
            "checkpoint.keep_best",
            name,
            "the best checkpoint is kept and used by other commands",
        )
        migration.record("metric_for_best_model", "honoured", f"checkpoint.keep_best = {name}")
    text = "it requires validation that reports the loss or the accuracy" if best else "it is off"
    migration.record("load_best_model_at_end", "ignored", text)
    migration.record(
        "metric_for_best_model", "ignored", "no best checkpoint is kept; see checkpoint.keep_best"
    )
    text = "the task determines if a larger value is better; see checkpoint.best_mode"
    migration.record("greater_is_better", "ignored", text)


def _model_and_data(migration: FileMigration) -> None:
    """Translate arguments of example scripts: the model, the data, and options of TRL and PEFT."""
    key = "model_name_or_path" if migration.has("model_name_or_path") else "model_name"
    name = migration.get(key, str)
    if name:
        folder, how = model_folder(name)
        migration.set(key, "model.hf_assets_path", folder, how)
        migration.default(
            "model.flavor", "from_folder", "the folder's config.json determines the model"
        )
        migration.default(
            "checkpoint.initial_load_in_hf", True, "training starts from the folder's weights"
        )
    for other in ("model_name_or_path", "model_name"):
        migration.record(other, "ignored", "it is empty")

    # A dataset of the Hub takes precedence over a local file.
    data = migration.get("dataset_name", str)
    if data:
        migration.set("dataset_name", "training.dataset_path", data)
        migration.default("training.dataset", "huggingface")
    elif migration.has("train_file"):
        migration.default(
            "training.dataset", dataset_of(str(migration.values["train_file"])) or "text"
        )
    # The validation set has the same format as the training set.
    values = {setting.option: setting.value for setting in migration.settings}
    if "validation.enable" in values:
        file = values.get("validation.dataset_path")
        kind = "huggingface"
        if file:
            kind = dataset_of(file) or "text"
        migration.default("validation.dataset", kind)
        if not file and data:
            migration.default("validation.dataset_path", data)
        if "training.seq_len" in values:
            migration.default("validation.seq_len", values["training.seq_len"])

    modules(migration, "lora_target_modules", "lora.target_modules")
    modules(migration, "lora_modules_to_save", "lora.modules_to_save")
    # PEFT's arguments contain no switch.
    if migration.has("lora_r"):
        migration.default("lora.enable", True, "lora_r is set")
    base_dtypes = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
    for name, kind in base_dtypes.items():
        if migration.get(name, bool, False):
            migration.set(name, "lora.base_dtype", kind)
        migration.record(name, "ignored", "it is off")
    # Only preference training has a beta.
    if migration.has("beta"):
        migration.set("beta", "task.beta", migration.get("beta", float))
        migration.default("task.name", "preference", "beta is an argument of DPO")
    _preference_loss(migration)
    packs = migration.get("packing", bool)
    if packs is not None:
        # "wrapped" concatenates documents and cuts rows anywhere. It is also the behaviour of versions without
        # this key. The other strategies ("bfd", "bfd_split") are best-fit decreasing.
        wraps = migration.get("packing_strategy", str, "wrapped") == "wrapped"
        packed_kind = "concat" if wraps else "best_fit"
        migration.set("packing", "data.packing", packed_kind if packs else "padded")
        migration.record(
            "packing_strategy", "renamed" if packs else "ignored", "part of data.packing"
        )


def _preference_loss(migration: FileMigration) -> None:
    """Set the loss of DPO. TRL accepts one name or a list, and a list with one name has the same meaning."""
    given = migration.values.get("loss_type")
    # The type of the option lists the supported losses.
    names = given if isinstance(given, list) else [given]
    losses = get_args(get_type_hints(Task)["loss_type"])
    if len(names) == 1 and names[0] in losses:
        migration.set("loss_type", "task.loss_type", names[0])
    migration.record(
        "loss_type", "unsupported", f"it must be one of {', '.join(losses)}: task.loss_type"
    )
    if migration.has("label_smoothing"):
        migration.set(
            "label_smoothing", "task.label_smoothing", migration.get("label_smoothing", float, 0.0)
        )
    if migration.get("reference_free", bool, False):
        migration.set("reference_free", "task.reference_free", True)
    migration.record("reference_free", "ignored", "it is off")
    # Two names of the weight of the likelihood term, in DPO and CPO.
    for name in ("rpo_alpha", "cpo_alpha"):
        if migration.has(name):
            migration.set(name, "task.nll_weight", migration.get(name, float, 0.0))


def _reports(migration: FileMigration) -> None:
    """Enable the metric sinks named by report_to: one name or a list."""
    # "none" and "all" are not names of sinks.
    given = migration.values.get("report_to")
    names = []
    if isinstance(given, list):
        names = [str(name) for name in given]
    elif given:
        names = [str(given)]
    known = {
        name: f"metrics.enable_{name}" for name in ("tensorboard", "wandb", "mlflow", "trackio")
    }
    chosen = [name for name in names if name in known]
    for number, name in enumerate(chosen):
        if number == 0:
            migration.set("report_to", known[name], True)
        else:
            migration.default(known[name], True, "also in report_to")
    others = [name for name in names if name not in known and name not in ("none", "all")]
    text = "metrics.jsonl is always written"
    if others:
        text = f"{', '.join(others)}: {text}"
    migration.record("report_to", "ignored", text)
