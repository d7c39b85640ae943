"""Unsupported combinations of ``model.converters`` and optimizer options are rejected with the reason."""

from __future__ import annotations

import pytest

from shardtrain.config import ConfigError, check, load, notes, unavailable
from shardtrain.config.machine_rules import machine_notes

FLOAT8 = "--model.converters=quantize.linear.float8"
EMULATED = [FLOAT8, "--quantize.linear.float8.emulate=true"]

MX = ["--model.converters=quantize.linear.mx", "--quantize.linear.mx.recipe_name=mxfp8_emulated"]
EXPERTS = [
    "--model.converters=quantize.grouped_mm.float8",
    "--quantize.grouped_mm.float8.fqns=experts",
    "--quantize.grouped_mm.float8.emulate",
]
MOE = ["--model.name=qwen3_moe", "--model.flavor=debugmodel_moe"]


def problems(*arguments: str) -> str:
    return "\n".join(map(str, check(load("debug", list(arguments)))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model.converters=quantize.linear.float9"], "did you mean quantize.linear.float8?"),
        (["--model.converters=quantize.linear.float8,quantize.linear.mx"], "two dtypes for the same products (linear)"),
        (["--model.print_after_conversion"], "prints the changes of model.converters, which is empty"),
        ([*EMULATED, "--lora.enable", "--lora.random_base"], "is not supported with adapters"),
        ([*EMULATED, "--training.mixed_precision_param=float16"], "is float16"),
        ([*MX, "--training.mixed_precision_param=float16"], "is float16"),
        ([*MX, "--lora.enable", "--lora.random_base"], "is not supported with adapters"),
        (
            [*EMULATED, "--quantize.linear.float8.recipe_name=rowwise",
             "--quantize.linear.float8.enable_fsdp_float8_all_gather"], "requires one scale per weight",
        ),
        (
            [*EMULATED, "--quantize.linear.float8.enable_fsdp_float8_all_gather", "--training.enable_cpu_offload"],
            "rounds weights on the device",
        ),
        (
            [*EMULATED, "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"],
            "has no effect without enable_fsdp_float8_all_gather",
        ),
        (["--model.converters=quantize.grouped_mm.float8"], 'set it to ["experts"]'),
        ([*EXPERTS, "--model.name=llama3"], "names experts, and llama3 has none"),
        ([*EXPERTS, *MOE, "--model.overrides.moe_ffn_dim=24"], "whose moe_ffn_dim is 24, which is not a multiple of"),
        (["--optimizer.early_step_in_backward"], "before all gradients are known, which training.max_norm"),
        (
            ["--optimizer.early_step_in_backward", "--training.max_norm=inf", "--training.nonfinite_policy=skip"],
            'nonfinite_policy = "skip" requires',
        ),
        (
            ["--optimizer.early_step_in_backward", "--training.max_norm=inf", "--optimizer.name=Muon"],
            "this optimizer may require",
        ),
        (["--optimizer.name=AdamW8bit", "--optimizer.state_dtype=bfloat16"], "is only supported by Adam and AdamW"),
        (["--optimizer.bf16_stochastic_round"], "requires parameters or optimizer states in bfloat16"),
    ],
    ids=str,
)  # fmt: skip
def test_ineffective_float8_options_are_rejected(arguments, message):
    assert message in problems(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        EMULATED,
        MX,
        ["--model.converters=quantize.linear.mx"],
        [
            *MX[1:],
            *EXPERTS[1:],
            "--model.converters=quantize.linear.mx,quantize.grouped_mm.float8",
            *MOE,
        ],
        [*EXPERTS, *MOE],
        ["--optimizer.early_step_in_backward", "--training.max_norm=inf"],
        ["--optimizer.name=AdamW8bit"],
        ["--optimizer.state_dtype=bfloat16", "--optimizer.bf16_stochastic_round"],
        [
            "--training.dtype=bfloat16",
            "--training.mixed_precision_param=bfloat16",
            "--optimizer.bf16_stochastic_round",
        ],
    ],
    ids=str,
)
def test_compatible_float8_options_are_accepted(arguments):
    assert problems(*arguments) == ""


