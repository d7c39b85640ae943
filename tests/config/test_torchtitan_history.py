"""Every option in the history of torchtitan is accepted, mapped, or rejected with its replacement.

The names are from all commits of its ``config_manager.py`` and ``config/job_config.py``, from February 2024 to
v0.2.2, of the models and experiments in the packages 0.1.0 to 0.2.2, and of v0.3.0's command line.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardtrain import config as configs
from shardtrain.config import aliases
from shardtrain.config.options import options, suggestion
from shardtrain.utils.errors import ConfigError

# section: keys
HISTORY = """
activation_checkpoint: debug determinism_check early_stop memory_budget mode
    per_op_sac_force_recompute_mm_shapes_by_fqns preserve_rng_state selective_ac_option
    visualize_memory_budget_pareto
checkpoint: async_mode create_seed_checkpoint enable enable_checkpoint enable_first_step_checkpoint
    enable_ft_dataloader_checkpoints exclude_from_loading export_dtype folder initial_load_in_hf
    initial_load_in_hf_quantized initial_load_model_only initial_load_model_weights_only initial_load_path
    interval interval_type keep_latest_k last_save_in_hf last_save_in_safetensors_format last_save_model_only
    last_save_model_weights_only load_only load_step model_weights_only
comm: init_timeout_seconds mode save_traces_file_prefix save_traces_folder timeout_seconds trace_buf_size
    train_timeout_seconds
compile: backend components enable
debug: deterministic deterministic_warn_only moe_force_load_balance seed
estimate: memory mode
experimental: context_parallel_degree context_parallel_rotate_method custom_args_module custom_import
    custom_model_path enable_async_tensor_parallel enable_compiled_autograd pipeline_parallel_degree
    pipeline_parallel_microbatches pipeline_parallel_schedule pipeline_parallel_schedule_csv
    pipeline_parallel_split_mode pipeline_parallel_split_points torch_spmd
fault_tolerance: enable fragment_sync_delay fragment_update_alpha group_size min_replica_size
    module_fqns_per_model_fragment num_fragments process_group process_group_timeout_ms replica_id
    semi_sync_method should_quantize sync_steps
float8: emulate enable_float8_linear enable_fsdp_float8_all_gather filter_fqns
    force_recompute_fp8_weight_in_bwd moe_fqns_prototype precompute_float8_dynamic_scale_for_fsdp recipe_name
    scaling_type_grad_output scaling_type_input scaling_type_weight
job: config_file custom_config_module description dump_folder print_args print_config save_config_file
    save_config_folder use_for_integration_test
lr_scheduler: decay_ratio decay_type lr_min min_lr_factor total_steps warmup_steps
memory_estimation: disable_fake_mode enable enabled
metrics: disable_color_printing disable_logging_from_checkpoint enable_color_printing enable_tensorboard
    enable_wandb log_freq rank_0_only save_for_all_ranks save_tb_folder
model: attn_mask_type converters flavor hf_assets_path name norm_type print_after_conversion tokenizer_path
    use_flex_attn
mx: filter_fqns moe_fqns_prototype mxfp8_dim1_cast_kernel_choice recipe_name use_fp8_dim1_cast_triton_kernel
optimizer: beta1 beta2 early_step_in_backward eps fused implementation lr name weight_decay
parallelism: context_parallel_degree context_parallel_load_balancer context_parallel_rotate_method
    data_parallel_replicate_degree data_parallel_shard_degree disable_loss_parallel
    enable_async_tensor_parallel enable_compiled_autograd expert_parallel_comm_backend expert_parallel_degree
    expert_tensor_parallel_degree fsdp_reshard_after_forward module_fqns_per_model_part
    pipeline_parallel_degree pipeline_parallel_expert_parallel_overlap
    pipeline_parallel_first_stage_less_layers pipeline_parallel_last_stage_less_layers
    pipeline_parallel_layers_per_stage pipeline_parallel_microbatch_size pipeline_parallel_microbatches
    pipeline_parallel_schedule pipeline_parallel_schedule_csv pipeline_parallel_split_points
    tensor_parallel_degree
