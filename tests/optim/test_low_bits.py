"""Optimizer state and parameters in 16 and 8 bits: unbiased rounding, and equal on every mesh."""

from __future__ import annotations

import dataclasses
import itertools
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


def test_random_bits_are_uniform_and_independent():
    """For 2^18 draws in 64 classes, chi-squared with 63 degrees of freedom exceeds 120 once in 20,000 times."""
    draws = [*chances(1 << 18), *chances(1 << 18, step=2), *chances(1 << 18, key=8)]
    for numbers in draws:
        count = torch.bincount(numbers >> 10, minlength=64).double()
        assert ((count - 4096).square() / 4096).sum() < 120

    # Two sequences are uncorrelated, and so are neighbors of one sequence.
    five_standard_deviations = 5 / 2**9
    centered = [numbers.double() - 32767.5 for numbers in draws]
    for x, y in itertools.combinations(centered, 2):
        assert abs((x * y).mean() / y.square().mean()) < five_standard_deviations
    x = centered[0]
    assert abs((x[1:] * x[:-1]).mean() / x.square().mean()) < five_standard_deviations


@pytest.mark.parametrize("value", [1.0, -1.0009765625, 3.14159274, 1e-39, -2.5e38, 1.00390625])
def test_rounding_to_bfloat16_is_unbiased(value):
    """The mean over all random values equals the number, up to float64 rounding."""
    x = torch.full((stochastic_rounding.LEVELS,), value)
    rounded = stochastic_rounding.to_bfloat16(x, torch.arange(stochastic_rounding.LEVELS))
    assert rounded.double().mean().item() == pytest.approx(x[0].item(), rel=1e-12)
    assert len(rounded.unique()) <= 2
    if torch.equal(x.bfloat16().float(), x):
        assert torch.equal(rounded.float(), x)  # a bfloat16 number is unchanged


def test_nonfinite_numbers_are_unchanged():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan])
    rounded = stochastic_rounding.to_bfloat16(x, torch.full((3,), 65535))
    assert rounded[:2].tolist() == [torch.inf, -torch.inf]
    assert rounded[2].isnan()


@pytest.mark.parametrize("signed", [True, False])
def test_code_has_256_numbers_and_is_unbiased(signed):
    code = torch.tensor(low_bits.code(signed))
    assert len(code) == len(code.unique()) == 256
    assert code.min() == (-1 if signed else 0)
    assert code.max() == 1
    assert (code == 0).any()

    every = torch.arange(stochastic_rounding.LEVELS)
    # The mean over all random values may differ by 1 / LEVELS of the distance between two codes.
    step = (code[1:] - code[:-1]).max() / stochastic_rounding.LEVELS
    values = [0.3, 1.0, 7e-4, 2e-7]
    if signed:
        values += [-0.3, -1.0, -2e-3]
    for value in values:
        repeated = torch.full((len(every),), value)
        decoded = code[stochastic_rounding.to_code(repeated, code, every).int()]
        assert abs(decoded.double().mean() - repeated[0].double()) <= step


