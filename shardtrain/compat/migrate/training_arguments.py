"""Hugging Face ``TrainingArguments``, SFTConfig and the arguments of their example scripts, as JSON or YAML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.compat.migrate.migration_report import JOINED, Cannot, FileMigration, Idle, Rule, To
from shardtrain.facts.file_kinds import dataset_of

SYSTEM = "Hugging Face TrainingArguments"
OPEN = "not an argument of TrainingArguments; the program that reads this file defines it"
LEAVES = frozenset(
    {"dataset_mixture", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs", "fsdp_config", "accelerator_config"}
)
_HUB = Cannot("nothing is uploaded while it trains: `shardtrain export RUN --to HF_DIR --push ORG/NAME` does")
_WATCH = Idle("only affects output, not numbers")
_LOADER = Idle("only affects how batches are loaded, not numbers")


def looks(values: Mapping[str, Any]) -> bool:
    """True if the keys are those of this system."""
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
    """Return the folder of a model, and a note on how to download it if the name is a repository."""
    path = Path(name).expanduser()
    if path.is_dir() or name.startswith((".", "/", "~")) or name.count("/") != 1:
        return str(path), "a local folder"
    local = f"./assets/hf/{name.rpartition('/')[2]}"
    return local, f"get it by `shardtrain data download --repo_id {name} --assets all --local_dir ./assets/hf`"


KEYS: Mapping[str, Rule] = {
    "output_dir": To("job.dump_folder", str),
    "run_name": To("job.description", str),
    "overwrite_output_dir": Cannot("a run continues in its folder; name another one", off=(None, False, True)),
    "do_train": Idle("`shardtrain train` trains"),
    "do_eval": Idle("eval_strategy says when"),
    "do_predict": Idle("`shardtrain test` does"),
    "evaluate_during_training": Idle("eval_strategy says when"),
    "eval_strategy": JOINED,
    "evaluation_strategy": JOINED,
    "eval_steps": JOINED,
    "eval_on_start": Idle("the first validation is at validation.freq"),
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
    "num_train_epochs": JOINED,
    "max_steps": JOINED,
    "lr_scheduler_type": JOINED,
    "lr_scheduler_kwargs": Cannot("its words are those of lr_scheduler here"),
    "warmup_ratio": JOINED,
    "warmup_steps": JOINED,
    "bf16": JOINED,
    "fp16": JOINED,
    "tf32": Idle("float32 matmuls are as PyTorch is set"),
    "bf16_full_eval": Idle("validation computes as training does"),
    "fp16_full_eval": Idle("validation computes as training does"),
    "torch_dtype": JOINED,
    "dtype": JOINED,
    "seed": To("debug.seed", int),
    "data_seed": Idle("the order of the data follows from debug.seed"),
    "gradient_checkpointing": JOINED,
    "gradient_checkpointing_kwargs": Idle("recomputation never re-enters autograd"),
    "optim": JOINED,
    "adafactor": Cannot("there are AdamW, Adam and Muon, in optimizer.name"),
    "optim_args": Cannot("constants of an optimizer are options of [optimizer]"),
    "label_smoothing_factor": Cannot("targets are not smoothed"),
    "neftune_noise_alpha": Cannot("no noise is added to embeddings"),
    "torch_compile": To("compile.enable", bool),
    "torch_compile_backend": To("compile.backend", str),
    "torch_compile_mode": Idle("layers are compiled one by one"),
    "save_strategy": JOINED,
    "save_steps": JOINED,
    "save_total_limit": JOINED,
    "save_only_model": Cannot(
        "checkpoints hold all that a run needs to continue; checkpoint.last_save_model_only is for the last"
    ),
    "save_safetensors": Idle("weights are never pickled"),
    "load_best_model_at_end": JOINED,
    "metric_for_best_model": JOINED,
    "greater_is_better": JOINED,
    "resume_from_checkpoint": Idle("a run continues by itself from the newest checkpoint of its folder"),
    "logging_steps": JOINED,
    "logging_strategy": Idle("metrics.log_freq counts steps"),
    "logging_first_step": Idle("the first step is always logged"),
    "logging_dir": Idle("files go below job.dump_folder"),
    "logging_nan_inf_filter": Idle("what is not finite stops the run: training.nonfinite_policy"),
    "log_level": _WATCH,
    "log_level_replica": _WATCH,
    "disable_tqdm": _WATCH,
    "report_to": JOINED,
    "dataloader_num_workers": To("training.dataloader.num_workers", int),
    "dataloader_prefetch_factor": JOINED,
    "dataloader_pin_memory": To("training.dataloader.pin_memory", bool),
    "dataloader_persistent_workers": JOINED,
    "dataloader_drop_last": Idle("each sample is seen once in an epoch"),
    "dataset_num_proc": _LOADER,
    "preprocessing_num_workers": _LOADER,
    "remove_unused_columns": _LOADER,
    "group_by_length": Cannot("rows are shuffled over the whole set; data.packing leaves no padding"),
    "ddp_find_unused_parameters": Idle("every parameter has a gradient"),
    "ddp_timeout": To("comm.train_timeout_seconds", int),
    "ddp_backend": Idle("nccl on CUDA, gloo on a CPU"),
    "local_rank": Idle("where a rank is belongs to its launcher"),
    "deepspeed": JOINED,
    "fsdp": JOINED,
    "fsdp_config": Idle("parameters are sharded layer by layer"),
    "accelerator_config": _LOADER,
    "use_cpu": To("training.device", bool, lambda on: "cpu" if on else "auto"),
    "no_cuda": To("training.device", bool, lambda on: "cpu" if on else "auto"),
    "push_to_hub": _HUB,
    "hub_model_id": Idle("it is read with push_to_hub alone"),
    "hub_strategy": Idle("it is read with push_to_hub alone"),
    "hub_token": Idle("it is read with push_to_hub alone"),
    "prediction_loss_only": _WATCH,
    "include_num_input_tokens_seen": _WATCH,
    "full_determinism": To("debug.deterministic", bool),
    "auto_find_batch_size": Cannot("`shardtrain train --comm.mode fake_backend` shows what fits"),
    "use_liger_kernel": Idle("which kernels compute the same"),
    "eval_accumulation_steps": _LOADER,
    # Arguments of the Trainer's example scripts and of TRL: models, data and adapters.
    "model_name_or_path": JOINED,
    "model_name": JOINED,
    "model_revision": Idle("it names what is downloaded: `shardtrain data download --revision`"),
    "tokenizer_name": Idle("the tokenizer is that of model.hf_assets_path"),
    "tokenizer_name_or_path": Idle("the tokenizer is that of model.hf_assets_path"),
    "config_name": Idle("the sizes are those of model.hf_assets_path"),
    "model_type": Idle("the folder of model.hf_assets_path says which model it holds"),
    "cache_dir": Idle("downloads are kept where HF_HOME says"),
    "trust_remote_code": Cannot("code of a repository is never run; write a model file"),
    "attn_implementation": Idle("attention takes the fastest kernel that there is"),
    "dataset_name": JOINED,
    "dataset_config_name": To("data.subset", str),
    "dataset_train_split": To("data.split", str),
    "dataset_test_split": JOINED,
    "dataset_mixture": Cannot("name each dataset in [data.sources.NAME], with its weight"),
    "train_file": To("training.dataset_path", str),
    "validation_file": JOINED,
    "block_size": To("training.seq_len", int),
    "model_max_length": To("training.seq_len", int),
    "max_seq_length": To("training.seq_len", int),
    "max_length": To("training.seq_len", int),
    "max_prompt_length": Idle("a pair is cut at training.seq_len as a whole"),
    "packing": JOINED,
    "chat_template": Cannot("save it to a file, and name that in data.chat_template"),
    "beta": JOINED,
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


def modules(found: FileMigration, key: str, option: str) -> None:
    """Set the modules of adapters from a list of names, or from one name such as "all-linear"."""
    value = found.values.get(key)
    names = [value] if isinstance(value, str) and value else found.get(key, list)
    if names:
        found.set(key, option, [str(name) for name in names])
    found.answer(key, "ignored", "it is empty")


def finish(found: FileMigration) -> None:
    """Translate keys that depend on each other, and set the defaults of the Trainer."""
    _length(found)
    rows = found.get("per_device_train_batch_size", int, 8)
    found.set("per_device_train_batch_size", "training.local_batch_size", rows)
    accumulate(found, rows)
    schedule(found, str(found.get("lr_scheduler_type", str, "linear")), "lr_scheduler_type")
    precision(found)
    found.default("optimizer.lr", 5e-5)
    found.default("optimizer.beta2", 0.999)
    found.default("optimizer.weight_decay", 0.0)
    optimizer(found, found.get("optim", str, "adamw_torch"), "optim")
    if found.get("weight_decay", float, 0.0):
        found.default("optimizer.no_weight_decay", ["*.bias", "*norm*"], "the Trainer decays neither")
    _saving(found)
    _validation(found)
    _model_and_data(found)
    clip = found.get("max_grad_norm", float, 1.0)
    found.set("max_grad_norm", "training.max_norm", clip or float("inf"))
    if found.get("gradient_checkpointing", bool, False):
        found.set("gradient_checkpointing", "activation_checkpoint.mode", "full")
    else:
        found.set("gradient_checkpointing", "activation_checkpoint.mode", "none")
    steps = found.get("logging_steps", float, 500.0)
    if steps >= 1:
        found.set("logging_steps", "metrics.log_freq", int(steps))
    else:
        found.answer("logging_steps", "ignored", "a share of the steps; metrics.log_freq counts them")
    _reports(found)

    # The DataLoader rejects these options without workers.
    workers = found.get("dataloader_num_workers", int, 0)
    prefetch = found.get("dataloader_prefetch_factor", int)
    persistent = found.get("dataloader_persistent_workers", bool, False)
    if workers and prefetch is not None:
        found.set("dataloader_prefetch_factor", "training.dataloader.prefetch_factor", prefetch)
    if workers and persistent:
        found.set("dataloader_persistent_workers", "training.dataloader.persistent_workers", True)
    for name in ("dataloader_prefetch_factor", "dataloader_persistent_workers"):
        found.answer(name, "ignored", "without workers it has no effect")
    if found.values.get("deepspeed"):
        found.answer("deepspeed", "honoured", "give that file beside this one, and both are read")
    found.answer("deepspeed", "ignored", "it is empty")
    found.answer("fsdp", "honoured", "parameters are sharded over the ranks")


def _length(found: FileMigration) -> None:
    """Set the length of the run. Steps take precedence over epochs."""
    steps = found.get("max_steps", int, -1)
    epochs = found.get("num_train_epochs", float, 3.0)
    if steps > 0:
        found.set("max_steps", "training.steps", steps)
        found.default("training.on_data_end", "repeat", "the data are repeated until max_steps")
        found.answer("num_train_epochs", "ignored", "max_steps decides")
    elif epochs == int(epochs) and epochs >= 1:
        found.set("num_train_epochs", "training.epochs", int(epochs))
        found.answer("max_steps", "ignored", "it asks for nothing")
    else:
        found.answer("num_train_epochs", "unsupported", "epochs are whole; training.steps ends a run anywhere")


def accumulate(found: FileMigration, rows: int) -> None:
    """Set the global batch: the batch per device times accumulation and devices."""
    accumulated = found.get("gradient_accumulation_steps", int, 1)
    world = found.num_processes
    if accumulated > 1:
        why = f"of {world} processes" if world else "of 1 process: give --nproc N where there are more"
        total = rows * accumulated * (world or 1)
        found.set("gradient_accumulation_steps", "training.global_batch_size", total, why)
    found.answer("gradient_accumulation_steps", "honoured", "nothing is accumulated")


def schedule(found: FileMigration, kind: str, key: str) -> None:
    """Set a schedule of transformers. The rate is 0 at the first step."""
    steps = found.get("warmup_steps", float, 0.0)
    ratio = found.get("warmup_ratio", float, 0.0)
    if 0 < steps < 1:  # a share of the steps, as transformers 5 reads it
        ratio = steps
        steps = 0.0
    # Name -> shape, last rate relative to the peak, and the warmup if the name determines it.
    known = {
        "linear": ("linear", 0.0, None),
        "cosine": ("cosine", 0.0, None),
        "constant_with_warmup": ("linear", 1.0, None),
        "constant": ("linear", 1.0, 0),
    }
    if kind not in known:
        found.answer(key, "unsupported", f"there are {', '.join(known)}, as lr_scheduler.decay_type and min_lr_factor")
        return
    shape, least, warmup = known[kind]
    found.set(key, "lr_scheduler.decay_type", shape, "" if kind == shape else f"with min_lr_factor = {least}")
    found.default("lr_scheduler.name", "transformers")
    if least:
        found.default("lr_scheduler.min_lr_factor", least)
    if warmup == 0:
        steps = ratio = 0.0
        for name in ("warmup_steps", "warmup_ratio"):
            found.answer(name, "ignored", "a constant rate has no warmup")
    found.set("warmup_steps", "lr_scheduler.warmup_steps", int(steps))
    if steps >= 1:
        found.answer("warmup_ratio", "ignored", "warmup_steps decides")
    found.set("warmup_ratio" if steps < 1 else "", "lr_scheduler.warmup_proportion", ratio if steps < 1 else 0.0)


def precision(found: FileMigration) -> None:
    """Set the compute dtype from bf16 and fp16. Parameters are float32."""
    bf16 = found.values.get("bf16") == "auto" or found.get("bf16", bool, False)
    fp16 = found.get("fp16", bool, False)
    if bf16 and fp16 and found.values.get("bf16") != "auto":
        found.answer("fp16", "unsupported", "bf16 is set too, and one is to be chosen")
    name = "bf16" if bf16 else "fp16"
    wanted = "bfloat16" if bf16 else "float16" if fp16 else "float32"
    # If neither is set, a DeepSpeed file may set the precision.
    if bf16 or fp16 or not found.document.values.get("deepspeed"):
        found.set(name, "training.mixed_precision_param", wanted, "" if bf16 or fp16 else "computed in float32")
    for other in ("bf16", "fp16"):
        found.answer(other, "ignored", "it is off" if not found.values.get(other) else f"computed in {wanted}")
    for name in ("torch_dtype", "dtype"):
        kind = found.get(name, str)
        if kind in ("bfloat16", "bf16") and found.system == SYSTEM:
            found.set(name, "training.dtype", "bfloat16", "parameters and their updates too")
        elif kind in ("float16", "fp16", "half"):
            found.answer(name, "unsupported", "parameters are stored in float32 or bfloat16: training.dtype")
        found.answer(name, "ignored", "parameters are stored in float32")


def optimizer(found: FileMigration, kind: str, key: str) -> None:
    """Set the optimizer from the Trainer's names of AdamW, including those with 8-bit states."""
    if kind.startswith(("adamw_torch", "adamw_hf", "adamw_apex")) and not kind.endswith(("8bit", "4bit", "fp8")):
        found.set(key, "optimizer.name", "AdamW")
    elif "adamw" in kind and kind.endswith("8bit"):  # of bitsandbytes or torchao, paged or not
        found.set(key, "optimizer.name", "AdamW8bit")
    elif "adamw" in kind:
        found.set(key, "optimizer.name", "AdamW")
        found.entries = [e for e in found.entries if e.key != key]
        found.answer(key, "unsupported", 'its state has other bits; the nearest is written: optimizer.name = "AdamW"')
    else:
        found.answer(key, "unsupported", "there are AdamW, Adam and Muon, in optimizer.name")


