"""Adapted modules: output, initialization, FLOPs, non-finite factors and dry-run sizes."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import Ended, assert_bitwise, deep_config, make_run, tiny_config, train_whole
from torch import nn

from shardtrain.config.schema.lora_options import Lora
from shardtrain.distributed import fake_backend
from shardtrain.lora import spec
from shardtrain.lora.linear import LoraLinear, merged
from shardtrain.lora.spec import Spec
from shardtrain.metrics.flops import count_model, flops_per_token
from shardtrain.models import build, llama3, mixtral, shape_of
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import dry_run
from shardtrain.train.trainer import step
from shardtrain.utils.errors import NumericalError

ON = {"enable": True, "random_base": True, "rank": 4, "alpha": 8.0}


def test_the_output_matches_the_formula_and_only_factors_have_gradients():
    torch.manual_seed(0)
    base = nn.Linear(24, 16).double()
    adapted = LoraLinear(base, rank=4, scale=2.5)
    x = torch.randn(3, 5, 24, dtype=torch.float64)
    with torch.no_grad():
        adapted.lora_a.normal_()
        adapted.lora_b.normal_()
    y = adapted(x)
    a = adapted.lora_a
    b = adapted.lora_b

    base_output = x @ base.weight.T + base.bias
    torch.testing.assert_close(y, base_output + 2.5 * x @ a.T @ b.T)

    y.square().sum().backward()
    assert base.weight.grad is None
    assert base.bias.grad is None

    gradient = 2 * y.detach()
    expected_b_grad = 2.5 * torch.einsum("bto,btr->or", gradient, x @ a.detach().T)
    expected_a_grad = 2.5 * torch.einsum("btr,bti->ri", gradient @ b.detach(), x)
    torch.testing.assert_close(b.grad, expected_b_grad)
    torch.testing.assert_close(a.grad, expected_a_grad)

    merged_weight = merged(base.weight, a, b, 2.5)
    assert merged_weight.dtype == torch.float32
    output_of_merged = x.float() @ merged_weight.T + base.bias.float()
    # the merged weight is rounded to float32, and outputs are sums of 24 numbers up to about 30
    torch.testing.assert_close(output_of_merged, y.float(), atol=1e-4, rtol=0)


def test_dropout_only_applies_to_the_adapter_s_input_in_training():
    torch.manual_seed(0)
    adapted = LoraLinear(nn.Linear(64, 8), rank=2, scale=1.0, dropout=0.5)
    with torch.no_grad():
        adapted.lora_a.normal_()
        adapted.lora_b.zero_()
    x = torch.randn(4, 64)
    base = nn.functional.linear(x, adapted.weight, adapted.bias)

    # dropout does not apply to the input of the frozen weight
    assert torch.equal(adapted.train()(x), base)

    with torch.no_grad():
        adapted.lora_b.normal_()
    assert not torch.equal(adapted(x), adapted(x))
    assert torch.equal(adapted.eval()(x), adapted(x))


@pytest.mark.parametrize("start", ["kaiming", "gaussian"])
def test_factors_are_initialized_like_in_the_paper_and_its_code(start):
    model = nn.Sequential(LoraLinear(nn.Linear(300, 40, device="meta"), rank=32, scale=1.0))
    draws = spec.draws(model, start)
    a = torch.empty(32, 300)
    b = torch.ones(40, 32)
    init_weights.draw_(a, "0.lora_a", draws["0.lora_a"], seed=1)
    init_weights.draw_(b, "0.lora_b", draws["0.lora_b"], seed=1)

    assert not b.any()

    bound = 1 / math.sqrt(300)  # torch's kaiming_uniform_ with a = sqrt(5)
    if start == "kaiming":
        assert 0.99 * bound < a.abs().max() <= bound

    expected = bound / math.sqrt(3) if start == "kaiming" else 1 / 32
    # six standard errors of 9,600 numbers
    assert float(a.std()) == pytest.approx(expected, rel=0.03)
    assert abs(float(a.mean())) < 0.05 * expected


def test_scale_is_alpha_over_rank_or_its_root():
    assert Spec(16, 32.0, False, ()).scale == 2.0
    assert Spec(16, 32.0, True, ()).scale == 8.0


def test_a_frozen_weight_costs_four_operations_and_a_trained_one_six():
    config = deep_config(lora=ON)
    shape = shape_of(llama3, "debugmodel", config.model.overrides, "rmsnorm")
    model = build(llama3, shape)
    total, before = count_model(model, llama3.LAYOUT, shape)
    spec.adapt(model, llama3, shape, config.lora)
    with_adapters, after = count_model(model, llama3.LAYOUT, shape)
    added = with_adapters - total

    # 4 layers x rank 4 x (inputs of q, k, v and o + outputs of q, of k and v, and of o)
    assert added == 4 * 4 * (4 * 64 + 64 + 2 * 32 + 64)

    used = total - 512 * 64
    assert before(64) == flops_per_token(used, 4, 4, 16, 64)
    assert after(64) == before(64) + 6 * added - 2 * used


def not_finite(rank, config):
    run = make_run(rank, config)
    with torch.no_grad():
        run.runner.parameters()["layers.1.attn.wv.lora_a"].fill_(math.nan)
    with pytest.raises(NumericalError) as caught:
        step(run)
    return str(caught.value)


def test_a_factor_that_is_not_finite_is_named():
    assert "layers.1.attn.wv.lora_a" in run_ranks(1, not_finite, deep_config(lora=ON))[0]


def dropping(rank, root, parallelism) -> dict[str, Ended]:
    def config(name):
        return deep_config(
            job={"dump_folder": str(root / name)},
            model={"overrides": {"num_layers": 2}},
            parallelism=parallelism,
            training={"steps": 4, "local_batch_size": 4},
            lora={**ON, "dropout": 0.2},
            checkpoint={"enable": True, "interval": 2},
        )

    train_whole(rank, config("stopped"), stop_after=2)
    return {
        "straight": train_whole(rank, config("straight")),
        "stopped": train_whole(rank, config("stopped")),
    }


@pytest.mark.parametrize("parallelism", [{}, {"pipeline_parallel_degree": 2}], ids=["fsdp", "pp"])
@pytest.mark.nightly(
    "with adapters",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_adapters_with_dropout_resume_bitwise(parallelism, tmp_path):
    for ended in run_ranks(2, dropping, tmp_path, parallelism):
        straight = ended["straight"]
        stopped = ended["stopped"]
        assert straight.error is None
        assert stopped.error is None
        assert stopped.losses == straight.losses[2:]
        assert_bitwise(stopped.weights, straight.weights)
        assert_bitwise(stopped.optimizer, straight.optimizer)


@pytest.mark.parametrize(("kind", "dropout"), [("Linear", 0.0), ("Conv1D", 0.0), ("Linear", 0.5)])
def test_dora_matches_the_output_and_gradients_of_peft(kind: str, dropout: float) -> None:
    """In float32, within 1e-5 for values of about 1. With dropout, both use the same seed."""
    peft = pytest.importorskip("peft", reason="PEFT is the reference of DoRA")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    base: Any = nn.Linear(24, 16) if kind == "Linear" else transformers.pytorch_utils.Conv1D(16, 24)
    options = {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["0"],
        "use_dora": True,
        "lora_dropout": dropout,
        "fan_in_fan_out": kind == "Conv1D",
    }
    adapted = LoraLinear(base, 4, 2.0, dropout, use_dora=True)
    reference = peft.get_peft_model(nn.Sequential(copy.deepcopy(base)), peft.LoraConfig(**options))

    # Both get the same random factors and magnitudes.
    their = {}
    for name, parameter in reference.named_parameters():
        if parameter.requires_grad:
            their[name.split(".default")[0].rpartition(".")[2]] = parameter
    magnitude = next(p for name, p in reference.named_parameters() if "magnitude" in name)
    with torch.no_grad():
        adapted.lora_a.copy_(their["lora_A"].normal_())
        adapted.lora_b.copy_(their["lora_B"].normal_())
        adapted.lora_magnitude.copy_(magnitude.uniform_(0.5, 2.0))

    # A forward and a backward pass with the same input and dropout.
    outputs = []
    for model in (adapted, reference):
        x = torch.randn(5, 24, generator=torch.Generator().manual_seed(1), requires_grad=True)
        torch.manual_seed(2)
        out = model.train()(x)
        out.square().sum().backward()
        outputs.append((out.detach(), x.grad))

    pairs = [
        *zip(*outputs, strict=True),
        (adapted.lora_a.grad, their["lora_A"].grad),
        (adapted.lora_b.grad, their["lora_B"].grad),
        (adapted.lora_magnitude.grad, magnitude.grad),
    ]
    for actual, expected in pairs:
        atol = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(actual, expected, atol=atol, rtol=1e-5)
    assert adapted.weight.grad is None
    assert adapted.bias.grad is None


def held_by_a_rank(rank: int, config: Any) -> Any:
    run = make_run(rank, config)
    trained = [local_tensor(p) for p in run.runner.parameters().values() if p.requires_grad]
    parameters = [local_tensor(p) for p in run.runner.parameters().values()]
    return (
        sum(t.nbytes for t in trained),
        sum(t.nbytes for t in parameters),
        run.num_params,
        run.flops_per_token,
    )


@pytest.mark.parametrize(
    ("lora", "flavor"),
    [
        (
            {
                "use_dora": True,
                "target_modules": ["all-linear"],
                "modules_to_save": ["embed_tokens"],
            },
            "llama3",
        ),
        ({"target_parameters": ["experts.*"], "target_modules": ["o_proj"]}, "mixtral"),
    ],
)
def test_a_dry_run_counts_what_a_rank_holds_and_trains(lora: dict[str, Any], flavor: str) -> None:
    # One micro-batch: several would accumulate unreduced gradients, which are larger.
    config = tiny_config(
        lora={**ON, **lora}, optimizer={"name": "AdamW"}, training={"global_batch_size": 4}
    )
    if flavor == "mixtral":
        sizes = {
            "vocab_size": 512,
            "dim": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
        }
        sizes |= {"moe_ffn_dim": 32, "num_experts": 4, "top_k": 2}
        config = replace(
            config, model=replace(config.model, name=flavor, flavor="debugmodel", overrides=sizes)
        )
    trained_bytes, parameter_bytes, params, flops = run_ranks(2, held_by_a_rank, config)[0]
    with fake_backend.join(0, 2) as here:
        report = dry_run.build(config, here)

    assert (report.gradient_bytes, report.parameter_bytes) == (trained_bytes, parameter_bytes)
    assert (report.num_params, report.flops_per_token) == (params, flops)
    # Adam has two float32 numbers per trained weight, and a step count per parameter.
    assert 2 * trained_bytes <= report.optimizer_bytes < 2 * trained_bytes + 4 * 2 * 100


def test_inactive_experts_with_adapters_cost_no_flops() -> None:
    """2 of 4 experts are active: half of the adapters at 6 FLOPs per weight, half of the frozen weights at 4."""
    sizes = {
        "vocab_size": 512,
        "dim": 64,
        "num_layers": 1,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
    }
    shape = shape_of(
        mixtral, "debugmodel", sizes | {"moe_ffn_dim": 32, "num_experts": 4, "top_k": 2}, "rmsnorm"
    )
    model = build(mixtral, shape)
    _, before = count_model(model, mixtral.LAYOUT, shape)
    options = Lora(enable=True, rank=4, target_parameters=["experts.gate_up_proj"])
    spec.adapt(model, mixtral, shape, options)
    _, after = count_model(model, mixtral.LAYOUT, shape)

    # Adapters have rank 4 in each of 4 experts, of which half are active.
    added = 4 * 4 * (64 + 2 * 32) // 2
    # Active weights: the FLOPs without attention, at 6 per weight.
    used = (before(64) - 12 * 1 * 4 * 16 * 64) // 6
    assert after(64) == before(64) - 2 * used + 6 * added
