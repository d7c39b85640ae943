"""A pipe, device or huge file instead of a small file is refused without waiting for it or reading it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shardtrain import config
from shardtrain.checkpoint import best
from shardtrain.cli import main
from shardtrain.compat.migrate import document
from shardtrain.config.rules import schedule_file, transformers_rules
from shardtrain.config.schema import Config, Parallelism
from shardtrain.data.tokenizers import tokenizer_config
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.hf import initial_weights, listing, source
from shardtrain.hf.bin_weights import BinWeights
from shardtrain.hf.weights import HubWeights
from shardtrain.hub_formats import config_json
from shardtrain.launch import hostfile
from shardtrain.launch.goodput import events
from shardtrain.lora import peft
from shardtrain.metrics.sinks import metrics_jsonl
from shardtrain.tasks.images import image_processor
from shardtrain.tools.convert import card
from shardtrain.tools.generate import locate_checkpoint, prompts
from shardtrain.tools.plan import calibrate, hardware
from shardtrain.tools.runs import run_files
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
    if kind is giant and reader in SAMPLED:  # these readers read only a part of a huge file
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


@pytest.mark.parametrize("command", [
    "config check", "config show", "config migrate", "train", "plan", "launch ssh --dry-run", "init new.toml",
    "data show", "verify", "test", "doctor",
])  # fmt: skip
def test_pipe_instead_of_a_configuration_is_refused(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run.toml", "run.yaml", "run.json"):
        pipe(tmp_path / name)
        arguments = command.split()
        options = [argument for argument in arguments if argument.startswith("--")]
        verb = [argument for argument in arguments if argument not in options]
        assert main([*verb, name, *options]) == 2
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
    assert bounded_reads.read_all(tmp_path / "file", 8) == b"12345678"
    with pytest.raises(OSError, match="larger than 7 bytes"):
        bounded_reads.read_all(tmp_path / "file", 7)


def socket_file(path: Path) -> None:
    # The path of a socket has at most 108 bytes, so bind it in its folder.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def broken_link(path: Path) -> None:
    path.symlink_to("missing")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def long_line(path: Path) -> None:
    path.write_bytes(b'{"step": 1, "text": "' + b"a" * 20_000_000 + b'"}\n')


def empty(path: Path) -> None:
    path.touch()


SPECIAL = [device, pipe, giant, Path.mkdir, socket_file, broken_link, link_to_itself]
NOT_A_RECORD = [*SPECIAL, empty, long_line]


@pytest.mark.parametrize("start_step", [0, 4])
@pytest.mark.parametrize("kind", NOT_A_RECORD)
def test_history_starts_anew_if_the_file_is_not_one(
    kind: Callable[[Path], None], start_step: int, tmp_path: Path
) -> None:
    """New records are written in each case. A file that is no history is renamed instead of read to its end."""
    path = tmp_path / "metrics.jsonl"
    kind(path)
    history = metrics_jsonl.JsonlFile(path, start_step)

    assert history.history == []

    history.write({"step": 5, "loss": 1.0})
    assert history.num_lost == 0
    assert not path.is_symlink()
    assert metrics_jsonl.read_records(path) == [{"step": 5, "loss": 1.0}]


def test_long_line_between_records_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resume samples a large file at evenly spaced offsets, many of which lie in the long line."""
    path = tmp_path / "metrics.jsonl"
    records = [{"step": step, "loss": 1.0} for step in range(1, 5)]
    lines = [metrics_jsonl.line_of(record) for record in records]
    path.write_bytes(b"".join(lines[:2]) + b"a" * 20_000_000 + b"\n" + b"".join(lines[2:]))
    num_calls = 0
    read_line = bounded_reads.line

    def counted(*arguments: object) -> bytes:
        nonlocal num_calls
        num_calls += 1
        return read_line(*arguments)

    monkeypatch.setattr(bounded_reads, "line", counted)

    assert metrics_jsonl.JsonlFile(path, 4).history[-1] == records[-1]
    assert num_calls < 100
    assert metrics_jsonl.read_records(path) == records