def _train(config: Optimizer, dtype: torch.dtype, steps: int = 40) -> float:
    """Return the distance from the minimum of a quadratic after some steps."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(64, 128, generator=generator)
    weight = Parameter(torch.zeros(64, 128, dtype=dtype))
    optimizer = build([("w", weight)], config)
    for _ in range(steps):
        weight.grad = (weight.detach().float() - target).to(dtype)
        optimizer.step()
    return (weight.detach().float() - target).norm().item()


def test_small_updates_are_not_lost():
    """Steps of 1e-3 on weights near 1 are lost in bfloat16 without stochastic rounding."""
    config = Optimizer(lr=1e-3, weight_decay=0.0)
    weight = torch.ones(64, 128)
    results = {}
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
        results[name] = parameter.detach().float().mean().item()

    assert results["float32"] == pytest.approx(0.98, abs=1e-4)
    assert results["nearest"] == 1.0
    # 20 roundings of 8192 numbers with a spacing of 2^-8: the mean is within 5 standard deviations
    assert results["chance"] == pytest.approx(0.98, abs=5 * 20**0.5 * 2**-9 / 8192**0.5)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "AdamW8bit"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_weight_decay_of_bfloat16_weights_without_gradients_is_not_lost(
    name: str, state_dtype: str
) -> None:
    """Stochastic rounding keeps a decay of 1e-6 per step, which is 1/4000 of the spacing of bfloat16.

    AdamW shrinks weights by rate times decay. Adam adds the decay to the gradient, so its first steps are as large as
    the rate.
    """
    if name == "AdamW8bit" and state_dtype == "bfloat16":
        pytest.skip("its state has 8 bits")
    steps = 100
    rate = 1e-5
    decay = 0.1
    state = {} if name == "AdamW8bit" else {"state_dtype": state_dtype}
    config = Optimizer(name=name, lr=rate, weight_decay=decay, bf16_stochastic_round=True, **state)
    weight = Parameter(torch.ones(512, 512, dtype=torch.bfloat16))
    optimizer = build([("w", weight)], config)
    for _ in range(steps):
        weight.grad = torch.zeros_like(weight)
        optimizer.step()
    expected = 1 - steps * rate if name == "Adam" else (1 - rate * decay) ** steps
    # 262,144 numbers randomly step down by 2^-8: within 4 standard deviations of the mean
    deviation = ((1 - expected) * 2**-8) ** 0.5 / 512

    assert weight.detach().double().mean().item() == pytest.approx(expected, abs=4 * deviation)


def test_eight_bit_state_converges_like_float32():
    common = {"lr": 0.05, "weight_decay": 0.0}
    loss_of_float32 = _train(Optimizer(**common), torch.float32)

    eight_bits = Optimizer(name="AdamW8bit", **common)
    assert _train(eight_bits, torch.float32) <= 1.1 * loss_of_float32

    bfloat16 = Optimizer(state_dtype="bfloat16", bf16_stochastic_round=True, **common)
    assert _train(bfloat16, torch.float32) <= 1.02 * loss_of_float32


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_float32_updates_match_pytorch(name):
    """Without rounding, updates equal those of torch.optim up to the order of operations."""
    config = Optimizer(name=name, lr=1e-2, weight_decay=0.1)
    results = []
    for variant in (config, dataclasses.replace(config, state_dtype="bfloat16")):
        generator = torch.Generator().manual_seed(0)
        weight = Parameter(torch.randn(8, 6, generator=generator))
        optimizer = build([("w", weight)], variant)
        if variant is not config:
            optimizer.state[weight].update(
                {k: v.float() for k, v in optimizer.zero_state(weight).items()}
            )
        for _ in range(5):
            weight.grad = torch.randn(8, 6, generator=generator)
            optimizer.step()
        results.append(weight.detach())

    assert torch.allclose(*results, rtol=1e-5, atol=1e-7)


@pytest.mark.nightly(
    "compiled updates", by="tests/optim/test_low_bits.py::test_meshes_are_bitwise_equal"
)
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW"])
def test_compiled_update_matches_eager(name, monkeypatch):
    """Up to the order of float32 operations: one number in a thousand may be rounded differently."""
    config = Optimizer(name=name, lr=1e-2, bf16_stochastic_round=name == "AdamW")
    monkeypatch.setattr(low_bits, "_CHUNK", 1 << 14)
    monkeypatch.setattr(low_bits, "_COMPILED_CHUNK", 1 << 14)
    monkeypatch.setattr(low_bits, "_COMPILED_CHUNK_8BIT", 1 << 14)
    results = []
    for compiles in (False, True):
        monkeypatch.setattr(low_bits, "is_accelerator", lambda _, compiles=compiles: compiles)
        generator = torch.Generator().manual_seed(0)
        weights = []
        for shape in ((300, 512), (40, 700), (512,), (64, 64), ()):
            weights.append(Parameter(torch.randn(shape, generator=generator).bfloat16()))
        named = [(str(index), weight) for index, weight in enumerate(weights)]
        optimizer = build(named, config, seed=3)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
            optimizer.step()
        values = [weight.detach() for weight in weights]
        states = [optimizer.state[weight]["exp_avg"] for weight in weights]
        results.append([*values, *states])

    for eager, compiled in zip(*results, strict=True):
        differ = ~torch.isclose(compiled.double(), eager.double(), rtol=1e-5, atol=1e-8)
        assert int(differ.sum()) <= eager.numel() / 1000


def test_update_that_cannot_be_compiled_is_unchanged_and_logged_once(monkeypatch, caplog):
    def refuses(*_, **__):
        def fails(*_):
            raise torch._dynamo.exc.InternalTorchDynamoError("no compiler here")

        return fails

    results = []
    for compiles in (False, True):
        monkeypatch.setattr(low_bits, "is_accelerator", lambda _, compiles=compiles: compiles)
        monkeypatch.setattr(torch, "compile", refuses)
        generator = torch.Generator().manual_seed(0)
        first = Parameter(torch.randn(40, 512, generator=generator).bfloat16())
        second = Parameter(torch.randn(40, 512, generator=generator).bfloat16())
        weights = [first, second]
        optimizer = build([("0", first), ("1", second)], CONFIGS["bfloat16"], seed=3)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator).bfloat16()
            optimizer.step()
        results.append(weights)

    for expected, uncompiled in zip(*results, strict=True):
        assert torch.equal(uncompiled, expected)
    # two weights and two steps, but one message
    message = "the update of AdamW cannot be compiled, so it is slow: no compiler here"
    assert caplog.text.count(message) == 1


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
    assert all(isinstance(tensor, DTensor) for name, tensor in tensors.items() if name != "w.step")
    return {name: to_full(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize(("name", "dim"), [("AdamW8bit", 0), ("AdamW8bit", 1), ("bfloat16", 0)])
def test_meshes_are_bitwise_equal(name, dim):
    generator = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16
    weight = Parameter(torch.randn(24, 512, generator=generator).to(dtype))
    optimizer = build([("w", weight)], CONFIGS[name], seed=3)
    for _ in range(3):
        weight.grad = torch.randn(24, 512, generator=generator).to(dtype)
        optimizer.step()
    expected = {"w": weight.detach(), **state_tensors(optimizer, [("w", weight)])}

    for sharded in run_ranks(2, _sharded, CONFIGS[name], dtype, dim):
        assert sharded.keys() == expected.keys()
        for key, tensor in expected.items():
            assert torch.equal(sharded[key], tensor), key

    other_seed = build([("w", Parameter(weight.detach().clone()))], CONFIGS[name], seed=4)
    assert other_seed._keys != optimizer._keys  # a different seed rounds differently


def test_block_split_over_two_ranks_is_rejected():
    def split(rank: int) -> str:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = Parameter(distribute_tensor(torch.zeros(64, 256), mesh, (Shard(1),)))
        with pytest.raises(ConfigError) as refused:
            build([("w", weight)], CONFIGS["AdamW8bit"])
        return str(refused.value)

    assert "w with 256 columns splits a block" in run_ranks(2, split)[0]


@pytest.mark.parametrize(
    "optimizer",
    cases(
        [{"name": "AdamW8bit"}],
        nightly=[{"state_dtype": "bfloat16", "bf16_stochastic_round": True}],
    ),
    ids=str,
)
def test_run_on_ranks_matches_one_process(optimizer):
    """Weights are equal up to float32 rounding, which makes one number in a thousand round differently."""
    options = {"optimizer": {"lr": 1e-2, "eps": 1e-3, **optimizer}}
    one_process = run_tiny(1, tiny_config(training={"local_batch_size": 8}, **options))[0]
    assert_same_numbers(
        run_tiny(2, tiny_config(**options))[0], one_process, loss=2e-4, grad_norm=1e-3
    )


def _norms(rank: int, early: bool) -> tuple[list[float], list[float], dict[str, Tensor], int]:
    from tiny import train_steps

    from shardtrain.distributed.update_in_backward import UpdateInBackward

    gradients_in_memory = []
    update = UpdateInBackward._update

    def watched(self, parameter):
        count = 0
        for group in self._optimizer.param_groups:
            count += sum(p.grad is not None for p in group["params"])
        gradients_in_memory.append(count)
        update(self, parameter)

    UpdateInBackward._update = watched
    training = {"max_norm": float("inf"), "global_batch_size": -1}
    config = tiny_config(training=training, optimizer={"lr": 1e-2, "early_step_in_backward": early})
    result = train_steps(rank, config, 3)
    UpdateInBackward._update = update
    return result.losses, result.grad_norms, result.final, max(gradients_in_memory, default=0)


@pytest.mark.parametrize("ranks", cases([2], nightly=[1]))
def test_updates_in_backward_change_no_number(ranks):
    plain, early = (run_ranks(ranks, _norms, value)[0] for value in (False, True))
    assert early[0] == plain[0]
    assert early[1] == pytest.approx(plain[1], rel=1e-12)  # squares are summed in a different order
    assert all(torch.equal(early[2][name], weight) for name, weight in plain[2].items())
    assert early[3] == 1  # at most one gradient exists at a time


@pytest.mark.nightly(
    "with other optimizers",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
@pytest.mark.parametrize(
    "optimizer", [{"name": "AdamW8bit"}, {"state_dtype": "bfloat16", "bf16_stochastic_round": True}]
)
def test_run_resumes_bitwise_and_on_other_ranks(tmp_path, optimizer):
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

    assert continued.error is None
    assert continued.losses == straight.losses[3:]
    for name, tensor in straight.optimizer.items():
        assert torch.equal(continued.optimizer[name], tensor), name

    # One rank draws other random bits for rounding, so losses differ slightly.
    on_one_rank = run_ranks(1, train_whole, config("one"))[0]
    assert on_one_rank.error is None
    assert on_one_rank.losses == pytest.approx(straight.losses[3:], abs=2e-4)
