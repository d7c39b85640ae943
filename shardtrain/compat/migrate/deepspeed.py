"""Reader of DeepSpeed's JSON, including FMEngine's keys: batches, optimizer, schedule, precision, ZeRO."""

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
    default_to_constant_rate,
    translate_offload,
)
from shardtrain.utils.errors import Problem

SYSTEM = "DeepSpeed"
OPEN = ""
LEAVES: frozenset[str] = frozenset()
_BUFFER = Idle("only affects the size and order of transfers, not numbers")
_LOGGED = Idle("only measures training; see [profiling] and `shardtrain goodput`")
_AUTO = '"auto": the trainer that reads this file sets it'
_FMENGINE_DEAD = Idle("FMEngine ignores it too: only `scheduler` sets the schedule")


def looks(values: Mapping[str, Any]) -> bool:
    """True if the top-level keys are those of a DeepSpeed file."""
    marks = {
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
        "train_batch_size",
        "steps_per_print",
    }
    # An accelerate file may contain a DeepSpeed table, but accelerate has its own reader.
    return bool(marks & values.keys()) and "distributed_type" not in values


KEYS: Mapping[str, Rule] = {
    # DeepSpeed derives one of these three from the other two.
    "train_batch_size": JOINED,
    "train_micro_batch_size_per_gpu": JOINED,
    "gradient_accumulation_steps": JOINED,
    "steps_per_print": To("metrics.log_freq", int),
    "gradient_clipping": JOINED,
    # The order of division and sum only affects rounding.
    "prescale_gradients": Idle("gradients are summed first, and divided once"),
    "gradient_predivide_factor": Idle("gradients are summed first, and divided once"),
    "sparse_gradients": Cannot("gradients of embeddings are always dense"),
    "communication_data_type": Idle(
        "data_types or training.mixed_precision_reduce sets the dtype of gradient reductions"
    ),
    "precision": JOINED,
    "bf16.enabled": JOINED,
    "bf16.*": Idle("bfloat16 has no loss scale"),
    "bfloat16.enabled": JOINED,
    "fp16.enabled": JOINED,
    "fp16.auto_cast": Idle("the precision of each operation is fixed"),
    "fp16.loss_scale": JOINED,
    "fp16.loss_scale_window": JOINED,
    "fp16.initial_scale_power": JOINED,
    # DeepSpeed's hysteresis is the number of overflows until the loss scale halves.
    "fp16.hysteresis": Idle(
        "the loss scale halves at the first overflow, and the step is skipped as in DeepSpeed"
    ),
    "fp16.consecutive_hysteresis": Idle("the loss scale halves at the first overflow"),
    "fp16.min_loss_scale": Idle(
        "the run stops after training.nonfinite_max_skips steps without an update"
    ),
    "amp.enabled": Cannot("apex is not supported; use bf16 or fp16"),
    "amp.*": Idle("only read with amp.enabled"),
    "data_types.grad_accum_dtype": JOINED,
    "optimizer.type": JOINED,
    "optimizer.params.lr": JOINED,
    "optimizer.params.betas": JOINED,
    "optimizer.params.eps": To("optimizer.eps", float),
    "optimizer.params.weight_decay": To("optimizer.weight_decay", float),
    "optimizer.params.adam_w_mode": JOINED,
    "optimizer.params.bias_correction": Cannot(
        "the moments' bias is always corrected", off=(True, None, "auto")
    ),
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
    # Parameters, gradients and optimizer state are offloaded together, so either table enables it.
    "zero_optimization.offload_optimizer.device": JOINED,
    "zero_optimization.offload_param.device": JOINED,
    "zero_optimization.offload_optimizer.*": Idle("offloading has no further options"),
    "zero_optimization.offload_param.*": Idle("offloading has no further options"),
    "zero_optimization.offload_optimizer": Idle("it is empty"),
    "zero_optimization.offload_param": Idle("it is empty"),
    "zero_optimization.cpu_offload": JOINED,
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": Idle(
        "checkpoints load on any number of ranks; checkpoint.last_save_in_hf writes a Hugging Face folder"
    ),
    "zero_optimization.zero_hpz_partition_size": Cannot(
        "parameters are gathered over all shards; parallelism.data_parallel_replicate_degree is similar",
        off=(None, 1),
    ),
    "zero_optimization.zero_quantized_weights": Cannot("weights are gathered without quantization"),
    "zero_optimization.zero_quantized_gradients": Cannot(
        "gradients are reduced in the dtype of training.mixed_precision_reduce"
    ),
    # How ZeRO packs and schedules its transfers.
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
    "zero_allow_untested_optimizer": Idle("every optimizer can be sharded"),
    "zero_force_ds_cpu_optimizer": Idle("only selects a kernel for the same update"),
    "offload_optimizer.*": Idle("DeepSpeed only reads this table inside zero_optimization"),
    "activation_checkpointing.partition_activations": Idle(
        "tensor-parallel ranks always partition activations (sequence parallelism)"
    ),
    "activation_checkpointing.cpu_checkpointing": JOINED,
    # How activations are stored for recomputation.
    **{
        f"activation_checkpointing.{name}": Idle(
            "only affects how layers are recomputed, not numbers"
        )
        for name in (
            [
                "contiguous_memory_optimization",
                "number_checkpoints",
                "synchronize_checkpoint_boundary",
                "profile",
            ]
        )
    },
    "activation_checkpointing": JOINED,
    "lora.r": To("lora.rank", int),
    "lora.lora_alpha": To("lora.alpha", float),
    "lora.lora_dropout": To("lora.dropout", float),
    # Keys of FMEngine's example files that its code never reads.
    "lr-decay-style": _FMENGINE_DEAD,
    "warmup": _FMENGINE_DEAD,
    "min_lr": _FMENGINE_DEAD,
    "wall_clock_breakdown": _LOGGED,
    "memory_breakdown": _LOGGED,
    "dump_state": _LOGGED,
    "flops_profiler.*": _LOGGED,
    "comms_logger.*": _LOGGED,
    "autotuning.*": Idle("sizes are not tuned at the start of a run; see `shardtrain plan`"),
    "tensorboard.enabled": To("metrics.enable_tensorboard", bool),
    "tensorboard.*": Idle("files are written below job.dump_folder"),
    "wandb.enabled": To("metrics.enable_wandb", bool),
    "wandb.*": Idle("set WANDB_PROJECT, WANDB_TEAM and similar environment variables"),
    "csv_monitor.*": Idle("metrics.jsonl is always written"),
    "checkpoint.*": Idle("checkpoints have a different format"),
    "zero3_init_flag": Idle("each rank creates only its shards of the parameters"),
}


