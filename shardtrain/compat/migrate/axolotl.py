"""axolotl's YAML: datasets, adapters, batches, schedule, precision."""

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
_WANDB = Idle("set WANDB_PROJECT, WANDB_RUN_NAME and the like in the environment")
_HUB = Idle("nothing is uploaded while it trains: `shardtrain export RUN --to HF_DIR --push ORG/NAME` does")
_KERNEL = Idle("attention and fused operations use the fastest available kernels")
_PREPARED = Idle("tokenized data are kept by `shardtrain data prepare`")
_FOLDER = Idle("determined by the folder model.hf_assets_path")
_RELORA = Cannot("adapters are not restarted")
_SHARDS = Idle("only affects how rows are read, not their content")
_SAVES = Idle("checkpoint.interval counts steps; checkpoint.keep_best saves the best")


def looks(values: Mapping[str, Any]) -> bool:
    """True if the keys are those of this system."""
    return "base_model" in values and bool(
        {"datasets", "micro_batch_size", "sequence_len", "pretraining_dataset"} & values.keys()
    )


KEYS: Mapping[str, Rule] = {
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
    "trust_remote_code": Cannot("code of a repository is never run; write a model file"),
    "resize_token_embeddings_to_32x": Cannot("`shardtrain import --vocab_size N` adds rows to the embedding"),
    "special_tokens": Cannot("tokens are those of the folder's tokenizer; write them there"),
    "tokens": Cannot(
        "tokens are those of the folder's tokenizer; `shardtrain import --vocab_size N` adds rows for new ones"
    ),
    "added_tokens_overrides": Cannot("tokens are those of the folder's tokenizer"),
    "model_config": JOINED,
    "overrides_of_model_config": JOINED,
    "bnb_config_kwargs": Idle("nf4 is taken with double quantization of nothing: lora.base_dtype"),
    "gptq": Cannot("weights that were quantized for inference are not trained on"),
    "gptq_groupsize": Idle("only read with gptq"),
    "gptq_model_v1": Idle("only read with gptq"),
    "load_in_8bit": JOINED,
    "load_in_4bit": JOINED,
    "bf16": JOINED,
    "fp16": JOINED,
    "tf32": Idle("float32 matmuls are as PyTorch is set"),
    "bfloat16": JOINED,
    "float16": Cannot("parameters are stored in float32 or bfloat16: training.dtype"),
    "gpu_memory_limit": Idle("all of the device's memory may be used"),
    "lora_on_cpu": Cannot("adapters are where the model is"),
    "max_memory": Idle("all of the device's memory may be used"),
    "device_map": Idle("[parallelism] distributes the model"),
    "strict": Idle("every key is reported"),
    "datasets": JOINED,
    "test_datasets": JOINED,
    "pretraining_dataset": Cannot(
        'name it in training.dataset_path, with training.dataset = "huggingface" and data.streaming'
    ),
    "shuffle_merged_datasets": Cannot("rows are always shuffled", off=(None, True)),
    "dataset_prepared_path": _PREPARED,
    "push_dataset_to_hub": _HUB,
    "dataset_processes": _SHARDS,
    "dataset_keep_in_memory": _SHARDS,
    "dataset_shard_num": Cannot("use a part of the file"),
    "dataset_shard_idx": Idle("only read with dataset_shard_num"),
    "hub_model_id": _HUB,
    "hub_strategy": _HUB,
    "hf_use_auth_token": Idle("a token is read from HF_TOKEN"),
    "val_set_size": JOINED,
    "rl": JOINED,
    "rl_beta": To("task.beta", float),
    "dpo_beta": To("task.beta", float),
    "chat_template": JOINED,
    "chat_template_jinja": Idle("see chat_template"),
    "default_system_message": Cannot("the chat template contains the system message"),
    "sequence_len": To("training.seq_len", int),
    "pad_to_sequence_len": Idle("padding has no loss; data.packing says what shares a sequence"),
    "sample_packing": JOINED,
    "eval_sample_packing": Idle("held-out rows are packed as those of training"),
    "sample_packing_eff_est": Idle("no estimate is needed"),
    "total_num_tokens": Idle("no estimate is needed"),
    "excess_length_strategy": JOINED,
    "adapter": JOINED,
    "lora_model_dir": To("lora.initial_load_path", str),
    "lora_r": To("lora.rank", int),
    "lora_alpha": To("lora.alpha", float),
    "lora_dropout": To("lora.dropout", float),
    "lora_target_modules": JOINED,
    "lora_target_linear": JOINED,
    "lora_modules_to_save": JOINED,
    "lora_fan_in_fan_out": _FOLDER,
    "peft_layers_to_transform": Cannot("name the layers' paths in lora.target_modules"),
    "peft_use_rslora": To("lora.rank_stabilized", bool),
    "peft_use_dora": To("lora.use_dora", bool),
    "peft": JOINED,
    "relora_steps": _RELORA,
    "relora_warmup_steps": _RELORA,
    "relora_anneal_steps": _RELORA,
    "relora_prune_ratio": _RELORA,
    "relora_cpu_offload": _RELORA,
    "gradient_accumulation_steps": JOINED,
    "micro_batch_size": JOINED,
    "batch_size": Cannot("rows of a step are training.global_batch_size"),
    "eval_batch_size": To("validation.local_batch_size", int),
    "num_epochs": JOINED,
    "max_steps": JOINED,
    "warmup_steps": JOINED,
    "warmup_ratio": JOINED,
    "learning_rate": To("optimizer.lr", float),
    "lr_scheduler": JOINED,
    "lr_scheduler_kwargs": Cannot("use the options of [lr_scheduler]"),
    "cosine_min_lr_ratio": JOINED,
    "cosine_constant_lr_ratio": Cannot("lr_scheduler.decay_ratio of warmup_stable_decay is the nearest"),
    "lr_div_factor": Cannot("one-cycle schedules are not supported"),
    "lr_quadratic_warmup": Cannot("the warmup is linear"),
    "log_sweep_min_lr": Cannot("there is no search for learning rates"),
    "log_sweep_max_lr": Cannot("there is no search for learning rates"),
    "optimizer": JOINED,
    "optim_args": JOINED,
    "optim_target_modules": Cannot("GaLore is not supported"),
    "adam_beta1": To("optimizer.beta1", float),
    "adam_beta2": To("optimizer.beta2", float),
    "adam_epsilon": To("optimizer.eps", float),
    "weight_decay": To("optimizer.weight_decay", float),
    "max_grad_norm": JOINED,
    "neftune_noise_alpha": Cannot("no noise is added to embeddings"),
    "train_on_inputs": JOINED,
    "group_by_length": Cannot("rows are shuffled over the whole set; data.packing leaves no padding"),
    "gradient_checkpointing": JOINED,
    "gradient_checkpointing_kwargs": Idle("recomputation never re-enters autograd"),
    "early_stopping_patience": JOINED,
    "resume_from_checkpoint": Idle("a run continues by itself from the newest checkpoint of its folder"),
    "auto_resume_from_checkpoints": Idle("a run continues by itself from the newest checkpoint of its folder"),
    "local_rank": Idle("the launcher sets the local rank"),
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
    "debug": Idle("`shardtrain data show` prints samples"),
    "use_tensorboard": To("metrics.enable_tensorboard", bool),
    "wandb_project": JOINED,
    **{f"wandb_{name}": _WANDB for name in ("entity", "watch", "name", "log_model", "run_id", "mode", "run")},
    "mlflow_experiment_name": Idle("metrics.jsonl is always written"),
    "mlflow_tracking_uri": Idle("metrics.jsonl is always written"),
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
    "noisy_embedding_alpha": Cannot("no noise is added to embeddings"),
    "torchdistx_path": Idle("the optimizer is PyTorch's"),
    "ddp_find_unused_parameters": Idle("every parameter has a gradient"),
    "ddp_timeout": To("comm.train_timeout_seconds", int),
    "ddp_bucket_cap_mb": _SHARDS,
    "ddp_broadcast_buffers": _SHARDS,
    "deepspeed": JOINED,
    "fsdp": Idle("parameters are sharded over the ranks"),
    "fsdp_config": Idle("parameters are sharded layer by layer"),
    "sequence_parallel_degree": To("parallelism.context_parallel_degree", int),
    "context_parallel_size": To("parallelism.context_parallel_degree", int),
    "tensor_parallel_size": To("parallelism.tensor_parallel_degree", int),
    "heads_k_stride": Idle("only affects how keys and values are exchanged, not numbers"),
    "ring_attn_func": Idle("only affects how keys and values are exchanged, not numbers"),
    "plugins": Cannot("code of a plugin is not run"),
    "llmcompressor": Cannot("weights are not pruned"),
}

