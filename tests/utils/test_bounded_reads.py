"""Failing storage is not mistaken for a path that does not exist."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardtrain.data.sources import Request
from shardtrain.data.sources._data_files import list_files
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, DataError, StorageError


def test_kind_of_a_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "broken").symlink_to("gone")
    names = {
        ".": "folder",
        "file": "file",
        "pipe": "other",
        "broken": "",
        "gone": "",
        "file/below": "",
    }

    assert {name: bounded_reads.kind(tmp_path / name) for name in names} == names


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_failing_storage_is_not_reported_as_a_missing_folder(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first access to the folder fails, because later accesses concern a file in it."""
    (tmp_path / "rows.txt").write_text("a text\n")
    stat = os.stat
    failed = []

    def fails_once(path, *arguments, **keywords):
        if os.fspath(path) == str(tmp_path) and not failed:
            failed.append(path)
            raise OSError(number, os.strerror(number), path)
        return stat(path, *arguments, **keywords)

    monkeypatch.setattr(os, "stat", fails_once)

    with pytest.raises(StorageError, match=rf"^cannot read .*\(errno {number}\), "):
        list_files(Request(str(tmp_path)), "text", [".txt"])


@pytest.mark.parametrize("kind", [ConfigError, DataError])
def test_unreadable_file_is_named_unless_its_storage_fails(
    kind: type[ConfigError] | type[DataError],
) -> None:
    denied = bounded_reads.unreadable(
        "data.path", "rows", OSError(errno.EACCES, "Permission denied"), "allow it", kind
    )
    assert isinstance(denied, kind)
    assert "cannot be read (Permission denied); allow it" in str(denied)
    assert "rows" in str(denied)
    assert isinstance(
        bounded_reads.unreadable("data.path", "rows", OSError(errno.EIO, "I/O error")), StorageError
    )
