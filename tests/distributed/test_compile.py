"""Laws of compilation: in place and layer by layer, apart under tensor parallelism, and only when asked."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny import SHAPE
from torch import nn

from shardtrain.config.schema import Compile, Config
from shardtrain.distributed import compile
from shardtrain.models import build, find, shape_of
from shardtrain.ops.cross_entropy import cross_entropy_sum


def _config(**options: Any) -> Config:
    return dataclasses.replace(Config(), compile=Compile(**{"backend": "eager", **options}))


def _mesh(tensor_parallel: int) -> Any:
    return SimpleNamespace(size=lambda *axes: tensor_parallel if axes == ("tp",) else 1)


def _apply(tensor_parallel: int = 1, **options: Any) -> tuple[nn.Module, list[str]]:
    """A model, and the paths of its compiled modules."""
    module = find("llama3")
    shape = shape_of(module, "debugmodel", {**SHAPE, "num_layers": 2}, "rmsnorm")
    assert build(module, shape)
    torch.manual_seed(0)
    model = module.Model(shape)
    compile.apply(model, module.LAYOUT, _mesh(tensor_parallel), _config(**options))
    return model, [path for path, part in model.named_modules() if part._compiled_call_impl is not None]


def test_each_layer_is_compiled_and_nothing_else() -> None:
    assert _apply(enable=True)[1] == ["layers.0", "layers.1"]


def test_attention_and_feed_forward_are_compiled_apart_under_tensor_parallelism() -> None:
    """A whole layer with sequence parallelism fails in backward when compiled (torch 2.13)."""
    assert _apply(2, enable=True)[1] == ["layers.0.attn", "layers.0.ffn", "layers.1.attn", "layers.1.ffn"]


@pytest.mark.parametrize("options", [{"enable": False}, {"enable": True, "components": ["loss"]}])
def test_layers_are_left_alone_unless_asked(options: dict[str, Any]) -> None:
    assert _apply(**options)[1] == []


def test_names_never_change_and_numbers_are_those_of_eager_mode() -> None:
    plain, _ = _apply(enable=False)
    compiled, _ = _apply(enable=True)
    assert list(compiled.state_dict()) == list(plain.state_dict())
    assert not any("_orig_mod" in name for name, _ in compiled.named_modules())
    tokens, positions = torch.arange(16).view(1, 16), torch.arange(16)[None]
    assert torch.equal(compiled(tokens, positions), plain(tokens, positions))  # the backend "eager" changes no kernel


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"enable": True}, True),
        ({"enable": True, "components": ["loss"]}, True),
        ({"enable": True, "components": ["model"]}, False),
        ({"enable": False}, False),
    ],
)
def test_the_loss_is_compiled_when_asked(options: dict[str, Any], given: bool) -> None:
    chunk = compile.compiled_chunk_loss(_config(**options))
    assert (chunk is not None) is given
    if chunk is not None:
        torch.manual_seed(0)
        logits, targets = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
        expected = cross_entropy_sum(logits, targets)
        assert torch.equal(cross_entropy_sum(logits, targets, chunk=chunk), expected)