profiling: enable_memory_snapshot enable_profiling profile_every_x_iter profile_freq profiler_active
    profiler_warmup run_profiler save_memory_snapshot_folder save_traces_folder
quantize.dense.float8: emulate enable_fsdp_float8_all_gather filter_fqns
    precompute_float8_dynamic_scale_for_fsdp recipe_name
quantize.dense.mx: filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name
quantize.grouped_mm.float8: fqns
quantize.grouped_mm.mx: fqns recipe_name
quantize.linear.float8: emulate enable_fsdp_float8_all_gather filter_fqns
    precompute_float8_dynamic_scale_for_fsdp recipe_name
quantize.linear.mx: filter_fqns mxfp8_dim1_cast_kernel_choice recipe_name
quantize.moe.float8: fqns
quantize.moe.mx: fqns
training: batch_size checkpoint_folder checkpoint_interval checkpoint_interval_type compile
    data_parallel_degree data_parallel_replicate_degree data_parallel_shard_degree data_parallel_type dataset
    dataset_path debug_moe_force_load_balance deterministic disable_loss_parallel dtype enable_cpu_offload
    enable_float8_linear enable_fp8_linear enable_fsdp_float8_all_gather enable_fsdp_fp8_all_gather
    enable_loss_parallel enable_selective_ac float8_scaling_type_grad_output float8_scaling_type_input
    float8_scaling_type_weight fp8_linear fsdp_reshard_after_forward gc_debug gc_freq global_batch_size
    local_batch_size max_norm mixed_precision_param mixed_precision_reduce pipeline_parallel_degree
    precompute_float8_dynamic_scale_for_fsdp seed seq_len sequence_parallel_degree steps
    tensor_parallel_degree warmup_pct warmup_steps
training.dataloader: num_workers persistent_workers pin_memory prefetch_factor
validation.dataloader: num_workers persistent_workers pin_memory prefetch_factor
validation: dataset dataset_path enable enabled freq local_batch_size seq_len steps
"""
MODELS_AND_EXPERIMENTS = """
compile: graph_passes joint_passes model_backend_override passes
data: max_images_per_batch max_patches_per_image packing_buffer_size patch_size spatial_merge_size
encoder: autoencoder_path clip_encoder max_t5_encoding_len t5_encoder
eval: classifier_free_guidance_scale denoising_steps enable_classifer_free_guidance eval_freq save_img_folder
experimental: autop_force_bf16 comms_bucket_reorder_strategy
hf_transformers: model
inference: img_size local_batch_size prompts_path save_img_folder
training: classifer_free_guidance_prob classifier_free_guidance_prob img_size test_mode
validation: all_timesteps classifier_free_guidance_scale denoising_steps enable_classifier_free_guidance
    eval_freq save_img_count save_img_folder
"""
NEW_IN_0_3 = """
compile: enable_async_tensor_parallel
debug: batch_invariant detect_anomaly enable_structured_logging print_config save_config_file
    spmd_typechecking
-: dump_folder hf_assets_path
optimizer: optimizer_factory_kwargs_by_name param_groups
parallelism: context_parallel_ptrr_mask_key enable_fsdp_symm_mem enable_sequence_parallel spmd_backend
profiler: enable_memory_snapshot enable_profiling memory_snapshot_freq memory_snapshot_max_entries
    profile_freq profiler_active profiler_repeat profiler_skip_first profiler_skip_first_wait profiler_warmup
    save_memory_snapshot_folder save_traces_folder
