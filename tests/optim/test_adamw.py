"""Adam and AdamW: the published update, and a restored state that continues bitwise under any names."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from shardtrain.config.schema import Optimizer
from shardtrain.optim import build, set_learning_rate, state_tensors
from shardtrain.utils.errors import ConfigError

IMPLEMENTATIONS = ["fused", "foreach", "for-loop"]


def parameters(seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (5, 3), "a.bias": (5,), "norm.weight": (4,)}
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator))
        for name, shape in shapes.items()
    }


def set_gradients(params, step):
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params.values():
        gradient = torch.randn(parameter.shape, generator=generator)
        if isinstance(parameter, DTensor):
            gradient = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        parameter.grad = gradient


def rate(step):
    return 1e-2 / (step + 1)


def train(params, optimizer, steps):
    for step in steps:
        set_gradients(params, step)
        set_learning_rate(optimizer, rate(step))
        optimizer.step()


def reference(params, config, steps):
    """Reference: Adam (Kingma and Ba, algorithm 1) and AdamW (Loshchilov and Hutter, algorithm 2) in float64."""
    values = {name: p.detach().double().clone() for name, p in params.items()}
    means = {name: torch.zeros_like(v) for name, v in values.items()}
    squares = {name: torch.zeros_like(v) for name, v in values.items()}
    beta1 = config.beta1
    beta2 = config.beta2
    for step in range(steps):
        set_gradients(params, step)
        for name, value in values.items():
            gradient = params[name].grad.double()
            decay = 0.0 if name == "norm.weight" else config.weight_decay
            if config.name == "AdamW":
                value -= rate(step) * decay * value
            else:
                gradient = gradient + decay * value
            means[name] = beta1 * means[name] + (1 - beta1) * gradient
            squares[name] = beta2 * squares[name] + (1 - beta2) * gradient**2
            # correct the bias of averages that start at 0
            mean = means[name] / (1 - beta1 ** (step + 1))
            square = squares[name] / (1 - beta2 ** (step + 1))
            value -= rate(step) * mean / (square.sqrt() + config.eps)
    return values


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_ten_updates_match_the_published_ones(name, implementation):
    config = Optimizer(
        name=name, implementation=implementation, no_weight_decay=["norm*"], weight_decay=0.3
    )
    params = parameters()
    expected = reference(params, config, steps=10)
    train(params, build(params.items(), config), range(10))

    for key, value in expected.items():
        # float32 has 24 bits, so the error of ten updates of values of about 1 is a few 1e-7.
        torch.testing.assert_close(params[key].double(), value, rtol=0, atol=2e-6)
        assert not torch.equal(value, parameters()[key].double())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_restored_state_continues_bitwise(name, implementation):
    config = Optimizer(name=name, implementation=implementation, no_weight_decay=["*bias"])
    uninterrupted = parameters()
    train(uninterrupted, build(uninterrupted.items(), config), range(6))

    # three steps, and a copy of weights and state
    first = parameters()
    optimizer = build(first.items(), config)
    train(first, optimizer, range(3))
    saved = {}
    for key, tensor in state_tensors(optimizer, first.items()).items():
        saved[key] = tensor.clone()

    # a new optimizer with the parameters in another order
    second = {key: nn.Parameter(value.detach().clone()) for key, value in reversed(first.items())}
    optimizer = build(second.items(), config)
    for key, tensor in state_tensors(optimizer, second.items()).items():
        tensor.copy_(saved.pop(key))
    assert not saved

    train({key: second[key] for key in first}, optimizer, range(3, 6))
    for key, value in uninterrupted.items():
        assert torch.equal(second[key], value), key


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_creating_the_state_early_changes_no_update(implementation):
    config = Optimizer(implementation=implementation)
    plain = parameters()
    early = parameters()
    train(plain, build(plain.items(), config), range(3))
    optimizer = build(early.items(), config)
    tensors = state_tensors(optimizer, early.items())

    expected_names = set()
    for name in early:
        expected_names |= {f"{name}.exp_avg", f"{name}.exp_avg_sq", f"{name}.step"}
    assert set(tensors) == expected_names
    assert all(not tensor.any() for tensor in tensors.values())

    train(early, optimizer, range(3))
    for name, value in plain.items():
        assert torch.equal(early[name], value), name
        assert tensors[f"{name}.step"] == 3, "the tensors must be the live ones"


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_early_state_has_the_dtypes_of_a_first_update(implementation):
    config = Optimizer(implementation=implementation)
    early = parameters()
    stepped = parameters()
    early_state = state_tensors(build(early.items(), config), early.items())
    optimizer = build(stepped.items(), config)
    train(stepped, optimizer, range(1))

    for key, tensor in state_tensors(optimizer, stepped.items()).items():
        assert early_state[key].dtype == tensor.dtype
        assert early_state[key].shape == tensor.shape
        assert early_state[key].device == tensor.device


@pytest.fixture
def two_meshes():
    """Return two device meshes, each with this process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield (
        DeviceMesh("cpu", [0], mesh_dim_names=("fsdp",)),
        DeviceMesh("cpu", [[0]], mesh_dim_names=("fsdp", "tp")),
    )
    dist.destroy_process_group()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_distributed_tensors_on_several_meshes_and_plain_ones_train_alike(
    two_meshes, implementation
):
    first_mesh, second_mesh = two_meshes
    plain = parameters()
    placed = {name: parameter.detach().clone() for name, parameter in plain.items()}
    both_dims = [Shard(0), Shard(1)]
    placed["a.weight"] = distribute_tensor(placed["a.weight"], second_mesh, both_dims)
    placed["a.bias"] = distribute_tensor(placed["a.bias"], first_mesh, [Shard(0)])
    sharded = {name: nn.Parameter(tensor) for name, tensor in placed.items()}
    config = Optimizer(implementation=implementation, no_weight_decay=["a.bias"])
    optimizer = build(sharded.items(), config)
    tensors = state_tensors(optimizer, sharded.items())

    for name, parameter in sharded.items():
        assert isinstance(tensors[f"{name}.exp_avg"], DTensor) == isinstance(parameter, DTensor)

    train(plain, build(plain.items(), config), range(4))
    train(sharded, optimizer, range(4))
    for name, value in plain.items():
        full = sharded[name]
        if isinstance(full, DTensor):
            full = full.full_tensor()
        # Vectorized kernels may round the ends of differently aligned memory differently.
        torch.testing.assert_close(full, value, rtol=0, atol=1e-7)
        assert int(tensors[f"{name}.step"]) == 4


def test_frozen_parameters_are_skipped():
    params = parameters()
    params["a.bias"].requires_grad_(False)
    optimizer = build(params.items(), Optimizer())

    assert not any(key.startswith("a.bias") for key in state_tensors(optimizer, params.items()))

    params["a.weight"].requires_grad_(False)
    params["norm.weight"].requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter to train"):
        build(params.items(), Optimizer())


def test_unknown_optimizer_lists_the_existing_ones():
    with pytest.raises(ConfigError, match=r'optimizer.name="SGD" .*AdamW, Adam'):
        build(parameters().items(), Optimizer(name="SGD"))


def test_learning_rate_is_set_in_every_group():
    optimizer = build(parameters().items(), Optimizer(no_weight_decay=["norm*"]))
    assert len(optimizer.param_groups) == 2
    set_learning_rate(optimizer, 0.25)
    assert all(math.isclose(group["lr"], 0.25) for group in optimizer.param_groups)
