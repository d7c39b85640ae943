"""Reader of axolotl's YAML: datasets, adapters, batches, schedule, precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.compat.migrate.migration_report import JOINED, Cannot, FileMigration, Idle, Rule, To
from shardtrain.compat.migrate.training_arguments import (
    accumulate,
    model_folder,
    modules,
    optimizer,
    precision,
    schedule,
)

SYSTEM = "axolotl"
OPEN = ""
# Keys whose value is an entire table, which has no rules of its own.
LEAVES = frozenset(
    [
        "special_tokens",
        "fsdp_config",
        "gradient_checkpointing_kwargs",
        "optim_args",
        "lr_scheduler_kwargs",
        "model_config",
        "bnb_config_kwargs",
        "llmcompressor",
        "peft",
        "lora_target_modules",
        "overrides_of_model_config",
        "max_memory",
        "dataloader_kwargs",
        "trl",
        "rl_kwargs",
        "overrides_of_model_kwargs",
    ]
)
_WANDB = Idle("set WANDB_PROJECT, WANDB_RUN_NAME and similar environment variables")
_HUB = Idle("uploads are a separate command: `shardtrain export RUN --to HF_DIR --push ORG/NAME`")
_KERNEL = Idle("attention and fused operations use the fastest available kernels")
_PREPARED = Idle("`shardtrain data prepare` stores tokenized data")
_FOLDER = Idle("determined by the folder model.hf_assets_path")
_RELORA = Cannot("ReLoRA is not supported")
_SHARDS = Idle("only affects how rows are read, not their content")
_SAVES = Idle(
    "checkpoint.interval is a number of steps; checkpoint.keep_best keeps the best checkpoint"
)


def looks(values: Mapping[str, Any]) -> bool:
    """True if base_model is set together with another key that axolotl requires."""
    return "base_model" in values and bool(
        {"datasets", "micro_batch_size", "sequence_len", "pretraining_dataset"} & values.keys()
    )


KEYS: Mapping[str, Rule] = {
    # The model.
    "base_model": JOINED,
    "base_model_config": _FOLDER,
    "base_model_ignore_patterns": _FOLDER,
    "model_revision": Idle("only selects the files to download"),
    "revision_of_model": Idle("only selects the files to download"),
    "model_type": _FOLDER,
    "tokenizer_type": _FOLDER,
    "tokenizer_config": _FOLDER,
    "tokenizer_use_fast": _FOLDER,
    "tokenizer_legacy": _FOLDER,
    "is_falcon_derived_model": _FOLDER,
    "is_llama_derived_model": _FOLDER,
    "is_mistral_derived_model": _FOLDER,
    "is_qwen_derived_model": _FOLDER,
    "trust_remote_code": Cannot("code from a repository is never run; write a model file"),
    "resize_token_embeddings_to_32x": Cannot(
        "`shardtrain import --vocab_size N` adds rows to the embedding"
    ),
    "special_tokens": Cannot("tokens come from the folder's tokenizer; add them there"),
    "tokens": Cannot(
        "tokens come from the folder's tokenizer; `shardtrain import --vocab_size N` adds rows for new tokens"
    ),
    "added_tokens_overrides": Cannot("tokens come from the folder's tokenizer"),
    # Tables with fields of the model, and quantization.
    "model_config": JOINED,
    "overrides_of_model_config": JOINED,
    "bnb_config_kwargs": Idle("lora.base_dtype uses nf4 without double quantization"),
    "gptq": Cannot("weights quantized for inference cannot be trained"),
    "gptq_groupsize": Idle("only read with gptq"),
    "gptq_model_v1": Idle("only read with gptq"),
    "load_in_8bit": JOINED,
    "load_in_4bit": JOINED,
    # Precision and devices.
    "bf16": JOINED,
    "fp16": JOINED,
    "tf32": Idle("PyTorch's setting for float32 matmuls applies"),
    "bfloat16": JOINED,
    "float16": Cannot("training.dtype must be float32 or bfloat16"),
    "gpu_memory_limit": Idle("a run may use all memory of its device"),
    "lora_on_cpu": Cannot("adapters are on the device of the model"),
    "max_memory": Idle("a run may use all memory of its device"),
    "device_map": Idle("[parallelism] distributes the model"),
    "strict": Idle("every key is reported"),
    # Data.
    "datasets": JOINED,
    "test_datasets": JOINED,
    "pretraining_dataset": Cannot(
        'set training.dataset_path to it, with training.dataset = "huggingface" and data.streaming'
    ),
    "shuffle_merged_datasets": Cannot("rows are always shuffled", off=(None, True)),
    "dataset_prepared_path": _PREPARED,
    "push_dataset_to_hub": _HUB,
    "dataset_processes": _SHARDS,
    "dataset_keep_in_memory": _SHARDS,
    "dataset_shard_num": Cannot("write the shard to a file and use that"),
    "dataset_shard_idx": Idle("only read with dataset_shard_num"),
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hf_use_auth_token": Idle("the token comes from HF_TOKEN"),
    "val_set_size": JOINED,
    # Preference tasks and templates.
    "rl": JOINED,
    "rl_beta": To("task.beta", float),
    "dpo_beta": To("task.beta", float),
    "chat_template": JOINED,
    "chat_template_jinja": Idle("see chat_template"),
    "default_system_message": Cannot("the chat template contains the system message"),
    # Length of rows, and packing.
    "sequence_len": To("training.seq_len", int),
    "pad_to_sequence_len": Idle(
        "padding has no loss; data.packing determines which rows share a sequence"
    ),
    "sample_packing": JOINED,
    "eval_sample_packing": Idle("validation rows are packed like training rows"),
    "sample_packing_eff_est": Idle("no estimate is needed"),
    "total_num_tokens": Idle("no estimate is needed"),
    "excess_length_strategy": JOINED,
    # Adapters.
    "adapter": JOINED,
    "lora_model_dir": To("lora.initial_load_path", str),
    "lora_r": To("lora.rank", int),
    "lora_alpha": To("lora.alpha", float),
    "lora_dropout": To("lora.dropout", float),
    "lora_target_modules": JOINED,
    "lora_target_linear": JOINED,
    "lora_modules_to_save": JOINED,
    "lora_fan_in_fan_out": _FOLDER,
    "peft_layers_to_transform": Cannot("list the paths of the layers in lora.target_modules"),
    "peft_use_rslora": To("lora.rank_stabilized", bool),
    "peft_use_dora": To("lora.use_dora", bool),
    "peft": JOINED,
    "relora_steps": _RELORA,
    "relora_warmup_steps": _RELORA,
    "relora_anneal_steps": _RELORA,
    "relora_prune_ratio": _RELORA,
    "relora_cpu_offload": _RELORA,
    # Batches, length and schedule.
    "gradient_accumulation_steps": JOINED,
    "micro_batch_size": JOINED,
    "batch_size": Cannot("set training.global_batch_size to the rows of a step"),
    "eval_batch_size": To("validation.local_batch_size", int),
    "num_epochs": JOINED,
    "max_steps": JOINED,
    "warmup_steps": JOINED,
    "warmup_ratio": JOINED,
    "learning_rate": To("optimizer.lr", float),
    "lr_scheduler": JOINED,
    "lr_scheduler_kwargs": Cannot("use the options of [lr_scheduler]"),
    "cosine_min_lr_ratio": JOINED,
    "cosine_constant_lr_ratio": Cannot(
        "lr_scheduler.decay_ratio of warmup_stable_decay is similar"
    ),
    "lr_div_factor": Cannot("one-cycle schedules are not supported"),
    "lr_quadratic_warmup": Cannot("the warmup is always linear"),
    "log_sweep_min_lr": Cannot("searching for a learning rate is not supported"),
    "log_sweep_max_lr": Cannot("searching for a learning rate is not supported"),
    # The optimizer.
    "optimizer": JOINED,
    "optim_args": JOINED,
    "optim_target_modules": Cannot("GaLore is not supported"),
    "adam_beta1": To("optimizer.beta1", float),
    "adam_beta2": To("optimizer.beta2", float),
    "adam_epsilon": To("optimizer.eps", float),
    "weight_decay": To("optimizer.weight_decay", float),
    "max_grad_norm": JOINED,
    "neftune_noise_alpha": To("training.neftune_noise_alpha", float),
    # Loss and gradients.
    "train_on_inputs": JOINED,
    "group_by_length": Cannot(
        "rows are shuffled over the full data set; data.packing avoids padding instead"
    ),
    "gradient_checkpointing": JOINED,
    "gradient_checkpointing_kwargs": Idle("recomputation never re-enters autograd"),
    "early_stopping_patience": JOINED,
    "resume_from_checkpoint": Idle(
        "a run resumes automatically from the newest checkpoint in its folder"
    ),
    "auto_resume_from_checkpoints": Idle(
        "a run resumes automatically from the newest checkpoint in its folder"
    ),
    "local_rank": Idle("the launcher sets the local rank"),
    # Files, validation and checkpoints.
    "output_dir": To("job.dump_folder", str),
    "logging_steps": To("metrics.log_freq", int, lambda steps: max(1, steps)),
    "eval_steps": JOINED,
    "evals_per_epoch": JOINED,
    "eval_strategy": JOINED,
    "evaluation_strategy": JOINED,
    "save_steps": To("checkpoint.interval", int),
    "saves_per_epoch": _SAVES,
    "save_strategy": _SAVES,
    "save_total_limit": To("checkpoint.keep_latest_k", int, lambda count: max(2, count)),
    "save_safetensors": Idle("weights are never pickled"),
    "eval_table_size": Idle("`shardtrain generate` writes text"),
    "eval_max_new_tokens": Idle("`shardtrain generate` writes text"),
    "eval_causal_lm_metrics": Idle("`shardtrain evaluate` measures more than the loss"),
    "loss_watchdog_threshold": Idle("training.spike_policy watches the loss"),
    "loss_watchdog_patience": Idle("training.spike_policy watches the loss"),
    "seed": To("debug.seed", int),
    # Trackers.
    "debug": Idle("`shardtrain data show` prints samples"),
    "use_tensorboard": To("metrics.enable_tensorboard", bool),
    "wandb_project": JOINED,
    **{
        f"wandb_{name}": _WANDB
        for name in ("entity", "watch", "name", "log_model", "run_id", "mode", "run")
    },
    "mlflow_experiment_name": Idle("metrics.jsonl is always written"),
    "mlflow_tracking_uri": Idle("metrics.jsonl is always written"),
    # Kernels and the compiler.
    "torch_compile": To("compile.enable", bool),
    "torch_compile_backend": To("compile.backend", str),
    **{
        name: _KERNEL
        for name in [
            "flash_attention",
            "xformers_attention",
            "sdp_attention",
            "s2_attention",
            "flash_attn_cross_entropy",
            "flash_attn_rms_norm",
            "flash_attn_fuse_qkv",
            "flash_attn_fuse_mlp",
            "flash_optimum",
            "eager_attention",
            "flex_attention",
        ]
    },
    "noisy_embedding_alpha": Cannot("noise on embeddings is not supported"),
    # Distributed training.
    "torchdistx_path": Idle("torchdistx is not used"),
    "ddp_find_unused_parameters": Idle("every parameter receives a gradient"),
    "ddp_timeout": To("comm.train_timeout_seconds", int),
    "ddp_bucket_cap_mb": _SHARDS,
    "ddp_broadcast_buffers": _SHARDS,
    "deepspeed": JOINED,
    "fsdp": Idle("parameters are always sharded over the ranks"),
    "fsdp_config": Idle("each layer is sharded separately"),
    "sequence_parallel_degree": To("parallelism.context_parallel_degree", int),
    "context_parallel_size": To("parallelism.context_parallel_degree", int),
    "tensor_parallel_size": To("parallelism.tensor_parallel_degree", int),
    "heads_k_stride": Idle("only affects how keys and values are exchanged, not numbers"),
    "ring_attn_func": Idle("only affects how keys and values are exchanged, not numbers"),
    "plugins": Cannot("code of plugins is not run"),
    "llmcompressor": Cannot("pruning is not supported"),
}

# Type of a dataset -> our dataset, and the format of its rows.
_FORMATS = {
    "alpaca": ("alpaca", "prompt_completion"),
    "alpaca_chat": ("alpaca", "prompt_completion"),
    "completion": ("jsonl", "text"),
    "chat_template": ("jsonl", "chat"),
}


def finish(migration: FileMigration) -> None:
    """Translate the keys that depend on each other, and set axolotl's defaults."""
    get = migration.get

    # Translate the options that select the model.
    name = get("base_model", str)
    if name:
        folder, how = model_folder(name)
        migration.set("base_model", "model.hf_assets_path", folder, how)
        migration.default(
            "model.flavor", "from_folder", "the folder's config.json determines the model"
        )
        migration.default(
            "checkpoint.initial_load_in_hf", True, "training starts from the folder's weights"
        )

    # The batch, and the length of the run.
    rows = get("micro_batch_size", int, 1)
    migration.set("micro_batch_size", "training.local_batch_size", rows)
    accumulate(migration, rows)
    steps = get("max_steps", int, 0)
    epochs = get("num_epochs", float, 1.0)
    if steps > 0:
        migration.set("max_steps", "training.steps", steps)
        migration.default("training.on_data_end", "repeat", "the data repeat until max_steps")
    elif epochs == int(epochs) and epochs >= 1:
        migration.set("num_epochs", "training.epochs", int(epochs))
    else:
        migration.record(
            "num_epochs",
            "unsupported",
            "training.epochs must be an integer; use training.steps for another length",
        )
    migration.record("max_steps", "ignored", "it is not positive, so it sets no limit")
    migration.record("num_epochs", "ignored", "max_steps takes precedence")

    # The optimizer with its schedule, and precision.
    schedule(migration, str(get("lr_scheduler", str, "cosine")), "lr_scheduler")
    # axolotl names the last rate of the cosine separately.
    least = get("cosine_min_lr_ratio", float)
    if least is not None:
        migration.set("cosine_min_lr_ratio", "lr_scheduler.min_lr_factor", least)
    optimizer(migration, str(get("optimizer", str, "adamw_torch")), "optimizer")
    _optimizer_args(migration)
    # axolotl uses the Trainer's defaults.
    migration.default("optimizer.beta2", 0.999)
    migration.default("optimizer.weight_decay", 0.0)
    if get("bfloat16", bool, False):
        migration.set(
            "bfloat16",
            "training.dtype",
            "bfloat16",
            "parameters and their updates also use this dtype",
        )
    precision(migration)
    migration.set("max_grad_norm", "training.max_norm", get("max_grad_norm", float, 1.0))
    on = get("gradient_checkpointing", bool, False)
    migration.set("gradient_checkpointing", "activation_checkpoint.mode", "full" if on else "none")
    migration.default("checkpoint.enable", True, "the last step is always saved")
    _adapter(migration)
    _data(migration)
    _validation(migration)
    if get("wandb_project", str):
        migration.set(
            "wandb_project",
            "metrics.enable_wandb",
            True,
            "also set WANDB_PROJECT in the environment",
        )

    # Record the keys that contain a table or name another file. They only have an effect if they are not
    # empty.
    if migration.values.get("deepspeed"):
        migration.record("deepspeed", "honoured", "add that file to the command to translate both")
    migration.record("deepspeed", "ignored", "it is empty")
    for key in ("model_config", "overrides_of_model_config"):
        value = migration.values.get(key)
        parts = value.values() if isinstance(value, dict) else ()
        fields: list[Any] = []
        for part in parts:
            fields += part.values() if isinstance(part, dict) else [part]
        if any(field not in (None, "") for field in fields):
            migration.record(key, "unsupported", "set fields of the model as model.overrides.FIELD")
        migration.record(key, "ignored", "it is empty")
    has_peft_options = _has_value(migration.values.get("peft"))
    migration.record(
        "peft",
        "unsupported" if has_peft_options else "ignored",
        "use lora.init for the initialization of adapters",
    )