_FORMATS = {
    "alpaca": ("alpaca", "prompt_completion"),
    "alpaca_chat": ("alpaca", "prompt_completion"),
    "completion": ("jsonl", "text"),
    "chat_template": ("jsonl", "chat"),
}


def finish(found: FileMigration) -> None:
    """Translate keys that depend on each other, and set the defaults of axolotl."""
    get = found.get

    # The model.
    name = get("base_model", str)
    if name:
        folder, how = model_folder(name)
        found.set("base_model", "model.hf_assets_path", folder, how)
        found.default("model.flavor", "from_folder", "the folder says which model it holds")
        found.default("checkpoint.initial_load_in_hf", True, "training begins with its weights")

    # The batch, and the length of the run.
    rows = get("micro_batch_size", int, 1)
    found.set("micro_batch_size", "training.local_batch_size", rows)
    accumulate(found, rows)
    steps = get("max_steps", int, 0)
    epochs = get("num_epochs", float, 1.0)
    if steps > 0:
        found.set("max_steps", "training.steps", steps)
        found.default("training.on_data_end", "repeat", "the data are repeated until max_steps")
    elif epochs == int(epochs) and epochs >= 1:
        found.set("num_epochs", "training.epochs", int(epochs))
    else:
        found.answer("num_epochs", "unsupported", "epochs are whole; training.steps ends a run anywhere")
    found.answer("max_steps", "ignored", "it asks for nothing")
    found.answer("num_epochs", "ignored", "max_steps decides")

    # The optimizer with its schedule, and precision.
    schedule(found, str(get("lr_scheduler", str, "cosine")), "lr_scheduler")
    least = get("cosine_min_lr_ratio", float)
    if least is not None:
        found.set("cosine_min_lr_ratio", "lr_scheduler.min_lr_factor", least)
    optimizer(found, str(get("optimizer", str, "adamw_torch")), "optimizer")
    _optimizer_args(found)
    found.default("optimizer.beta2", 0.999)
    found.default("optimizer.weight_decay", 0.0)
    if get("bfloat16", bool, False):
        found.set("bfloat16", "training.dtype", "bfloat16", "parameters and their updates too")
    precision(found)
    found.set("max_grad_norm", "training.max_norm", get("max_grad_norm", float, 1.0))
    on = get("gradient_checkpointing", bool, False)
    found.set("gradient_checkpointing", "activation_checkpoint.mode", "full" if on else "none")
    found.default("checkpoint.enable", True, "the last step is always saved")
    _adapter(found)
    _data(found)
    _validation(found)
    if get("wandb_project", str):
        found.set("wandb_project", "metrics.enable_wandb", True, "and WANDB_PROJECT in the environment")

    # Tables and other files only matter if they are not empty.
    if found.values.get("deepspeed"):
        found.answer("deepspeed", "honoured", "give that file beside this one")
    found.answer("deepspeed", "ignored", "it is empty")
    for key in ("model_config", "overrides_of_model_config"):
        value = found.values.get(key)
        fields: list[Any] = []
        for part in value.values() if isinstance(value, dict) else ():
            fields += part.values() if isinstance(part, dict) else [part]
        if any(field not in (None, "") for field in fields):
            found.answer(key, "unsupported", "fields of a model are model.overrides.FIELD")
        found.answer(key, "ignored", "it is empty")
    has_peft_options = _has_value(found.values.get("peft"))
    found.answer("peft", "unsupported" if has_peft_options else "ignored", "lora.init initializes adapters")


