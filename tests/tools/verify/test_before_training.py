"""Before training a sharded model file, ``train`` compares it with one process, and refuses only incorrect files.

``WRONG`` and ``RIGHT`` are tables of changes to ``sound_model.py``. Without the comparison, each wrong file would train
without an error, or end with an error that does not name the fix.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from other_styles import FILES, FOLDER, NOT_POSSIBLE
from ranks import run_ranks

from shardtrain import config as configs
from shardtrain.config import Config
from shardtrain.tools.verify import before_training, forked_workers, meshes, own_sizes
from shardtrain.tools.verify.before_training import VerifyVerdict
from shardtrain.train import model_check
from shardtrain.utils.errors import ConfigError

SOUND = (Path(__file__).parent / "sound_model.py").read_text()
FAMILIES = Path(configs.__file__).parents[1] / "models"
AXES = {"tp": "tensor", "cp": "context", "pp": "pipeline", "ep": "expert"}

QKV = "self.q, self.k, self.v, self.out = (nn.Linear(c.dim, c.dim, bias=False) for _ in range(4))"
FUSED = "self.qkv, self.out = nn.Linear(c.dim, 3 * c.dim, bias=False), nn.Linear(c.dim, c.dim, bias=False)"
SPLIT = "q, k, v = (w(x).unflatten(-1, (-1, self.head_dim)) for w in (self.q, self.k, self.v))"
FFN = "self.up, self.down = nn.Linear(c.dim, 2 * c.dim), nn.Linear(2 * c.dim, c.dim)"
IN_FFN = "return self.down(F.gelu(self.up(x)))"
CALL = "return self.out(self.core(turn(q, positions), turn(k, positions), v).flatten(2))"
RESIDUAL = "x = x + self.drop(self.attn("
EMBEDDED = "x = self.embed(tokens)\n"
WORD = '"blocks.*.attn.[qkv]": "colwise"'
SINUS = """def sinus(positions, dim):
    angles = positions[..., None] * 100.0 ** (-torch.arange(dim // 2) / (dim // 2))
    return torch.cat([angles.sin(), angles.cos()], -1)


class Sinus(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, positions):
        return sinus(positions, self.dim)


class Block("""

Changes = list[tuple[str, str]]


def sinus_in_block(call: str) -> Changes:
    """Return changes that add sinusoidal positions to the residual stream."""
    with_sinus = "self.ffn_norm, self.ffn = nn.LayerNorm(c.dim), FeedForward(c)\n        self.pos = Sinus(c.dim)"
    return [
        ("class Block(", SINUS),
        (RESIDUAL, f"x = x + {call}\n        {RESIDUAL}"),
        ("self.ffn_norm, self.ffn = nn.LayerNorm(c.dim), FeedForward(c)", with_sinus),
    ]


# name -> mesh, changes, texts in the refusal
WRONG: dict[str, tuple[str, Changes, list[str]]] = {
    "queries, keys and values one after the other": (
        "tp=2",
        [
            (QKV, FUSED),
            (SPLIT, "q, k, v = (y.unflatten(-1, (-1, self.head_dim)) for y in self.qkv(x).chunk(3, -1))"),
            (WORD, '"blocks.*.attn.qkv": "colwise"'),
        ],
        ["blocks.0.attn", "order queries, keys and values by head"],
    ),
    "gate and value one after the other": (
        "tp=2",
        [
            (FFN, "self.up, self.down = nn.Linear(c.dim, 4 * c.dim), nn.Linear(2 * c.dim, c.dim)"),
            (IN_FFN, "a, b = self.up(x).chunk(2, -1)\n        return self.down(F.silu(a) * b)"),
        ],
        ["blocks.0.ffn", "equal stretches of rows"],
    ),
    "dropout of a gathered input": (
        "tp=2",
        [(IN_FFN, "x = F.dropout(x, 0.1, self.training)\n        " + IN_FFN)],
        ["dropout with p=0.1 in module blocks.0.ffn", "equal on all", "as after the rowwise linear"],
    ),
    "a path that is dropped by rows": (
        "tp=2",
        [(RESIDUAL, RESIDUAL.replace("self.drop(", "F.dropout(x.new_ones(x.size(0), 1, 1), 0.1) * (")) ],
        ["dropout with p=0.1 in module blocks.0 ", "equal on all"],
    ),
    "a path that is dropped by rows, in parts of a sequence": (
        "cp=2",
        [(RESIDUAL, RESIDUAL.replace("self.drop(", "F.dropout(x.new_ones(x.size(0), 1, 1), 0.1) * (")) ],
        ["dropout with p=0.1 in module blocks.0 ", "equal on all context-parallel ranks"],
    ),
    "hidden features divided by their norm": (
        "tp=2",
        [(IN_FFN, "h = F.gelu(self.up(x))\n        return self.down(h / (1e-6 + h.norm(dim=-1, keepdim=True)))")],
        ["blocks.0.ffn"],
    ),
    "a mean over heads": (
        "tp=2", [(CALL, "v = v + v.mean(2, keepdim=True)\n        " + CALL)], ["blocks.0.attn"],
    ),
    "a number for each head, counted here": (
        "tp=2",
        [(CALL, "v = v * (1 + torch.arange(v.size(2)))[:, None]\n        " + CALL)],
        ["blocks.0.attn"],
    ),
    "a factor of the number of heads here": (
        "tp=2", [(CALL, "v = v / v.size(2)\n        " + CALL)], ["blocks.0.attn"],
    ),
    "a mean over the sequence on the residual stream": (
        "tp=2", [(RESIDUAL, f"x = x + x.cumsum(1) / x.size(1)\n        {RESIDUAL}")], ["blocks.0", "split along"],
    ),
    "sinusoidal positions on the residual stream": (
        "tp=2", sinus_in_block("sinus(positions, x.size(-1))")[:2], ["blocks.0", 'with the style "embed"'],
    ),
    "places counted by arange on the residual stream": (
        "tp=2",
        [("class Block(", SINUS), (RESIDUAL, f"x = x + sinus(torch.arange(x.size(1)), x.size(2))\n        {RESIDUAL}")],
        ["blocks.0"],
    ),
    "places counted by arange in attention": (
        "cp=2",
        [("positions[..., None, None] *", "torch.arange(x.size(1))[:, None, None] *")],
        ["take positions from its argument"],
    ),
    "a token shift": (
        "cp=2",
        [(IN_FFN, "x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]\n        " + IN_FFN)],
        ["mixes the tokens", "blocks.0.ffn"],
    ),
    "a call counter": (
        "pp=2",
        [
            (FFN, FFN + "\n        self.calls = 0"),
            (IN_FFN, f"self.calls += 1\n        x = x / self.calls\n        {IN_FFN}"),
        ],
        ["blocks.0.ffn", "keeps state"],
    ),
    "initial weights by rank": (
        "tp=2",
        [('"*.weight": Draw("normal", std=0.02', '"*.weight": Draw("normal", std=1 + int(os.environ.get("RANK", 0))')],
        ["starts from other weights on rank 1 of 2"],
    ),
    "a scale between embedding and layers": (
        "pp=2", [(EMBEDDED, EMBEDDED + "        x = 3.0 * x\n")], ["chain"],
    ),
}  # fmt: skip

# name -> mesh, changes that train must not refuse
RIGHT: dict[str, tuple[str, Changes]] = {
    "unchanged": ("tp=2,pp=2", []),
    "queries, keys and values by head": (
        "tp=2",
        [
            (QKV, FUSED),
            (SPLIT, "q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_dim)).unbind(-2)"),
            (WORD, '"blocks.*.attn.qkv": "colwise"'),
        ],
    ),
    "an attention core in bfloat16": (
        "tp=2",
        [
            ("(x.transpose(1, 2) for x in (q, k, v))", "(x.transpose(1, 2).bfloat16() for x in (q, k, v))"),
            ("is_causal=True).transpose(1, 2)", "is_causal=True).transpose(1, 2).float()"),
        ],
    ),
    "a feed-forward under autocast": (
        "tp=2",
        [(IN_FFN, f'with torch.autocast("cpu", torch.bfloat16):\n            {IN_FFN}')],
    ),
    "dropout of hidden features": (
        "tp=2", [("F.gelu(self.up(x))", "F.dropout(F.gelu(self.up(x)), 0.1, self.training)")],
    ),
    "a scale between embedding and layers, without stages": ("tp=2", [(EMBEDDED, EMBEDDED + "        x = 3.0 * x\n")]),
    "places counted by arange with unsplit sequences": (
        "tp=2", [("positions[..., None, None] *", "torch.arange(x.size(1))[:, None, None] *")],
    ),
    "a token shift in a gathered module": (
        "tp=2", [(IN_FFN, "x = x + F.pad(x, (0, 0, 1, 0))[:, :-1]\n        " + IN_FFN)],
    ),
    "a module of sinusoidal positions": (
        "cp=2,tp=2",
        [
            *sinus_in_block("self.pos(positions)"),
            ('"blocks.*.attn": "gather"', '"blocks.*.pos": "embed",\n        "blocks.*.attn": "gather"'),
        ],
    ),
    "a constant of the type of its input": (
        "tp=2,cp=2", [(RESIDUAL, f"x = x + 0.1 * x.new_ones(x.size(0), 1, 1)\n        {RESIDUAL}")],
    ),
    "its sizes at eight billion": (
        "tp=2", [("dim: int = 32", "dim: int = 4096"), ("num_layers: int = 2", "num_layers: int = 32")],
    ),
}  # fmt: skip
BY_DEFAULT = ("queries, keys and values one after the other", "dropout of a gathered input")
RIGHT_BY_DEFAULT = ("an attention core in bfloat16", "its sizes at eight billion")


def changed(changes: Changes) -> str:
    text = SOUND
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    return text


def run_of(path: Path, mesh: str, flavor: str = "small", **sections: dict[str, Any]) -> Config:
    arguments = [
        "--model.name",
        str(path),
        "--model.flavor",
        flavor,
        "--activation_checkpoint.mode",
        "none",
    ]
    for axis, degree in meshes.read(mesh).items():
        if axis in AXES:
            arguments += [f"--parallelism.{AXES[axis]}_parallel_degree", str(degree)]
    config = configs.load(None, arguments).config
    for name, values in sections.items():
        config = dataclasses.replace(
            config, **{name: dataclasses.replace(getattr(config, name), **values)}
        )
    return config


def verdict_of(tmp_path: Path, text: str, mesh: str) -> VerifyVerdict:
    path = tmp_path / "model.py"
    path.write_text(text)
    return before_training.judge(run_of(path, mesh))


def tiers(names: Any, default: tuple[str, ...]) -> list[Any]:
    return [
        name if name in default else pytest.param(name, marks=pytest.mark.nightly) for name in names
    ]


@pytest.mark.parametrize("name", tiers(WRONG, BY_DEFAULT))
def test_a_wrong_file_is_refused_with_its_module_and_a_fix(name: str, tmp_path: Path) -> None:
    mesh, changes, texts = WRONG[name]
    verdict = verdict_of(tmp_path, changed(changes), mesh)
    assert verdict.refused, verdict
    assert not verdict.compared, verdict
    for text in texts:
        assert text in " ".join(verdict.refused), verdict.refused
    assert all("\n" not in line for line in verdict.refused)


@pytest.mark.parametrize("name", tiers(RIGHT, RIGHT_BY_DEFAULT))
def test_a_correct_file_is_compared_and_not_refused(name: str, tmp_path: Path) -> None:
    mesh, changes = RIGHT[name]
    verdict = verdict_of(tmp_path, changed(changes), mesh)
    assert verdict.refused == [], verdict
    assert verdict.left_out == [], verdict
    assert verdict.compared, verdict
    if "bfloat16" in name or "autocast" in name:
        assert any("casts to bfloat16 are disabled" in line for line in verdict.noticed)


@pytest.mark.nightly(
    "63 comparisons; test_a_correct_file_is_compared_and_not_refused covers it by default"
)
@pytest.mark.parametrize("name", FILES)
def test_no_correct_file_of_another_style_is_refused(name: str) -> None:
    """Each file is compared on exactly the meshes that are possible for it, and never refused."""
    for mesh in ("tp=2", "pp=2", "cp=2"):
        config = run_of(FOLDER / f"{name}.py", mesh, "tiny")
        verdict = before_training.judge(config)
        assert bool(verdict.compared) == (mesh not in NOT_POSSIBLE.get(name, {})), (mesh, verdict)


def test_a_file_with_fixed_sizes_is_reported_as_not_compared(tmp_path: Path) -> None:
    """The file cannot be compared at a small size, so it is reported instead of refused."""
    verdict = verdict_of(
        tmp_path, changed([(EMBEDDED, EMBEDDED + "        x = x.view(-1, 2048, 32)\n")]), "tp=2"
    )
    assert verdict.refused == []
    assert verdict.compared == []
    assert "does not run on 32 tokens" in verdict.left_out[0]


@pytest.mark.parametrize(
    ("name", "flavor", "tp"),
    [
        ("llama3", "405B", 8),
        ("deepseek_v3", "671B", 4),
        ("qwen3_moe", "235B-A22B", 2),
        ("mixtral", "8x22B", 8),
        ("qwen2", "0.5B", 2),
        ("neox", "20B", 4),
        ("llama4", "17bx128e", 8),
        ("gpt_oss", "20b", 4),
    ],
)
def test_a_reduced_copy_is_found_for_every_family(
    name: str, flavor: str, tp: int, tmp_path: Path
) -> None:
    """Like a user's file: the meaning of its sizes is inferred only from their names and from test runs."""
    config = run_of(FAMILIES / f"{name}.py", "tp=2", flavor)
    (reduction,) = forked_workers.run(1, own_sizes.smaller, config, 2, tp, folder=tmp_path)
    assert reduction["why"] == ""
    assert reduction["given"]["num_layers"] <= own_sizes.MOST_LAYERS

    facts = configs.read_model_file(str(FAMILIES / f"{name}.py"))
    small = configs.shape(facts, flavor, reduction["given"])
    assert small["num_heads"] % tp == 0
    assert small["dim"] % tp == 0
    assert small["vocab_size"] % tp == 0
    assert small["dim"] <= 512


def test_the_meshes_of_a_run_need_no_more_than_eight_ranks() -> None:
    for degrees, expected in (
        ({"tensor": 2}, ["tp=2"]),
        ({"tensor": 16}, ["tp=2"]),
        ({"tensor": 8, "pipeline": 4}, ["tp=2,pp=2", "tp=8"]),
        ({"expert": 8, "context": 6}, ["cp=2,ep=2"]),
    ):
        arguments = [
            f"--parallelism.{axis}_parallel_degree={degree}" for axis, degree in degrees.items()
        ]
        assert meshes.of_run(configs.load(None, arguments)) == expected


def ask_on_ranks(rank: int, path: str, folder: str) -> tuple[str, list[str]]:
    store = dist.FileStore(f"{folder}/store", 2)
    quiet = run_of(Path(path), "tp=2", model={"check": False})
    lines = model_check.check(quiet, store, rank, 2)
    try:
        model_check.check(run_of(Path(path), "tp=2"), store, rank, 2)
    except ConfigError as error:
        return str(error), lines
    return "", lines


@pytest.mark.nightly(
    "on two ranks",
    by="tests/tools/verify/test_before_training.py::test_a_wrong_file_is_refused_with_its_module_and_a_fix",
)
def test_all_ranks_receive_the_same_verdict_before_building(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(changed(WRONG["queries, keys and values one after the other"][1]))
    answers = run_ranks(2, ask_on_ranks, str(path), str(tmp_path))

    assert answers[0] == answers[1]

    refusal, quiet = answers[0]
    assert refusal.startswith(f"model.name={path} on tp=2")
    assert "order queries, keys and values by head" in refusal
    assert quiet == [
        f"model.check=false: {path} is NOT compared with one process; run `shardtrain verify {path}` to do so"
    ]


def test_a_failed_comparison_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    (line,) = model_check.check(run_of(FOLDER / "gpt2.py", "tp=2", "tiny"), dist.HashStore(), 0, 2)
    assert "NOT compared with one process: the comparison failed: exit status 1" in line


def test_only_sharded_user_files_are_compared(tmp_path: Path) -> None:
    """Models of this package have separate tests, and data-parallel ranks only split rows."""
    assert model_check.applies_to(run_of(FOLDER / "gpt2.py", "pp=2", "tiny"))
    assert not model_check.applies_to(run_of(FOLDER / "gpt2.py", "dp_shard=2", "tiny"))
    built_in = configs.load(None, ["--parallelism.tensor_parallel_degree", "2"]).config
    assert not model_check.applies_to(built_in)