def _has_value(value: Any) -> bool:
    """True if a value or any value of a nested table is set."""
    if isinstance(value, dict):
        return any(map(_has_value, value.values()))
    return value not in (None, "", False)


def _optimizer_args(migration: FileMigration) -> None:
    """Set the optimizer's options from optim_args if all of them have a counterpart."""
    value = migration.values.get("optim_args")
    known = {"eps": "optimizer.eps", "weight_decay": "optimizer.weight_decay"}
    # A report entry has one option, so the first entry has the key, and the others are defaults.
    if isinstance(value, dict) and value and set(value) <= known.keys():
        for number, (name, item) in enumerate(value.items()):
            try:
                rate = float(item)
            except (TypeError, ValueError):
                migration.record("optim_args", "unsupported", f"{name} is not a number")
                return
            if number:
                migration.default(known[name], rate, "also in optim_args")
            else:
                migration.set("optim_args", known[name], rate)
    elif value:
        migration.record("optim_args", "unsupported", "use the options of [optimizer]")
    else:
        migration.record("optim_args", "ignored", "it is empty")


def _adapter(migration: FileMigration) -> None:
    """Set LoRA on quantized or full weights. Without an adapter, ignore its keys."""
    kind = migration.get("adapter", str)
    if kind in ("lora", "qlora"):
        migration.set("adapter", "lora.enable", True)
        # All linear layers include those that a list would name.
        if migration.get("lora_target_linear", bool, False):
            names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            migration.set("lora_target_linear", "lora.target_modules", names, "all linear layers")
            migration.record("lora_target_modules", "honoured", "lora_target_linear includes them")
        if not migration.is_recorded("lora_target_modules"):
            modules(migration, "lora_target_modules", "lora.target_modules")
        modules(migration, "lora_modules_to_save", "lora.modules_to_save")
        if migration.get("load_in_4bit", bool, kind == "qlora"):
            migration.set("load_in_4bit", "lora.base_dtype", "nf4")
        elif migration.get("load_in_8bit", bool, False):
            migration.set("load_in_8bit", "lora.base_dtype", "int8")
    elif kind is not None:
        migration.record("adapter", "unsupported", "it must be lora or qlora")
    else:
        # Without an adapter, axolotl does not read these keys. Rules may have set options from them before.
        options = (
            "r",
            "alpha",
            "dropout",
            "model_dir",
            "modules_to_save",
            "target_linear",
            "target_modules",
        )
        for name in (*(f"lora_{option}" for option in options), "peft_use_dora", "peft_use_rslora"):
            if migration.has(name):
                migration.settings = [
                    s for s in migration.settings if not s.option.startswith("lora.")
                ]
                migration.entries = [e for e in migration.entries if e.key != name]
                migration.record(name, "ignored", "only used with an adapter")
        for name in ("load_in_4bit", "load_in_8bit"):
            if migration.get(name, bool, False):
                migration.record(
                    name,
                    "unsupported",
                    "a quantized model can only be trained with adapters: set adapter to lora",
                )
    names = ["adapter", "lora_target_linear", "lora_target_modules", "lora_modules_to_save"]
    for name in (*names, "load_in_4bit", "load_in_8bit"):
        migration.record(name, "ignored", "it is off or empty here")