def _k(name: str) -> str:
    """Return the flat key of ``FileMigration.values`` for a dotted name."""
    return name.replace(".", "\0")


def finish(migration: FileMigration) -> None:
    """Translate the keys that depend on each other, and set DeepSpeed's defaults."""
    _batches(migration)
    _precision(migration)
    _optimizer(migration)
    _schedule(migration)
    _zero(migration)
    _clipping(migration)
    _recompute(migration)
    # FMEngine builds adapters from this table without a switch, and fixes their modules.
    if any(key.startswith("lora\0") for key in migration.values):
        migration.default("lora.enable", True, "the lora table enables adapters")
        names = ["q_proj", "k_proj", "v_proj", "o_proj"]
        why = "FMEngine's modules for Llama; for Mistral they are q_proj and v_proj"
        migration.default("lora.target_modules", names, why)


def _clipping(migration: FileMigration) -> None:
    """Set the largest norm of the gradient. 0 disables clipping, as in DeepSpeed."""
    key = "gradient_clipping"
    clip = migration.get(key, float)
    if clip is None and migration.values.get(key) == "auto":
        migration.record(key, "ignored", _AUTO)
    elif clip is None:
        migration.default("training.max_norm", float("inf"), "DeepSpeed does not clip by default")
    elif clip == 0:
        migration.set(key, "training.max_norm", float("inf"), "gradients are not clipped")
    else:
        migration.set(key, "training.max_norm", clip)


