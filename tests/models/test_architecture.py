"""Initial weights of ``transformers`` networks follow the ``_init_weights`` of their architecture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_architectures import ARCHITECTURES, BYTES, hf_config, installed
from hf_meshes import hf_tiny
from ranks import run_ranks
from tiers import cases
from tiny import make_run
from torch import Tensor, nn

from shardtrain import models
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.models import architecture
from shardtrain.ops import init_weights
from shardtrain.train import trainer
from shardtrain.train.resume import resume
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")

DEFAULT = ["qwen3_next", "kimi_linear", "minimax", "bamba", "nemotron_h"]


def built(name: str, path: Path) -> Any:
    """Build the meta model of a tiny architecture from its config.json."""
    config = hf_config(name)
    config.architectures = [ARCHITECTURES[name][0]]
    config.save_pretrained(path)
    module = models.find("transformers")
    return models.build(module, module.Config(str(path)))


def drawn(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Return the initial weights of all parameters."""
    weights = {}
    for name, parameter in model.named_parameters():
        weights[name] = torch.empty(parameter.shape)
        init_weights.draw_(weights[name], name, model.draws[name], seed)
    return weights


@pytest.mark.parametrize(
    "name", cases(DEFAULT, nightly=[name for name in ARCHITECTURES if name not in DEFAULT])
)
def test_initial_weights_follow_the_architecture(name: str, tmp_path: Path) -> None:
    """Mean and standard deviation of each parameter equal those of ``transformers``, up to sampling error."""
    import transformers

    if name not in installed():
        pytest.skip("this version of transformers does not have it")
    model = built(name, tmp_path)
    weights = drawn(model)
    torch.manual_seed(1)
    original = getattr(transformers, ARCHITECTURES[name][0])(hf_config(name))
    expected_weights = {
        f"hf.{path}": parameter.detach() for path, parameter in original.named_parameters()
    }

    assert expected_weights.keys() == weights.keys()

    for path, expected in expected_weights.items():
        weight = weights[path]
        assert not weight.isnan().any(), path
        if expected.unique().numel() == 1:
            assert torch.equal(weight, expected), path
            continue
        spread = float(expected.std())
        error = 6 * spread / math.sqrt(expected.numel())

        # ``error`` is six standard errors of the mean, and both models are random samples.
        assert abs(float(weight.mean() - expected.mean())) <= 2 * error, path
        assert abs(float(weight.std()) - spread) <= 2 * error, path


def test_formulas_depend_on_seed_and_name_and_stay_in_range(tmp_path: Path) -> None:
    model = built("qwen3_next", tmp_path)
    name = "hf.model.layers.0.linear_attn.A_log"
    first, again, other = (drawn(model, seed)[name] for seed in (0, 0, 1))

    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.ge(math.log(0.01)).all()
    assert first.le(math.log(16)).all()


def test_values_without_randomness_equal_those_of_transformers(tmp_path: Path) -> None:
    import transformers

    weights = drawn(built("bamba", tmp_path / "bamba"))
    heads = torch.arange(1, 9, dtype=torch.float32)

    assert torch.equal(weights["hf.model.layers.0.mamba.A_log"], heads.log())

    model = built("minimax", tmp_path / "minimax")
    original = transformers.MiniMaxForCausalLM(hf_config("minimax"))
    expected = original.model.layers[0].self_attn
    ours = model.hf.model.layers[0].self_attn

    for name in ("slope_rate", "query_decay", "key_decay", "diagonal_decay"):
        assert torch.equal(getattr(ours, name), getattr(expected, name)), name
    assert "model.layers.0.self_attn.slope_rate" in model.computed


