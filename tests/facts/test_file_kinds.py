"""One table of file kinds: every command reads the same files."""

from __future__ import annotations

import gzip
import json

import pytest

from shardtrain.config.toml_file import parse_file
from shardtrain.data.sources import _data_files
from shardtrain.facts import file_kinds
from shardtrain.tools.evaluate import evaluate_request
from shardtrain.utils.errors import ConfigError

NAMES = [
    (f"rows{ending}{compression}", dataset)
    for dataset, endings in file_kinds.ENDINGS.items()
    for ending in endings
    for compression in ("", *file_kinds.COMPRESSIONS)
]


@pytest.mark.parametrize(
    ("name", "dataset"), [*NAMES, ("ROWS.JSONL.GZ", "jsonl"), ("notes.md", "text")]
)
def test_every_command_takes_the_same_files(name, dataset, tmp_path):
    file = tmp_path / name
    file.write_bytes(gzip.compress(json.dumps({"text": "a"}).encode()))
    assert file_kinds.dataset_of(name) == dataset
    assert evaluate_request.read(["--from", "run", "--data", f"held={file}"]).data == {"held": file}

    # A .json file passed as a configuration is read as that of another trainer, not as data.
    if name.endswith(".json"):
        return
    problems = []
    parse_file(file, problems)

    assert f"--training.dataset {dataset} " in problems[0].fix


@pytest.mark.parametrize("name", ["weights.bin", "rows", "rows.gz", ".hidden", "rows.jsonl.rar"])
def test_other_files_are_rejected_with_the_known_endings(name, tmp_path):
    file = tmp_path / name
    file.write_text("a")
    assert file_kinds.dataset_of(str(file)) is None
    with pytest.raises(
        ConfigError,
        match=r"has an ending of no known format; use a file with one of the endings \.jsonl.*gz",
    ):
        evaluate_request.read(["--from", "run", "--data", f"held={file}"])


def test_compressions_are_those_that_can_be_read():
    assert _data_files.COMPRESSIONS is file_kinds.COMPRESSIONS
