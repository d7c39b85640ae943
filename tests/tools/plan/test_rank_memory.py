"""The memory that a plan computes from formulas agrees with the traced dry run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hf_architectures import hf_folder
from hf_meshes import deep_folder, hf_tiny
from tiers import cases
from tiny import deep_config, tiny_config

from shardtrain.config import derived, load
from shardtrain.config.schema import Model
from shardtrain.distributed import fake_backend
from shardtrain.tools.plan import hardware, job_sizes, rank_memory, schedule, shapes
from shardtrain.train import dry_run

WIDE = {
    "dim": 256, "ffn_dim": 768, "num_heads": 8, "num_kv_heads": 4, "head_dim": 32, "vocab_size": 1024, "num_layers": 6
}  # fmt: skip
"""Large enough to make scalars and rounded-up chunks negligible."""
LORA = {"enable": True, "random_base": True}


def planned(config, rank, size):
    model = shapes.read(config)
    sizes = job_sizes.of_config(config, size, len(model.layers), has_experts=model.has_experts)
    orders = schedule.orders(
        sizes.schedule, sizes.pp, len(sizes.stages), sizes.num_microbatches, sizes.recomputes_layers
    )
    return rank_memory.of_rank(model, sizes, rank, orders[rank] if orders else (), "cpu")


def traced(config, rank, size):
    with fake_backend.join(rank, size) as here:
        return dry_run.build(config, here)


def wide(**sections):
    training = {"seq_len": 512, "mixed_precision_param": "bfloat16", **sections.pop("training", {})}
    return deep_config(
        model={"overrides": {**WIDE, **sections.pop("model", {})}}, training=training, **sections
    )


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"activation_checkpoint": {"mode": "full"}},
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "op"}},
        {"activation_checkpoint": {"mode": "selective", "selective_ac_option": "2"}},
        {"parallelism": {"tensor_parallel_degree": 2}},
        {"parallelism": {"tensor_parallel_degree": 4}, "activation_checkpoint": {"mode": "full"}},
        {"parallelism": {"fsdp_reshard_after_forward": "never"}},
        {"parallelism": {"data_parallel_replicate_degree": 2}},
        {"model": {"vocab_size": 16384}},
        {"training": {"mixed_precision_param": "float32"}},
        {"optimizer": {"name": "AdamW8bit"}},
        {"optimizer": {"state_dtype": "bfloat16"}},
        {"optimizer": {"early_step_in_backward": True}, "training": {"max_norm": float("inf")}},
        {"lora": LORA},
        {"lora": {**LORA, "base_dtype": "nf4"}},
        {"lora": {**LORA, "base_dtype": "int8"}, "parallelism": {"pipeline_parallel_degree": 2}},
    ],
    ids=str,
)
def test_a_plan_agrees_with_the_dry_run_within_five_percent(sections):
    config = wide(**sections)
    run = traced(config, 0, 8)
    plan = planned(config, 0, 8)
    weight_bytes = run.parameter_bytes + run.low_bits_bytes

    assert (plan.parameters, plan.gradients) == (weight_bytes, run.gradient_bytes)
    assert plan.optimizer == run.optimizer_bytes
    assert plan.total == pytest.approx(run.total_bytes, rel=0.05)
    assert plan.activations == pytest.approx(run.traced.activations_bytes, rel=0.08)


@pytest.mark.parametrize(
    ("name", "flavor", "most"),
    [
        ("deepseek_v3", "debugmodel", 0.05),
        ("gpt_oss", "debugmodel", 0.05),
        ("llama4", "debugmodel", 0.05),
        ("mixtral", "debugmodel", 0.05),
        ("neox", "debugmodel", 0.05),
        ("qwen3", "debugmodel", 0.05),
        ("qwen3_next", "debugmodel", 0.05),
    ],
)
def test_the_plan_of_every_family_matches_its_trace(name, flavor, most):
    options = {"name": name, "flavor": flavor, "overrides": {}}
    training = {"seq_len": 256, "mixed_precision_param": "bfloat16"}
    config = replace(tiny_config(training=training), model=Model(**options))
    run = traced(config, 0, 4)
    plan = planned(config, 0, 4)

    assert (plan.parameters, plan.optimizer) == (run.parameter_bytes, run.optimizer_bytes)
    assert plan.total == pytest.approx(run.total_bytes, rel=most)


@pytest.mark.parametrize(
    "parallelism",
    [
        {"tensor_parallel_degree": 2},
        {"expert_parallel_degree": 2},
        {
            "pipeline_parallel_degree": 2,
            "pipeline_parallel_first_stage_less_layers": 0,
            "pipeline_parallel_last_stage_less_layers": 0,
        },
    ],
    ids=str,
)
def test_weights_of_a_transformers_network_are_counted_from_its_modules(parallelism, tmp_path):
    pytest.importorskip("transformers")
    training = {"local_batch_size": 2, "global_batch_size": 8}
    config = hf_tiny(deep_folder("qwen3_moe"), tmp_path, parallelism=parallelism, training=training)
    run = traced(config, 0, 4)
    plan = planned(config, 0, 4)

    assert shapes.read(config).has_experts
    assert (plan.parameters, plan.optimizer) == (run.parameter_bytes, run.optimizer_bytes)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@pytest.mark.parametrize(
    "parallelism",
    [
        {},
        {"tensor_parallel_degree": 2},
        {"expert_parallel_degree": 2},
        {"expert_parallel_degree": 4},
        {"expert_parallel_degree": 2, "tensor_parallel_degree": 2},
    ],
    ids=str,
)
def test_activations_of_experts_of_a_transformers_network_are_traced(parallelism, name, tmp_path):
    """Plan and dry run agree for evenly loaded experts, including the rows that they send and receive."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_local_experts": 8}
    training = {"local_batch_size": 2, "global_batch_size": 8, "seq_len": 256}
    folder = hf_folder(name, **sizes)
    config = hf_tiny(folder, tmp_path, parallelism=parallelism, training=training)
    run = traced(config, 0, 4)
    plan = planned(config, 0, 4)

    assert not run.traced.not_traced
    assert (plan.parameters, plan.optimizer) == (run.parameter_bytes, run.optimizer_bytes)
    # With tp=2 the plan counts the unsharded gradients of two micro-batches, and the dry run does not
    assert plan.total == pytest.approx(run.total_bytes, rel=0.17)

    experts = shapes.read(config).layers[0].experts
    assert (experts.count, experts.top_k, experts.ffn) == (8, 2, 256)


