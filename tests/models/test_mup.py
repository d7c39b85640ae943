"""The example of muP: the published scaling by width, and equal numbers on every mesh."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiers import cases
from tiny import Result, assert_same_numbers, run_tiny, tiny_config

from shardtrain.config.schema import Config, Optimizer
from shardtrain.models import llama
from shardtrain.train.preflight import meta_model
from shardtrain.utils import own_file

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "models" / "mup.py"
WIDE = {
    "flavor": "wide",
    "overrides": {"dim": 128, "num_heads": 8, "num_kv_heads": 8, "ffn_dim": 256},
}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mup_coordinates

    return mup_coordinates


def mup() -> ModuleType:
    return own_file.load(str(FILE), own_file.MODEL, "model.name")


def test_base_width_is_llama_with_adamw(benchmark: ModuleType) -> None:
    width = mup().BASE_DIM
    expected = benchmark.changes(llama, "AdamW", width)
    actual = benchmark.changes(mup(), str(FILE), width)
    # the fused kernel of AdamW rounds differently
    assert actual == pytest.approx(expected, rel=1e-4)


def test_activations_change_alike_at_every_width(benchmark: ModuleType) -> None:
    """Coordinate check: activations change alike at widths 64 and 256 with muP, and twice as much without it."""
    base = benchmark.changes(mup(), str(FILE), 64)
    wide = benchmark.changes(mup(), str(FILE), 256)
    standard = benchmark.changes(llama, "AdamW", 256)

    for name, change in base.items():
        assert 0.5 < wide[name] / change < 1.5, name
        assert standard[name] / change > 2, name


def test_initial_values_and_rates_follow_the_width() -> None:
    """Table 8 of the paper, for a width of four times the base."""
    module = mup()
    shape = module.Config(**module.FLAVORS["wide"])
    base = llama.initial(module.Config(**module.FLAVORS["base"]))
    for pattern, draw in module.initial(shape).items():
        is_hidden = "attn.w" in pattern or "ffn.w" in pattern
        factor = 0.5 if is_hidden and draw.distribution == "normal" else 1.0
        assert draw.std == pytest.approx(base[pattern].std * factor), pattern

    # Learning rates of hidden matrices are divided by the factor of the width.
    with torch.device("meta"):
        model = module.Model(shape)
    named = list(model.named_parameters())
    group = {
        "params": [parameter for _, parameter in named],
        "param_names": [name for name, _ in named],
        "weight_decay": 0.1,
    }
    optimizer = module.build([group], Optimizer())
    for built in optimizer.param_groups:
        for name in built["param_names"]:
            is_hidden = name.startswith("layers.") and "norm" not in name
            assert built["width_factor"] == (4 if is_hidden else 1), name

    # Attention scores are divided by the head size instead of its root, scaled to be equal at the base.
    assert model.layers["0"].attn.core.scale == pytest.approx(16**0.5 / 16)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp": (2, {}),
    "tp": (2, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}),
    "pp": (2, {"pipeline_parallel_degree": 2}),
    "cp": (2, {"context_parallel_degree": 2}),
    "hsdp": (4, {"data_parallel_replicate_degree": 2}),
}


def config(**sections: dict[str, Any]) -> Config:
    optimizer = {"name": str(FILE), "lr": 1e-2, "eps": 1e-3}
    return tiny_config(model={"name": str(FILE), **WIDE}, optimizer=optimizer, **sections)


@functools.cache
def one_process() -> Result:
    return run_tiny(1, config(training={"local_batch_size": 8}), steps=3)[0]


@pytest.mark.parametrize("mesh", cases(["tp"], nightly=[name for name in MESHES if name != "tp"]))
def test_meshes_change_no_number(mesh: str) -> None:
    num_ranks, parallelism = MESHES[mesh]
    training = {} if mesh in ("fsdp", "hsdp") else {"local_batch_size": 8}
    reference = one_process()

    for result in run_tiny(num_ranks, config(parallelism=parallelism, training=training), 3):
        # a pipeline stage has a part of the weights
        initial = {key: reference.initial[key] for key in result.initial}
        expected = Result(**{**vars(reference), "initial": initial})
        assert_same_numbers(result, expected)
        for key, weight in result.final.items():
            # float32 gradients are summed in a different order
            torch.testing.assert_close(weight, expected.final[key], atol=1e-5, rtol=0, msg=key)


def test_tied_embeddings_are_rejected() -> None:
    wrong = tiny_config(
        model={"name": str(FILE), "flavor": "base", "overrides": {"tied_embeddings": True}}
    )
    errors, _ = meta_model.build(wrong)
    assert "tied_embeddings must be false: the head has its own scale" in str(errors[0])
