"""LayerNorm in 16 bits on a CPU: gradients of weight and bias are summed in float32."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from ranks import run_ranks
from tiny import make_run, tiny_config
from torch import Tensor, nn

from shardtrain.config.schema import Config, Model
from shardtrain.ops.cpu import layer_norm
from shardtrain.ops.cpu.layer_norm import Float32SumLayerNorm
from shardtrain.ops.dtensor import to_full
from shardtrain.train import trainer


def computed(
    kind: type[nn.LayerNorm],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    bias: bool,
    eps: float = 1e-5,
) -> list[Tensor]:
    """Return the output, and gradients of input, weight and bias."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator, dtype=torch.float32).add_(0.3).bfloat16().to(dtype)
    gradient = (
        torch.randn(*shape, generator=generator, dtype=torch.float32).add_(0.3).bfloat16().to(dtype)
    )
    module = kind(shape[-1], eps=eps, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(
                torch.randn(shape[-1], generator=generator, dtype=torch.float32).bfloat16()
            )
    x.requires_grad_()
    out = module(x)
    out.backward(gradient)
    assert out.dtype == dtype
    assert x.grad is not None
    return [
        out.detach(),
        x.grad,
        *(parameter.grad for parameter in module.parameters() if parameter.grad is not None),
    ]


@pytest.fixture
def _float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_default_dtype_changes_no_number(request: pytest.FixtureRequest) -> None:
    expected = computed(Float32SumLayerNorm, torch.bfloat16, (7, 24), True)
    request.getfixturevalue("_float64_by_default")
    for actual, expected_value in zip(
        computed(Float32SumLayerNorm, torch.bfloat16, (7, 24), True), expected, strict=True
    ):
        assert torch.equal(actual, expected_value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 5), (7, 24), (3, 2, 5, 8), (8192, 2, 16)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_gradients_match_float64_except_for_the_last_rounding(
    dtype: torch.dtype, shape: tuple[int, ...], bias: bool, eps: float
) -> None:
    exact = computed(nn.LayerNorm, torch.float64, shape, bias, eps)
    results = computed(Float32SumLayerNorm, dtype, shape, bias, eps)
    assert len(results) == len(exact) == 3 + bias
    for actual, expected in zip(results, exact, strict=True):
        error = float((actual.double() - expected).norm())
        last_rounding = torch.finfo(dtype).eps * float(expected.norm())
        assert error <= last_rounding


def test_pytorch_layer_norm_loses_most_of_a_sum() -> None:
    """If this test fails, PyTorch sums in float32 too, and our LayerNorm class can be removed."""
    *_, exact_bias = computed(nn.LayerNorm, torch.float64, (16384, 16), True)
    *_, pytorch_bias = computed(nn.LayerNorm, torch.bfloat16, (16384, 16), True)

    error = (pytorch_bias.double() - exact_bias).norm()
    assert float(error) > 0.1 * float(exact_bias.norm())


def test_float32_mixed_dtypes_and_norms_without_weights_use_pytorch() -> None:
    x = torch.randn(40, 8, generator=torch.Generator().manual_seed(0))
    model = nn.ModuleList(
        [nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm((4, 8))]
    )
    before = [model[0](x), model[1](x.bfloat16()), model[2](x.view(10, 4, 8))]
    layer_norm.use(model)

    assert [type(module) for module in model] == [
        Float32SumLayerNorm,
        nn.LayerNorm,
        Float32SumLayerNorm,
    ]

    after = [model[0](x), model[1](x.bfloat16()), model[2](x.view(10, 4, 8))]
    for original, replaced in zip(before, after, strict=True):
        assert torch.equal(original, replaced)
    assert torch.equal(model[0](x.bfloat16()), nn.LayerNorm(8)(x.bfloat16()))  # float32 weights


def gradients(rank: int, config: Config) -> dict[str, Tensor]:
    run = make_run(rank, config)
    saved: dict[str, Tensor] = {}
    update = run.runner.update

    def keep(optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in run.runner.parameters().items():
            if parameter.grad is not None:
                saved[name] = to_full(parameter.grad).float()
        update(optimizer)

    run.runner.update = keep  # type: ignore[method-assign]
    trainer.step(run)
    return saved


@pytest.mark.parametrize("how", ["mixed precision", "whole model"])
def test_bfloat16_model_has_the_gradients_of_float32_on_one_process(how: str) -> None:
    """With rows of 2,048 tokens, PyTorch's sums would be off by a tenth."""
    overrides = {
        "dim": 16,
        "num_heads": 2,
        "head_dim": 8,
        "ffn_dim": 32,
        "vocab_size": 320,
        "num_layers": 2,
    }
    option = "mixed_precision_param" if how == "mixed precision" else "dtype"

    def config(**training: str) -> Config:
        base = tiny_config(
            training={"seq_len": 2048, "local_batch_size": 2, "global_batch_size": -1, **training}
        )
        model = Model(name="neox", flavor="debugmodel", overrides=overrides)
        return dataclasses.replace(base, model=model)

    (exact,) = run_ranks(1, gradients, config(mixed_precision_param="float32"))
    (in_bfloat16,) = run_ranks(1, gradients, config(**{option: "bfloat16"}))
    names_of_norms = [name for name in exact if "norm" in name]

    assert len(names_of_norms) == 10
    for name in names_of_norms:
        # bfloat16 rounds activations to 8 significant bits.
        error = in_bfloat16[name] - exact[name]
        assert float(error.norm()) < 0.03 * float(exact[name].norm()), name
