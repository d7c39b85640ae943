"""Optimizer state and parameters in 16 and 8 bits: exact in expectation, and the same on every mesh."""

from __future__ import annotations

import dataclasses
import shutil

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import assert_same_numbers, run_tiny, tiny_config, train_whole
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn import Parameter

from shardtrain.config.schema import Optimizer
from shardtrain.ops import stochastic_rounding
from shardtrain.ops.dtensor import to_full
from shardtrain.optim import build, low_bits, state_tensors
from shardtrain.utils.errors import ConfigError


def chances(numbers: int, step: int = 1, key: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    place = stochastic_rounding.places((numbers,), (1,), torch.tensor(0))
    return stochastic_rounding.chances(key, torch.tensor(float(step)), place)


def test_chance_is_even_and_independent():
    """Of 2^18 draws in 64 classes, chi-squared with 63 degrees of freedom is below 120 but for one time in 20,000."""
    draws = [*chances(1 << 18), *chances(1 << 18, step=2), *chances(1 << 18, key=8)]
    for one in draws:
        count = torch.bincount(one >> 10, minlength=64).double()
        assert ((count - 4096).square() / 4096).sum() < 120
    for a in range(len(draws)):
        for b in range(a):
            x, y = (d.double() - 32767.5 for d in (draws[a], draws[b]))
            assert abs((x * y).mean() / (x.square().mean())) < 5 / 2**9  # five standard deviations
    following = draws[0].double() - 32767.5
    assert abs((following[1:] * following[:-1]).mean() / following.square().mean()) < 5 / 2**9


@pytest.mark.parametrize("value", [1.0, -1.0009765625, 3.14159274, 1e-39, -2.5e38, 1.00390625])
def test_rounding_to_bfloat16_is_exact_in_expectation(value):
    """Over all chances, each once: the mean is the number, to the rounding of float64."""
    x = torch.full((stochastic_rounding.LEVELS,), value)
    found = stochastic_rounding.to_bfloat16(x, torch.arange(stochastic_rounding.LEVELS))
    assert found.double().mean().item() == pytest.approx(x[0].item(), rel=1e-12)
    assert len(found.unique()) <= 2
    if torch.equal(x.bfloat16().float(), x):
        assert torch.equal(found.float(), x)  # a number that is one already stays


def test_what_is_not_finite_stays():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    found = stochastic_rounding.to_bfloat16(x, torch.full((3,), 65535))
    assert found[:2].tolist() == [torch.inf, -torch.inf] and found[2].isnan()


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_has_256_numbers_and_is_exact_in_expectation(signed):
    code = torch.tensor(low_bits.code(signed))
    assert len(code) == len(code.unique()) == 256 and code.min() == (-1 if signed else 0) and code.max() == 1
    assert (code == 0).any()
    every = torch.arange(stochastic_rounding.LEVELS)
    for value in [0.3, 1.0, 7e-4, 2e-7, *([-0.3, -1.0, -2e-3] if signed else [])]:
        found = code[stochastic_rounding.to_code(torch.full((len(every),), value), code, every).int()]
        step = (code[1:] - code[:-1]).max() / stochastic_rounding.LEVELS
        assert abs(found.double().mean() - torch.tensor(value).double()) <= step


def _train(config: Optimizer, dtype: torch.dtype, steps: int = 40) -> float:
    """The distance from a quadratic's minimum after some steps."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(64, 128, generator=generator)
    weight = Parameter(torch.zeros(64, 128, dtype=dtype))
    optimizer = build([("w", weight)], config)
    for _ in range(steps):
        weight.grad = (weight.detach().float() - target).to(dtype)
        optimizer.step()
    return (weight.detach().float() - target).norm().item()


def test_small_updates_are_not_lost():
    """Steps of 1e-3 on weights near 1: bfloat16 loses them, where chance leaves what float32 comes to."""
    config = Optimizer(lr=1e-3, weight_decay=0.0)
    weight = torch.ones(64, 128)
    found = {}
    for name, options in {
        "float32": {},
        "nearest": {"state_dtype": "bfloat16"},
        "chance": {"bf16_stochastic_round": True},
    }.items():
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        parameter = Parameter(weight.clone().to(dtype))
        optimizer = build([("w", parameter)], dataclasses.replace(config, **options))
        for _ in range(20):
            parameter.grad = torch.ones_like(parameter)
            optimizer.step()
        found[name] = parameter.detach().float().mean().item()
    assert found["float32"] == pytest.approx(0.98, abs=1e-4)
    assert found["nearest"] == 1.0
    # 20 roundings of 8192 numbers, each between two that are 2^-8 apart: the mean is within 5 standard deviations
    assert found["chance"] == pytest.approx(0.98, abs=5 * 20**0.5 * 2**-9 / 8192**0.5)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "AdamW8bit"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_weight_decay_of_bfloat16_weights_without_gradients_is_not_lost(name: str, state_dtype: str) -> None:
    """A decay of 1e-6 per step is a 4,000th of the distance between two numbers of bfloat16.

    AdamW shrinks weights by rate times decay. Adam adds the decay to the gradient, so its first steps are as large as
    the rate.
    """
    if name == "AdamW8bit" and state_dtype == "bfloat16":
        pytest.skip("its state has 8 bits")
    steps, rate, decay = 100, 1e-5, 0.1
    state = {} if name == "AdamW8bit" else {"state_dtype": state_dtype}
    config = Optimizer(name=name, lr=rate, weight_decay=decay, bf16_stochastic_round=True, **state)
    weight = Parameter(torch.ones(512, 512, dtype=torch.bfloat16))
    optimizer = build([("w", weight)], config)
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    expected = 1 - steps * rate if name == "Adam" else (1 - rate * decay) ** steps
    # of 262,144 numbers a step of 2^-8 below 1 is taken by chance: 4 standard deviations of the mean
    deviation = ((1 - expected) * 2**-8) ** 0.5 / 512
    assert weight.detach().double().mean().item() == pytest.approx(expected, abs=4 * deviation)


def test_eight_bits_come_as_far_as_float32():
    plain = _train(Optimizer(lr=0.05, weight_decay=0.0), torch.float32)
    assert _train(Optimizer(name="AdamW8bit", lr=0.05, weight_decay=0.0), torch.float32) <= 1.1 * plain
    state = Optimizer(lr=0.05, weight_decay=0.0, state_dtype="bfloat16", bf16_stochastic_round=True)
    assert _train(state, torch.float32) <= 1.02 * plain


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_in_float32_it_is_pytorch_s(name):
    """Where nothing is rounded the update is the one of torch.optim: to the order of its operations."""
    config = Optimizer(name=name, lr=1e-2, weight_decay=0.1)
    found = []
    for wanted in (config, dataclasses.replace(config, state_dtype="bfloat16")):
        generator = torch.Generator().manual_seed(0)
        weight = Parameter(torch.randn(8, 6, generator=generator))
        optimizer = build([("w", weight)], wanted)
        if wanted is not config:
            optimizer.state[weight].update({k: v.float() for k, v in optimizer.zero_state(weight).items()})
        for _ in range(5):
            weight.grad = torch.randn(8, 6, generator=generator)
            optimizer.step()
        found.append(weight.detach())
    assert torch.allclose(*found, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly(
    "what the compiler makes of an update", by="tests/optim/test_low_bits.py::test_a_mesh_changes_no_bit"
)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW"])
def test_a_compiled_update_is_the_update(name, monkeypatch):
    """To the order of float32 operations: a number of a thousand may be rounded the other way."""
    config = Optimizer(name=name, lr=1e-2, bf16_stochastic_round=name == "AdamW")
    monkeypatch.setattr(low_bits, "_CHUNK", 1 << 14)
    monkeypatch.setattr(low_bits, "_COMPILED_CHUNK", {True: 1 << 14, False: 1 << 14})
    found = []
    for compiles in (False, True):
        monkeypatch.setattr(low_bits, "is_accelerator", lambda _, compiles=compiles: compiles)
        generator = torch.Generator().manual_seed(0)
        shapes = [(300, 512), (40, 700), (512,), (64, 64), ()]
        weights = [Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]
        optimizer = build([(str(index), weight) for index, weight in enumerate(weights)], config, seed=3)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
            optimizer.step()
        found.append([*(weight.detach() for weight in weights), *(optimizer.state[one]["exp_avg"] for one in weights)])
    for eager, compiled in zip(*found, strict=True):
        differ = ~torch.isclose(compiled.double(), eager.double(), rtol=1e-5, atol=1e-8)
        assert int(differ.sum()) <= eager.numel() / 1000


def test_an_update_that_cannot_be_compiled_is_the_same_and_told_once(monkeypatch, caplog):
    def refuses(*_, **__):
        def fails(*_):
            raise torch._dynamo.exc.InternalTorchDynamoError("no compiler here")

        return fails

    found = []
    for compiles in (False, True):
        monkeypatch.setattr(low_bits, "is_accelerator", lambda _, compiles=compiles: compiles)
        monkeypatch.setattr(torch, "compile", refuses)
        generator = torch.Generator().manual_seed(0)
        weights = [Parameter(torch.randn(40, 512, generator=generator).bfloat16()) for _ in range(2)]
        optimizer = build([(str(index), weight) for index, weight in enumerate(weights)], CONFIGS["bfloat16"], seed=3)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
            optimizer.step()
        found.append(weights)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*found, strict=True))
    assert caplog.text.count("the update of AdamW cannot be compiled, so it is slow: no compiler here") == 1


CONFIGS = {
    "AdamW8bit": Optimizer(name="AdamW8bit", lr=1e-2),
    "bfloat16": Optimizer(lr=1e-2, bf16_stochastic_round=True),
}


def _sharded(rank: int, config: Optimizer, dtype: torch.dtype, dim: int) -> dict[str, Tensor]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(24, 512, generator=generator).to(dtype)
    weight = Parameter(distribute_tensor(value, mesh, (Shard(dim),)))
    optimizer = build([("w", weight)], config, seed=3)
    for _ in range(3):
        gradient = torch.randn(24, 512, generator=generator).to(dtype)
        weight.grad = distribute_tensor(gradient, mesh, (Shard(dim),))
        optimizer.step()
    tensors = {"w": weight.detach(), **state_tensors(optimizer, [("w", weight)])}
    assert all(isinstance(one, DTensor) for name, one in tensors.items() if name != "w.step")
    return {name: to_full(one) for name, one in tensors.items()}


@pytest.mark.parametrize(("name", "dim"), [("AdamW8bit", 0), ("AdamW8bit", 1), ("bfloat16", 0)])
def test_a_mesh_changes_no_bit(name, dim):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16
    weight = Parameter(torch.randn(24, 512, generator=generator).to(dtype))
    optimizer = build([("w", weight)], CONFIGS[name], seed=3)
    for _ in range(3):
        weight.grad = torch.randn(24, 512, generator=generator).to(dtype)
        optimizer.step()
    expected = {"w": weight.detach(), **state_tensors(optimizer, [("w", weight)])}
    for found in run_ranks(2, _sharded, CONFIGS[name], dtype, dim):
        assert found.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(found[key], tensor), key
    other = build([("w", Parameter(weight.detach().clone()))], CONFIGS[name], seed=4)
    assert other._keys != optimizer._keys  # another seed rounds otherwise


def test_a_block_that_two_ranks_would_share_is_refused():
    def split(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = Parameter(distribute_tensor(torch.zeros(64, 256), mesh, (Shard(1),)))
        with pytest.raises(ConfigError) as refused:
            build([("w", weight)], CONFIGS["AdamW8bit"])
        return str(refused.value)

    assert "w with 256 columns is split within one" in run_ranks(2, split)[0]


@pytest.mark.parametrize(
    "optimizer",
    cases([{"name": "AdamW8bit"}], nightly=[{"state_dtype": "bfloat16", "bf16_stochastic_round": True}]),
    ids=str,
)
def test_a_run_is_the_same_on_ranks(optimizer):
    """Of weights that are equal to rounding in float32; what rounds otherwise by that is one number in a thousand."""
    options = {"optimizer": {"lr": 1e-2, "eps": 1e-3, **optimizer}}
    one = run_tiny(1, tiny_config(training={"local_batch_size": 8}, **options))[0]
    assert_same_numbers(run_tiny(2, tiny_config(**options))[0], one, loss=2e-4, grad_norm=1e-3)


def _norms(rank: int, early: bool) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    from tiny import train_steps

    from shardtrain.distributed.update_in_backward import UpdateInBackward

    held = []
    update = UpdateInBackward._update

    def watched(self, parameter):
        held.append(sum(p.grad is not None for group in self._optimizer.param_groups for p in group["params"]))
        update(self, parameter)

    UpdateInBackward._update = watched
    training = {"max_norm": float("inf"), "global_batch_size": -1}
    config = tiny_config(training=training, optimizer={"lr": 1e-2, "early_step_in_backward": early})
    result = train_steps(rank, config, 3)
    UpdateInBackward._update = update
    return result.losses, result.grad_norms, result.final, max(held, default=0)


@pytest.mark.parametrize("ranks", cases([2], nightly=[1]))
def test_updating_in_backward_changes_no_number(ranks):
    plain, early = (run_ranks(ranks, _norms, value)[0] for value in (False, True))
    assert early[0] == plain[0]
    assert early[1] == pytest.approx(plain[1], rel=1e-12)  # squares are added in another order
    assert all(torch.equal(early[2][name], weight) for name, weight in plain[2].items())
    assert early[3] == 1  # one gradient at a time


@pytest.mark.nightly(
    "with other optimizers",
    by="tests/train/test_resume.py::test_a_resumed_run_has_the_bits_of_the_run_that_never_ended",
)
@pytest.mark.parametrize(
    "optimizer", [{"name": "AdamW8bit"}, {"state_dtype": "bfloat16", "bf16_stochastic_round": True}]
)
def test_a_run_continues_bit_by_bit_from_its_checkpoint_and_on_other_ranks(tmp_path, optimizer):
    def config(folder):
        return tiny_config(
            job={"dump_folder": str(tmp_path / folder)},
            optimizer={"lr": 1e-2, "eps": 1e-3, **optimizer},
            training={"steps": 6},
            checkpoint={"enable": True, "interval": 3},
        )

    straight = run_ranks(2, train_whole, config("straight"))[0]
    run_ranks(2, train_whole, config("cut"), 4)
    shutil.copytree(tmp_path / "cut", tmp_path / "one")
    continued = run_ranks(2, train_whole, config("cut"))[0]
    assert continued.error is None and continued.losses == straight.losses[3:]
    for name, tensor in straight.optimizer.items():
        assert torch.equal(continued.optimizer[name], tensor), name
    alone = run_ranks(1, train_whole, config("one"))[0]
    assert alone.error is None and alone.losses == pytest.approx(straight.losses[3:], abs=2e-4)