def _has_value(value: Any) -> bool:
    """True if a value or any value of a nested table is set."""
    if isinstance(value, dict):
        return any(map(_has_value, value.values()))
    return value not in (None, "", False)


def _optimizer_args(found: FileMigration) -> None:
    """Set options of the optimizer, if all of them have a counterpart."""
    value = found.values.get("optim_args")
    known = {"eps": "optimizer.eps", "weight_decay": "optimizer.weight_decay"}
    if isinstance(value, dict) and value and set(value) <= known.keys():
        for number, (name, item) in enumerate(value.items()):
            try:
                rate = float(item)
            except (TypeError, ValueError):
                found.answer("optim_args", "unsupported", f"{name} is not a number")
                return
            if number:
                found.default(known[name], rate, "in optim_args")
            else:
                found.set("optim_args", known[name], rate)
    if value:
        found.answer("optim_args", "unsupported", "constants of an optimizer are options of [optimizer]")
    found.answer("optim_args", "ignored", "it is empty")


def _adapter(found: FileMigration) -> None:
    """Set LoRA on quantized or full weights. Without an adapter, its keys are ignored."""
    kind = found.get("adapter", str)
    if kind in ("lora", "qlora"):
        found.set("adapter", "lora.enable", True)
        if found.get("lora_target_linear", bool, False):
            names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            found.set("lora_target_linear", "lora.target_modules", names, "each linear of the layers")
            found.answer("lora_target_modules", "honoured", "they are among the linears of the layers")
        if not found.answered("lora_target_modules"):
            modules(found, "lora_target_modules", "lora.target_modules")
        modules(found, "lora_modules_to_save", "lora.modules_to_save")
        if found.get("load_in_4bit", bool, kind == "qlora"):
            found.set("load_in_4bit", "lora.base_dtype", "nf4")
        elif found.get("load_in_8bit", bool, False):
            found.set("load_in_8bit", "lora.base_dtype", "int8")
    elif kind is not None:
        found.answer("adapter", "unsupported", "adapters are lora and qlora")
    else:
        options = ("r", "alpha", "dropout", "model_dir", "modules_to_save")
        for name in (*(f"lora_{option}" for option in options), "peft_use_dora", "peft_use_rslora"):
            if found.has(name):
                found.settings = [s for s in found.settings if not s.option.startswith("lora.")]
                found.entries = [e for e in found.entries if e.key != name]
                found.answer(name, "ignored", "there is no adapter")
        for name in ("load_in_4bit", "load_in_8bit"):
            if found.get(name, bool, False):
                found.answer(name, "unsupported", "a quantized model is trained with adapters alone: adapter = lora")
    asked = ("adapter", "lora_target_linear", "lora_target_modules", "lora_modules_to_save")
    for name in (*asked, "load_in_4bit", "load_in_8bit"):
        found.answer(name, "ignored", "it asks for nothing")


