"""Files of a dataset: which paths they are, that they are regular files, and that changes are detected."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import pickle
import socket

import pytest
import zstandard

from shardtrain.data.sources import Request, every_row, jsonl
from shardtrain.data.sources._data_files import list_files
from shardtrain.data.sources._index import RecordReader
from shardtrain.utils.errors import ConfigError, DataError


def write(root, *names, content="{}\n"):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)


def names(path, **options):
    files = list_files(Request(str(path), **options), "jsonl", (".jsonl", ".json"))
    return [file.name for file in files]


def test_folder_means_its_files_with_the_right_suffix_sorted_by_path(tmp_path):
    write(tmp_path, "c.jsonl", "a.JSONL", "b/x.json", "b-1.jsonl.gz")
    write(tmp_path, "notes.txt", ".a.jsonl", ".cache/b.jsonl", "d.gz")

    assert names(tmp_path) == ["a.JSONL", "b-1.jsonl.gz", "b/x.json", "c.jsonl"]


def test_single_file_may_have_any_suffix(tmp_path, monkeypatch):
    write(tmp_path, "a.data")
    assert names(tmp_path / "a.data") == ["a.data"]
    monkeypatch.chdir(tmp_path)
    assert names("a.data") == ["a.data"]


def test_pattern_matches_files_named_relative_to_its_fixed_folder(tmp_path):
    write(tmp_path, "x/a1.jsonl", "x/a2.jsonl", "y/a1.jsonl", "y/b1.jsonl", "x/a3.folder/c.jsonl")
    assert names(tmp_path / "*" / "a*") == ["x/a1.jsonl", "x/a2.jsonl", "y/a1.jsonl"]
    assert names(tmp_path / "**" / "*1.jsonl") == ["x/a1.jsonl", "y/a1.jsonl", "y/b1.jsonl"]
    with pytest.raises(ConfigError, match=r"matches no file"):
        names(tmp_path / "z*")


def test_existing_file_with_a_wildcard_in_its_name_is_not_a_pattern(tmp_path):
    write(tmp_path, "a[1].jsonl", "a1.jsonl")
    assert names(tmp_path / "a[1].jsonl") == ["a[1].jsonl"]


def test_links_are_followed_and_a_loop_is_an_error(tmp_path):
    write(tmp_path, "real/a.jsonl")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "link.jsonl").symlink_to(tmp_path / "real" / "a.jsonl")
    (tmp_path / "data" / "folder").symlink_to(tmp_path / "real")

    assert names(tmp_path / "data") == ["folder/a.jsonl", "link.jsonl"]

    (tmp_path / "data" / "loop").symlink_to(tmp_path / "data")
    with pytest.raises(DataError, match=r'loop" is found twice, because a link leads to it'):
        names(tmp_path / "data")


def test_missing_path_is_reported_with_the_option(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r'validation.dataset_path is not set, and the dataset "jsonl" requires it',
    ):
        names("", option="validation.dataset_path")
    with pytest.raises(
        ConfigError, match=r'training.dataset_path=".*/no" does not exist; name a file'
    ):
        names(tmp_path / "no")
    with pytest.raises(ConfigError, match=r"is a folder without \*.jsonl, \*.json files"):
        names(tmp_path)


def test_special_files_are_rejected_without_opening_them(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DataError, match=r'pipe.jsonl" is a pipe, not a regular file'):
        names(tmp_path)
    with pytest.raises(DataError, match=r'/dev/null" is a device, not a regular file'):
        names("/dev/null")

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        with pytest.raises(DataError, match=r"is a socket, not a regular file"):
            names(tmp_path / "s")


def test_empty_file_and_broken_link_are_named(tmp_path):
    write(tmp_path, "a.jsonl")
    write(tmp_path, "b.jsonl", content="")
    with pytest.raises(DataError, match=r'b.jsonl" is empty; remove the file'):
        names(tmp_path)

    (tmp_path / "b.jsonl").unlink()
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match=r'b.jsonl" cannot be read \(No such file'):
        names(tmp_path)


def test_unreadable_file_is_named(tmp_path, monkeypatch):
    write(tmp_path, "a.jsonl")

    def refuse(path, flags, *rest):  # file modes do not stop root
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(
        DataError, match=r'a.jsonl" cannot be read \(Permission denied\); make it readable'
    ):
        jsonl.open_source(Request(str(tmp_path)))


def test_unreadable_folder_is_named(tmp_path, monkeypatch):
    write(tmp_path, "a.jsonl", "b/c.jsonl")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(DataError, match=r'b" cannot be listed \(Permission denied\)'):
        names(tmp_path)


@pytest.mark.parametrize(
    ("ending", "content", "rule"),
    [
        ("jsonl.gz", b"{}\n", "is named .gz but does not begin like such a file"),
        ("jsonl", gzip.compress(b"{}", mtime=0), "is compressed but not named .gz"),
        ("jsonl", bz2.compress(b"{}"), "is compressed but not named .bz2"),
        ("jsonl", lzma.compress(b"{}"), "is compressed but not named .xz"),
        ("jsonl", zstandard.compress(b"{}"), "is compressed but not named .zst"),
        ("jsonl", '{"text": "a"}'.encode("utf-16"), "is UTF-16; convert it to UTF-8"),
    ],
)
def test_wrong_compression_or_encoding_is_one_error_per_file(tmp_path, ending, content, rule):
    (tmp_path / f"a.{ending}").write_bytes(content)
    with pytest.raises(DataError, match=rf'a.{ending}" {rule}'):
        jsonl.open_source(Request(str(tmp_path)))


def test_text_that_begins_like_a_bzip2_file_is_read_as_text(tmp_path):
    (tmp_path / "a.jsonl").write_text("BZh9 is not JSON\n")
    assert jsonl.open_source(Request(str(tmp_path))).num_rows == 1


def test_fingerprint_depends_on_content_and_not_on_path_or_time(tmp_path):
    content = os.urandom(3 * 2**20)
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.bin").write_bytes(content)
    os.utime(tmp_path / "y" / "a.bin", ns=(1, 1))

    def fingerprint(folder):
        (file,) = list_files(Request(str(tmp_path / folder)), "x", (".bin",))
        return file.name, file.fingerprint()

    assert fingerprint("x") == fingerprint("y")

    # The first and the last byte are always hashed.
    for offset in (0, len(content) - 1):
        changed = bytearray(content)
        changed[offset] ^= 1
        (tmp_path / "y" / "a.bin").write_bytes(changed)
        assert fingerprint("x") != fingerprint("y")

    (tmp_path / "y" / "a.bin").write_bytes(content + b"!")
    assert fingerprint("x") != fingerprint("y")


def test_fingerprint_covers_every_byte_of_a_small_file(tmp_path):
    fingerprints = set()
    content = bytearray(200_000)
    for offset in (None, 0, 65_535, 65_536, 131_072, 199_999):
        if offset is not None:
            content[offset] ^= 1
        (tmp_path / "a.bin").write_bytes(content)
        (file,) = list_files(Request(str(tmp_path)), "x", (".bin",))
        fingerprints.add(file.fingerprint())

    assert len(fingerprints) == 6


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz"])
@pytest.mark.parametrize("change", ["grow", "same size", "replace", "remove", "rename"])
def test_file_changed_during_the_run_is_named(tmp_path, ending, change):
    file = tmp_path / f"a.{ending}"
    content = b'{"a": 1}\n'
    file.write_bytes(gzip.compress(content) if ending.endswith("gz") else content)
    source = jsonl.open_source(Request(str(tmp_path)))
    source.check_unchanged()
    if change == "grow":
        file.write_bytes(file.read_bytes() + b"{}\n")
    elif change == "same size":
        os.utime(file, ns=(1, 1))
    elif change == "replace":
        status = file.stat()
        (tmp_path / "new").write_bytes(file.read_bytes())
        os.utime(tmp_path / "new", ns=(status.st_atime_ns, status.st_mtime_ns))
        os.replace(tmp_path / "new", file)
    elif change == "remove":
        file.unlink()
    else:
        file.rename(tmp_path / "b.jsonl")
    rule = "was removed or renamed" if change in ("remove", "rename") else "was changed"

    with pytest.raises(
        ConfigError, match=rf'training.dataset_path=".*a.{ending}" {rule} since the run opened it'
    ):
        source.check_unchanged()

    # A copy of the source in another process reopens the files, and notices the change too.
    if change in ("replace", "remove"):
        with pytest.raises(ConfigError, match=rf"a.{ending}\" {rule}"):
            list(every_row(pickle.loads(pickle.dumps(source))))


def test_file_truncated_while_it_is_read_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    source = jsonl.open_source(Request(str(tmp_path)))
    os.truncate(tmp_path / "a.jsonl", 12)

    assert source.row(0) == {"a": 1}
    with pytest.raises(ConfigError, match=r"a.jsonl\" was changed"):
        source.row(1)


def test_reader_keeps_few_files_open_and_reads_all(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.bin").write_text(f"content {number}")
    files = list_files(Request(str(tmp_path)), "x", (".bin",))
    reader = RecordReader(capacity=3)
    before = len(os.listdir("/dev/fd"))
    expected = [str(number).encode() for number in range(10)]

    for _ in range(2):
        assert [reader.read(file, 1, 8) for file in files] == expected
    assert len(os.listdir("/dev/fd")) == before + 3

    del reader
    assert len(os.listdir("/dev/fd")) == before
