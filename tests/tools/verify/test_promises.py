"""A user-defined model file verifies unchanged, or is refused with the broken promise and its location."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from model_files import ask

from shardtrain.tools import verify
from shardtrain.utils.errors import ConfigError

MODEL_FILE = '''
"""Learned positions in each block, attention and feed-forward in parallel after one norm, biases, gelu."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from shardtrain.layout import Draw, Layout


@dataclass(frozen=True)
class Config:
    vocab_size: int = 96
    dim: int = 32
    num_layers: int = 6
    num_heads: int = 4
    max_tokens: int = 64


LAYOUT = Layout(
    first=("embed",),
    layers="blocks",
    last=("norm", "head"),
    tensor={
        "embed": "embed",
        "blocks.*.places": "embed",
        "blocks.*.norm": "sequence",
        "blocks.*.mix": "gather",
        "blocks.*.mix.[qkv]": "colwise",
        "blocks.*.mix.out": "rowwise",
        "blocks.*.mix.up": "colwise",
        "blocks.*.mix.down": "rowwise",
        "norm": "sequence",
        "head": "head",
    },
    context="blocks.*.mix.core",
)


class Core(nn.Module):
    def forward(self, q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Mix(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.head_dim, self.num_heads = c.dim // c.num_heads, c.num_heads
        self.q, self.k, self.v = (nn.Linear(c.dim, c.dim) for _ in range(3))
        self.core = Core()
        self.out = nn.Linear(c.dim, c.dim, bias=False)
        self.up, self.down = nn.Linear(c.dim, 4 * c.dim), nn.Linear(4 * c.dim, c.dim)

    def forward(self, x):
        heads = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.q, self.k, self.v))
        return self.out(self.core(*heads).flatten(2)) + self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.places = nn.Embedding(c.max_tokens, c.dim)
        self.norm, self.mix = nn.LayerNorm(c.dim), Mix(c)

    def forward(self, x, positions):
        x = x + self.places(positions)
        return x + self.mix(self.norm(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab_size, c.dim)
        self.blocks = nn.ModuleDict({f"{i}": Block(c) for i in range(c.num_layers)})
        self.norm = nn.LayerNorm(c.dim)
        self.head = nn.Linear(c.dim, c.vocab_size)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for block in self.blocks.values():
            x = block(x, positions)
        return self.head(self.norm(x))


FLAVORS = {"big": {"dim": 64, "num_layers": 8}, "small": {}}


def initial(c):
    return {
        "*.weight": Draw("normal", std=0.2),
        "*.bias": Draw("normal", std=0.1),
        "blocks.*.norm.*": Draw("ones"),
        "blocks.*.places.weight": Draw("normal", std=0.5),
        "blocks.*.*.*.weight": Draw("normal", std=0.2),
        "blocks.*.*.*.bias": Draw("zeros"),
    }
'''


def spoiled(*changes: tuple[str, str]) -> str:
    text = MODEL_FILE
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    return text


def write(folder: Path, *changes: tuple[str, str]) -> str:
    path = folder / "my_model.py"
    path.write_text(spoiled(*changes))
    return str(path)


def run(path: str, *arguments: str) -> int:
    return verify.main([path, *arguments])


@pytest.mark.nightly(
    "by verify",
    by="tests/models/test_external_model.py::test_model_file_of_a_user_has_the_same_numbers_on_every_mesh",
)
def test_a_user_defined_model_file_is_verified_on_every_axis(tmp_path, capsys):
    meshes = ["--mesh", "dp_shard=2", "tp=2", "pp=2", "cp=2"]
    assert run(write(tmp_path), *meshes, "--steps", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in report["rows"]] == ["same"] * 4
    assert report["model"].endswith("my_model.py/small")  # the smallest flavor
    assert any("num_layers 6 -> 2" in note for note in report["notes"])


HEADS = "heads = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.q, self.k, self.v))"
BROKEN = {
    "reads config heads": (
        [(HEADS, HEADS.replace("(-1, self.head_dim)", "(self.num_heads, self.head_dim)"))],
        ["fails with half of the columns", "in blocks.0.mix", "write unflatten(-1, (-1, head_dim))"],
    ),
    "head count from config, without an error": (
        [(HEADS, HEADS.replace("(-1, self.head_dim)", "(self.num_heads, -1)"))],
        ["heads and sizes from weight shapes", "blocks.*.mix.core gets (4, 4, 4) heads instead of half"],
    ),
    "unnamed parameter": (
        [('        "blocks.*.mix.up": "colwise",\n', "")],
        ["blocks.*.mix.up.weight matches 0 rules", 'a rule for "blocks.*.mix.up"', '"colwise" or "rowwise"'],
    ),
    "accepts documents and ignores them": (
        [("def forward(self, tokens, positions):", "def forward(self, tokens, positions, documents_BT=None):")],
        ["keep documents apart", "pass documents_BT on to every attention core"],
    ),
    "unknown style": (
        [('"blocks.*.mix.up": "colwise"', '"blocks.*.mix.up": "columns"')],
        ["'columns' is not a known style"],
    ),
    "no chain": (
        [("return self.head(self.norm(x))", "return self.head(self.norm(x + self.embed(tokens)))")],
        ["forward is a chain"],
    ),
    "shapes of tokens": (
        [("x = self.embed(tokens)\n", "B, T = tokens.shape\n        x = self.embed(tokens)\n")],
        ["forward is a chain", "with only blocks.0", "too many values to unpack"],
    ),
    "fixed sequence length": (
        [("x = self.embed(tokens)\n", "x = self.embed(tokens) + torch.zeros(32, 1)\n")],
        ["one row with half of a sequence fails in the model", "take batch and sequence from x.shape"],
    ),
    "computes its positions": (
        [("self.places(positions)", "self.places(torch.arange(x.size(1)))")],
        ["take positions from its argument", "first in module blocks.0 (Block)"],
    ),
    "a convolution as a linear": (
        [("self.up, self.down = nn.Linear(c.dim, 4 * c.dim)", "self.up, self.down = nn.Conv1d(c.dim, 4 * c.dim, 1)"),
         ("self.up(x)", "self.up(x.transpose(1, 2)).transpose(1, 2)")],
        ["'blocks.*.mix.up']=\"colwise\" is for nn.Linear", "blocks.0.mix.up is of class Conv1d"],
    ),
    "core with weights": (
        [("class Core(nn.Module):\n", "class Core(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
          "        self.scale = nn.Linear(1, 1)\n\n"),
         ('"blocks.*.mix.out"', '"blocks.*.mix.core.scale": "colwise", "blocks.*.mix.out"'),
         ('"blocks.*.*.*.bias"', '"blocks.*.mix.core.scale.*": Draw("normal"), "blocks.*.*.*.bias"')],
        ["weightless attention core", "blocks.0.mix.core contains the parameter scale.weight"],
    ),
    "missing part": ([("def initial", "def start")], ["has no initial"]),
    "no positions": (
        [("def forward(self, tokens, positions):", "def forward(self, tokens):\n        positions = tokens")],
        ["takes no positions"],
    ),
    "fails in itself": ([("F.gelu(self.up(x))", "F.gelu(self.up(x)).nothing")], ["fails in blocks.0.mix", "nothing"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return ask(
        folder,
        {name: spoiled(*changes) for name, (changes, _) in BROKEN.items() if name not in COMMAND},
    )


COMMAND = ("missing part", "fails in itself")


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_promise_is_refused_with_its_place(name, tmp_path, results):
    changes, texts = BROKEN[name]
    if name in COMMAND:
        with pytest.raises(ConfigError) as error:
            run(write(tmp_path, *changes), "--mesh", "tp=2")
        assert error.value.exit_code == 2
        message = str(error.value)
    else:
        message = "\n".join([*results[name]["broken"], results[name]["impossible"].get("pp", "")])

    for text in texts:
        assert text in message


@pytest.mark.parametrize(
    "also", [[], [('        "blocks.*.mix": "gather",\n', "")]], ids=["core", "core and gather"]
)
def test_a_model_without_an_attention_core_cannot_split_sequences(also, tmp_path, capsys):
    path = write(tmp_path, ('    context="blocks.*.mix.core",\n', ""), *also)
    run(path, "--mesh", "cp=2", "dp_shard=2", "--steps", "1")
    out = capsys.readouterr().out
    assert "not possible: LAYOUT.context names no attention core" in out
    assert "same" in out
