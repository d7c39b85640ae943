"""``accelerate config`` files: number of processes, sharding of parameters, precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardtrain.compat.migrate.migration_report import JOINED, Cannot, FileMigration, Idle, Rule, To, answer_offload

SYSTEM = "accelerate"
OPEN = ""
LEAVES: frozenset[str] = frozenset()
_LAUNCH = Idle("where ranks are belongs to the command line: train --nnodes N --node_rank K --rdzv_endpoint HOST:PORT")
_SHARDS = Idle("how shards travel or are wrapped, which changes no number: each layer is a unit")
_TPU = Cannot("there is no TPU backend")

_FSDP: Mapping[str, Rule] = {
    "sharding_strategy": JOINED,
    "reshard_after_forward": JOINED,
    "version": Idle("FSDP2 is used"),
    "offload_params": JOINED,
    "activation_checkpointing": JOINED,
    "mixed_precision": JOINED,
    "state_dict_type": Idle("a checkpoint is whole on any mesh"),
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
_DEEPSPEED: Mapping[str, Rule] = {
    "zero_stage": JOINED,
    "gradient_accumulation_steps": Idle("the program that is started has its own; write training.global_batch_size"),
    "gradient_clipping": To("training.max_norm", float),
    "offload_optimizer_device": JOINED,
    "offload_param_device": JOINED,
    "offload_optimizer_nvme_path": Idle("host memory is where offloading goes"),
    "offload_param_nvme_path": Idle("host memory is where offloading goes"),
    "zero3_init_flag": Idle("parameters are always made in shards"),
    "zero3_save_16bit_model": Idle("checkpoint.last_save_in_hf writes a whole folder"),
    "deepspeed_multinode_launcher": _LAUNCH,
    "deepspeed_hostfile": To("launch.ssh.hostfile", str),
    "deepspeed_inclusion_filter": To("launch.ssh.include", str),
    "deepspeed_exclusion_filter": To("launch.ssh.exclude", str),
    "deepspeed_config_file": Idle("give that file beside this one, and both are read"),
    "deepspeed_moe_layer_cls_names": _SHARDS,
    "zero_optimization.stage": JOINED,
    "zero_optimization.offload_optimizer.device": JOINED,
    "zero_optimization.offload_param.device": JOINED,
    "zero_optimization.*": _SHARDS,
    "bf16.enabled": JOINED,
    "fp16.enabled": JOINED,
    "activation_checkpointing.*": Idle("accelerate does not hand it on: the program that is started says so"),
}

KEYS: Mapping[str, Rule] = {
    "compute_environment": Cannot(
        "SageMaker is not started; `shardtrain launch` has the platforms", off=("LOCAL_MACHINE", None)
    ),
    "distributed_type": JOINED,
    "num_processes": JOINED,
    "num_machines": To("launch.nodes", int),
    "machine_rank": _LAUNCH,
    "main_process_ip": _LAUNCH,
    "main_process_port": _LAUNCH,
    "rdzv_backend": _LAUNCH,
    "same_network": _LAUNCH,
    "main_training_function": Idle("`shardtrain train` has one"),
    "mixed_precision": JOINED,
    "gradient_accumulation_steps": Idle("the program that is started has its own; write training.global_batch_size"),
    "downcast_bf16": _TPU,
    "tpu_env": _TPU,
    "tpu_name": _TPU,
    "tpu_zone": _TPU,
    "tpu_use_cluster": _TPU,
    "tpu_use_sudo": _TPU,
    "use_cpu": To("training.device", bool, lambda on: "cpu" if on else "auto"),
    "gpu_ids": Idle("CUDA_VISIBLE_DEVICES chooses devices"),
    "debug": Idle("the flight recorder of collectives is always on"),
    "enable_cpu_affinity": _LAUNCH,
    "command_file": _LAUNCH,
    "commands": _LAUNCH,
    "dynamo_backend": JOINED,
    "dynamo_config.*": Idle("[compile] says how"),
    "dynamo_config": Idle("it is empty"),
    "fp8_config.*": Cannot("quantize.linear.float8 in model.converters is the way"),
    "fsdp_config": Idle("it is empty"),
    "deepspeed_config": Idle("it is empty"),
    "megatron_lm_config": Idle("it is empty"),
    "megatron_lm_config.*": Cannot("degrees are those of [parallelism]"),
    **{f"fsdp_config.{start}{name}": rule for name, rule in _FSDP.items() for start in ("", "fsdp_")},
    **{f"deepspeed_config.{name}": rule for name, rule in _DEEPSPEED.items()},
}


def looks(values: Mapping[str, Any]) -> bool:
    """True if the keys are those of this system."""
    return "distributed_type" in values or {"compute_environment", "num_processes"} <= values.keys()


def _fsdp(found: FileMigration, name: str) -> str:
    """Return the key of an FSDP option, which may have a prefix."""
    key = f"fsdp_config\0fsdp_{name}"
    return key if key in found.values else f"fsdp_config\0{name}"


def finish(found: FileMigration) -> None:
    """Translate keys that depend on each other."""
    machines = found.get("num_machines", int, 1)
    count = found.get("num_processes", int)
    if count is not None:
        found.set(
            "num_processes",
            "launch.nproc_per_node",
            max(1, count // max(1, machines)),
            f"{count} over {machines} nodes",
        )

    # Sharding. YAML reads an unquoted NO as false.
    kind = "NO"
    if found.values.get("distributed_type") is not False:
        kind = str(found.get("distributed_type", str, "NO"))
    _precision(found)
    if kind == "FSDP":
        _strategy(found)
        found.answer("distributed_type", "honoured", "parameters are sharded over the ranks")
    elif kind in ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_HPU"):
        if count and count > 1:
            found.set(
                "distributed_type",
                "parallelism.data_parallel_replicate_degree",
                count,
                "each process holds the whole model",
            )
            found.default("parallelism.data_parallel_shard_degree", 1)
    elif kind == "DEEPSPEED":
        _zero(found, count)
    elif kind not in ("NO", "no", "False"):
        found.answer("distributed_type", "unsupported", "ranks are processes of CUDA or of CPUs")
    found.answer("distributed_type", "honoured", "one process" if kind == "NO" else "as many ranks as num_processes")
    backend = found.get("dynamo_backend", str, "NO")
    if backend.upper() not in ("NO", "FALSE"):
        found.set("dynamo_backend", "compile.enable", True)
    found.answer("dynamo_backend", "ignored", "nothing is compiled")


def _precision(found: FileMigration) -> None:
    words = {"bf16": "bfloat16", "fp16": "float16", "no": "float32", "False": "float32"}
    value = found.values.get("mixed_precision")
    inner = _fsdp(found, "mixed_precision")
    if isinstance(value, str | bool) and str(value) in words:
        found.set("mixed_precision", "training.mixed_precision_param", words[str(value)])
    elif value == "fp8":
        found.answer(
            "mixed_precision", "unsupported", 'model.converters = ["quantize.linear.float8"] computes in float8'
        )
    elif value is not None:
        found.answer("mixed_precision", "unsupported", "it is no, fp16, bf16 or fp8")
    found.answer(inner, "ignored", "mixed_precision says the same")
    for name, kind in (("bf16", "bfloat16"), ("fp16", "float16")):
        key = f"deepspeed_config\0{name}\0enabled"
        if found.get(key, bool, False):
            found.set(key, "training.mixed_precision_param", kind)
        found.answer(key, "ignored", "it is off")


def _strategy(found: FileMigration) -> None:
    """Translate FSDP options: sharding, resharding after forward, offload and recomputation."""
    key = _fsdp(found, "sharding_strategy")
    names = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"}
    given = str(found.get(key, str, "FULL_SHARD"))
    strategy = names.get(given, given)
    machines = found.get("num_machines", int, 1)
    count = found.get("num_processes", int, 1)
    reshard = {
        "FULL_SHARD": "always",
        "SHARD_GRAD_OP": "never",
        "HYBRID_SHARD": "always",
        "HYBRID_SHARD_ZERO2": "never",
    }
    if strategy in reshard:
        found.set(key, "parallelism.fsdp_reshard_after_forward", reshard[strategy], strategy)
        if strategy.startswith("HYBRID") and machines > 1:
            found.default("parallelism.data_parallel_replicate_degree", machines, "a copy of the model on each node")
    elif strategy == "NO_SHARD" and count > 1:
        found.set(key, "parallelism.data_parallel_replicate_degree", count, "each process holds the whole model")
        found.default("parallelism.data_parallel_shard_degree", 1)
    else:
        text = "strategies are FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HYBRID_SHARD, HYBRID_SHARD_ZERO2"
        found.answer(key, "honoured" if strategy == "NO_SHARD" else "unsupported", text)

    # FSDP 2 has its own key, which takes precedence over the strategy.
    again = _fsdp(found, "reshard_after_forward")
    value = found.values.get(again)
    if isinstance(value, bool):
        found.set(again, "parallelism.fsdp_reshard_after_forward", "always" if value else "never")
    found.answer(again, "honoured", f"parallelism.fsdp_reshard_after_forward = {reshard.get(strategy, 'default')}")
    for name, option, on in (
        ("offload_params", "training.enable_cpu_offload", True),
        ("activation_checkpointing", "activation_checkpoint.mode", "full"),
    ):
        if found.get(_fsdp(found, name), bool, False):
            found.set(_fsdp(found, name), option, on)
        found.answer(_fsdp(found, name), "ignored", "it is off")


def _zero(found: FileMigration, count: int | None) -> None:
    """Translate ZeRO stages to FSDP. Keys are flat or nested as in a DeepSpeed file."""
    key = "deepspeed_config\0zero_stage"
    key = key if key in found.values else "deepspeed_config\0zero_optimization\0stage"
    stage = found.get(key, int, 2)
    if stage in (2, 3):
        found.set(key, "parallelism.fsdp_reshard_after_forward", "always" if stage == 3 else "never")
    elif stage in (0, 1) and count and count > 1:
        found.set(key, "parallelism.data_parallel_replicate_degree", count, "each process holds the whole model")
        found.default("parallelism.data_parallel_shard_degree", 1)
        if stage == 1:
            found.default("parallelism.shard_optimizer_states", True)
    if stage in (0, 1):
        found.answer(key, "honoured", "one process has nothing to shard")
    found.answer(key, "unsupported", "stages are 0 to 3")
    for name in ("offload_optimizer", "offload_param"):
        for place in (f"deepspeed_config\0{name}_device", f"deepspeed_config\0zero_optimization\0{name}\0device"):
            answer_offload(found, place)
    found.answer("distributed_type", "honoured", "ZeRO is sharding of parameters, gradients and state: [parallelism]")
