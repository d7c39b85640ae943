"""Qwen3-Next: the published size, and Hugging Face's logits and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hub_folders import build as build_hf
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from shardtrain.hub_formats import qwen3_next_format
from shardtrain.hub_formats.format import Fields, MergedExperts, pieces
from shardtrain.layout import check
from shardtrain.models import build, find, shape_of
from shardtrain.models.moe import Balance
from shardtrain.utils.errors import ConfigError

NEXT = find("qwen3_next")


def test_the_published_flavor_has_its_size() -> None:
    model = build(NEXT, shape_of(NEXT, "80B-A3B", {}, "rmsnorm"))
    # computed from the weights of Qwen3-Next-80B-A3B without its multi-token prediction module
    assert sum(p.numel() for p in model.parameters()) == 79_674_391_296


@pytest.mark.parametrize(("interval", "attentions"), [(1, 4), (2, 2), (4, 1), (5, 0)])
def test_the_layout_fits_every_interval(interval: int, attentions: int) -> None:
    overrides = {"num_layers": 4, "full_attention_interval": interval}
    model = build(NEXT, shape_of(NEXT, "debugmodel", overrides, "rmsnorm"))
    paths = [path for path, _ in model.named_modules()]

    assert check(NEXT.LAYOUT, paths, [name for name, _ in model.named_parameters()]) == []
    assert sum(path.endswith("attn.core") for path in paths) == attentions
    assert sum(path.endswith("delta.core") for path in paths) == 4 - attentions


@pytest.mark.parametrize(
    ("overrides", "option"),
    [({"linear_value_heads": 6}, "linear_value_heads"), ({"rotary_pct": 0.05}, "rotary_pct")],
)
def test_impossible_sizes_are_rejected(overrides: dict[str, Any], option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        NEXT.Model(NEXT.Config(**{**NEXT.FLAVORS["debugmodel"], **overrides}))


class InDouble(TorchFunctionMode):
    """Function mode that computes in float64 where a model converts to float32."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is Tensor.float:
            function = Tensor.double
        single = torch.float32
        args = [torch.float64 if arg is single else arg for arg in args]
        kwargs = {
            key: torch.float64 if value is single else value
            for key, value in (kwargs or {}).items()
        }
        return function(*args, **kwargs)


def weights_of(
    hf: nn.Module, ours: nn.Module, config: Any, gradients: bool = False
) -> dict[str, Tensor]:
    """Return the weights, or gradients, of Hugging Face's model under our names."""
    source = {name: p.grad if gradients else p for name, p in hf.named_parameters()}
    weights = {}
    for name, parameter in ours.named_parameters():
        place = NEXT.HUB.source(name, config)
        assert place is not None
        assert not isinstance(place, MergedExperts)
        if ".experts." in name:
            # their model stacks experts, and gate and up projections
            stack = name.rpartition(".")[0].replace("layers", "model.layers").replace("moe", "mlp")
            if name.endswith("w2"):
                weights[name] = source[f"{stack}.down_proj"]
            else:
                gate, up = source[f"{stack}.gate_up_proj"].chunk(2, dim=1)
                weights[name] = gate if name.endswith("w1") else up
            continue
        weights[name] = torch.empty_like(parameter, requires_grad=False)
        for piece in pieces(place, tuple(parameter.shape), config.head_dim):
            weights[name][piece.ours] = source[piece.name].detach()[piece.theirs]
    return weights


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_logits_and_gradients_equal_those_of_transformers(
    dtype: torch.dtype, tolerance: float
) -> None:
    pytest.importorskip("transformers")
    theirs = build_hf("qwen3_next").to(dtype)
    theirs.config._experts_implementation = "eager"  # PyTorch has no grouped product in float64
    described = qwen3_next_format.HUB.read(
        Fields(theirs.config.to_dict(), "config.json", NEXT.HUB.defaults)
    )
    config = NEXT.Config(**described)
    ours = NEXT.Model(config).to(dtype)
    with torch.no_grad():
        for name, weight in weights_of(theirs, ours, config).items():
            ours.get_parameter(name).copy_(weight)
    for module in ours.modules():
        if isinstance(module, Balance):
            module.loss_weight = torch.zeros(())
    # more than one block of tokens, with an incomplete last block
    tokens = torch.randint(
        0, config.vocab_size, (2, 101), generator=torch.Generator().manual_seed(1)
    )
    pull = torch.randn(2, 101, config.vocab_size, generator=torch.Generator().manual_seed(2)).to(
        dtype
    )
    with InDouble() if dtype is torch.float64 else torch.enable_grad():
        # transformers computed its frequencies in float32
        theirs.model.rotary_emb.inv_freq = ours.rope.inverse_frequencies()
        expected = theirs(tokens).logits
        actual = ours(tokens, torch.arange(101).expand(2, -1))
        (expected * pull).sum().backward()
        (actual * pull).sum().backward()

    assert expected.std() > 0.1
    assert (actual - expected).norm() <= tolerance * expected.norm()

    for name, gradient in weights_of(theirs, ours, config, gradients=True).items():
        error = (ours.get_parameter(name).grad - gradient).norm() / gradient.norm()
        assert error <= 10 * tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize(
    ("fields", "interval"),
    [
        ({}, 4),
        ({"full_attention_interval": 2}, 2),
        (
            {
                "num_hidden_layers": 3,
                "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            },
            2,
        ),
        ({"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}, 4),
        ({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, 1),
    ],
)
def test_the_interval_is_read_from_both_forms(fields: dict[str, Any], interval: int) -> None:
    read = NEXT.HUB.read(Fields(fields, "config.json", NEXT.HUB.defaults))
    assert read["full_attention_interval"] == interval


@pytest.mark.parametrize(
    "listed",
    [["full_attention", "linear_attention"], ["linear_attention"], ["linear_attention", "mamba"]],
)
def test_irregular_layer_types_have_no_native_model(listed: list[str]) -> None:
    with pytest.raises(ConfigError, match="layer_types"):
        NEXT.HUB.read(
            Fields(
                {"num_hidden_layers": 2, "layer_types": listed}, "config.json", NEXT.HUB.defaults
            )
        )