def _saving(found: FileMigration) -> None:
    """Set the interval and number of checkpoints. YAML reads an unquoted ``no`` as false."""
    strategy = "no"
    if found.values.get("save_strategy") is not False:
        strategy = str(found.get("save_strategy", str, "steps"))
    found.default("checkpoint.enable", True, "the last step is always saved")
    steps = found.get("save_steps", float, 500.0)
    if strategy == "steps" and steps >= 1:
        found.set("save_steps", "checkpoint.interval", int(steps))
        found.answer("save_strategy", "honoured", "checkpoint.interval counts steps")
    elif strategy == "steps":
        found.answer("save_steps", "unsupported", "a share of the steps; checkpoint.interval counts them")
    elif strategy == "no":
        found.answer(
            "save_strategy", "honoured", "the last step is saved, and every 500 before it: checkpoint.interval"
        )
    else:
        found.answer(
            "save_strategy",
            "ignored",
            f"{strategy}: checkpoint.interval counts steps, and checkpoint.keep_best saves the best",
        )
    found.answer("save_strategy", "honoured", "checkpoint.interval counts steps")
    found.answer("save_steps", "ignored", "save_strategy does not count steps")
    limit = found.get("save_total_limit", int)
    if limit is not None and limit > 0:
        found.set(
            "save_total_limit",
            "checkpoint.keep_latest_k",
            max(2, limit),
            "one is kept while the next is written" if limit == 1 else "",
        )
    else:
        found.default("checkpoint.keep_latest_k", 0, "all are kept")
    found.answer("save_total_limit", "ignored", "all are kept")


