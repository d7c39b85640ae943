"""Model files outside the package train on any mesh, or are rejected with the reason."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
from tiers import cases
from tiny import assert_same_numbers, run_tiny, tiny_config

from shardtrain.models import build, find, shape_of
from shardtrain.utils.errors import ConfigError

MODEL_FILE = '''
"""A decoder unlike Llama: gelu feed-forward with biases, layer norms."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout
from shardtrain.models.layers import Attention, RotaryAngles


@dataclass(frozen=True)
class Config:
    vocab_size: int = 512
    dim: int = 32
    num_layers: int = 2
    num_heads: int = 4
    head_dim: int = 8


LAYOUT = Layout(
    first=("tokens",),
    layers="blocks",
    last=("out_norm", "out"),
    tensor={
        "tokens": "embed",
        "blocks.*.norm1": "sequence",
        "blocks.*.attn": "gather",
        "blocks.*.attn.w[qkv]": "colwise",
        "blocks.*.attn.wo": "rowwise",
        "blocks.*.norm2": "sequence",
        "blocks.*.mlp": "gather",
        "blocks.*.mlp.up": "colwise",
        "blocks.*.mlp.down": "rowwise",
        "out_norm": "sequence",
        "out": "head",
    },
    context="blocks.*.attn.core",
)


class Mlp(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.attn = Attention(c.dim, c.num_heads, c.num_heads, c.head_dim)
        self.mlp = Mlp(c.dim)

    def forward(self, x, angles):
        x = x + self.attn(self.norm1(x), angles)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tokens = nn.Embedding(c.vocab_size, c.dim)
        self.rope = RotaryAngles(c.head_dim, 10000.0)
        self.blocks = nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})
        self.out_norm = nn.LayerNorm(c.dim)
        self.out = nn.Linear(c.dim, c.vocab_size, bias=False)

    def forward(self, tokens, positions):
        x, angles = self.tokens(tokens), self.rope(positions)
        for block in self.blocks.values():
            x = block(x, angles)
        return self.out(self.out_norm(x))


FLAVORS = {"small": {}, "wide": {"dim": 64}}


def initial(c):
    return {
        "out_norm.weight": Draw("ones"),
        "blocks.*.norm?.weight": Draw("ones"),
        "out_norm.bias": Draw("zeros"),
        "blocks.*.*.bias": Draw("zeros"),
        "blocks.*.mlp.*.bias": Draw("normal", std=0.02),
        "tokens.weight": Draw("normal"),
        "out.weight": Draw("truncated_normal", std=c.dim**-0.5),
        "blocks.*.*.*.weight": Draw("normal", std=0.05, depth="total"),
    }
