"""Errors of storage: each errno has its own cause and fix, and each message about storage uses them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardtrain import cli
from shardtrain.checkpoint import files
from shardtrain.launch import local
from shardtrain.utils import atomic_io, bounded_reads, storage_errors
from shardtrain.utils.errors import OutOfMemoryError, ShardtrainError, StorageError
from shardtrain.utils.storage_errors import CAUSES

NAMES_OF_STORAGE = [
    "ESTALE",
    "EROFS",
    "EDQUOT",
    "EIO",
    "ENOMEM",
    "ENOSPC",
    "EMFILE",
    "ENFILE",
    "ENOTCONN",
    "EHOSTDOWN",
]
NAMES_OF_PATHS = [
    "EACCES",
    "EPERM",
    "ENAMETOOLONG",
    "ENOTDIR",
    "ELOOP",
    "ETXTBSY",
    "EBUSY",
    "EISDIR",
    "EEXIST",
    "ENOENT",
]
NAMED = [
    *NAMES_OF_STORAGE,
    "ETIMEDOUT",
    *NAMES_OF_PATHS,
    "ENOENT",
    "EFBIG",
    "ENXIO",
    "ENODEV",
    "ENOLCK",
]


def fix_of(name: str) -> str:
    return "memory ran out" if name == "ENOMEM" else CAUSES[getattr(errno, name)].fix


def test_each_errno_has_its_own_fix() -> None:
    assert {getattr(errno, name) for name in NAMED} <= CAUSES.keys()
    # ENODEV has the same cause and fix as ENXIO
    texts = [
        (cause.meaning, cause.fix) for number, cause in CAUSES.items() if number != errno.ENODEV
    ]
    assert len(set(texts)) == len(texts)


def write_atomically(path: Path) -> None:
    atomic_io.write(path, "text", durable=True)


def write_checkpoint_file(path: Path) -> None:
    files.write_durable(path, b"data")


@pytest.mark.parametrize("write", [write_atomically, write_checkpoint_file])
@pytest.mark.parametrize("call", ["open", "write", "fsync"])
@pytest.mark.parametrize("name", NAMED)
def test_error_names_the_file_the_cause_and_the_fix(
    name: str,
    call: str,
    write: Callable[[Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (name, call) == ("EEXIST", "open"):
        return  # the write is retried with another temporary name
    number = getattr(errno, name)
    path = tmp_path / "file"

    def fails(*_: object, **__: object) -> int:
        raise OSError(number, os.strerror(number))  # errors of write and fsync have no file name

    monkeypatch.setattr(os, call, fails)
    if call == "write" and write is write_atomically:
        monkeypatch.setattr(os, "fdopen", fails)  # a file object writes without os.write
    with pytest.raises(ShardtrainError) as caught, storage_errors.writing(path, "use another"):
        write(path)
    monkeypatch.undo()
    cause = CAUSES[number]
    message = str(caught.value)

    if name == "ENOMEM":
        assert message.startswith(
            f"cannot write {path}: memory ran out (Cannot allocate memory)"
        ), message
    else:
        assert message.startswith(f"cannot write {path}: {os.strerror(number)} (errno {number})"), (
            message
        )
        assert message.endswith(f"{cause.meaning}; {cause.fix}, or use another"), message
    assert type(caught.value) is (OutOfMemoryError if name == "ENOMEM" else StorageError)


@pytest.mark.parametrize(
    ("free_blocks", "free_inodes", "message"),
    [
        (100, 0, "0 of 5000 inodes are free although there is free space; delete files"),
        (100, 7, "7 of 5000 inodes are free although there is free space; delete files"),
        (100, 33, "(errno 28); free space"),
        (0, 0, "(errno 28); free space"),
    ],
)
def test_exhausted_inodes_are_distinguished_from_a_full_disk(
    free_blocks: int,
    free_inodes: int,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = SimpleNamespace(f_bavail=free_blocks, f_files=5000, f_favail=free_inodes)
    monkeypatch.setattr(os, "statvfs", {tmp_path: facts}.__getitem__)
    # the file and its folder do not exist yet, so the nearest existing folder determines the filesystem
    path = tmp_path / "new" / "file"

    assert message in storage_errors.explain(
        OSError(errno.ENOSPC, "No space left on device", str(path)), path
    )


@pytest.mark.parametrize("call", ["mkdir", "rename"])
def test_inodes_are_those_of_the_drafts_filesystem(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call relative to the descriptor of a folder reports only the last name, which exists in another folder."""

    def fails(name: str, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", name)

    full = SimpleNamespace(f_bavail=100, f_files=5000, f_favail=0)
    roomy = SimpleNamespace(f_bavail=100, f_files=5000, f_favail=700)
    monkeypatch.setattr(os, "statvfs", lambda path: full if Path(path) == tmp_path else roomy)
    monkeypatch.setattr(os, call, fails)

    with pytest.raises(OSError) as caught:
        if call == "mkdir":
            files.make_draft(tmp_path / "step-2.tmp-0")
        else:
            files.rename(tmp_path / "step-2.tmp-0", tmp_path / "step-2")

    message = str(storage_errors.cannot("write checkpoint", "", caught.value))
    assert f"{tmp_path}/step-2.tmp-0" in message
    assert "0 of 5000 inodes are free" in message


def test_link_instead_of_a_new_folder_is_named_before_writing(tmp_path: Path) -> None:
    output = tmp_path / "exported"
    output.symlink_to(tmp_path / "absent")
    message = f"exported: it is a link to {tmp_path}/absent; remove it"
    with pytest.raises(StorageError, match=message), files.new_folder(output):
        pytest.fail("the folder is written")

    assert list(tmp_path.iterdir()) == [output]


@pytest.mark.parametrize("name", NAMED)
def test_reading_distinguishes_failing_storage_from_a_wrong_path(name: str, tmp_path: Path) -> None:
    number = getattr(errno, name)
    error = bounded_reads.trouble(tmp_path / "file", OSError(number, os.strerror(number)))
    assert (error is not None) is (name in [*NAMES_OF_STORAGE, "ETIMEDOUT"])
    assert error is None or fix_of(name) in str(error)


@pytest.mark.parametrize("name", NAMED)
def test_an_error_anywhere_in_a_run_has_the_fix_of_its_errno(name: str, tmp_path: Path) -> None:
    number = getattr(errno, name)
    inside = local.of_storage(
        OSError(number, os.strerror(number), str(tmp_path / "run/metrics.jsonl")), tmp_path
    )
    assert isinstance(inside, ShardtrainError)
    assert fix_of(name) in str(inside)

    # an error without a file name may come from a socket instead of a file of the run
    unnamed = local.of_storage(OSError(number, os.strerror(number)), tmp_path)
    is_told = CAUSES[number].may_pass and not CAUSES[number].is_of_sockets
    assert isinstance(unnamed, ShardtrainError) is is_told


def test_the_command_line_uses_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    def action(_: list[str]) -> int:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/data/file")

    assert cli.run(action, []) == 8

    message = capsys.readouterr().err
    assert "/data/file: Stale file handle (errno 116)" in message
    assert CAUSES[errno.ESTALE].fix in message
