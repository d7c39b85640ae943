"""oneDNN linear layers match nn.Linear on one process and on meshes, and fall back to PyTorch where unsupported."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny import Result, reference, tiny_config, train_steps
from torch import Tensor, nn
from torch.nn import functional as F

from shardtrain.ops import chosen_kernels
from shardtrain.ops.chosen_kernels import Kernels
from shardtrain.ops.cpu import onednn_linear
from shardtrain.ops.cpu.onednn_linear import OneDnnLinear

pytestmark = pytest.mark.skipif(
    not onednn_linear.is_available(), reason="this build of PyTorch has no oneDNN"
)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("weight_gradient", [0.0, 2.0])
def test_values_and_gradients_match_linear(
    bias: bool, weight_gradient: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn_linear, "_SMALLEST_PRODUCT", 0)
    monkeypatch.setattr(chosen_kernels, "_chosen", Kernels(onednn_weight_gradient=weight_gradient))
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias)
    ours = nn.Sequential(nn.Linear(48, 80, bias=bias))
    ours[0].load_state_dict(plain.state_dict())
    onednn_linear.use(ours)

    assert type(ours[0]) is OneDnnLinear
    assert list(ours.state_dict()) == [f"0.{name}" for name in plain.state_dict()]

    x = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = torch.randn(3, 5, 48, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gradient = torch.randn(3, 5, 80)
    out = ours(x)
    expected = plain(y)
    out.backward(gradient)
    expected.backward(gradient)
    pairs = [(out, expected), (x.grad, y.grad)]
    for weight, plain_weight in zip(ours.parameters(), plain.parameters(), strict=True):
        pairs.append((weight.grad, plain_weight.grad))

    for actual, target in pairs:
        # float32 sums in a different order
        torch.testing.assert_close(actual, target, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, x: (layer, x),  # smaller than the smallest product for oneDNN
        lambda layer, x: (layer.double(), x.double()),
        lambda layer, x: (layer.bfloat16(), x.bfloat16()),
        lambda layer, x: (layer.to("meta"), x.to("meta")),
        lambda layer, x: (layer, x[:0]),
    ],
)
def test_unsupported_cases_use_pytorch(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("oneDNN was called")

    monkeypatch.setattr(onednn_linear, "product", refuse)
    monkeypatch.setattr(onednn_linear, "_linear", refuse)
    layer = nn.Sequential(nn.Linear(8, 8))
    onednn_linear.use(layer)
    layer, x = change(layer, torch.ones(2, 8))
    out = layer(x)

    if x.device.type != "meta":
        assert torch.equal(out, F.linear(x, layer[0].weight, layer[0].bias))


def test_subclass_with_its_own_forward_is_not_replaced() -> None:
    class Other(nn.Linear):
        pass

    model = nn.Sequential(Other(2, 2))
    onednn_linear.use(model)

    assert type(model[0]) is Other


def by_onednn(rank: int, config: Any) -> tuple[Result, int]:
    """Train with oneDNN's products. Return the result and the number of products."""
    calls = []
    product = onednn_linear.product

    def counted_product(*arguments: Any) -> Tensor:
        calls.append(1)
        return product(*arguments)

    onednn_linear._SMALLEST_PRODUCT = 0
    onednn_linear.product = counted_product
    chosen_kernels.use(Kernels(onednn_linear=2.0))
    return train_steps(rank, config, 4), len(calls)


MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "fsdp": {},
    "tp": {"tensor_parallel_degree": 2},
    "pp": {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_first_stage_less_layers": 0,
        "pipeline_parallel_last_stage_less_layers": 0,
    },
}


@pytest.mark.parametrize("mesh", MESHES)
def test_onednn_changes_no_number_of_a_run(mesh: str) -> None:
    training = {"local_batch_size": 4 if mesh == "fsdp" else 8}
    config = tiny_config(parallelism=MESHES[mesh], training=training)
    expected = reference(4)
    num_ranks = 1 if mesh == "one" else 2

    for result, calls in run_ranks(num_ranks, by_onednn, config):
        assert calls > 0  # also with tensor parallelism, where split layers multiply plain tensors
        # float32 sums in a different order
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
        assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)


def test_compiler_treats_it_as_one_operation() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    weight = torch.randn(5, 4, requires_grad=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(onednn_linear._product, (x, weight, None), test_utils=tests)
    torch.library.opcheck(onednn_linear._product, (x, weight, torch.randn(5)), test_utils=tests)
