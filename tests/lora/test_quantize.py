"""Frozen weights in 4 or 8 bits: small, unchanged, and used equally in training, merging and generation."""

from __future__ import annotations

import pytest
import torch
from hub_folders import build, save
from lora_runs import adapter_config, logits, train
from ranks import run_ranks
from tiny import make_run, tiny_config

from shardtrain import cli, models
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import Loaded, check
from shardtrain.lora.frozen import FrozenWeights
from shardtrain.lora.linear import FrozenLinear
from shardtrain.lora.quantize import Packed, packed_bytes
from shardtrain.ops.dtensor import to_full
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.train import resume
from shardtrain.train.trainer import step

pytest.importorskip("torchao", reason="low bits need torchao: install the qlora extra")

BYTES = {"nf4": (0.5 + 1 / 64, 100), "int8": (1 + 5 / 32, 0)}
"""Maximum bytes per weight, with scales, for rows of at least 32 weights; and per module (the nf4 table)."""


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(build("llama3"), tmp_path_factory.mktemp("base") / "llama3")


def low_config(base, folder, kind, parallelism=None, **training):
    lora = {"base_dtype": kind, "target_modules": ["q_proj", "v_proj", "w2"]}
    return adapter_config(
        base, folder, lora=lora, parallelism=parallelism or {}, training={"steps": 10, **training}
    )


def ten_steps(rank, config):
    """Train. Return losses, stored bytes, number of weights, True if unchanged, adapters, and number of modules."""
    run = make_run(rank, config)
    resume.resume(run, Checkpoints(config))
    modules = []
    for part in run.runner.parts:
        for module in part.modules():
            if isinstance(module, FrozenLinear) and module.low_bits:
                modules.append(module)
    weights_before = [module.low_bits.restored(torch.float32) for module in modules]

    losses = []
    for _ in range(10):
        outcome = step(run)
        loss_sum = run.mesh.sum(outcome.loss_sum.double(), over=("pp", "dp_shard"))
        losses.append(float(loss_sum) / outcome.global_tokens)

    unchanged = True
    for module, weight in zip(modules, weights_before, strict=True):
        unchanged = unchanged and torch.equal(module.low_bits.restored(torch.float32), weight)
    adapters = {}
    for name, parameter in run.runner.parameters().items():
        if parameter.requires_grad:
            adapters[name] = to_full(parameter.detach())
    stored_bytes = sum(module.low_bits.bytes for module in modules)
    num_weights = sum(weight.numel() for weight in weights_before)
    return losses, stored_bytes, num_weights, unchanged, adapters, len(modules)


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantized_weights_are_small_unchanged_and_equal_on_every_mesh(kind, base, tmp_path):
    config = low_config(base, tmp_path / "one", kind, local_batch_size=8)
    ((losses, num_bytes, num_weights, unchanged, adapters, num_modules),) = run_ranks(
        1, ten_steps, config
    )
    assert unchanged
    # All seven linear modules of both layers are quantized.
    assert num_modules == 2 * 7

    per_weight, per_module = BYTES[kind]
    assert num_bytes <= per_weight * num_weights + per_module * num_modules

    config = low_config(base, tmp_path / "unquantized", "training", local_batch_size=8)
    ((unquantized_losses, _, _, _, _, num_quantized),) = run_ranks(1, ten_steps, config)
    assert num_quantized == 0
    # Relative error of a weight: a tenth for 4 bits, less than a hundredth for 8 bits.
    tolerance = 0.05 if kind == "nf4" else 0.005
    assert losses == pytest.approx(unquantized_losses, rel=tolerance)
    assert losses[-1] < losses[0] - 0.2
    assert losses != unquantized_losses

    for name, parallelism in (("fsdp", {}), ("pp", {"pipeline_parallel_degree": 2})):
        config = low_config(base, tmp_path / name, kind, parallelism, local_batch_size=4)
        for result in run_ranks(2, ten_steps, config):
            losses_on_mesh, _, _, unchanged, adapters_on_mesh, _ = result
            assert losses_on_mesh == pytest.approx(losses, abs=1e-5)
            assert unchanged
            for adapter, tensor in adapters_on_mesh.items():
                torch.testing.assert_close(tensor, adapters[adapter], atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("shape_OI", [(64, 64), (96, 320), (40, 24 * 8), (512, 2048)])
def test_the_bytes_of_a_quantized_weight_are_predicted(shape_OI, kind, dtype):
    assert (
        packed_bytes(shape_OI, kind, dtype)
        == Packed(torch.randn(shape_OI, dtype=dtype), kind).bytes
    )


def test_adapters_on_quantized_weights_merge_with_their_dequantized_values(base, tmp_path):
    config = low_config(base, tmp_path / "run", "nf4", steps=4)
    assert train(1, config)[0].error is None
    unmerged = logits(open_model(tmp_path / "run").model, 260)
    step_4 = str(tmp_path / "run" / "checkpoint" / "step-4")
    assert cli.main(["merge", step_4, "--to", str(tmp_path / "merged")]) == 0

    # float32 rounding of logits of about 1
    merged = open_model(tmp_path / "merged", tmp_path / "run" / "config.resolved.toml").model
    torch.testing.assert_close(logits(merged, 260), unmerged, atol=1e-5, rtol=0)
    logits_of_run = run_ranks(1, logits_in_training, config)[0]
    torch.testing.assert_close(logits_of_run, unmerged, atol=1e-5, rtol=0)


def test_initialized_weights_include_router_buffers():
    sizes = {
        "num_layers": 1,
        "num_experts": 4,
        "dim": 32,
        "num_heads": 4,
        "load_balance_coeff": 1e-3,
    }
    module = models.find("mixtral")
    shape = models.shape_of(module, "debugmodel", sizes, "rmsnorm")
    config = tiny_config(lora={"enable": True, "random_base": True, "base_dtype": "nf4"})
    with FrozenWeights(None, module, shape, config, "nf4") as weights:
        assert not weights.read("layers.0.moe.router.expert_bias").any()
        assert weights.read("layers.0.moe.router.gate.weight").any()


def logits_in_training(rank, config):
    run = make_run(rank, config)
    resume.resume(run, Checkpoints(config))
    return logits(run.runner.parts[0], 260)


def test_options_incompatible_with_quantization_are_rejected():
    on = {"enable": True, "random_base": True, "base_dtype": "nf4"}
    for sections, message in (
        ({"parallelism": {"tensor_parallel_degree": 2}}, "tensor parallelism"),
        ({"compile": {"enable": True}}, "compile.enable"),
        ({"comm": {"mode": "local_tensor"}}, "simulated"),
        ({"training": {"enable_cpu_offload": True}}, "enable_cpu_offload"),
    ):
        problems = [str(problem) for problem in check(Loaded(tiny_config(lora=on, **sections)))]
        (problem,) = [problem for problem in problems if "base_dtype" in problem]
        assert message in problem