def _batches(migration: FileMigration) -> None:
    """Set the micro-batch and the global batch.

    DeepSpeed derives one of its three batch options from the other two.
    """
    micro = migration.get("train_micro_batch_size_per_gpu", int)
    total = migration.get("train_batch_size", int)
    accumulated = migration.get("gradient_accumulation_steps", int)
    for key in (
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "gradient_accumulation_steps",
    ):
        if migration.values.get(key) == "auto":
            migration.record(key, "ignored", _AUTO)
    world = migration.num_processes
    # DeepSpeed computes the micro-batch from the total. Unknown counts are 1.
    if micro is None and total is not None and (accumulated or world):
        micro = max(1, total // ((accumulated or 1) * (world or 1)))
        migration.default(
            "training.local_batch_size",
            micro,
            "train_batch_size divided by accumulation steps and processes",
        )
    elif micro is not None:
        migration.set("train_micro_batch_size_per_gpu", "training.local_batch_size", micro)
    if total is not None:
        migration.set(
            "train_batch_size",
            "training.global_batch_size",
            total,
            "accumulated over several micro-batches if needed",
        )
        # If the file has all three options, DeepSpeed also requires that train_batch_size is the product of
        # the micro-batch size, the accumulation steps and the number of processes.
        micro_in_file = migration.get("train_micro_batch_size_per_gpu", int) or 0
        per_process = micro_in_file * (accumulated or 0)
        disagrees = False
        if per_process and world:
            disagrees = total != per_process * world
        elif per_process:
            disagrees = total % per_process != 0
        if disagrees:
            migration.problems.append(
                Problem(
                    "train_batch_size",
                    total,
                    rule=(
                        f"must be {micro} x {accumulated} x {world or 'the number of'} processes, as DeepSpeed requires"
                    ),
                    fix="remove gradient_accumulation_steps, or correct one of the three options",
                    where=migration.where("train_batch_size"),
                )
            )
        migration.record(
            "gradient_accumulation_steps", "honoured", "the two batch sizes determine it"
        )
        return
    # Without a total, the global batch depends on the number of processes, which the file does not contain.
    if accumulated is not None and accumulated > 1 and micro is not None:
        step = micro * accumulated * (world or 1)
        why = f"for {world} processes" if world else "for 1 process: for several, add --nproc N"
        migration.set("gradient_accumulation_steps", "training.global_batch_size", step, why)
    elif accumulated is not None and micro is None and accumulated > 1:
        migration.record(
            "gradient_accumulation_steps",
            "unsupported",
            "training.global_batch_size requires train_micro_batch_size_per_gpu",
        )
    migration.record("gradient_accumulation_steps", "honoured", "no gradients are accumulated")


def _precision(migration: FileMigration) -> None:
    """Set the compute dtype, the loss scale of fp16, and the dtype of gradient reductions."""
    older_bf16 = migration.get(_k("bfloat16.enabled"), bool, False)
    bf16 = migration.get(_k("bf16.enabled"), bool, older_bf16)
    fp16 = migration.get(_k("fp16.enabled"), bool, False)
    switch_names = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled")
    switches = [migration.values.get(_k(name)) for name in switch_names]
    is_auto = "auto" in switches and not (bf16 or fp16)
    # bf16 takes precedence if both are on.
    precision = "float32"
    if bf16:
        precision = "bfloat16"
    elif fp16:
        precision = "float16"
    # Report the result at the switch that determines it.
    key = _k("bf16.enabled") if migration.has(_k("bf16.enabled")) else _k("bfloat16.enabled")
    if fp16 and not bf16:
        key = _k("fp16.enabled")
    if not is_auto:
        migration.set(key, "training.mixed_precision_param", precision)
    for name in switch_names:
        if is_auto:
            migration.record(_k(name), "ignored", _AUTO)
        else:
            migration.record(_k(name), "honoured", f"training computes in {precision}")
    migration.record("precision", "ignored", f"bf16 and fp16 determine the precision: {precision}")

    # The loss scale of fp16, which is dynamic here.
    scale = _k("fp16.loss_scale")
    static = migration.get(scale, float, 0.0)
    if fp16:
        if static:
            migration.record(
                scale,
                "unsupported",
                "the loss scale is always dynamic; training.initial_loss_scale sets its first value",
            )
        # DeepSpeed stores the exponent of the first loss scale.
        power = migration.get(_k("fp16.initial_scale_power"), int, 16)
        if not 0 <= power <= 32:
            migration.record(
                _k("fp16.initial_scale_power"), "unsupported", "it must be between 0 and 32"
            )
        else:
            migration.set(
                _k("fp16.initial_scale_power"),
                "training.initial_loss_scale",
                float(2**power),
                f"2^{power}",
            )
        window = migration.get(_k("fp16.loss_scale_window"), int, 1000)
        migration.set(_k("fp16.loss_scale_window"), "training.loss_scale_growth_interval", window)
        migration.record(scale, "honoured", "the loss scale is dynamic")
    for name in ("fp16.loss_scale", "fp16.initial_scale_power", "fp16.loss_scale_window"):
        text = _AUTO if is_auto else "the loss scale is only used with fp16"
        migration.record(_k(name), "ignored", text)

    # The option does not support float16, and sums in float32 are more precise.
    key = _k("data_types.grad_accum_dtype")
    dtypes = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16"}
    dtypes |= dict.fromkeys(("fp16", "float16"), "float32")
    kind = migration.get(key, str)
    if kind in dtypes:
        why = "gradients are summed in float32" if kind == "fp32" else ""
        if kind in ("fp16", "float16"):
            why = f"gradients are summed in float32, which is more precise than {kind}"
        migration.set(key, "training.mixed_precision_reduce", dtypes[kind], why)
    elif kind is not None:
        migration.record(
            key, "unsupported", "training.mixed_precision_reduce must be float32 or bfloat16"
        )


def _optimizer(migration: FileMigration) -> None:
    """Set Adam or AdamW with its options.

    Do nothing without an optimizer: the trainer that reads the file then has its own.
    """
    type_key = _k("optimizer.type")
    mode_key = _k("optimizer.params.adam_w_mode")
    rate_key = _k("optimizer.params.lr")
    betas_key = _k("optimizer.params.betas")
    kind = migration.get(type_key, str)
    if kind is None:
        return
    # DeepSpeed's "Adam" decays weights like AdamW unless the file turns this off.
    decoupled = migration.get(mode_key, bool, True)
    names = {"adam": "AdamW" if decoupled else "Adam", "adamw": "AdamW"}
    name = names.get(kind.lower())
    if name is None:
        text = "optimizer.name supports AdamW, Adam, AdamW8bit and Muon"
        migration.record(type_key, "unsupported", text)
    else:
        why = ""
        if kind.lower() == "adam" and decoupled:
            why = "DeepSpeed's Adam uses AdamW's weight decay"
        migration.set(type_key, "optimizer.name", name, why)
        migration.record(mode_key, "honoured", f"optimizer.name = {name}")

    # A value "auto" is neither set nor missing: the trainer that reads the file sets it.
    if migration.has(rate_key):
        migration.set(rate_key, "optimizer.lr", migration.get(rate_key, float))
    elif rate_key not in migration.values:
        migration.default("optimizer.lr", 1e-3)
    betas = migration.get(betas_key, list)
    if betas is None:
        if migration.values.get(betas_key) != "auto":
            migration.default("optimizer.beta2", 0.999)
    elif len(betas) != 2 or not all(isinstance(beta, int | float) for beta in betas):
        text = "it must be two numbers: optimizer.beta1 and optimizer.beta2"
        migration.record(betas_key, "unsupported", text)
    else:
        migration.default("optimizer.beta1", float(betas[0]), "the first value of betas")
        why = "the second value; the first is optimizer.beta1"
        migration.set(betas_key, "optimizer.beta2", float(betas[1]), why)
    # This and the other defaults are those of DeepSpeed's optimizer, which differ from ours.
    if _k("optimizer.params.weight_decay") not in migration.values:
        migration.default("optimizer.weight_decay", 0.0)
    for key in (rate_key, betas_key):
        migration.record(key, "ignored", _AUTO)


_SCHEDULES = {
    "WarmupLR": ("deepspeed_warmup", "the peak rate after the warmup"),
    "WarmupDecayLR": ("deepspeed_warmup_decay", "linear decay to the first rate after the warmup"),
    "WarmupCosineLR": ("deepspeed_warmup_cosine", "half a cosine after the warmup"),
}
_WARMUP = "scheduler.params.warmup_"


def _schedule(migration: FileMigration) -> None:
    """Set one of DeepSpeed's schedules. Without a schedule, the learning rate is constant."""
    kind = migration.get(_k("scheduler.type"), str)
    if kind in _SCHEDULES:
        migration.set(_k("scheduler.type"), "lr_scheduler.name", *_SCHEDULES[kind])
        _warmup(migration)
        if kind == "WarmupCosineLR":
            _shares(migration)
        else:
            _rates(migration)
        if kind != "WarmupLR":
            _length(migration)
        # Every known parameter has a result now. DeepSpeed stops with an error for any other one.
        for key in migration.values:
            if key.startswith(_k("scheduler.params.")):
                migration.record(
                    key, "unsupported", f"DeepSpeed's {kind} has no such parameter and rejects it"
                )
    elif kind is not None:
        for key in migration.values:
            if key.startswith("scheduler\0"):
                text = (
                    f"DeepSpeed's {kind} has no counterpart; choose a schedule in lr_scheduler.name"
                )
                migration.record(key, "unsupported", text)
    elif migration.has(_k("optimizer.type")):
        default_to_constant_rate(migration, "without a scheduler the learning rate is constant")


def _warmup(migration: FileMigration) -> None:
    """Set the length and shape of the warmup."""
    steps = _k(f"{_WARMUP}num_steps")
    shape = _k(f"{_WARMUP}type")
    if migration.values.get(steps) == "auto":
        migration.record(
            steps, "unsupported", '"auto" is not supported here; write the number of steps'
        )
    else:
        migration.set(steps, "lr_scheduler.warmup_steps", migration.get(steps, int, 1000))
    kind = migration.get(shape, str, "log")
    if kind in ("log", "linear"):
        migration.set(shape, "lr_scheduler.warmup_type", kind)
    else:
        migration.record(shape, "unsupported", "it must be log or linear")


def _rates(migration: FileMigration) -> None:
    """Set the first learning rate and the peak. The peak overrides the optimizer's learning rate."""
    first = _k(f"{_WARMUP}min_lr")
    peak = _k(f"{_WARMUP}max_lr")
    optimizer_rate = _k("optimizer.params.lr")
    # With "auto" the peak is unknown here, so a first rate other than 0 cannot become a fraction of it.
    least = migration.get(first, float, 0.0)
    if migration.values.get(peak) == "auto":
        migration.record(
            peak, "ignored", '"auto": the Trainer that reads this file sets its learning rate'
        )
        if not least:
            migration.set(
                first, "lr_scheduler.min_lr_factor", 0.0, "the first rate as a fraction of the peak"
            )
        migration.record(
            first,
            "unsupported",
            "it becomes a fraction of the peak, which warmup_max_lr does not contain",
        )
        return
    most = migration.get(peak, float, 1e-3)
    rate = migration.get(optimizer_rate, float)
    is_overridden = migration.has(optimizer_rate) and rate != most
    # The optimizer's rate has a result already. The rate of the schedule replaces it.
    migration.entries = [e for e in migration.entries if e.key != "optimizer.params.lr"]
    migration.set(peak, "optimizer.lr", most, "the peak")
    text = "the schedule sets the same value"
    if is_overridden:
        text = f"the schedule overrides it with {most}"
    migration.record(optimizer_rate, "ignored", text)
    share = least / most if most else 0.0
    migration.set(
        first, "lr_scheduler.min_lr_factor", share, "the first rate as a fraction of the peak"
    )
    # A warmup that starts above its peak is a mistake in the file.
    if not 0 <= share <= 1:
        migration.problems.append(
            Problem(
                f"{_WARMUP}min_lr",
                least,
                rule=f"is above warmup_max_lr={most}",
                fix="correct it",
                where=migration.where(first),
            )
        )


def _shares(migration: FileMigration) -> None:
    """Set the first and the last rate of a cosine. Its peak is the optimizer's learning rate."""
    first = _k(f"{_WARMUP}min_ratio")
    last = _k("scheduler.params.cos_min_ratio")
    share = migration.get(last, float, 0.0001)
    migration.set(
        last, "lr_scheduler.min_lr_factor", share, "the last rate as a fraction of the peak"
    )
    if not migration.get(first, float, 0.0):
        migration.record(first, "honoured", "the warmup starts at 0")
    migration.record(first, "unsupported", "the warmup of a cosine always starts at 0")
    if not 0 <= share <= 1:
        migration.problems.append(
            Problem(
                "scheduler.params.cos_min_ratio",
                share,
                rule="must be between 0 and 1",
                fix="correct it",
                where=migration.where(last),
            )
        )


def _length(migration: FileMigration) -> None:
    """Set the length of a schedule. "auto" means the length of the run, as in the Trainer."""
    key = _k("scheduler.params.total_num_steps")
    steps = migration.get(key, int)
    if migration.values.get(key) == "auto":
        migration.record(key, "honoured", "the schedule ends with the run: training.steps")
    # Without a length, DeepSpeed's schedule fails when it is built.
    elif steps is None or steps < 1:
        rule = "must be a positive number of steps for this schedule"
        place = migration.where(key if key in migration.values else _k("scheduler.type"))
        migration.problems.append(
            Problem(
                "scheduler.params.total_num_steps",
                steps,
                rule=rule,
                fix="write it",
                where=place,
            )
        )
    else:
        migration.set(key, "lr_scheduler.total_steps", steps, "later steps use the last rate")


def _zero(migration: FileMigration) -> None:
    """Translate ZeRO stages to FSDP: sharding, and resharding after forward."""
    stage = migration.get(_k("zero_optimization.stage"), int, 0)
    world = migration.num_processes
    key = _k("zero_optimization.stage")
    if stage == 3:
        why = "parameters, gradients and optimizer state are sharded"
        migration.set(key, "parallelism.fsdp_reshard_after_forward", "always", why)
    elif stage == 2:
        why = "parameters stay gathered from the forward pass to the backward pass"
        migration.set(key, "parallelism.fsdp_reshard_after_forward", "never", why)
    # Stages 0 and 1 keep full parameters on each rank, which are replicas here.
    elif stage in (0, 1) and world and world > 1:
        why = f"each of {world} processes has a full copy of the model"
        migration.default("parallelism.data_parallel_replicate_degree", world, why)
        migration.default(
            "parallelism.data_parallel_shard_degree", 1, "each process has a full copy of the model"
        )
        if stage == 1:
            migration.set(key, "parallelism.shard_optimizer_states", True)
        else:
            migration.set(key, "parallelism.data_parallel_shard_degree", 1)
    # The number of processes is unknown, and sharding computes the same numbers as replicas.
    elif stage in (0, 1):
        text = "data-parallel ranks shard the model, with the same numbers; --nproc N gives each rank a full copy"
        migration.record(key, "honoured", text)
    else:
        migration.record(key, "unsupported", "it must be 0, 1, 2 or 3")

    for name in ("offload_optimizer", "offload_param"):
        translate_offload(migration, _k(f"zero_optimization.{name}.device"))
    if migration.get(_k("zero_optimization.cpu_offload"), bool, False):
        migration.set(_k("zero_optimization.cpu_offload"), "training.enable_cpu_offload", True)


def _recompute(migration: FileMigration) -> None:
    """Enable full activation recomputation if the file has a table of options for it."""
    # The file has no switch: DeepSpeed recomputes if the model calls its function, which reads this table.
    if not any(key.startswith("activation_checkpointing") for key in migration.values):
        return
    migration.default(
        "activation_checkpoint.mode",
        "full",
        "the activation_checkpointing table enables recomputation",
    )
    key = _k("activation_checkpointing.cpu_checkpointing")
    if migration.get(key, bool, False):
        migration.set(key, "activation_checkpoint.cpu_offload", True)
    migration.record(key, "ignored", "inputs for recomputation stay on the device")