def _validation(found: FileMigration) -> None:
    """Set the interval and data of validation, and the metric of the best checkpoint."""
    key = "eval_strategy" if found.has("eval_strategy") else "evaluation_strategy"
    strategy = "no"
    if found.values.get(key) is not False:
        strategy = str(found.get(key, str, "no"))
    file = found.get("validation_file", str)
    split = found.get("dataset_test_split", str)
    on = strategy in ("steps", "epoch") and bool(file or split)
    if strategy in ("steps", "epoch") and not on:
        text = "the file names no held-out set: set validation.enable, dataset and dataset_path"
        found.answer(key, "ignored", text)
    elif on:
        found.set(key, "validation.enable", True)
        if strategy == "epoch":
            found.default("validation.per_epoch", 1)
        else:
            # The Trainer's default is logging_steps.
            steps = found.get("eval_steps", float, found.get("logging_steps", float, 500.0))
            found.set("eval_steps", "validation.freq", int(max(1, steps)))
    for name in ("eval_strategy", "evaluation_strategy"):
        found.answer(name, "ignored", "nothing is validated")
    found.answer("eval_steps", "ignored", "nothing is validated at steps")
    if file and on:
        found.set("validation_file", "validation.dataset_path", file)
    if split and on:
        found.set("dataset_test_split", "validation.split", split)
    for name in ("validation_file", "dataset_test_split"):
        found.answer(name, "ignored", "nothing is validated")
    best = found.get("load_best_model_at_end", bool, False)
    metric = str(found.get("metric_for_best_model", str, "loss"))
    if on and best and metric.removeprefix("eval_") in ("loss", "accuracy"):
        name = f"validation.{metric.removeprefix('eval_')}"
        found.set(
            "load_best_model_at_end", "checkpoint.keep_best", name, "the best checkpoint is kept, and commands open it"
        )
        found.answer("metric_for_best_model", "honoured", f"checkpoint.keep_best = {name}")
    found.answer("load_best_model_at_end", "ignored", "there is no validation to be best at" if best else "it is off")
    found.answer("metric_for_best_model", "ignored", "nothing is chosen by it; see checkpoint.keep_best")
    found.answer(
        "greater_is_better", "ignored", "the task knows whether more of its metric is better; see checkpoint.best_mode"
    )