def _data(found: FileMigration) -> None:
    """Set one dataset of a known type, its learned tokens, and packing."""
    sets = [entry for entry in found.get("datasets", list, []) if isinstance(entry, dict) and entry.get("path")]
    first = sets[0] if sets else {}
    kind = first.get("type")
    if len(sets) == 1 and isinstance(kind, str) and kind.split(".")[0].split(":")[0] in _FORMATS:
        source, form = _FORMATS[kind.split(".")[0].split(":")[0]]
        path = str(first["path"])
        local = path.startswith((".", "/", "~")) or "." in path.rpartition("/")[2]
        files = first.get("data_files")
        if files and path in ("json", "csv", "parquet", "text"):
            path = str(files[0] if isinstance(files, list) else files)
            local = True
        found.set("datasets", "training.dataset_path", path, f"type {kind}")
        found.default("training.dataset", source if source == "alpaca" or local else "huggingface")
        found.default("data.format", form)
        for name, option in (("split", "data.split"), ("train_on_split", "data.split"), ("name", "data.subset")):
            if isinstance(first.get(name), str):
                found.default(option, first[name], f"the dataset's {name}")
        if form == "chat" and isinstance(first.get("field_messages"), str):
            found.default("data.messages_field", first["field_messages"])
        if form == "text" and isinstance(first.get("field"), str):
            found.default("data.text_field", first["field"])

        # Any other field would change the rows, and other roles would change the learned tokens.
        known = {"path", "type", "split", "train_on_split", "name", "field_messages", "field", "data_files", "ds_type"}
        known |= {"roles_to_train", "shards", "conversation"}
        strange = sorted(key for key, value in first.items() if key not in known and value not in (None, "", []))
        roles = first.get("roles_to_train")
        if roles not in (None, ["assistant"], ["gpt"], ["model"], ["assistant", "gpt"]):
            strange.append("roles_to_train")
        if strange:
            found.entries = [e for e in found.entries if e.key != "datasets"]
            found.answer(
                "datasets",
                "unsupported",
                f"{', '.join(strange)} of a dataset: columns are named in [data], and the assistant has the loss",
            )
    elif len(sets) > 1:
        text = "name each dataset in [data.sources.NAME], with its weight and format"
        found.answer("datasets", "unsupported", text)
    elif sets:
        text = f'of type {kind!r}: write rows as messages (data.format = "chat"), or name columns in data.template'
        found.answer("datasets", "unsupported", text)
    found.answer("datasets", "ignored", "it names none")

    inputs = found.get("train_on_inputs", bool, False)
    found.answer("train_on_inputs", "unsupported" if inputs else "honoured", "only the answer has a loss")
    template = found.get("chat_template", str)
    if template in (None, "tokenizer_default"):
        found.answer("chat_template", "honoured", "the tokenizer's own template is used")
    else:
        found.answer(
            "chat_template",
            "unsupported",
            "save it to a file, and name that in data.chat_template; configs/recipes/chatml.jinja is ChatML's",
        )

    packing = found.get("sample_packing", bool, False)
    found.set("sample_packing", "data.packing", "first_fit" if packing else "padded")
    strategies = {"drop": "drop", "truncate": "cut"}
    strategy = found.get("excess_length_strategy", str, "drop")
    if strategy in strategies:
        why = "rows longer than sequence_len"
        found.set("excess_length_strategy", "data.long_documents", strategies[strategy], why)
    else:
        found.answer("excess_length_strategy", "unsupported", "it is drop or truncate: data.long_documents")

    # Preference tasks build batches of rows, without packing.
    tasks = {"dpo": "preference", "ipo": None, "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
    rl = found.get("rl", str)
    if rl is not None and tasks.get(rl):
        found.set("rl", "task.name", tasks[rl])
        found.settings = [
            s for s in found.settings if s.option not in ("data.format", "data.packing", "data.long_documents")
        ]
    if rl:
        found.answer("rl", "unsupported", "there are dpo, kto, orpo and simpo: task.name")
    found.answer("rl", "ignored", "it is empty")


def _validation(found: FileMigration) -> None:
    """Set validation data from a separate file, and the interval of validation."""
    if found.get("val_set_size", float, 0.0):
        text = "no rows are taken from training: write them to a file, and name that in validation.dataset_path"
        found.answer("val_set_size", "unsupported", text)
    found.answer("val_set_size", "ignored", "nothing is held out")
    sets = [entry for entry in found.get("test_datasets", list, []) if isinstance(entry, dict) and entry.get("path")]
    if len(sets) == 1 and any(s.option == "training.dataset_path" for s in found.settings):
        training = next((s.value for s in found.settings if s.option == "training.dataset"), "jsonl")
        found.set("test_datasets", "validation.dataset_path", str(sets[0]["path"]))
        found.default("validation.dataset", training)
        found.default("validation.enable", True)
        if isinstance(sets[0].get("split"), str):
            found.default("validation.split", sets[0]["split"])
        length = found.get("sequence_len", int)
        if length:
            found.default("validation.seq_len", length)
    if sets:
        found.answer("test_datasets", "unsupported", "name the held-out rows in [validation]")
    found.answer("test_datasets", "ignored", "it is empty")
    on = any(setting.option == "validation.enable" for setting in found.settings)
    per_epoch = found.get("evals_per_epoch", int, 0)
    steps = found.get("eval_steps", float, 0.0)
    if on and per_epoch > 0:
        found.set("evals_per_epoch", "validation.per_epoch", per_epoch)
    elif on and steps >= 1:
        found.set("eval_steps", "validation.freq", int(steps))
    patience = found.get("early_stopping_patience", int, 0)
    if on and patience > 0:
        found.set("early_stopping_patience", "validation.patience", patience)
    for name in ("evals_per_epoch", "eval_steps", "eval_strategy", "evaluation_strategy", "early_stopping_patience"):
        found.answer(name, "ignored", "nothing is validated by it")