class Network(nn.Module):
    """A network with two buffers, of which ``_init_weights`` sets only the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((2,), 3.0))
        self.register_buffer("statistic", torch.ones(2))

    def _init_weights(self, module: nn.Module) -> None:
        module.scale.fill_(3.0)  # type: ignore[operator, union-attr]


def test_only_buffers_that_initialization_sets_follow_from_the_config() -> None:
    network = Network()
    assert architecture.follows_from_config(network, "", "scale")
    assert not architecture.follows_from_config(network, "", "statistic")
    assert network.scale.eq(3).all() and network.statistic.eq(1).all()  # type: ignore[operator, union-attr]


def test_buffer_with_other_values_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(architecture, "follows_from_config", lambda *_: False)
    with pytest.raises(
        ConfigError, match="whose buffer model.layers.0.self_attn.slope_rate does not start at zero"
    ):
        built("minimax", tmp_path)


def losses_and_numbers(rank: int, config: Config) -> tuple[list[float], dict[str, float]]:
    """Train two steps from the weights of a folder. Return losses and initial values of scalar buffers."""
    run = make_run(rank, config)
    numbers = {name: float(value) for name, value in run.runner.buffers().items() if not value.ndim}
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    losses = []
    for _ in range(2):
        outcome = trainer.step(run)
        assert outcome is not None
        losses.append(outcome.loss_sum.item() / outcome.global_tokens)
    return losses, numbers


class Constructed(torch.nn.Module):
    """Parameters that the constructor computes, draws at random, or leaves uninitialized."""

    def __init__(self) -> None:
        super().__init__()
        self.known = torch.nn.Parameter(torch.log(torch.expm1(torch.tensor(0.8))).unsqueeze(0))
        self.drawn = torch.nn.Parameter(torch.rand(1))
        self.drawn_in_place = torch.nn.Parameter(torch.full((1,), 0.5).normal_())
        self.from_drawn = torch.nn.Parameter(torch.tensor(2.0) * torch.rand(1))
        self.memory = torch.nn.Parameter(torch.empty(1))
        self.like_known = torch.nn.Parameter(torch.empty_like(torch.tensor([0.8])))


def test_only_parameters_that_follow_from_numbers_keep_their_values() -> None:
    recorder = architecture._InitRecorder()
    with torch.device("cpu"), architecture._parameters_on_meta(recorder), recorder:
        module = Constructed()
    draws = {name: recorder.draw(parameter) for name, parameter in module.named_parameters()}
    known = draws.pop("known")
    assert known.compute(0).item() == pytest.approx(math.log(math.expm1(0.8)))
    assert all(math.isnan(draw.std) for draw in draws.values()), draws


@pytest.mark.parametrize("lora", [False, True])
def test_apertus_starts_from_random_weights(lora: bool, tmp_path: Path) -> None:
    """The activation function has exponents as parameters, which only its constructor sets."""
    import transformers

    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    network = transformers.ApertusConfig(**sizes, **heads, **BYTES)
    path = tmp_path / "apertus"
    network.architectures = ["ApertusForCausalLM"]
    network.save_pretrained(path)
    sections = {"lora": {"enable": True, "random_base": True, "rank": 2}} if lora else {}
    config = hf_tiny(
        path,
        tmp_path / "run",
        checkpoint={"initial_load_path": None, "initial_load_in_hf": False},
        **sections,
    )
    losses, _ = run_ranks(1, losses_and_numbers, config)[0]
    assert all(map(math.isfinite, losses))


def test_numbers_of_an_activation_function_keep_their_values(tmp_path: Path) -> None:
    """The activation of Apertus has two scalars as persistent buffers, which ``_init_weights`` does not set."""
    import transformers

    path = tmp_path / "apertus"
    sizes = {"vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    network = transformers.ApertusConfig(**sizes, **heads, **BYTES, rope_parameters=rope)
    transformers.ApertusForCausalLM(network).save_pretrained(path)

    one_process = hf_tiny(path, tmp_path / "one")
    split = hf_tiny(path, tmp_path / "tp", parallelism={"tensor_parallel_degree": 2})
    expected, numbers = run_ranks(1, losses_and_numbers, one_process)[0]

    assert numbers == {
        "hf.model.layers.0.mlp.act_fn.beta": pytest.approx(0.5),
        "hf.model.layers.0.mlp.act_fn.eps": pytest.approx(-1e-6),
        "hf.model.layers.1.mlp.act_fn.beta": pytest.approx(0.5),
        "hf.model.layers.1.mlp.act_fn.eps": pytest.approx(-1e-6),
    }
    for losses, _ in run_ranks(2, losses_and_numbers, split):
        assert losses == pytest.approx(expected, abs=1e-5)  # float32 sums in another order
