"""Reader of ``accelerate config`` files: number of processes, sharding of parameters, precision."""

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
    translate_offload,
)

SYSTEM = "accelerate"
OPEN = ""
LEAVES: frozenset[str] = frozenset()
_LAUNCH = Idle(
    "set it on the command line: train --nnodes N --node_rank K --rdzv_endpoint HOST:PORT"
)
_SHARDS = Idle(
    "only affects how FSDP wraps modules and transfers shards; here each layer is a unit"
)
_TPU = Cannot("TPUs are not supported")

# Options of fsdp_config. Older files prefix each with fsdp_.
_FSDP: Mapping[str, Rule] = {
    "sharding_strategy": JOINED,
    "reshard_after_forward": JOINED,
    "version": Idle("FSDP2 is always used"),
    "offload_params": JOINED,
    "activation_checkpointing": JOINED,
    "mixed_precision": JOINED,
    "state_dict_type": Idle("checkpoints load on any number of ranks"),
    # How FSDP splits the model into units, and when it transfers them.
    **{
        name: _SHARDS
        for name in [
            "auto_wrap_policy",
            "backward_prefetch",
            "backward_prefetch_policy",
            "forward_prefetch",
            "cpu_ram_efficient_loading",
            "sync_module_states",
            "use_orig_params",
            "transformer_layer_cls_to_wrap",
            "min_num_params",
            "limit_all_gathers",
        ]
    },
}
# Options of deepspeed_config, flat or nested as in a DeepSpeed file.
_DEEPSPEED: Mapping[str, Rule] = {
    "zero_stage": JOINED,
    "gradient_accumulation_steps": Idle(
        "the launched program sets it itself; use training.global_batch_size"
    ),
    "gradient_clipping": To("training.max_norm", float),
    "offload_optimizer_device": JOINED,
    "offload_param_device": JOINED,
    "offload_optimizer_nvme_path": Idle("offloading always uses host memory"),
    "offload_param_nvme_path": Idle("offloading always uses host memory"),
    "zero3_init_flag": Idle("each rank creates only its shards of the parameters"),
    "zero3_save_16bit_model": Idle(
        "checkpoint.last_save_in_hf writes an unsharded Hugging Face folder"
    ),
    "deepspeed_multinode_launcher": _LAUNCH,
    "deepspeed_hostfile": To("launch.ssh.hostfile", str),
    "deepspeed_inclusion_filter": To("launch.ssh.include", str),
    "deepspeed_exclusion_filter": To("launch.ssh.exclude", str),
    "deepspeed_config_file": Idle("add that file to the command to translate both"),
    "deepspeed_moe_layer_cls_names": _SHARDS,
    "zero_optimization.stage": JOINED,
    "zero_optimization.offload_optimizer.device": JOINED,
    "zero_optimization.offload_param.device": JOINED,
    "zero_optimization.*": _SHARDS,
    "bf16.enabled": JOINED,
    "fp16.enabled": JOINED,
    "activation_checkpointing.*": Idle(
        "accelerate does not pass it to the launched program, which sets it itself"
    ),
}

KEYS: Mapping[str, Rule] = {
    # Processes and machines.
    "compute_environment": Cannot(
        "SageMaker is not supported; see `shardtrain launch` for supported platforms",
        off=("LOCAL_MACHINE", None),
    ),
    "distributed_type": JOINED,
    "num_processes": JOINED,
    "num_machines": To("launch.nodes", int),
    "machine_rank": _LAUNCH,
    "main_process_ip": _LAUNCH,
    "main_process_port": _LAUNCH,
    "rdzv_backend": _LAUNCH,
    "same_network": _LAUNCH,
    "main_training_function": Idle("`shardtrain train` is the program"),
    "mixed_precision": JOINED,
    "gradient_accumulation_steps": Idle(
        "the launched program sets it itself; use training.global_batch_size"
    ),
    # TPUs.
    "downcast_bf16": _TPU,
    "tpu_env": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "use_cpu": To("training.device", bool, lambda on: "cpu" if on else "auto"),
    "gpu_ids": Idle("CUDA_VISIBLE_DEVICES selects devices"),
    "debug": Idle("the flight recorder of collectives is always on"),
    "enable_cpu_affinity": _LAUNCH,
    "command_file": _LAUNCH,
    "commands": _LAUNCH,
    "dynamo_backend": JOINED,
    "dynamo_config.*": Idle("use the options of [compile]"),
    "dynamo_config": Idle("it is empty"),
    "fp8_config.*": Cannot("add quantize.linear.float8 to model.converters"),
    "fsdp_config": Idle("it is empty"),
    "deepspeed_config": Idle("it is empty"),
    "megatron_lm_config": Idle("it is empty"),
    "megatron_lm_config.*": Cannot("set the degrees in [parallelism]"),
    # Both spellings of the FSDP options have the same rule.
    **{
        f"fsdp_config.{start}{name}": rule
        for name, rule in _FSDP.items()
        for start in ("", "fsdp_")
    },
    **{f"deepspeed_config.{name}": rule for name, rule in _DEEPSPEED.items()},
}