def test_an_unknown_optimizer_is_reported_once_with_early_steps():
    early_steps = ["--optimizer.early_step_in_backward", "--training.max_norm=inf"]
    unknown = "--optimizer.name=SGD"

    # Whether early steps fit depends on the optimizer, so an unknown one must not be reported twice.
    text_of_problems = problems(*early_steps, unknown)
    assert text_of_problems.count("optimizer.") == problems(unknown).count("optimizer.")
    assert "early_step_in_backward" not in text_of_problems


def test_float8_on_a_cpu_is_rejected_with_a_fix():
    (problem,) = machine_notes(load("debug", [FLOAT8]), 1, "cpu", 0)
    assert "needs float8 matmuls, which a CPU does not support" in str(problem)
    assert "emulate = true" in str(problem)
    assert machine_notes(load("debug", EMULATED), 1, "cpu", 0) == []


def test_mx_on_a_cpu_is_rejected_with_a_fix():
    (problem,) = machine_notes(load("debug", MX[:1]), 1, "cpu", 0)
    assert (
        "needs MXFP8 matmuls (CUDA capability 10.0 or higher), which a CPU does not support"
        in str(problem)
    )
    assert 'quantize.linear.mx.recipe_name = "mxfp8_emulated"' in str(problem)
    assert len(str(problem).splitlines()) == 1

    (problem,) = machine_notes(load("debug", MX[:1]), 1, "xpu", 1)
    assert "which xpu does not support" in str(problem)
    assert (
        machine_notes(load("debug", MX[:1]), 1, "cuda", 1)
        == machine_notes(load("debug", MX), 1, "cpu", 0)
        == []
    )


def test_a_recipe_of_mx_is_one_of_three():
    with pytest.raises(ConfigError, match="mxfp8_cublas"):
        load("debug", ["--quantize.linear.mx.recipe_name=mxfp4"])


def test_experts_in_mx_are_not_available():
    (problem,) = unavailable(load("debug", ["--model.converters=quantize.grouped_mm.mx"]))
    assert "not available yet" in str(problem)
    assert 'use "quantize.grouped_mm.float8"' in str(problem)
    assert unavailable(load("debug", MX)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], ""),
        (
            ["--quantize.linear.mx.mxfp8_dim1_cast_kernel_choice=triton"],
            "casts are PyTorch's operations here",
        ),
        (
            ["--training.seq_len=72"],
            "seq_len=72: a row is 72 tokens, which does not fill blocks of 32",
        ),
        (
            ["--training.seq_len=96", "--parallelism.context_parallel_degree=2"],
            "a row is 96 tokens in 4 pieces",
        ),
    ],
    ids=str,
)
def test_ineffective_and_mesh_dependent_mx_options_are_reported(arguments, message):
    reported = [
        note for note in notes(load("debug", [*MX, *arguments])) if "mx." in note or "MX" in note
    ]

    assert message in "".join(reported)
    assert bool(reported) == bool(message)


def test_an_update_in_backward_and_accumulation_exclude_each_other():
    arguments = [
        "--optimizer.early_step_in_backward",
        "--training.max_norm=inf",
        "--training.global_batch_size=64",
    ]
    (problem,) = machine_notes(
        load("debug", [*arguments, "--training.local_batch_size=8"]), 2, "cpu", 0
    )

    assert "is more than one pass of 2 data-parallel ranks" in str(problem)
    assert (
        machine_notes(load("debug", [*arguments, "--training.local_batch_size=32"]), 2, "cpu", 0)
        == []
    )


def test_gathering_in_float8_on_one_shard_is_reported():
    arguments = [*EMULATED, "--quantize.linear.float8.enable_fsdp_float8_all_gather"]
    assert any(
        "without effect, one rank" in n
        for n in notes(load("debug", [*arguments, "--parallelism.data_parallel_shard_degree=1"]))
    )
