"""Fully trained modules next to adapters, including a grown vocabulary, in PEFT's format."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from lora_runs import adapter_config, tokens, train
from tiers import cases
from tiny import tiny_config

from shardtrain import cli
from shardtrain.checkpoint import manifest
from shardtrain.config import Loaded, check
from shardtrain.config.schema import Config
from shardtrain.lora.linear import is_adapter
from shardtrain.tools.generate.trained_model import open_model
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is the reference of adapters")
TOLERANCE = 1e-5
SAVED = {"modules_to_save": ["embed_tokens", "lm_head"], "target_modules": ["q_proj", "w2"]}
ROWS = 262
"""Grown vocabulary: two more rows than the folders have."""


def config_of(
    base: Path, output: Path, rows: int = 0, lora: dict[str, Any] = SAVED, **sections: Any
) -> Config:
    run_config = adapter_config(base, output, lora=lora, **sections)
    if not rows:
        return run_config
    model = dataclasses.replace(
        run_config.model, overrides={**run_config.model.overrides, "vocab_size": rows}
    )
    checkpoint = dataclasses.replace(run_config.checkpoint, initial_load_resize_embeddings=True)
    return dataclasses.replace(run_config, model=model, checkpoint=checkpoint)


def logits(model: Any, rows: int = 260) -> torch.Tensor:
    with torch.no_grad():
        tokens_BT = tokens(rows)
        tokens_BT[:, -1] = rows - 1  # a new row, if there are any
        if hasattr(model, "peft_config") or hasattr(model, "lm_head"):
            return model.eval()(tokens_BT).logits
        return model(tokens_BT, torch.arange(tokens_BT.size(1)).expand(2, -1))


@pytest.mark.parametrize(("family", "rows"), [("llama3", 0), ("llama3", ROWS), ("qwen3", ROWS)])
def test_peft_opens_saved_modules_and_new_rows(family: str, rows: int, tmp_path: Path) -> None:
    """PEFT duplicates the tied embedding of qwen3."""
    base = save(build(family), tmp_path / "base")
    ended = train(1, config_of(base, tmp_path / "run", rows))[0]
    assert ended.error is None
    assert ended.losses[-1] < ended.losses[0]

    step = tmp_path / "run" / "checkpoint" / "step-4"
    saved_names = [name for name in manifest.read(step).tensors if name.startswith("model.")]
    fully_trained = {"model.embed.weight"} | (
        {"model.head.weight"} if family == "llama3" else set()
    )

    assert {name for name in saved_names if not is_adapter(name)} == fully_trained

    unmerged = logits(open_model(tmp_path / "run").model, rows or 260)
    assert cli.main(["export", str(step), "--to", str(tmp_path / "peft"), "--adapter"]) == 0
    reference = build(family)
    if rows:
        reference.resize_token_embeddings(rows)
    model = peft.PeftModel.from_pretrained(reference, tmp_path / "peft")

    torch.testing.assert_close(logits(model, rows or 260), unmerged, atol=3 * TOLERANCE, rtol=0)
    assert cli.main(["merge", str(step), "--to", str(tmp_path / "merged")]) == 0

    resolved = tmp_path / "run" / "config.resolved.toml"
    summed = logits(open_model(tmp_path / "merged", resolved).model, rows or 260)
    torch.testing.assert_close(summed, unmerged, atol=TOLERANCE, rtol=0)
    assert (
        cli.main(
            ["export", str(tmp_path / "merged"), "--to", str(tmp_path / "hf"), "--check", "logits"]
        )
        == 0
    )

    # A run can start from the folder that PEFT writes.
    model.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    lora = {**SAVED, "initial_load_path": str(tmp_path / "theirs")}
    off = {"optimizer": {"lr": 0.0}, "training": {"steps": 1}}

    assert train(1, config_of(base, tmp_path / "again", rows, lora, **off))[0].error is None

    again = logits(open_model(tmp_path / "again").model, rows or 260)
    torch.testing.assert_close(again, unmerged, atol=1e-6, rtol=0)


def test_new_rows_are_initialized_like_in_transformers(tmp_path: Path) -> None:
    """New rows are the mean of the others plus noise of 1e-9 of their variance: 6e-6 here, tolerance 1e-4."""
    base = save(build("llama3"), tmp_path / "base")
    off = {"optimizer": {"lr": 0.0}, "training": {"steps": 1}}
    ended = train(2, config_of(base, tmp_path / "run", ROWS, **off))[0]
    reference = build("llama3")
    reference.resize_token_embeddings(ROWS)
    state = reference.state_dict()

    for ours, name in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
    ):
        assert torch.equal(ended.weights[ours][:260], state[name][:260])
        torch.testing.assert_close(ended.weights[ours][260:], state[name][260:], atol=1e-4, rtol=0)


MESHES: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {}),
    "tp2": (2, {"tensor_parallel_degree": 2}),
    "pp2": (2, {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"}),
    "fsdp2 tp2": (4, {"tensor_parallel_degree": 2}),
}


@pytest.mark.parametrize("mesh", cases(["tp2"], nightly=["fsdp2", "pp2", "fsdp2 tp2"]))
def test_saved_modules_are_equal_on_every_mesh(mesh: str, tmp_path: Path) -> None:
    base = save(build("llama3"), tmp_path / "base")
    ranks, degrees = MESHES[mesh]
    rows = {"global_batch_size": 8, "local_batch_size": 4}
    single = train(1, config_of(base, tmp_path / "one", ROWS, training=rows))[0]
    split = config_of(base, tmp_path / "split", ROWS, training=rows, parallelism=degrees)

    for ended in train(ranks, split):
        assert ended.error is None
        # float32 sums in a different order
        assert ended.losses == pytest.approx(single.losses, abs=1e-5)
        for name, weight in ended.weights.items():
            expected = single.weights[name]
            torch.testing.assert_close(weight, expected, atol=TOLERANCE, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("sections", "texts"),
    [
        (
            {"checkpoint": {"enable": True, "initial_load_resize_embeddings": True}},
            ["initial_load_in_hf = true"],
        ),
        (
            {
                "lora": {"enable": True},
                "model": {"overrides": {"vocab_size": 600}},
                "checkpoint": {
                    "enable": True,
                    "initial_load_path": "x",
                    "initial_load_in_hf": True,
                    "initial_load_resize_embeddings": True,
                },
            },
            ["lora.modules_to_save"],
        ),
    ],
)
def test_a_vocabulary_that_cannot_grow_is_refused_before_ranks_start(
    sections: Any, texts: list[str]
) -> None:
    problems = "\n".join(map(str, check(Loaded(tiny_config(**sections)))))
    for text in texts:
        assert text in problems


def test_modules_that_cannot_be_fully_saved_are_named(tmp_path: Path) -> None:
    base = save(build("llama3"), tmp_path / "base")

    def message(lora: dict[str, Any], rows: int = 0) -> str:
        error = train(1, config_of(base, tmp_path / "run", rows, {**SAVED, **lora}))[0].error
        assert isinstance(error, ConfigError)
        return str(error)

    assert "did you mean lm_head?" in message({"modules_to_save": ["lm_haed"]})
    assert "which lora.modules_to_save trains fully" in message(
        {"modules_to_save": ["layers.1.ffn"]}
    )
    assert "is below the 260 rows" in message({}, 259)
