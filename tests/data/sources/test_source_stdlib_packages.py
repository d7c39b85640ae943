"""Lines of the standard library labeled with their packages: equal on every rank, and no line in two splits."""

from __future__ import annotations

import pytest

from shardtrain.data.sources import Request, stdlib_packages
from shardtrain.utils.errors import ConfigError


def rows(split: str) -> list[tuple[str, str]]:
    source = stdlib_packages.open_source(Request(split=split))
    return [(row["text"], row["label"]) for row in map(source.row, range(source.num_rows))]


def test_no_line_is_in_two_splits_and_all_packages_are_in_each() -> None:
    rows_of_split = {split: rows(split) for split in stdlib_packages.SPLITS}
    texts = []
    for rows_ in rows_of_split.values():
        texts += [text for text, _ in rows_]
        assert {label for _, label in rows_} == set(stdlib_packages.PACKAGES)

    assert len(texts) > 1000
    assert len(set(texts)) == len(texts)
    assert rows_of_split["train"] == rows("train")
    assert len(rows_of_split["train"]) > 3 * len(rows_of_split["test"])


def test_place_locates_the_row() -> None:
    source = stdlib_packages.open_source(Request())
    path, line = source.place(3).rsplit(":", 1)
    with open(path, encoding="utf-8") as file:
        assert file.read().splitlines()[int(line) - 1].strip() == source.row(3)["text"]


@pytest.mark.parametrize("request_", [Request(split="dev"), Request(path="x")])
def test_unknown_split_and_path_are_rejected(request_: Request) -> None:
    with pytest.raises(ConfigError, match=r"not a split of stdlib_packages|has no effect"):
        stdlib_packages.open_source(request_)