def _dataset(migration: FileMigration) -> None:
    """Set the dataset. Only a single dataset of a type in ``_FORMATS`` can be translated."""
    sets = [
        entry
        for entry in migration.get("datasets", list, [])
        if isinstance(entry, dict) and entry.get("path")
    ]
    first = sets[0] if sets else {}
    # A type may have variants, such as chat_template.default.
    kind = first.get("type")
    base_kind = ""
    if isinstance(kind, str):
        base_kind = kind.split(".")[0].split(":")[0]
    if len(sets) == 1 and base_kind in _FORMATS:
        # The path is a local file or folder, or a repository of the Hub.
        source, form = _FORMATS[base_kind]
        path = str(first["path"])
        is_path = path.startswith((".", "/", "~"))
        has_ending = "." in path.rpartition("/")[2]
        local = is_path or has_ending
        files = first.get("data_files")
        if files and path in ("json", "csv", "parquet", "text"):
            path = str(files[0] if isinstance(files, list) else files)
            local = True
        migration.set("datasets", "training.dataset_path", path, f"type {kind}")
        reader = "huggingface"
        if source == "alpaca" or local:
            reader = source
        migration.default("training.dataset", reader)

        # The split and the columns.
        migration.default("data.format", form)
        for name, option in (
            ("split", "data.split"),
            ("train_on_split", "data.split"),
            ("name", "data.subset"),
        ):
            if isinstance(first.get(name), str):
                migration.default(option, first[name], f"the dataset's {name}")
        if form == "chat" and isinstance(first.get("field_messages"), str):
            migration.default("data.messages_field", first["field_messages"])
        if form == "text" and isinstance(first.get("field"), str):
            migration.default("data.text_field", first["field"])

        # Any other field would change the rows. Other roles would change the tokens with loss.
        known = {
            "path",
            "type",
            "split",
            "train_on_split",
            "name",
            "field_messages",
            "field",
            "data_files",
            "ds_type",
        }
        known |= {"roles_to_train", "shards", "conversation"}
        fields = []
        for key, value in first.items():
            if key not in known and value not in (None, "", []):
                fields.append(key)
        fields.sort()
        roles = first.get("roles_to_train")
        if roles not in (None, ["assistant"], ["gpt"], ["model"], ["assistant", "gpt"]):
            fields.append("roles_to_train")
        # The result replaces the one that was recorded above.
        if fields:
            migration.entries = [e for e in migration.entries if e.key != "datasets"]
            migration.record(
                "datasets",
                "unsupported",
                f"{', '.join(fields)}: set columns in [data]; only the assistant's messages count in the loss",
            )
    elif len(sets) > 1:
        text = "add a table [data.sources.NAME] with weight and format for each dataset"
        migration.record("datasets", "unsupported", text)
    elif sets:
        text = f'type {kind!r} has no counterpart: write rows as messages (data.format = "chat"), or set data.template'
        migration.record("datasets", "unsupported", text)
    migration.record("datasets", "ignored", "it is empty")