def looks(values: Mapping[str, Any]) -> bool:
    """True if the top-level keys are those that ``accelerate config`` writes."""
    return "distributed_type" in values or {"compute_environment", "num_processes"} <= values.keys()


def _fsdp(migration: FileMigration, name: str) -> str:
    """Return the flat key of an FSDP option. Older files prefix its name with ``fsdp_``."""
    key = f"fsdp_config\0fsdp_{name}"
    return key if key in migration.values else f"fsdp_config\0{name}"


def finish(migration: FileMigration) -> None:
    """Translate the keys that depend on each other."""
    # accelerate counts the processes of all nodes, and the option those of one node.
    machines = migration.get("num_machines", int, 1)
    count = migration.get("num_processes", int)
    if count is not None:
        migration.set(
            "num_processes",
            "launch.nproc_per_node",
            max(1, count // max(1, machines)),
            f"{count} over {machines} nodes",
        )

    # Sharding. YAML reads an unquoted NO as false.
    kind = "NO"
    if migration.values.get("distributed_type") is not False:
        kind = str(migration.get("distributed_type", str, "NO"))
    _precision(migration)
    if kind == "FSDP":
        _strategy(migration)
        migration.record(
            "distributed_type", "honoured", "parameters are always sharded over the ranks"
        )
    elif kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_HPU"):
        if count and count > 1:
            migration.set(
                "distributed_type",
                "parallelism.data_parallel_replicate_degree",
                count,
                "each process has a full copy of the model",
            )
            migration.default("parallelism.data_parallel_shard_degree", 1)
    elif kind == "DEEPSPEED":
        _zero(migration, count)
    elif kind not in ("NO", "no", "False"):
        migration.record(
            "distributed_type", "unsupported", "only CUDA devices and CPUs are supported"
        )
    migration.record(
        "distributed_type",
        "honoured",
        "one process" if kind == "NO" else "num_processes is the number of ranks",
    )
    # Any backend enables compilation. Its name is not used.
    backend = migration.get("dynamo_backend", str, "NO")
    if backend.upper() not in ("NO", "FALSE"):
        migration.set("dynamo_backend", "compile.enable", True)
    migration.record("dynamo_backend", "ignored", "compilation is off")


def _precision(migration: FileMigration) -> None:
    """Set the compute dtype. YAML reads an unquoted ``no`` as false."""
    dtypes = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "False": "float32"}
    # The value may be text or a boolean, and ``get`` accepts a single type.
    value = migration.values.get("mixed_precision")
    inner = _fsdp(migration, "mixed_precision")
    if isinstance(value, str | bool) and str(value) in dtypes:
        migration.set("mixed_precision", "training.mixed_precision_param", dtypes[str(value)])
    elif value == "fp8":
        migration.record(
            "mixed_precision",
            "unsupported",
            'for float8, set model.converters = ["quantize.linear.float8"]',
        )
    elif value is not None:
        migration.record("mixed_precision", "unsupported", "it must be no, fp16, bf16 or fp8")
    migration.record(inner, "ignored", "the top-level mixed_precision takes precedence")
    # A nested DeepSpeed table may set the precision, too.
    for name, kind in (("bf16", "bfloat16"), ("fp16", "float16")):
        key = f"deepspeed_config\0{name}\0enabled"
        if migration.get(key, bool, False):
            migration.set(key, "training.mixed_precision_param", kind)
        migration.record(key, "ignored", "it is off")


