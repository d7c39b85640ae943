"""Dataset names: each is the name of a file, and an unknown name is an error with suggestions."""

from __future__ import annotations

import pytest

from shardtrain.data import sources
from shardtrain.data.sources import BadRow, jsonl
from shardtrain.utils.errors import ConfigError


def test_dataset_is_found_by_the_name_of_its_file():
    assert sources.find("jsonl") is jsonl

    local = {"python_stdlib", "text", "jsonl", "tsv", "parquet"}
    assert local | {"huggingface", "c4", "c4_mini", "c4_test", "alpaca", "openwebtext"} <= set(
        sources.names()
    )
    assert not any(name.startswith("_") for name in sources.names())


@pytest.mark.parametrize("name", ["python_stdlip", "__init__", "_files", "../text", "os", ""])
def test_unknown_dataset_lists_the_existing_ones(name):
    with pytest.raises(ConfigError, match=r"training.dataset=.*python_stdlib, .*text"):
        sources.find(name)


def test_similar_name_is_suggested():
    with pytest.raises(ConfigError, match=r'validation.dataset="txt" .*did you mean "text"'):
        sources.find("txt", option="validation.dataset")


def test_bad_row_prints_reason_and_detail():
    assert str(BadRow("is not UTF-8", detail="byte 3 is 0xff")) == "is not UTF-8 (byte 3 is 0xff)"
    assert str(BadRow("is empty")) == "is empty"
