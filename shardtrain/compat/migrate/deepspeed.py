"""DeepSpeed's JSON, including FMEngine's keys: batches, optimizer, schedule, precision, ZeRO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.compat.migrate.migration_report import (
    JOINED,
    Cannot,
    FileMigration,
    Idle,
    Rule,
    To,
    answer_offload,
    default_to_constant_rate,
)
from shardtrain.utils.errors import Problem

SYSTEM = "DeepSpeed"
OPEN = ""
LEAVES: frozenset[str] = frozenset()
_BUFFER = Idle("only affects the size or order of transfers, not numbers")
_LOGGED = Idle("only measures training; see [profiling] and `shardtrain goodput`")
_FMENGINE_DEAD = Idle("FMEngine did not read it either: only scheduler sets the schedule")


def looks(values: Mapping[str, Any]) -> bool:
    """True if the keys are those of this system."""
    marks = {"train_micro_batch_size_per_gpu", "zero_optimization", "train_batch_size", "steps_per_print"}
    return bool(marks & values.keys()) and "distributed_type" not in values


KEYS: Mapping[str, Rule] = {
    "train_batch_size": JOINED,
    "train_micro_batch_size_per_gpu": JOINED,
    "gradient_accumulation_steps": JOINED,
    "steps_per_print": To("metrics.log_freq", int),
    "gradient_clipping": JOINED,
    "prescale_gradients": Idle("gradients are sums here, divided once"),
    "gradient_predivide_factor": Idle("gradients are sums here, divided once"),
    "sparse_gradients": Cannot("gradients of embeddings are dense here"),
    "communication_data_type": Idle("gradients travel as data_types or training.mixed_precision_reduce say"),
    "precision": JOINED,
    "bf16.enabled": JOINED,
    "bf16.*": Idle("bfloat16 has no loss scale"),
    "bfloat16.enabled": JOINED,
    "fp16.enabled": JOINED,
    "fp16.auto_cast": Idle("operations choose their precision themselves"),
    "fp16.loss_scale": JOINED,
    "fp16.loss_scale_window": JOINED,
    "fp16.initial_scale_power": JOINED,
    "fp16.hysteresis": Idle("the loss scale halves at the first overflow, and the step is left out as there"),
    "fp16.consecutive_hysteresis": Idle("the loss scale halves at the first overflow"),
    "fp16.min_loss_scale": Idle("the run stops after training.nonfinite_max_skips steps without an update"),
    "amp.enabled": Cannot("apex is not used; bf16 or fp16 say the precision"),
    "amp.*": Idle("only read with amp.enabled"),
    "data_types.grad_accum_dtype": JOINED,
    "optimizer.type": JOINED,
    "optimizer.params.lr": JOINED,
    "optimizer.params.betas": JOINED,
    "optimizer.params.eps": To("optimizer.eps", float),
    "optimizer.params.weight_decay": To("optimizer.weight_decay", float),
    "optimizer.params.adam_w_mode": JOINED,
    "optimizer.params.bias_correction": Cannot("the moments' bias is always corrected", off=(True, None, "auto")),
    "optimizer.params.torch_adam": Idle("only selects a kernel for the same update"),
    "scheduler.type": JOINED,
    "scheduler.params.warmup_min_lr": JOINED,
    "scheduler.params.warmup_max_lr": JOINED,
    "scheduler.params.warmup_num_steps": JOINED,
    "scheduler.params.warmup_type": JOINED,
    "scheduler.params.total_num_steps": JOINED,
    "scheduler.params.warmup_min_ratio": JOINED,
    "scheduler.params.cos_min_ratio": JOINED,
    "zero_optimization.stage": JOINED,
    "zero_optimization.offload_optimizer.device": JOINED,
    "zero_optimization.offload_param.device": JOINED,
    "zero_optimization.offload_optimizer.*": Idle("offloading has no such options here"),
    "zero_optimization.offload_param.*": Idle("offloading has no such options here"),
    "zero_optimization.offload_optimizer": Idle("it is empty"),
    "zero_optimization.offload_param": Idle("it is empty"),
    "zero_optimization.cpu_offload": JOINED,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Idle(
        "checkpoints are whole on any mesh; checkpoint.last_save_in_hf writes a folder for others"
    ),
    "zero_optimization.zero_hpz_partition_size": Cannot(
        "parameters are gathered over all shards; parallelism.data_parallel_replicate_degree is the nearest",
        off=(None, 1),
    ),
    "zero_optimization.zero_quantized_weights": Cannot("weights travel in full precision"),
    "zero_optimization.zero_quantized_gradients": Cannot("gradients travel in training.mixed_precision_reduce"),
    **{
        f"zero_optimization.{name}": _BUFFER
        for name in [
            "allgather_partitions",
            "allgather_bucket_size",
            "overlap_comm",
            "reduce_scatter",
            "reduce_bucket_size",
            "contiguous_gradients",
            "sub_group_size",
            "round_robin_gradients",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_prefetch_bucket_size",
            "stage3_param_persistence_threshold",
            "stage3_gather_fp16_weights_on_model_save",
            "ignore_unused_parameters",
            "memory_efficient_linear",
            "elastic_checkpoint",
            "load_from_fp32_weights",
        ]
    },
    "zero_allow_untested_optimizer": Idle("no optimizer is refused for its sharding"),
    "zero_force_ds_cpu_optimizer": Idle("only selects a kernel for the same update"),
    "offload_optimizer.*": Idle("DeepSpeed only reads it in zero_optimization"),
    "activation_checkpointing.partition_activations": Idle(
        "tensor parallel ranks hold a part of each activation anyway (sequence parallelism)"
    ),
    "activation_checkpointing.cpu_checkpointing": JOINED,
    **{
        f"activation_checkpointing.{name}": Idle("only affects how layers are recomputed, not numbers")
        for name in (
            ["contiguous_memory_optimization", "number_checkpoints", "synchronize_checkpoint_boundary", "profile"]
        )
    },
    "activation_checkpointing": JOINED,
    "lora.r": To("lora.rank", int),
    "lora.lora_alpha": To("lora.alpha", float),
    "lora.lora_dropout": To("lora.dropout", float),
    "lr-decay-style": _FMENGINE_DEAD,
    "warmup": _FMENGINE_DEAD,
    "min_lr": _FMENGINE_DEAD,
    "wall_clock_breakdown": _LOGGED,
    "memory_breakdown": _LOGGED,
    "dump_state": _LOGGED,
    "flops_profiler.*": _LOGGED,
    "comms_logger.*": _LOGGED,
    "autotuning.*": Idle("sizes are not searched for at the start of a run"),
    "tensorboard.enabled": To("metrics.enable_tensorboard", bool),
    "tensorboard.*": Idle("files go below job.dump_folder"),
    "wandb.enabled": To("metrics.enable_wandb", bool),
    "wandb.*": Idle("set WANDB_PROJECT, WANDB_TEAM and the like in the environment"),
    "csv_monitor.*": Idle("metrics.jsonl is always written"),
    "checkpoint.*": Idle("checkpoints have another format here"),
    "zero3_init_flag": Idle("parameters are always made in shards"),
}


def _k(name: str) -> str:
    """Return the key of ``values`` for a dotted name."""
    return name.replace(".", "\0")


def finish(found: FileMigration) -> None:
    """Translate keys that depend on each other, and set the defaults of DeepSpeed."""
    _batches(found)
    _precision(found)
    _optimizer(found)
    _schedule(found)
    _zero(found)
    clip = found.get("gradient_clipping", float)
    if clip is None:
        if found.values.get("gradient_clipping") == "auto":
            found.answer("gradient_clipping", "ignored", "left to the trainer that reads this file")
        else:
            found.default("training.max_norm", float("inf"), "DeepSpeed does not clip by default")
    else:
        found.set("gradient_clipping", "training.max_norm", clip or float("inf"), "" if clip else "nothing is clipped")
    _recompute(found)
    if any(key.startswith("lora\0") for key in found.values):
        found.default("lora.enable", True, "the block turns adapters on")
        found.default(
            "lora.target_modules",
            ["q_proj", "k_proj", "v_proj", "o_proj"],
            "FMEngine's of Llama; Mistral's are q_proj and v_proj",
        )


def _batches(found: FileMigration) -> None:
    """Set micro-batch and global batch. DeepSpeed derives the third of its batch options from two of them."""
    micro = found.get("train_micro_batch_size_per_gpu", int)
    total = found.get("train_batch_size", int)
    accumulated = found.get("gradient_accumulation_steps", int)
    for key in ("train_micro_batch_size_per_gpu", "train_batch_size", "gradient_accumulation_steps"):
        if found.values.get(key) == "auto":
            found.answer(key, "ignored", "left to the trainer that reads this file")
    world = found.num_processes
    if micro is None and total is not None and (accumulated or world):
        micro = max(1, total // ((accumulated or 1) * (world or 1)))
        found.default("training.local_batch_size", micro, "train_batch_size by accumulation and processes")
    elif micro is not None:
        found.set("train_micro_batch_size_per_gpu", "training.local_batch_size", micro)
    if total is not None:
        found.set("train_batch_size", "training.global_batch_size", total, "what exceeds one pass is accumulated")
        each = (found.get("train_micro_batch_size_per_gpu", int) or 0) * (accumulated or 0)
        if each and (total != each * world if world else total % each):
            rule = f"is not {micro} x {accumulated} x {world or 'the'} processes, which DeepSpeed asks of the three"
            fix = "take gradient_accumulation_steps out, or correct one of them"
            found.problems.append(Problem("train_batch_size", total, rule, fix, found.where("train_batch_size")))
        found.answer("gradient_accumulation_steps", "honoured", "it follows from the two batch sizes")
        return
    if accumulated is not None and accumulated > 1 and micro is not None:
        step = micro * accumulated * (world or 1)
        why = f"of {world} processes" if world else "of 1 process: give --nproc N where there are more"
        found.set("gradient_accumulation_steps", "training.global_batch_size", step, why)
    elif accumulated is not None and micro is None and accumulated > 1:
        found.answer(
            "gradient_accumulation_steps", "unsupported", "training.global_batch_size needs the batch of a process"
        )
    found.answer("gradient_accumulation_steps", "honoured", "nothing is accumulated")


def _precision(found: FileMigration) -> None:
    """Set the compute dtype, the loss scale of fp16, and the dtype of gradient reductions."""
    bf16 = found.get(_k("bf16.enabled"), bool, found.get(_k("bfloat16.enabled"), bool, False))
    fp16 = found.get(_k("fp16.enabled"), bool, False)
    asked = [found.values.get(_k(name)) for name in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")]
    auto = "auto" in asked and not (bf16 or fp16)
    precision = "float32"
    if bf16:
        precision = "bfloat16"
    elif fp16:
        precision = "float16"
    key = _k("bf16.enabled") if found.has(_k("bf16.enabled")) else _k("bfloat16.enabled")
    if fp16 and not bf16:
        key = _k("fp16.enabled")
    if not auto:
        found.set(key, "training.mixed_precision_param", precision)
    for name in ("bf16.enabled", "bfloat16.enabled", "fp16.enabled"):
        text = "left to the trainer that reads this file" if auto else f"training computes in {precision}"
        found.answer(_k(name), "ignored" if auto else "honoured", text)
    found.answer("precision", "ignored", f"bf16 and fp16 decide: training computes in {precision}")

    # The loss scale of fp16, which is dynamic here.
    scale = _k("fp16.loss_scale")
    static = found.get(scale, float, 0.0)
    if fp16:
        if static:
            found.answer(
                scale, "unsupported", "the loss scale is dynamic here; training.initial_loss_scale is its first value"
            )
        power = found.get(_k("fp16.initial_scale_power"), int, 16)
        if not 0 <= power <= 32:
            found.answer(_k("fp16.initial_scale_power"), "unsupported", "it must lie between 0 and 32")
        else:
            found.set(_k("fp16.initial_scale_power"), "training.initial_loss_scale", float(2**power), f"2^{power}")
        window = found.get(_k("fp16.loss_scale_window"), int, 1000)
        found.set(_k("fp16.loss_scale_window"), "training.loss_scale_growth_interval", window)
        found.answer(scale, "honoured", "the loss scale is dynamic")
    for name in ("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"):
        text = "left to the trainer that reads this file" if auto else "without fp16 there is no loss scale"
        found.answer(_k(name), "ignored", text)

    key = _k("data_types.grad_accum_dtype")
    words = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    words |= dict.fromkeys(("fp16", "float16"), "float32")
    kind = found.get(key, str)
    if kind in words:
        why = "gradients are summed in float32" if kind == "fp32" else ""
        if kind in ("fp16", "float16"):
            why = f"gradients are summed in float32, which is more precise than {kind}"
        found.set(key, "training.mixed_precision_reduce", words[kind], why)
    elif kind is not None:
        found.answer(key, "unsupported", "gradients are summed in float32 or bfloat16: training.mixed_precision_reduce")


def _optimizer(found: FileMigration) -> None:
    """Set Adam or AdamW with its options.

    Without an optimizer, the trainer that reads the file has its own.
    """
    kind = found.get(_k("optimizer.type"), str)
    if kind is None:
        return
    decoupled = found.get(_k("optimizer.params.adam_w_mode"), bool, True)
    names = {"adam": "AdamW" if decoupled else "Adam", "adamw": "AdamW"}
    if kind.lower() in names:
        why = "DeepSpeed's Adam decays weights as AdamW does" if kind.lower() == "adam" and decoupled else ""
        found.set(_k("optimizer.type"), "optimizer.name", names[kind.lower()], why)
        found.answer(_k("optimizer.params.adam_w_mode"), "honoured", f"optimizer.name = {names[kind.lower()]}")
    else:
        found.answer(_k("optimizer.type"), "unsupported", "there are AdamW, Adam and Muon, in optimizer.name")
    if found.has(_k("optimizer.params.lr")):
        found.set(_k("optimizer.params.lr"), "optimizer.lr", found.get(_k("optimizer.params.lr"), float))
    elif _k("optimizer.params.lr") not in found.values:
        found.default("optimizer.lr", 1e-3)
    betas = found.get(_k("optimizer.params.betas"), list)
    if betas is not None and (len(betas) != 2 or not all(isinstance(beta, int | float) for beta in betas)):
        found.answer(_k("optimizer.params.betas"), "unsupported", "AdamW has two: optimizer.beta1 and optimizer.beta2")
    elif betas is not None:
        found.default("optimizer.beta1", float(betas[0]), "the first of betas")
        found.set(_k("optimizer.params.betas"), "optimizer.beta2", float(betas[1]), "and optimizer.beta1 the first")
    elif found.values.get(_k("optimizer.params.betas")) != "auto":
        found.default("optimizer.beta2", 0.999)
    if _k("optimizer.params.weight_decay") not in found.values:
        found.default("optimizer.weight_decay", 0.0)
    for name in ("lr", "betas"):
        found.answer(_k(f"optimizer.params.{name}"), "ignored", "left to the trainer that reads this file")


_SCHEDULES = {
    "WarmupLR": ("deepspeed_warmup", "then the peak to the end"),
    "WarmupDecayLR": ("deepspeed_warmup_decay", "then linearly back to the first rate"),
    "WarmupCosineLR": ("deepspeed_warmup_cosine", "then half a cosine"),
}
_WARMUP = "scheduler.params.warmup_"


def _schedule(found: FileMigration) -> None:
    """Set one of DeepSpeed's schedules. Without a schedule, the learning rate is constant."""
    kind = found.get(_k("scheduler.type"), str)
    if kind in _SCHEDULES:
        found.set(_k("scheduler.type"), "lr_scheduler.name", *_SCHEDULES[kind])
        _warmup(found)
        if kind == "WarmupCosineLR":
            _shares(found)
        else:
            _rates(found)
        if kind != "WarmupLR":
            _length(found)
        for key in [key for key in found.values if key.startswith(_k("scheduler.params."))]:
            found.answer(key, "unsupported", f"DeepSpeed's {kind} has no such number, and stops at it")
    elif kind is not None:
        for key in [key for key in found.values if key.startswith("scheduler\0")]:
            found.answer(
                key, "unsupported", f"DeepSpeed's {kind} is not here: schedules are those of lr_scheduler.name"
            )
    elif found.has(_k("optimizer.type")):
        default_to_constant_rate(found, "without a scheduler the rate stays as it is")


