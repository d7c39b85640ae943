"""A pipe, device or huge file instead of a small file is refused without waiting for it or reading it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from shardtrain import config
from shardtrain.cli import main
from shardtrain.compat.migrate import document
from shardtrain.config.rules import schedule_file, transformers_rules
from shardtrain.config.schema import Config, Parallelism
from shardtrain.hf import initial_weights, listing
from shardtrain.hf.bin_weights import BinWeights
from shardtrain.hf.weights import HubWeights
from shardtrain.hub_formats import config_json
from shardtrain.launch import hostfile
from shardtrain.launch.goodput import events
from shardtrain.lora import peft
from shardtrain.metrics.sinks import metrics_jsonl
from shardtrain.tools.convert import card
from shardtrain.tools.generate import prompts
from shardtrain.tools.plan import calibrate, hardware
from shardtrain.utils import bounded_reads, own_file
from shardtrain.utils.errors import ShardtrainError


def device(path: Path) -> None:
    path.symlink_to("/dev/null")  # like /dev/zero, but harmless if a reader reads it


def pipe(path: Path) -> None:
    os.mkfifo(path)


def giant(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(2**40)


def listing_of(folder: Path) -> object:
    return listing._types_of(folder / "model.safetensors")


READERS: list[tuple[str, Callable[[Path], object]]] = [
    ("config.json", lambda folder: config_json.read_json(folder / "config.json")),
    ("config.json", transformers_rules._read),
    ("config.json", initial_weights.of_folder),
    ("model.safetensors", HubWeights),
    ("model.safetensors.index.json", HubWeights),
    ("pytorch_model.bin.index.json", BinWeights),
    ("pytorch_model.bin", BinWeights),
    ("adapter_model.safetensors", peft._open),
    ("goodput.jsonl", events.read),
    ("model.safetensors", listing_of),
    ("run.toml", lambda folder: config.load(folder / "run.toml", [])),
    ("run.yaml", lambda folder: document.read_text(folder / "run.yaml")),
    ("hosts", lambda folder: hostfile.read_hostfile(folder / "hosts")),
    ("model.py", lambda folder: own_file.parse(folder / "model.py")),
    ("device.toml", lambda folder: hardware._read(folder / "device.toml", "--device")),
    (
        "report.json",
        lambda folder: calibrate.learn_report(folder / "report.json", hardware.find("h100")),
    ),
]
SAMPLED = {initial_weights.of_folder, listing_of}
"""Readers that read only parts of a file."""


@pytest.mark.parametrize("kind", [device, pipe, giant])
@pytest.mark.parametrize(("name", "reader"), READERS)
def test_special_or_huge_file_is_refused(
    name: str, reader: Callable[[Path], object], kind: Callable[[Path], None], tmp_path: Path
) -> None:
    kind(tmp_path / name)
    if kind is giant and reader in SAMPLED:
        reader(tmp_path)
        return
    try:
        result = str(reader(tmp_path))
    except (ShardtrainError, OSError) as error:
        result = str(error)
    reasons = (
        "regular file",
        "larger than",
        "at most",
        "more than",
        "not a file",
        "neither",
        "truncated",
        "damaged",
        "no file",
    )
    assert any(reason in result for reason in reasons), result


def schedule_problems(path: Path) -> str:
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(path))
    return "; ".join(
        map(
            str,
            schedule_file.check_schedule_file(config.Loaded(Config(parallelism=parallelism)), 2, 2),
        )
    )


@pytest.mark.parametrize("reader", [
    lambda path: prompts.read_rows(path, "prompt", "prediction"), metrics_jsonl.read_records, schedule_problems,
])  # fmt: skip
def test_pipe_instead_of_rows_is_refused(reader: Callable[[Path], object], tmp_path: Path) -> None:
    pipe(tmp_path / "rows")
    try:
        result = str(reader(tmp_path / "rows"))
    except (ShardtrainError, OSError) as error:
        result = str(error)
    assert "regular file" in result or not result


@pytest.mark.parametrize("words", [
    "config check", "config show", "config migrate", "train", "plan", "launch ssh --dry-run", "init new.toml",
    "data show", "verify", "test", "doctor",
])  # fmt: skip
def test_pipe_instead_of_a_configuration_is_refused(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.toml", "run.yaml", "run.json"):
        pipe(tmp_path / name)
        verb = words.split()
        options = [option for option in verb if option.startswith("--")]
        assert main([*(word for word in verb if word not in options), name, *options]) == 2
        assert "regular file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["x = " + "-" * 200_000 + "1", "x = " + "(" * 50_000, "x = " + "[" * 150 + "]" * 150]
)
def test_python_file_with_deep_expressions_is_refused(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser raises MemoryError, although memory has not run out."""
    (tmp_path / "model.py").write_text(text)
    assert main(["config", "check", "debug", "--model.name", str(tmp_path / "model.py")]) == 2
    output = capsys.readouterr()
    assert "model.name" in output.out + output.err
    assert "memory" not in output.out + output.err


@pytest.mark.parametrize("kind", [device, pipe, giant])
def test_model_card_ignores_special_files(kind: Callable[[Path], None], tmp_path: Path) -> None:
    for name in (card.CARD, "metrics.jsonl"):
        kind(tmp_path / name)
    assert card.exported(tmp_path) == ""
    if kind is not giant:  # a large metrics.jsonl is read in pieces
        assert card._measured(tmp_path / "metrics.jsonl", 1, "training") == []


def test_file_is_read_up_to_the_bound(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345678")
    assert bounded_reads.whole(tmp_path / "file", 8) == b"12345678"
    with pytest.raises(OSError, match="larger than 7 bytes"):
        bounded_reads.whole(tmp_path / "file", 7)