def _data(migration: FileMigration) -> None:
    """Set the dataset, the tokens with loss, packing, and the task of preference data.

    ``migration.record`` has no effect on a key that has a result already.
    """
    _dataset(migration)

    # The tokens with loss, and the chat template.
    inputs = migration.get("train_on_inputs", bool, False)
    migration.record(
        "train_on_inputs", "unsupported" if inputs else "honoured", "only answers count in the loss"
    )
    template = migration.get("chat_template", str)
    if template in (None, "tokenizer_default"):
        migration.record("chat_template", "honoured", "the tokenizer's own template is used")
    else:
        migration.record(
            "chat_template",
            "unsupported",
            "save it to a file, and set data.chat_template to its path; configs/recipes/chatml.jinja is ChatML",
        )

    # Packing, and documents that are longer than a row.
    packing = migration.get("sample_packing", bool, False)
    migration.set("sample_packing", "data.packing", "first_fit" if packing else "padded")
    strategies = {"drop": "drop", "truncate": "cut"}
    strategy = migration.get("excess_length_strategy", str, "drop")
    if strategy in strategies:
        why = "rows longer than sequence_len"
        migration.set("excess_length_strategy", "data.long_documents", strategies[strategy], why)
    else:
        migration.record(
            "excess_length_strategy",
            "unsupported",
            "it must be drop or truncate: data.long_documents",
        )

    # Preference tasks form batches of rows without packing.
    tasks = {
        "dpo": "preference",
        "ipo": "preference",
        "kto": "kto",
        "orpo": "orpo",
        "simpo": "simpo",
    }
    rl = migration.get("rl", str)
    # Preference tasks have their own columns, and do not pack rows.
    if rl is not None and tasks.get(rl):
        migration.set("rl", "task.name", tasks[rl])
        if rl == "ipo":
            migration.default("task.loss_type", "ipo", "rl is ipo")
        migration.settings = [
            s
            for s in migration.settings
            if s.option not in ("data.format", "data.packing", "data.long_documents")
        ]
    if rl:
        migration.record("rl", "unsupported", "it must be dpo, ipo, kto, orpo or simpo: task.name")
    migration.record("rl", "ignored", "it is empty")