def _warmup(found: FileMigration) -> None:
    """Set the length and shape of the warmup."""
    steps = _k(f"{_WARMUP}num_steps")
    shape = _k(f"{_WARMUP}type")
    if found.values.get(steps) == "auto":
        found.answer(steps, "unsupported", "it is left to another program (auto): write the number here")
    else:
        found.set(steps, "lr_scheduler.warmup_steps", found.get(steps, int, 1000))
    word = found.get(shape, str, "log")
    if word in ("log", "linear"):
        found.set(shape, "lr_scheduler.warmup_type", word)
    else:
        found.answer(shape, "unsupported", "it is log or linear")


def _rates(found: FileMigration) -> None:
    """Set the first rate and the peak, which overrides the rate of the optimizer."""
    first = _k(f"{_WARMUP}min_lr")
    peak = _k(f"{_WARMUP}max_lr")
    own = _k("optimizer.params.lr")
    least = found.get(first, float, 0.0)
    if found.values.get(peak) == "auto":
        found.answer(peak, "ignored", "the Trainer, which reads this file, writes its learning rate here")
        if not least:
            found.set(first, "lr_scheduler.min_lr_factor", 0.0, "the first rate, as a share of the peak")
        found.answer(first, "unsupported", "it is a share of the peak, and warmup_max_lr says none")
        return
    most = found.get(peak, float, 1e-3)
    overruled = found.has(own) and found.get(own, float) != most
    found.entries = [e for e in found.entries if e.key != "optimizer.params.lr"]
    found.set(peak, "optimizer.lr", most, "the peak")
    text = f"the schedule overrules it with {most}" if overruled else "the schedule says the same"
    found.answer(own, "ignored", text)
    share = least / most if most else 0.0
    found.set(first, "lr_scheduler.min_lr_factor", share, "the first rate, as a share of the peak")
    if not 0 <= share <= 1:
        found.problems.append(
            Problem(f"{_WARMUP}min_lr", least, f"is above warmup_max_lr={most}", "correct it", found.where(first))
        )


