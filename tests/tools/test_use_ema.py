"""``--use_ema`` selects the EMA weights in every command that reads weights, and in the Python API."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from ranks import run_ranks
from tiny import assert_bitwise, shallow_config, text_file, train_whole
from torch import Tensor

import shardtrain
from shardtrain import cli
from shardtrain.checkpoint import manifest, tensors
from shardtrain.checkpoint.manifest import AVERAGES_PREFIX
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.train.run_folder import write_resolved_config
from shardtrain.utils.errors import CheckpointError

STEPS = 2


def config(folder: Path, decay: float | None = 0.8, lora: bool = False) -> Config:
    held_out = folder.parent / "held_out.txt"
    held_out.write_text(Path(text_file()).read_text()[:500])
    options = shallow_config(
        job={"dump_folder": str(folder)},
        training={"steps": STEPS, "local_batch_size": 8, "ema_decay": decay},
        checkpoint={"enable": True, "interval": STEPS},
        validation={
            "enable": True,
            "dataset": "text",
            "dataset_path": str(held_out),
            "seq_len": 64,
            "use_ema": decay is not None,
        },
    )
    adapters = dataclasses.replace(options.lora, enable=lora, rank=4, random_base=lora)
    return dataclasses.replace(options, lora=adapters)


def train(folder: Path, decay: float | None = 0.8, lora: bool = False) -> Path:
    options = config(folder, decay, lora)
    (ended,) = run_ranks(1, train_whole, options)
    assert ended.error is None, ended.error
    write_resolved_config(Loaded(options), folder, 1)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("averages") / "run")


def averages(run: Path) -> dict[str, Tensor]:
    path = run / "checkpoint" / f"step-{STEPS}"
    stored = manifest.read(path)
    averaged_weights = {}
    for name in stored.tensors:
        if name.startswith(AVERAGES_PREFIX):
            short_name = name.removeprefix(AVERAGES_PREFIX)
            averaged_weights[short_name] = tensors.read_whole(stored, path, name)
    return averaged_weights


def weights(path: Path, use_ema: bool = False) -> dict[str, Tensor]:
    model = shardtrain.load_model(path, dtype="float32", use_ema=use_ema).model
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_load_model_opens_the_averages(run: Path) -> None:
    assert_bitwise(weights(run, use_ema=True), averages(run))
    assert not torch.equal(weights(run)["norm.weight"], averages(run)["norm.weight"])


def test_generate_and_evaluate_name_the_averages(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(run), "--prompt", "mesh", "--max_new_tokens", "1", "--use_ema"]
    assert cli.main(["generate", *arguments]) == 0
    assert "averaged weights" in capsys.readouterr().err
    assert cli.main(["evaluate", str(run), "--use_ema"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert "averaged weights" in result["model"]
    # the run validates with the averaged weights
    line = (run / "validation.jsonl").read_text().splitlines()[-1]
    validated = json.loads(line)["loss"]
    assert result["sets"]["validation"]["loss"] == pytest.approx(validated, abs=1e-6)


def test_test_follows_the_option_of_the_validation(run: Path, tmp_path: Path) -> None:
    arguments = [
        str(run / "config.resolved.toml"),
        "--output",
        str(tmp_path / "test"),
        "--nproc",
        "1",
    ]
    assert cli.main(["test", *arguments]) == 0
    tested = json.loads((tmp_path / "test" / "dev_results.json").read_text())["loss"]
    line = (run / "validation.jsonl").read_text().splitlines()[-1]
    assert tested == pytest.approx(json.loads(line)["loss"], abs=1e-6)


def test_export_writes_the_averages(run: Path, tmp_path: Path) -> None:
    arguments = [str(run), "--to", str(tmp_path / "hf"), "--use_ema", "--check", "weights"]
    assert cli.main(["export", *arguments]) == 0
    model = shardtrain.load_model(tmp_path / "hf", dtype="float32", tokenizer="bytes").model
    assert_bitwise({name: p.detach() for name, p in model.named_parameters()}, averages(run))


def test_merge_adds_the_averaged_adapters(tmp_path: Path) -> None:
    adapted = train(tmp_path / "run", lora=True)
    assert cli.main(["merge", str(adapted), "--to", str(tmp_path / "averaged"), "--use_ema"]) == 0
    assert cli.main(["merge", str(adapted), "--to", str(tmp_path / "plain")]) == 0

    tokens_BT = torch.arange(32)[None]
    logits = {}
    for name, path, use_ema in (
        ("adapted", adapted, True),
        ("averaged", tmp_path / "averaged", False),
        ("plain", tmp_path / "plain", False),
    ):
        file = adapted / "config.resolved.toml"
        opened = shardtrain.load_model(path, dtype="float32", config=file, use_ema=use_ema)
        logits[name] = opened.model(tokens_BT, tokens_BT)

    # A tolerance is needed, because merging rounds the weights to float32 once more.
    torch.testing.assert_close(logits["averaged"], logits["adapted"], atol=1e-5, rtol=0)
    assert (logits["plain"] - logits["adapted"]).abs().max() > 1e-5


def test_averages_of_a_run_without_them_are_one_error(tmp_path: Path) -> None:
    without = train(tmp_path / "run", decay=None)
    with pytest.raises(CheckpointError, match="has no averages of the weights; remove use_ema"):
        shardtrain.load_model(without, use_ema=True)


def test_hugging_face_folder_has_no_averages(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    assert cli.main(["export", str(run), "--to", str(folder), "--check", "weights"]) == 0
    for arguments in (
        ["generate", str(folder), "--prompt", "mesh", "--use_ema"],
        ["export", str(folder), "--to", str(tmp_path / "new"), "--use_ema"],
    ):
        assert cli.main(arguments) == 2
        assert "--use_ema=true requires a checkpoint" in capsys.readouterr().err


def test_plan_counts_the_averages(tmp_path: Path) -> None:
    ranks = []
    for decay in (None, 0.8):
        plan = shardtrain.plan(Loaded(config(tmp_path / "run", decay)), gpus=1)
        ranks.append(plan.ranks[0])
    without, with_averages = ranks

    assert with_averages.optimizer - without.optimizer == without.parameters
