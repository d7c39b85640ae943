"""Rowwise RMSNorm is as accurate as PyTorch's own, and falls back to it where unsupported."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import Result, reference, tiny_config, train_steps
from torch import Tensor, nn

from shardtrain.ops import chosen_kernels
from shardtrain.ops.chosen_kernels import Kernels
from shardtrain.ops.cpu import rms_norm
from shardtrain.ops.cpu.rms_norm import RowwiseRMSNorm


@pytest.fixture(autouse=True)
def _also_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm, "SMALLEST_NUMEL", 1)


def computed(
    kind: type[nn.RMSNorm], dtype: torch.dtype, shape: tuple[int, ...], eps: float
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def bfloat16_numbers(*sizes: int) -> Tensor:
        """Random numbers that every tested dtype represents exactly."""
        numbers = torch.randn(*sizes, generator=generator, dtype=torch.float32)
        return numbers.bfloat16().to(dtype)

    x = bfloat16_numbers(*shape)
    gradient = bfloat16_numbers(*shape)
    weight = bfloat16_numbers(shape[-1])
    module = kind(shape[-1], eps=eps, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    x.requires_grad_()
    out = module(x)
    out.backward(gradient)
    assert out.dtype == dtype
    assert x.grad is not None
    assert module.weight.grad is not None
    return [out.detach(), x.grad, module.weight.grad]


@pytest.fixture
def _float64_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_default_dtype_changes_no_number(request: pytest.FixtureRequest) -> None:
    expected = computed(RowwiseRMSNorm, torch.bfloat16, (7, 24), 1e-5)
    request.getfixturevalue("_float64_by_default")
    results = computed(RowwiseRMSNorm, torch.bfloat16, (7, 24), 1e-5)

    for actual, expected_value in zip(results, expected, strict=True):
        assert torch.equal(actual, expected_value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (7, 24), (2, 300, 48), (3, 2, 5, 8)])
@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_error_against_float64_is_that_of_pytorch(
    dtype: torch.dtype, shape: tuple[int, ...], eps: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rms_norm, "_CHUNK_NUMEL", 200)  # several chunks, with a shorter last one
    exact = computed(nn.RMSNorm, torch.float64, shape, eps)
    rowwise = computed(RowwiseRMSNorm, dtype, shape, eps)
    pytorch = computed(nn.RMSNorm, dtype, shape, eps)

    for actual, pytorch_value, expected in zip(rowwise, pytorch, exact, strict=True):
        error = float((actual.double() - expected).norm())
        usual_error = float((pytorch_value.double() - expected).norm())
        # one rounding of the result, in case PyTorch happens to be exact
        last_rounding = torch.finfo(dtype).eps * float(expected.norm())
        assert error <= 1.5 * usual_error + last_rounding, (error, usual_error)


def test_default_eps_is_that_of_pytorch() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        small = torch.full((1, 4), 0.001, dtype=dtype)  # small enough for eps to dominate
        torch.testing.assert_close(
            RowwiseRMSNorm(4, dtype=dtype)(small), nn.RMSNorm(4, dtype=dtype)(small)
        )


def test_non_contiguous_inputs_and_gradients_are_supported() -> None:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    results = []
    for kind in (RowwiseRMSNorm, nn.RMSNorm):
        leaf = x.clone().requires_grad_()
        kind(4, eps=1e-5)(leaf.t()).t().backward(torch.ones(6, 4).t())
        results.append(leaf.grad)

    torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "change",
    [
        lambda module, x: (module.double(), x.double()),
        lambda module, x: (module, x.bfloat16()),
        lambda module, x: (module.to("meta"), x.to("meta")),
        lambda module, x: (module, x[:0]),
    ],
)
def test_unsupported_cases_use_pytorch(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm._RMSNorm, "apply", lambda *_: pytest.fail("by rows"))
    module, x = change(RowwiseRMSNorm(8, eps=1e-5), torch.ones(2, 8))
    assert module(x).shape == x.shape


def test_subclass_and_norm_without_weight_are_not_replaced() -> None:
    class Other(nn.RMSNorm):
        pass

    model = nn.Sequential(Other(2), nn.RMSNorm(2, elementwise_affine=False), nn.RMSNorm(2))
    names = list(model.state_dict())
    rms_norm.use(model)

    assert [type(module) for module in model] == [Other, nn.RMSNorm, RowwiseRMSNorm]
    assert list(model.state_dict()) == names


def by_rows(rank: int, config: Any) -> tuple[Result, int]:
    """Train with the rowwise norm. Return the result and the number of calls."""
    calls = []
    apply = rms_norm._RMSNorm.apply

    def counted_apply(*arguments: Any) -> Tensor:
        calls.append(1)
        return apply(*arguments)

    rms_norm._RMSNorm.apply = counted_apply
    chosen_kernels.use(Kernels(rms_norm=2.0))
    return train_steps(rank, config, 4), len(calls)


@pytest.mark.parametrize("mesh", ["one", "fsdp", "tp"])
def test_rowwise_norm_changes_no_number_of_a_run(mesh: str) -> None:
    parallelism = {"tensor_parallel_degree": 2} if mesh == "tp" else {}
    training = {"local_batch_size": 4 if mesh == "fsdp" else 8}
    config = tiny_config(parallelism=parallelism, training=training)
    expected = reference(4)
    num_ranks = 1 if mesh == "one" else 2

    for result, calls in run_ranks(num_ranks, by_rows, config):
        assert calls or mesh == "tp"  # with TP, norms get DTensors and use PyTorch's kernel
        # float32 sums in a different order
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
        assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