'''


def write(folder: Path, *changes: tuple[str, str], name: str = "my_model.py") -> str:
    text = MODEL_FILE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path = folder / name
    path.write_text(text)
    return str(path)


def config_of(path: str, **sections):
    config = tiny_config(**sections)
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, name=path, flavor="small", overrides={})
    )


def test_model_file_of_a_user_has_the_same_numbers_on_every_mesh(tmp_path: Path) -> None:
    path = write(tmp_path)
    expected = run_tiny(1, config_of(path, training={"local_batch_size": 8}), steps=5)[0]
    assert expected.losses[-1] < expected.losses[0]
    for parallelism in ({}, {"tensor_parallel_degree": 2}):
        for result in run_tiny(2, config_of(path, parallelism=parallelism), steps=5):
            assert_same_numbers(result, expected)


VIEWS = (
    ("return x + self.mlp(self.norm2(x))", "return (x + self.mlp(self.norm2(x))).view(x.shape)"),
    ("for block in self.blocks", "x *= 1.5\n        for block in self.blocks"),
    ("x = block(x, angles)", "x = block(x, angles)\n            x *= 1.5"),
)
"""Changes of the file: layers return views, and the model modifies their outputs in place."""


@pytest.mark.parametrize(
    "parallelism",
    cases([{}], nightly=[{"fsdp_reshard_after_forward": "always"}, {"tensor_parallel_degree": 2}]),
)
def test_views_changed_in_place_train_as_on_one_process(parallelism, tmp_path: Path) -> None:
    path = write(tmp_path, *VIEWS)
    expected = run_tiny(1, config_of(path, training={"local_batch_size": 8}), steps=3)[0]
    for result in run_tiny(2, config_of(path, parallelism=parallelism), steps=3):
        assert_same_numbers(result, expected)


def test_model_file_works_inside_and_outside_of_the_package(tmp_path: Path) -> None:
    module = find(write(tmp_path))
    assert shape_of(module, "wide", {"num_layers": 3}, "rmsnorm") == module.Config(
        dim=64, num_layers=3
    )


def test_model_file_does_not_shadow_an_installed_package(tmp_path: Path) -> None:
    import json

    find(write(tmp_path, name="json.py"))
    assert sys.modules["json"] is json


@pytest.mark.parametrize("part", ["Config", "Model", "LAYOUT", "FLAVORS", "initial"])
def test_missing_part_is_named(part: str, tmp_path: Path) -> None:
    definition = {"Config": "class Config", "Model": "class Model", "initial": "def initial"}.get(
        part, f"{part} ="
    )
    path = write(tmp_path, (definition, definition.replace(part, "Other")))
    with pytest.raises(ConfigError, match=rf"model.name=.*my_model.py.* has no {part};") as error:
        find(path)
    assert "define it in the file" in str(error.value)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (('        "out_norm": "sequence",\n', ""), ["parameter out_norm.weight matches 0 rules"]),
        (
            ('"blocks.*.mlp.up": "colwise"', '"blocks.*.mlp.up": "columnwise"'),
            ["'columnwise' is not a known style"],
        ),
        (('"blocks.*.mlp.up"', '"blocks.*.ffn.up"'), ["'blocks.*.ffn.up'", "names no module"]),
        (
            ('layers="blocks"', 'layers="layers"'),
            ["LAYOUT.layers names 'layers', which is not a module"],
        ),
        (
            ('        "tokens.weight": Draw("normal"),\n', ""),
            ["initial() has no rule for parameter tokens.weight"],
        ),
        (
            (
                "nn.ModuleDict({str(i): Block(c) for i in range(c.num_layers)})",
                "nn.ModuleList([Block(c)])",
            ),
            ["ModuleDict"],
        ),
        (
            (
                "self.rope =",
                "self.register_buffer('mask', __import__('torch').ones(3)); self.rope =",
            ),
            ["buffer mask"],
        ),
        (('first=("tokens",)', 'first=("blocks.0",)'), ["blocks.0 must be a direct child"]),
    ],
)
def test_violated_requirement_is_a_config_error_with_its_name(
    change, parts: list[str], tmp_path: Path
) -> None:
    module = find(write(tmp_path, change))
    with pytest.raises(ConfigError) as error:
        build(module, module.Config())

    message = str(error.value)
    assert "my_model" in message
    for part in parts:
        assert part in message


def test_parameters_missing_in_all_layers_are_one_line_with_a_hint_about_stars(
    tmp_path: Path,
) -> None:
    module = find(write(tmp_path, ('"blocks.*.norm?.weight"', '"blocks*.weight"')))
    with pytest.raises(ConfigError) as error:
        build(module, module.Config())

    hint = "each * of 'blocks*.weight' stops at a dot, so write one for each part of the name"
    assert str(error.value).splitlines() == [
        f"model {tmp_path / 'my_model.py'}: initial() has no rule for parameter blocks.*.norm{number}.weight: {hint}"
        for number in (1, 2)
    ]


def test_missing_model_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent.py.* is not a file"):
        find(str(tmp_path / "absent.py"))


@pytest.mark.parametrize(
    "name", ["lama3", "layers", "yarn", "__init__", "../llama3", "llama3.sub", ""]
)
def test_unknown_name_lists_the_models(name: str) -> None:
    with pytest.raises(ConfigError, match=r"is not a model file; use .*llama2, llama3"):
        find(name)


def test_unknown_flavor_lists_the_flavors() -> None:
    with pytest.raises(
        ConfigError, match=r'model.flavor="9B" is unknown; use one of 2.6M, debugmodel, .*8B'
    ):
        shape_of(find("llama3"), "9B", {}, "rmsnorm")


def test_each_unknown_override_is_reported() -> None:
    with pytest.raises(ConfigError, match="not a field of the model's Config") as error:
        shape_of(find("llama3"), "8B", {"dims": 3, "layers": 4, "dim": 8}, "rmsnorm")
    assert len(error.value.problems) == 2
    assert "model.overrides.dims=3" in str(error.value)
    assert "model.overrides.layers=4" in str(error.value)


def test_overrides_take_precedence_over_the_flavor_and_the_norm_is_set() -> None:
    shape = shape_of(find("llama3"), "8B", {"num_layers": 2}, "layernorm")
    assert (shape.num_layers, shape.dim, shape.norm_type) == (2, 4096, "layernorm")


def test_unsupported_norm_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'model.norm_type="layernorm" has no effect'):
        shape_of(find(write(tmp_path)), "small", {}, "layernorm")
