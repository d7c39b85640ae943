"""If the child fails on an artefact, this process, which has no limits, does not open it."""

from __future__ import annotations

import errno
import io
import json
from pathlib import Path

import pytest
from parquet_files import (
    BYTE_ARRAY,
    DICTIONARY,
    Column,
    Groups,
    Page,
    group,
    leaf,
    one_column,
    rle,
    text,
)

from shardtrain.data import sandbox, sandbox_child, sources
from shardtrain.utils.errors import ConfigError, DataError, StorageError

MIB = 2**20


def answer(failed: list[str], error_number: int = 0, refused: str = "") -> str:
    """Return the verdict of a child that has ended normally."""
    content = {"refused": refused, "failed": failed, "errno": error_number}
    return sandbox._verdict(json.dumps(content).encode(), 0)


def fail(error_number: int = 0):
    """Return a replacement for the child process that always fails."""
    return lambda request: answer(["the decoder is out of tables"], error_number)


def rows(kind: str, path: Path) -> list[object]:
    source = sources.find(kind).open_source(sources.Request(path=str(path)))
    return [row for _, row in sources.every_row(source)]


def large_group(path: Path) -> Path:
    """A row group that is read in the child first, because one text of 8 MiB is chosen 200,000 times."""
    dictionary = Page(text(b"a" * 8 * MIB), 1, kind="dictionary")
    choices = Page(bytes([1]) + rle(0, 200_000, 1), 200_000, DICTIONARY)
    return one_column(path, [dictionary, choices], 200_000, codec="zstd")


def large_footer(path: Path) -> Path:
    """A valid file, whose footer has more columns than are read without a child."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({f"column {number}": [1] for number in range(11_000)}), path)
    return path


def arrow_file(path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(path.with_suffix("")))
    return next(path.with_suffix("").glob("*.arrow")).rename(path)


def saved_folder(path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(str(path))
    return path


ARTEFACTS = {
    "footer": ("parquet", large_footer, DataError),
    "arrow file": ("huggingface", arrow_file, DataError),
    "saved folder": ("huggingface", saved_folder, ConfigError),
}


@pytest.mark.parametrize("name", sorted(ARTEFACTS))
@pytest.mark.parametrize("error_number", [0, errno.EIO], ids=["library", "storage"])
def test_artefact_on_which_the_child_fails_is_refused(
    name: str, error_number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The artefacts are valid, so only the failure of the child prevents opening them."""
    kind, write, expected = ARTEFACTS[name]
    endings = {"arrow file": "a.arrow", "saved folder": "saved"}
    path = write(tmp_path / endings.get(name, "a.parquet"))
    monkeypatch.setattr(sandbox, "_ask", fail(error_number))

    with pytest.raises(StorageError if error_number else expected) as raised:
        rows(kind, path)

    message = str(raised.value)
    assert str(path) in message
    assert "the decoder is out of tables" in message
    assert len(message.splitlines()) == 1


def test_tokenizer_on_which_the_child_fails_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiny_tokenizers import bpe_folder

    from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer

    folder = bpe_folder(tmp_path)
    # Another test of this process may have opened the same files.
    monkeypatch.setattr(sandbox, "_opened_before", set())
    monkeypatch.setattr(sandbox, "_ask", lambda request: answer(["first problem", "second"]))

    with pytest.raises(ConfigError, match="^first problem\nsecond$"):
        open_tokenizer(str(folder))

    monkeypatch.setattr(sandbox, "_ask", fail(errno.EIO))
    with pytest.raises(StorageError, match="out of tables"):
        open_tokenizer(str(folder))


def test_refusal_precedes_a_failure_and_an_invalid_answer_is_a_refusal() -> None:
    assert answer([], refused="is too large") == "is too large"
    assert answer([]) == ""
    for content in (b"", b"{}", b'{"refused": ""}', b'{"refused": "", "failed": 1, "errno": 0}'):
        assert "data.artefact_memory_bytes" in sandbox._verdict(content, 0)


def test_memory_error_that_a_reader_wraps_is_a_refusal(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """A sentencepiece model that needs too much memory must not count as another format."""

    def open_large(request: object) -> None:
        try:
            raise MemoryError
        except MemoryError as error:
            raise ConfigError("is neither of the formats") from error

    class Input:
        buffer = io.BytesIO(b'{"kind": "large", "memory_bytes": 5}')

    monkeypatch.setitem(sandbox_child.OPENERS, "large", open_large)
    monkeypatch.setattr(sandbox_child.sys, "stdin", Input)
    monkeypatch.setattr(sandbox_child.os, "_exit", lambda code: None)
    sandbox_child.main()
    verdict = sandbox._verdict(capfdbinary.readouterr().out, 0)

    assert verdict == "needs more than data.artefact_memory_bytes=5 to open"


def test_row_group_on_which_the_child_fails_is_a_bad_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    path = large_group(tmp_path / "a.parquet")
    monkeypatch.setattr(sandbox, "_ask", fail())

    assert rows("parquet", path) == [sources.BadRow("the rest of the row group is damaged")]

    monkeypatch.setattr(sandbox, "_ask", fail(errno.EIO))
    with pytest.raises(StorageError, match="out of tables"):
        rows("parquet", path)


def test_damaged_row_group_does_not_hide_a_bomb_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The footer makes both groups suspicious, so the child tries both together, and fails on the first."""
    pytest.importorskip("pyarrow")
    schema = [group("schema", 1), leaf("text", BYTE_ARRAY)]
    large = 70 * MIB
    page = Page(b"", 1, packed=b"not zstandard", uncompressed=large)
    damaged = Column([page], total_uncompressed=large)
    bomb = Column([Page(text(b"a" * large), 1)])
    path = Groups(schema, [([damaged], 1), ([bomb], 1)]).save(tmp_path / "a.parquet")

    def ask(request: dict) -> str:
        if 0 in request["groups"]:
            return answer(["the page is damaged"])
        return "is too large"

    monkeypatch.setattr(sandbox, "_ask", ask)
    source = sources.find("parquet").open_source(sources.Request(path=str(path)))
    assert len(list(source.rows(0))) == 1
    with pytest.raises(DataError, match=r"a\.parquet.*is too large"):
        list(source.rows(1))