def _model_and_data(found: FileMigration) -> None:
    """Translate the arguments of example scripts: model, data, and options of TRL and PEFT."""
    key = "model_name_or_path" if found.has("model_name_or_path") else "model_name"
    name = found.get(key, str)
    if name:
        folder, how = model_folder(name)
        found.set(key, "model.hf_assets_path", folder, how)
        found.default("model.flavor", "from_folder", "the folder says which model it holds")
        found.default("checkpoint.initial_load_in_hf", True, "training begins with its weights")
    for other in ("model_name_or_path", "model_name"):
        found.answer(other, "ignored", "it is empty")

    data = found.get("dataset_name", str)
    if data:
        found.set("dataset_name", "training.dataset_path", data)
        found.default("training.dataset", "huggingface")
    elif found.has("train_file"):
        found.default("training.dataset", dataset_of(str(found.values["train_file"])) or "text")
    if any(setting.option == "validation.enable" for setting in found.settings):
        where = {s.option: s.value for s in found.settings}
        file = where.get("validation.dataset_path")
        found.default("validation.dataset", (dataset_of(file) or "text") if file else "huggingface")
        if not file and data:
            found.default("validation.dataset_path", data)
        if "training.seq_len" in where:
            found.default("validation.seq_len", where["training.seq_len"])

    modules(found, "lora_target_modules", "lora.target_modules")
    modules(found, "lora_modules_to_save", "lora.modules_to_save")
    if found.has("lora_r"):
        found.default("lora.enable", True, "there is a lora_r")
    held = {"load_in_4bit": "nf4", "load_in_8bit": "int8"}
    for name, kind in held.items():
        if found.get(name, bool, False):
            found.set(name, "lora.base_dtype", kind)
        found.answer(name, "ignored", "it is off")
    if found.has("beta"):
        found.set("beta", "task.beta", found.get("beta", float))
        found.default("task.name", "preference", "a beta is DPO's")
    if found.get("packing", bool) is not None:
        found.set("packing", "data.packing", "concat" if found.get("packing", bool) else "padded")


def _reports(found: FileMigration) -> None:
    """Set the metric sinks from one name or several."""
    given = found.values.get("report_to")
    names = []
    if isinstance(given, list):
        names = [str(name) for name in given]
    elif given:
        names = [str(given)]
    known = {name: f"metrics.enable_{name}" for name in ("tensorboard", "wandb", "mlflow", "trackio")}
    chosen = [name for name in names if name in known]
    for number, name in enumerate(chosen):
        if number == 0:
            found.set("report_to", known[name], True)
        else:
            found.default(known[name], True, "in report_to too")
    others = [name for name in names if name not in known and name not in ("none", "all")]
    text = f"{', '.join(others)}: metrics.jsonl is always written" if others else "metrics.jsonl is always written"
    found.answer("report_to", "ignored", text)
