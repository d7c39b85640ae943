"""What ``model.converters`` and the optimizer's options do not go with, each refused with its reason."""

from __future__ import annotations

import pytest

from shardtrain.config import check, load, notes
from shardtrain.config.machine import machine_notes

FLOAT8 = "--model.converters=quantize.linear.float8"
EMULATED = [FLOAT8, "--quantize.linear.float8.emulate=true"]

EXPERTS = [
    "--model.converters=quantize.grouped_mm.float8",
    "--quantize.grouped_mm.float8.fqns=experts",
    "--quantize.grouped_mm.float8.emulate",
]
MOE = ["--model.name=qwen3_moe", "--model.flavor=debugmodel_moe"]


def problems(*words: str) -> str:
    return "\n".join(map(str, check(load("debug", list(words)))))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model.converters=quantize.linear.float9"], "did you mean quantize.linear.float8?"),
        (["--model.converters=quantize.linear.float8,quantize.linear.mx"], "two types of the same products (linear)"),
        (["--model.print_after_conversion"], "prints what model.converters has changed, which is empty"),
        ([*EMULATED, "--lora.enable", "--lora.random_base"], "leaves frozen weights and adapters in high precision"),
        ([*EMULATED, "--training.mixed_precision_param=float16"], "is float16"),
        (
            [*EMULATED, "--quantize.linear.float8.recipe_name=rowwise",
             "--quantize.linear.float8.enable_fsdp_float8_all_gather"], "needs one scale for a weight",
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
            "nonfinite_policy looks at first",
        ),
        (["--optimizer.early_step_in_backward", "--training.max_norm=inf", "--optimizer.name=Muon"], "need together"),
        (["--optimizer.name=AdamW8bit", "--optimizer.state_dtype=bfloat16"], "is for Adam and AdamW"),
        (["--optimizer.bf16_stochastic_round"], "rounds what is stored in bfloat16, and nothing is"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_take_effect_is_refused(words, said):
    assert said in problems(*words)


@pytest.mark.parametrize(
    "words",
    [
        EMULATED,
        [*EXPERTS, *MOE],
        ["--optimizer.early_step_in_backward", "--training.max_norm=inf"],
        ["--optimizer.name=AdamW8bit"],
        ["--optimizer.state_dtype=bfloat16", "--optimizer.bf16_stochastic_round"],
        ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16", "--optimizer.bf16_stochastic_round"],
    ],
    ids=str,
)
def test_what_goes_together_is_taken(words):
    assert problems(*words) == ""


def test_a_cpu_multiplies_no_float8_and_says_what_it_does():
    (found,) = machine_notes(load("debug", [FLOAT8]), 1, "cpu", 0)
    assert "needs a device that multiplies in float8, and a CPU computes in float32 and bfloat16" in str(found)
    assert "emulate = true" in str(found)
    assert machine_notes(load("debug", EMULATED), 1, "cpu", 0) == []


def test_an_update_in_backward_and_accumulation_exclude_each_other():
    words = ["--optimizer.early_step_in_backward", "--training.max_norm=inf", "--training.global_batch_size=64"]
    (found,) = machine_notes(load("debug", [*words, "--training.local_batch_size=8"]), 2, "cpu", 0)
    assert "is more than one pass of 2 data-parallel ranks" in str(found)
    assert machine_notes(load("debug", [*words, "--training.local_batch_size=32"]), 2, "cpu", 0) == []


def test_gathering_in_float8_on_one_shard_is_reported():
    words = [*EMULATED, "--quantize.linear.float8.enable_fsdp_float8_all_gather"]
    assert any(
        "without effect, one rank" in n
        for n in notes(load("debug", [*words, "--parallelism.data_parallel_shard_degree=1"]))
    )
