"""Datasets defined in a Python file of the user."""

from __future__ import annotations

import pytest

from shardtrain.config import check, load
from shardtrain.config.schema import Config, Training
from shardtrain.data import open_dataloader, sources
from shardtrain.utils.errors import ConfigError

OWN = """
from dataclasses import dataclass

@dataclass(frozen=True)
class Numbers:
    num_rows: int = 40
    total_bytes: int = 400

    def row(self, index):
        return {"text": f"number {index}"}

    def place(self, index):
        return f"numbers:{index}"

    def files(self):
        return {"numbers": "1"}

    def check_unchanged(self):
        pass

def open_source(request):
    return Numbers()
"""


def test_path_of_a_python_file_is_a_dataset(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    name = str(tmp_path / "mine.py")
    problems = [str(problem) for problem in check(load(None, ["--training.dataset", name]))]
    assert not [problem for problem in problems if "dataset" in problem]

    training = Training(dataset=name, seq_len=16, local_batch_size=2)
    loader = open_dataloader(
        Config(training=training),
        batch_rank=0,
        num_batch_ranks=1,
        accumulation=1,
        shuffle=False,
    )
    first_row = next(loader).tokens_BT[0].tolist()

    # The first token marks the beginning of a document.
    assert bytes(first_row[1:9]).decode() == "number 0"


def test_missing_file_or_file_without_a_dataset_is_rejected(tmp_path):
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(
        ConfigError, match=r'dataset=".*empty.py" has no open_source; define open_source\(request\)'
    ):
        sources.find(str(tmp_path / "empty.py"))
    with pytest.raises(ConfigError, match="is not a file"):
        sources.find(str(tmp_path / "gone.py"))

    problems = [
        str(p) for p in check(load(None, ["--training.dataset", str(tmp_path / "gone.py")]))
    ]

    assert any("gone.py" in p and "does not exist" in p for p in problems)