training: disable_cuda_graphs
"""


def names_of(block: str) -> list[str]:
    names: list[str] = []
    section = ""
    for line in block.strip().splitlines():
        if not line.startswith(" "):
            section, _, line = line.partition(":")
        names += [key if section == "-" else f"{section}.{key}" for key in line.split()]
    return names


@pytest.mark.parametrize("name", names_of(HISTORY))
def test_every_option_of_torchtitan_s_files_is_known(name: str) -> None:
    alias = aliases.ALIASES.get(name)
    assert name in options() or alias is not None
    assert alias is None or alias.new in options() or alias.why


@pytest.mark.parametrize("name", [*names_of(MODELS_AND_EXPERIMENTS), *names_of(NEW_IN_0_3)])
def test_every_option_of_its_models_experiments_and_v0_3_is_known_or_replaced(name: str) -> None:
    if name in options() or name in aliases.ALIASES:
        return
    fix = suggestion(name)

    assert fix.startswith(("remove it: ", "set "))
    with pytest.raises(ConfigError, match="is not an option") as error:
        configs.load(None, [f"--{name}=1"])
    assert fix in str(error.value)


# option, value -> new option and value, or part of the notice or of the error
CHANGED: list[tuple[str, str, str, Any]] = [
    ("comm.timeout_seconds", "5", "comm.train_timeout_seconds", 5),
    ("estimate.memory", "true", "memory_estimation.enable", True),
    ("estimate.mode", "fake", "memory_estimation.disable_fake_mode", False),
    ("estimate.mode", "real", "memory_estimation.disable_fake_mode", True),
    ("job.save_config_folder", "kept", "job.save_config_file", "kept/job_config.json"),
    ("hf_assets_path", "assets/llama", "model.hf_assets_path", "assets/llama"),
    ("dump_folder", "elsewhere", "job.dump_folder", "elsewhere"),
    ("debug.print_config", "true", "job.print_config", True),
    ("debug.save_config_file", "c.json", "job.save_config_file", "c.json"),
    (
        "compile.enable_async_tensor_parallel",
        "true",
        "parallelism.enable_async_tensor_parallel",
        True,
    ),
    ("profiler.enable_profiling", "true", "profiling.enable_profiling", True),
    ("profiler.profile_freq", "7", "profiling.profile_freq", 7),
]
IGNORED = [
    ("metrics.disable_logging_from_checkpoint", "true", "are not sent again"),
    ("experimental.pipeline_parallel_split_mode", "manual", "cut by the model's LAYOUT"),
    ("parallelism.enable_sequence_parallel", "true", "splits sequences between layers"),
    ("parallelism.spmd_backend", "default", "sharded by the model's LAYOUT"),
]
REJECTED = [
    ("experimental.pipeline_parallel_split_mode", "tracer", "selects stages split by a tracer"),
    (
        "parallelism.enable_sequence_parallel",
        "false",
        "selects tensor parallelism without split sequences",
    ),
]


def _load(way: str, option: str, value: str, folder: Path) -> configs.Loaded:
    """Set an option on the command line or in a file."""
    if way == "command line":
        return configs.load(None, [f"--{option}", value])
    section, _, key = option.rpartition(".")
    text = value if value.isdigit() or value in ("true", "false") else f'"{value}"'
    file = folder / "old.toml"
    file.write_text((f"[{section}]\n" if section else "") + f"{key} = {text}\n")
    return configs.load(file)


@pytest.mark.parametrize("way", ["command line", "file"])
@pytest.mark.parametrize(("option", "value", "new", "expected"), CHANGED)
def test_an_old_option_becomes_its_current_name(
    option: str, value: str, new: str, expected: Any, way: str, tmp_path: Path
) -> None:
    loaded = _load(way, option, value, tmp_path)
    assert loaded.value(new) == expected
    assert any(option in notice and new in notice for notice in loaded.notices)


@pytest.mark.parametrize(("option", "value", "why"), IGNORED)
def test_an_old_option_without_a_counterpart_is_named(
    option: str, value: str, why: str, tmp_path: Path
) -> None:
    notices = _load("file", option, value, tmp_path).notices
    assert any(f"{option} is ignored" in notice and why in notice for notice in notices)


@pytest.mark.parametrize(("option", "value", "rule"), REJECTED)
def test_an_old_value_without_a_replacement_is_rejected(
    option: str, value: str, rule: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rule):
        _load("file", option, value, tmp_path)