def _shares(found: FileMigration) -> None:
    """Set the first and the last rate of a cosine. Its peak is the rate of the optimizer."""
    first = _k(f"{_WARMUP}min_ratio")
    last = _k("scheduler.params.cos_min_ratio")
    share = found.get(last, float, 0.0001)
    found.set(last, "lr_scheduler.min_lr_factor", share, "the last rate, as a share of the peak")
    if not found.get(first, float, 0.0):
        found.answer(first, "honoured", "the warmup begins at 0")
    found.answer(first, "unsupported", "the warmup of a cosine begins at 0 here")
    if not 0 <= share <= 1:
        rule = "must lie between 0 and 1"
        found.problems.append(Problem("scheduler.params.cos_min_ratio", share, rule, "correct it", found.where(last)))


def _length(found: FileMigration) -> None:
    """Set the length of a schedule. "auto" is the length of the run, as the Trainer writes it."""
    key = _k("scheduler.params.total_num_steps")
    steps = found.get(key, int)
    if found.values.get(key) == "auto":
        found.answer(key, "honoured", "the schedule is as long as the run: training.steps")
    elif steps is None or steps < 1:
        rule = "must be a number of steps above 0, which this schedule needs"
        place = found.where(key) if key in found.values else found.where(_k("scheduler.type"))
        found.problems.append(Problem("scheduler.params.total_num_steps", steps, rule, "write it", place))
    else:
        found.set(key, "lr_scheduler.total_steps", steps, "later steps, if there are any, keep its last rate")


