"""``shardtrain evaluate``: the loss of named sets is that of transformers and of validation, on any number of ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from ranks import run_ranks
from tiny import shallow_config, text_file, train_whole

from shardtrain import cli, data
from shardtrain.config import Loaded
from shardtrain.config.schema import Validation
from shardtrain.data import IGNORE
from shardtrain.distributed.process_group import World
from shardtrain.tools.evaluate import request, sets
from shardtrain.tools.generate.opening import open_model
from shardtrain.train.run_folder import write_resolved_config

TEXTS = ["mesh and shard, in step", "the rank that gathers last, é 東京", "a loss of seven; a norm of eleven " * 4]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sets") / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def section(rows: Path) -> Validation:
    return Validation(dataset="jsonl", dataset_path=str(rows), split="train", local_batch_size=2, seq_len=32)


def test_loss_and_bits_are_those_of_transformers_in_float64(rows: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    theirs = build("llama3").double()
    folder = save(theirs.float(), tmp_path / "hf")
    theirs = theirs.double()
    opened = open_model(folder, tokenizer_path="bytes")
    found = sets.measure(opened, section(rows))
    stream = data.open_dataloader(
        opened.config, section=section(rows), batch_rank=0, num_batch_ranks=1, accumulation=1, shuffle=False, loop=False
    )
    total, tokens = 0.0, 0
    for batch in stream:
        with torch.no_grad():
            logits = theirs(batch.tokens_BT).logits.flatten(0, 1)
        targets = batch.targets_BT.flatten()
        total += float(torch.nn.functional.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum"))
        tokens += int((targets != IGNORE).sum())
    assert found["tokens"] == tokens
    assert found["loss"] == pytest.approx(total / tokens, rel=1e-6)  # float32 against float64
    assert found["perplexity"] == pytest.approx(math.exp(total / tokens), rel=1e-5)
    size = sum(len(text.encode()) for text in TEXTS)
    assert size - 1 <= found["bytes"] <= size, "each byte but a first that nothing stands before"
    assert found["bits_per_byte"] == pytest.approx(total / math.log(2) / found["bytes"], rel=1e-6)


def measured(rank: int, folder: Path, size: int) -> Any:
    opened = open_model(folder, world=World(rank, size, rank, torch.device("cpu")))
    return sets.measure(opened, opened.config.validation)


def test_it_is_the_validation_loss_of_the_run_on_any_number_of_ranks(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(Path(text_file()).read_bytes()[:3000])
    validation = {"enable": True, "freq": 2, "dataset": "text", "dataset_path": str(tmp_path / "text"), "seq_len": 64}
    config = shallow_config(
        job={"dump_folder": str(tmp_path / "run")},
        training={"steps": 2, "local_batch_size": 8},
        checkpoint={"enable": True},
        validation={**validation, "local_batch_size": 8, "steps": -1},
    )
    assert run_ranks(1, train_whole, config)[0].error is None
    write_resolved_config(Loaded(config), tmp_path / "run", 1)
    lines = [json.loads(line) for line in (tmp_path / "run/validation.jsonl").read_text().splitlines()]
    expected = lines[-1]["loss"]
    alone = run_ranks(1, measured, tmp_path / "run", 1)[0]
    assert alone["loss"] == pytest.approx(expected, rel=1e-6)
    for found in run_ranks(2, measured, tmp_path / "run", 2):
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-6)  # sums in another order
        assert {**found, "loss": 0, "perplexity": 0, "bits_per_byte": 0} == {
            **alone, "loss": 0, "perplexity": 0, "bits_per_byte": 0,
        }  # fmt: skip


def test_the_command_prints_and_writes_json(rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    folder, output = save(build("llama3"), tmp_path / "hf"), tmp_path / "found.json"
    words = ["evaluate", "--from", str(folder), "--tokenizer", "bytes", "--seq_len", "32"]
    assert cli.main([*words, "--data", f"one={rows}", "--data", f"two={rows}", "--output", str(output)]) == 0
    printed = json.loads(capfd.readouterr().out)
    assert printed["sets"]["one"] == printed["sets"]["two"] and printed == json.loads(output.read_text())
    assert cli.main([*words, "--data", f"one={rows}", "--output", str(output)]) == 2, "nothing is written over"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--data", "x"], "is not NAME=FILE"),
        (["--data", "a=missing.jsonl"], "names no file that exists"),
        (["--data", f"a={__file__}"], "has an ending that no dataset reads"),
        (["--limit", "3"], "--limit=3 has no effect without --tasks".replace("=3", "")),
        (["--seq_len", "30", "--nproc", "4"], "is not a multiple of --nproc=4"),
        (["--batch_size", "0"], "must be at least 1"),
    ],
)
def test_a_wrong_word_is_refused_with_its_fix(words: list[str], told: str) -> None:
    with pytest.raises(Exception) as error:
        request.read(["--from", "x", *words])
    assert told in " ".join(map(str, getattr(error.value, "problems", [error.value]))).replace('="3"', "")