def _validation(migration: FileMigration) -> None:
    """Set validation data from a separate file, and the interval of validation.

    ``migration.record`` has no effect on a key that has a result already.
    """
    if migration.get("val_set_size", float, 0.0):
        text = "training rows cannot be held out: write them to a file, and set validation.dataset_path"
        migration.record("val_set_size", "unsupported", text)
    migration.record("val_set_size", "ignored", "no rows are held out")

    # A single validation set can be translated if the training data can. It has the same format.
    sets = [
        entry
        for entry in migration.get("test_datasets", list, [])
        if isinstance(entry, dict) and entry.get("path")
    ]
    if len(sets) == 1 and any(s.option == "training.dataset_path" for s in migration.settings):
        training = next(
            (s.value for s in migration.settings if s.option == "training.dataset"), "jsonl"
        )
        migration.set("test_datasets", "validation.dataset_path", str(sets[0]["path"]))
        migration.default("validation.dataset", training)
        migration.default("validation.enable", True)
        if isinstance(sets[0].get("split"), str):
            migration.default("validation.split", sets[0]["split"])
        length = migration.get("sequence_len", int)
        if length:
            migration.default("validation.seq_len", length)
    if sets:
        migration.record("test_datasets", "unsupported", "set the validation data in [validation]")
    migration.record("test_datasets", "ignored", "it is empty")

    # The interval and early stopping.
    validates = any(setting.option == "validation.enable" for setting in migration.settings)
    per_epoch = migration.get("evals_per_epoch", int, 0)
    steps = migration.get("eval_steps", float, 0.0)
    if validates and per_epoch > 0:
        migration.set("evals_per_epoch", "validation.per_epoch", per_epoch)
    elif validates and steps >= 1:
        migration.set("eval_steps", "validation.freq", int(steps))
    patience = migration.get("early_stopping_patience", int, 0)
    if validates and patience > 0:
        migration.set("early_stopping_patience", "validation.patience", patience)
    for name in (
        "evals_per_epoch",
        "eval_steps",
        "eval_strategy",
        "evaluation_strategy",
        "early_stopping_patience",
    ):
        migration.record(name, "ignored", "validation is off, or another key sets its interval")