def _strategy(migration: FileMigration) -> None:
    """Translate FSDP options: sharding strategy, resharding after the forward pass, offload and recomputation."""
    key = _fsdp(migration, "sharding_strategy")
    names = {
        "1": "FULL_SHARD",
        "2": "SHARD_GRAD_OP",
        "3": "NO_SHARD",
        "4": "HYBRID_SHARD",
        "5": "HYBRID_SHARD_ZERO2",
    }
    # Older files contain the number of the strategy.
    given = str(migration.get(key, str, "FULL_SHARD"))
    strategy = names.get(given, given)
    machines = migration.get("num_machines", int, 1)
    count = migration.get("num_processes", int, 1)
    reshard = {
        "FULL_SHARD": "always",
        "SHARD_GRAD_OP": "never",
        "HYBRID_SHARD": "always",
        "HYBRID_SHARD_ZERO2": "never",
    }
    if strategy in reshard:
        migration.set(key, "parallelism.fsdp_reshard_after_forward", reshard[strategy], strategy)
        # Hybrid strategies shard inside a node, and replicate over nodes.
        if strategy.startswith("HYBRID") and machines > 1:
            migration.default(
                "parallelism.data_parallel_replicate_degree",
                machines,
                "each node has a full copy of the model",
            )
    elif strategy == "NO_SHARD" and count > 1:
        migration.set(
            key,
            "parallelism.data_parallel_replicate_degree",
            count,
            "each process has a full copy of the model",
        )
        migration.default("parallelism.data_parallel_shard_degree", 1)
    # One process does not shard either, so NO_SHARD is then correct as it is.
    else:
        text = (
            "supported are FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD and HYBRID_SHARD_ZERO2"
        )
        migration.record(key, "honoured" if strategy == "NO_SHARD" else "unsupported", text)

    # FSDP 2 has its own key, which takes precedence over the strategy.
    again = _fsdp(migration, "reshard_after_forward")
    value = migration.values.get(again)
    if isinstance(value, bool):
        migration.set(
            again, "parallelism.fsdp_reshard_after_forward", "always" if value else "never"
        )
    migration.record(
        again,
        "honoured",
        f"parallelism.fsdp_reshard_after_forward = {reshard.get(strategy, 'default')}",
    )
    for name, option, on in (
        ("offload_params", "training.enable_cpu_offload", True),
        ("activation_checkpointing", "activation_checkpoint.mode", "full"),
    ):
        if migration.get(_fsdp(migration, name), bool, False):
            migration.set(_fsdp(migration, name), option, on)
        migration.record(_fsdp(migration, name), "ignored", "it is off")


def _zero(migration: FileMigration, count: int | None) -> None:
    """Translate ZeRO stages to FSDP. Keys are flat, or nested as in a DeepSpeed file."""
    # The flat key takes precedence.
    key = "deepspeed_config\0zero_stage"
    key = key if key in migration.values else "deepspeed_config\0zero_optimization\0stage"
    stage = migration.get(key, int, 2)
    has_replicas = count is not None and count > 1
    if stage == 3:
        migration.set(key, "parallelism.fsdp_reshard_after_forward", "always")
    elif stage == 2:
        migration.set(key, "parallelism.fsdp_reshard_after_forward", "never")
    # Stages 0 and 1 keep full parameters on each rank, which are replicas here.
    elif stage in (0, 1) and has_replicas:
        migration.set(
            key,
            "parallelism.data_parallel_replicate_degree",
            count,
            "each process has a full copy of the model",
        )
        migration.default("parallelism.data_parallel_shard_degree", 1)
        if stage == 1:
            migration.default("parallelism.shard_optimizer_states", True)
    elif stage in (0, 1):
        migration.record(key, "honoured", "a single process does not shard")
    else:
        migration.record(key, "unsupported", "it must be 0, 1, 2 or 3")
    for name in ("offload_optimizer", "offload_param"):
        for place in (
            f"deepspeed_config\0{name}_device",
            f"deepspeed_config\0zero_optimization\0{name}\0device",
        ):
            translate_offload(migration, place)
    migration.record(
        "distributed_type",
        "honoured",
        "ZeRO shards parameters, gradients and optimizer state: [parallelism]",
    )