def _zero(found: FileMigration) -> None:
    """Translate ZeRO stages to FSDP: sharding, and resharding after forward."""
    stage = found.get(_k("zero_optimization.stage"), int, 0)
    world = found.num_processes
    key = _k("zero_optimization.stage")
    if stage == 3:
        found.set(
            key, "parallelism.fsdp_reshard_after_forward", "always", "parameters, gradients and state are sharded"
        )
    elif stage == 2:
        found.set(
            key, "parallelism.fsdp_reshard_after_forward", "never", "parameters stay gathered from forward to backward"
        )
    elif stage in (0, 1) and world and world > 1:
        name = "parallelism.shard_optimizer_states" if stage == 1 else "parallelism.data_parallel_shard_degree"
        found.default(
            "parallelism.data_parallel_replicate_degree", world, f"each of {world} processes holds the whole model"
        )
        found.default("parallelism.data_parallel_shard_degree", 1, "each process holds the whole model")
        found.set(key, name, True if stage == 1 else 1)
    elif stage in (0, 1):
        found.answer(
            key,
            "honoured",
            "the data parallel ranks shard the model, which changes no number; --nproc N asks for whole copies",
        )
    else:
        found.answer(key, "unsupported", "stages are 0 to 3")

    for name in ("offload_optimizer", "offload_param"):
        answer_offload(found, _k(f"zero_optimization.{name}.device"))
    if found.get(_k("zero_optimization.cpu_offload"), bool, False):
        found.set(_k("zero_optimization.cpu_offload"), "training.enable_cpu_offload", True)


def _recompute(found: FileMigration) -> None:
    """Set full recomputation if the file has its block of options."""
    if not any(key.startswith("activation_checkpointing") for key in found.values):
        return
    found.default("activation_checkpoint.mode", "full", "the block makes each layer recompute")
    key = _k("activation_checkpointing.cpu_checkpointing")
    if found.get(key, bool, False):
        found.set(key, "activation_checkpoint.cpu_offload", True)
    found.answer(key, "ignored", "what recomputation needs stays on the device")