@pytest.mark.parametrize(
    "name", cases(["gpt_oss", "opt"], nightly=["llama", "stablelm", "deepseek_v3", "mixtral"])
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_activations_of_a_transformers_network_agree_with_the_trace(name, ranks, tmp_path):
    """Under tensor parallelism each layer of OPT and StableLM is split by the plan that its structure implies.

    The layers of gpt-oss have no plan, so each rank computes all of them. gpt-oss stores its attention scores, as
    DeepSeek-V3 does on a CPU, because its values are narrower than its keys.
    """
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    if name == "opt":
        sizes = {"hidden_size": 128, "word_embed_proj_dim": 128, "ffn_dim": 256}
    config = hf_tiny(
        hf_folder(name, **sizes),
        tmp_path,
        parallelism={"tensor_parallel_degree": ranks},
        training={"local_batch_size": 2, "global_batch_size": 8, "seq_len": 256},
    )
    run = traced(config, 0, 4)
    plan = planned(config, 0, 4)

    assert (plan.parameters, plan.optimizer) == (run.parameter_bytes, run.optimizer_bytes)
    # Layers of transformers save a few more activations than the native layers of the plan. OPT saves fewer.
    assert plan.total == pytest.approx(run.total_bytes, rel=0.15)


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_pipeline_holds_the_micro_batches_in_flight(name, rank):
    degrees = {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule": name,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    }
    config = wide(
        parallelism=degrees,
        training={"local_batch_size": 8, "global_batch_size": -1},
        model={"num_layers": 8},
    )
    run = traced(config, rank * 4, 8)
    plan = planned(config, rank, 8)

    assert plan.in_flight == run.traced.most_in_flight
    assert (plan.parameters, plan.optimizer) == (run.parameter_bytes, run.optimizer_bytes)
    assert plan.total == pytest.approx(run.total_bytes, rel=0.08)


@pytest.mark.parametrize(
    ("preset", "size"), [("llama3_8b", 8), ("llama3_70b", 256), ("llama3_405b", 512)]
)
def test_parameters_of_the_presets_are_counted_without_a_process_group(preset, size):
    config = load(preset, []).config
    model = shapes.read(config)
    sizes = job_sizes.of_config(config, size, len(model.layers), has_experts=model.has_experts)
    memory = rank_memory.of_rank(model, sizes, 0, (), "cuda")
    ranks = derived.shard_degree(config, size) * config.parallelism.tensor_parallel_degree

    # the small difference are norms, which tensor-parallel ranks replicate
    assert memory.parameters == pytest.approx(4 * model.num_params / ranks, rel=0.001)
    assert memory.optimizer == pytest.approx(2 * memory.parameters, rel=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"optimizer.name": "AdamW8bit", "optimizer.bf16_stochastic_round": "false"},
        {
            "optimizer.early_step_in_backward": "true",
            "training.max_norm": "inf",
            "training.global_batch_size": "-1",
        },
    ],
    ids=str,
)
def test_eight_billion_weights_fit_one_gpu_of_80_gb(options):
    """The preset and its documented alternatives leave at least 4 GiB free.

    With AdamW, as in torchtitan, the same model would need 146 GiB.
    """
    arguments = [f"--{option}={value}" for option, value in options.items()]
    config = load("llama3_8b_one_gpu", arguments).config
    model = shapes.read(config)
    memory = rank_memory.of_rank(
        model, job_sizes.of_config(config, 1, len(model.layers)), 0, (), "cuda"
    )

    assert model.num_params > 8e9
    assert config.training.seq_len == 8192

    device = hardware.find("h100")
    # for the driver, the allocator, and float32 temporaries of the update
    assert memory.total + 4 * 2**30 <= device.memory_bytes


def test_the_kernels_of_a_gpu_keep_less_than_those_of_the_cpu():
    config = wide()
    model = shapes.read(config)
    sizes = job_sizes.of_config(config, 8, len(model.layers))

    assert (
        rank_memory.of_rank(model, sizes, 0, (), "cuda").total
        < rank_memory.of_rank(model, sizes, 0, (), "cpu").total
    )


def test_a_shape_from_sizes_equals_that_of_the_model():
    config = load("llama3_8b", []).config
    read_shape = shapes.read(config)
    from_sizes = shapes.decoder(
        "llama3 8B", 32, 4096, 32, 8, 14336, 128256, config.training.seq_len
    )

    assert (from_sizes.num_params, from_sizes.flops_per_token) == (
        read_shape.num_params,
        read_shape.flops_per_token,
    )

    sizes = job_sizes.of_config(config, 8, 32)
    assert rank_memory.of_rank(from_sizes, sizes, 0, (), "cuda") == rank_memory.of_rank(
        read_shape, sizes, 0, (), "cuda"
    )