@pytest.mark.parametrize("kind", NOT_A_RECORD)
def test_reports_ignore_a_history_that_is_not_one(
    kind: Callable[[Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    kind(path)
    assert [record for record in run_files.records(path) if record is not None] == []


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("kind", SPECIAL)
def test_special_file_beside_a_tokenizer_is_refused(
    kind: Callable[[Path], None], name: str, tmp_path: Path
) -> None:
    """Ignoring the file would silently change the special tokens or the chat template."""
    kind(tmp_path / name)
    with pytest.raises(ShardtrainError, match=name):
        tokenizer_config.read_beside(tmp_path, "model.tokenizer_path")
    with pytest.raises(OSError):
        tokenizer_config.files_beside(tmp_path)


@pytest.mark.parametrize("kind", [broken_link, link_to_itself])
def test_broken_link_to_a_configuration_is_named(
    kind: Callable[[Path], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The most similar name in the folder is that of the link itself, which is no useful suggestion."""
    kind(tmp_path / "run.toml")
    assert main(["config", "check", str(tmp_path / "run.toml")]) == 2
    error = capsys.readouterr().err
    assert "is a broken link" in error
    assert "did you mean" not in error


def folder(path: Path) -> None:
    path.mkdir()


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        # The full path may be too long for a socket.
        here = os.open(".", os.O_RDONLY)
        os.chdir(path.parent)
        listener.bind(path.name)
        os.fchdir(here)
        os.close(here)


def broken_link(path: Path) -> None:
    path.symlink_to("/nonexistent/file")


def circular_link(path: Path) -> None:
    path.symlink_to(path.name)


def damage_of_best(folder: Path) -> str:
    pointer, damage = best.pointer_and_damage(folder)
    assert pointer == {}
    return damage


def damaged_lines(name: str) -> Callable[[Path], str]:
    """Return a reader of a run with a valid metrics.jsonl, which counts a bad file as a damaged line."""

    def read(folder: Path) -> str:
        (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
        assert run_files.read(folder).bad_lines == 1
        return f"{name} is not a regular file"

    return read


OPTIONAL_FILES: list[tuple[str, Callable[[Path], object]]] = [
    ("config.json", source.of_folder),
    ("config.json", locate_checkpoint.load_config),
    ("generation_config.json", source.of_folder),
    ("chat_template.jinja", source.of_folder),
    ("tokenizer.json", source.of_folder),
    ("tokenizer.json", lambda folder: open_tokenizer(str(folder), "model.hf_assets_path")),
    ("preprocessor_config.json", lambda folder: image_processor._check_files(str(folder))),
    ("model.safetensors", HubWeights),
    ("model.safetensors.index.json", HubWeights),
    ("adapter_model.safetensors", peft._open),
    ("config.resolved.toml", locate_checkpoint.load_config),
    ("metrics.jsonl", run_files.read),
    ("best.json", damage_of_best),
    ("validation.jsonl", damaged_lines("validation.jsonl")),
    ("samples.jsonl", damaged_lines("samples.jsonl")),
    ("goodput.jsonl", damaged_lines("goodput.jsonl")),
]
"""Files that a folder may omit. Without one of them, a command would continue with other data or settings."""


@pytest.mark.parametrize("kind", [pipe, device, folder, socket_file, broken_link, circular_link])
@pytest.mark.parametrize(("name", "reader"), OPTIONAL_FILES)
def test_unreadable_optional_file_is_not_taken_for_a_missing_one(
    name: str, reader: Callable[[Path], object], kind: Callable[[Path], None], tmp_path: Path
) -> None:
    kind(tmp_path / name)
    try:
        result = str(reader(tmp_path))
    except ShardtrainError as error:
        result = str(error)
    reasons = ("regular file", "is a folder", "a file that does not exist", "symbolic links")
    assert name in result
    assert any(reason in result for reason in reasons), result


def test_resolved_configuration_of_zero_bytes_is_refused(tmp_path: Path) -> None:
    """A power failure may leave an empty file. Its options, even the tokenizer, would silently be defaults."""
    (tmp_path / "config.resolved.toml").touch()
    with pytest.raises(ShardtrainError, match="has no options"):
        locate_checkpoint.load_config(tmp_path)
