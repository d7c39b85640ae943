"""A ``transformers`` model with more rows than its folder: new rows are the mean, and the export contains all."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import SHAPES, config_for, folder
from ranks import run_ranks
from tiers import cases
from tiny import train_whole

from shardtrain import cli
from shardtrain.config import Loaded, check
from shardtrain.config.schema import Config
from shardtrain.train.run_folder import write_resolved_config

transformers = pytest.importorskip("transformers")
OFF = {"optimizer": {"lr": 0.0}, "training": {"steps": 1}}


def config_of(name: str, output: Path, more: int, **sections: Any) -> Config:
    run_config = config_for(name, output, **sections)
    rows = transformers.AutoConfig.from_pretrained(folder(name)).get_text_config().vocab_size + more
    model = dataclasses.replace(
        run_config.model, overrides={**run_config.model.overrides, "vocab_size": rows}
    )
    checkpoint = dataclasses.replace(run_config.checkpoint, initial_load_resize_embeddings=True)
    return dataclasses.replace(run_config, model=model, checkpoint=checkpoint)


def train(ranks: int, config: Config) -> Any:
    ended = run_ranks(ranks, train_whole, config, None)
    assert ended[0].error is None
    write_resolved_config(Loaded(config), Path(config.job.dump_folder), ranks)
    return ended[0]


@pytest.mark.parametrize("name", cases(["gpt2", "phi"], nightly=["qwen3", "gpt_oss"]))
def test_new_rows_are_the_mean_and_the_exported_folder_has_them(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path / "run", 9, **OFF)
    ended = train(1, config)
    rows = config.model.overrides["vocab_size"]
    step = next((tmp_path / "run" / "checkpoint").glob("step-*"))

    assert cli.main(["export", str(step), "--to", str(tmp_path / "hf"), "--check", "logits"]) == 0

    model_class = getattr(transformers, SHAPES[name][0])
    grown = model_class.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    before = model_class.from_pretrained(folder(name), dtype=torch.float32)

    assert grown.config.get_text_config().vocab_size == rows
    # Old rows are unchanged, and new rows are their mean except for float32 rounding.
    for new, old in (
        (grown.get_input_embeddings().weight, before.get_input_embeddings().weight),
        (grown.get_output_embeddings().weight, before.get_output_embeddings().weight),
    ):
        assert new.shape[0] == rows
        assert torch.equal(new[: rows - 9], old)
        torch.testing.assert_close(new[rows - 9 :], old.mean(0).expand(9, -1), atol=1e-6, rtol=0)

    # config.json is otherwise unchanged.
    saved = json.loads((tmp_path / "hf" / "config.json").read_text())
    original = json.loads((Path(folder(name)) / "config.json").read_text())
    changed_fields = {key for key in original if saved.get(key) != original[key]}
    assert changed_fields <= {"vocab_size", "dtype", "torch_dtype"}

    assert ended.losses[0] == pytest.approx(ended.losses[0])


@pytest.mark.parametrize(
    ("name", "ranks", "degrees"),
    cases(
        [("qwen3", 2, {"tensor_parallel_degree": 2})],
        nightly=[("gpt2", 2, {}), ("qwen3", 4, {"tensor_parallel_degree": 2})],
    ),
)
def test_new_rows_are_equal_on_every_mesh(
    name: str, ranks: int, degrees: dict[str, int], tmp_path: Path
) -> None:
    rows = {"global_batch_size": 4, "local_batch_size": 1}
    single = train(1, config_of(name, tmp_path / "one", 12, training=rows))
    parts = train(
        ranks, config_of(name, tmp_path / "parts", 12, training=rows, parallelism=degrees)
    )

    assert parts.losses == pytest.approx(single.losses, abs=1e-5)
    for key, weight in parts.weights.items():
        torch.testing.assert_close(weight, single.weights[key], atol=1e-5, rtol=0, msg=key)


def test_adapters_with_new_rows_open_in_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    lora = {
        "enable": True,
        "rank": 4,
        "alpha": 8.0,
        "target_modules": ["q_proj"],
        "modules_to_save": ["embed_tokens", "lm_head"],
    }
    config = config_of("qwen3", tmp_path / "run", 7, lora=lora)
    train(1, config)
    step = next((tmp_path / "run" / "checkpoint").glob("step-*"))

    assert cli.main(["export", str(step), "--to", str(tmp_path / "peft"), "--adapter"]) == 0
    assert cli.main(["merge", str(step), "--to", str(tmp_path / "merged")]) == 0

    resolved = str(tmp_path / "run" / "config.resolved.toml")
    arguments = ["export", str(tmp_path / "merged"), "--to", str(tmp_path / "hf")]
    assert cli.main([*arguments, "--config", resolved, "--check", "weights"]) == 0

    # PEFT with the base model and the adapters computes the same logits as the merged model.
    vocab_size = config.model.overrides["vocab_size"]
    model_class = getattr(transformers, SHAPES["qwen3"][0])
    base = model_class.from_pretrained(folder("qwen3"), dtype=torch.float32)
    base.resize_token_embeddings(vocab_size)
    unmerged = peft.PeftModel.from_pretrained(base, tmp_path / "peft").eval()
    merged = model_class.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    tokens_BT = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(1))
    tokens_BT[:, -1] = vocab_size - 1
    with torch.no_grad():
        expected_BTV = unmerged(tokens_BT).logits
        actual_BTV = merged(tokens_BT).logits
    # float32 rounding of the merged products
    torch.testing.assert_close(actual_BTV, expected_BTV, atol=1e-5, rtol=0)


def test_fewer_rows_are_refused(tmp_path: Path) -> None:
    ended = run_ranks(1, train_whole, config_of("gpt2", tmp_path / "run", -1), None)[0]
    assert "and rows cannot be removed" in str(ended.error)


def test_the_number_of_rows_is_required(tmp_path: Path) -> None:
    run_config = config_of("gpt2", tmp_path / "run", 1)
    model = dataclasses.replace(
        run_config.model,
        overrides={k: v for k, v in run_config.model.overrides.items() if k != "vocab_size"},
    )
    problems = "\n".join(map(str, check(Loaded(dataclasses.replace(run_config, model=model)))))

    assert "requires the number of rows" in problems
