"""``data prepare`` keeps the order of the source, and writes the same bytes with any number of processes."""

from __future__ import annotations

import errno
import gzip
import json
import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain import cli
from shardtrain.config import load
from shardtrain.data import build_dataset, sources
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.documents.read_documents import BadRows, RowStats, read_documents
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer
from shardtrain.data.prepared.shards import ShardTokenBuffer, verify
from shardtrain.tools.data import prepare, work_units
from shardtrain.utils.errors import ConfigError, DataError, StorageError


@pytest.fixture(autouse=True)
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make work units so small (2 KB) that small test files are split, flushed and read in several blocks."""
    monkeypatch.setattr(work_units, "UNIT_BYTES", 2000)
    monkeypatch.setattr(work_units, "_FLUSH_TOKENS", 700)
    monkeypatch.setattr(work_units, "_BLOCK_BYTES", 512)


def jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines. Strings are written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return path


def texts(count: int = 300, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [{"text": "x" * draw.randint(1, 90) + str(draw.random())} for _ in range(count)]


def arguments_for(path: Path, *more: str) -> list[str]:
    return ["--training.dataset", "jsonl", "--training.dataset_path", str(path), *more]


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()
    }


def in_memory(arguments: list[str]) -> MemoryTokenBuffer:
    """Return the documents that the same options yield when tokenized on the fly, for comparison."""
    config = load(None, arguments).config
    named = build_dataset.named_sources(config, config.training)[0]
    tokenizer = build_dataset.tokenizer_of(config)
    source = sources.find(named.source.dataset).open_source(
        build_dataset.request_for(config, named)
    )
    encoder = open_encoder(tokenizer, config.data, named.source)
    return MemoryTokenBuffer(
        read_documents(source, encoder, BadRows.of(config.data), RowStats()), tokenizer.vocab_size
    )


def assert_same(line: ShardTokenBuffer, memory: MemoryTokenBuffer) -> None:
    n = memory.num_tokens
    assert (line.num_tokens, line.num_documents) == (n, memory.num_documents)
    assert (line.tokens(0, n) == memory.tokens(0, n)).all()
    assert (line.learned(0, n) == memory.learned(0, n)).all()
    assert (line.document_starts() == memory.document_starts()).all()


ROW = st.one_of(
    st.builds(lambda text: json.dumps({"text": text}) + "\n", st.text(max_size=60)),
    st.just('{"text": ""}\n'),
    st.just("{broken\n"),
    st.just('{"other": 1}\n'),
)


@settings(max_examples=12)
@given(rows=st.lists(ROW, min_size=1, max_size=120), shard_tokens=st.integers(50, 5000))
def test_any_number_of_processes_writes_the_same_bytes(rows: list[str], shard_tokens: int) -> None:
    rows = ['{"text": "one that is read"}\n', *rows]
    with tempfile.TemporaryDirectory() as name:
        path = jsonl(Path(name) / "a.jsonl", rows)
        arguments = arguments_for(
            path, "--data.bad_rows", "skip", "--data.bad_rows_max_fraction", "1.0"
        )
        folders = []
        for processes in (1, 4):
            folders.append(Path(name) / f"by-{processes}")
            extra = ["--processes", str(processes), "--shard_tokens", str(shard_tokens)]
            assert prepare.main(["--output", str(folders[-1]), *extra, *arguments]) == 0

        assert contents(folders[0]) == contents(folders[1])

        shards = ShardTokenBuffer(folders[0])
        assert_same(shards, in_memory(arguments))
        for _, problems in verify(shards):
            assert not problems
        assert shards.index.tally["rows"] == len(rows)


def test_masks_are_kept(tmp_path: Path) -> None:
    rows = [
        {"prompt": f"{i}?" * (i % 7 + 1), "completion": "yes" * (i % 5 + 1)} for i in range(200)
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    arguments = arguments_for(path, "--data.format", "prompt_completion")
    prepare.main(
        ["--output", str(tmp_path / "o"), "--shard_tokens", "999", "--processes", "2", *arguments]
    )
    line = ShardTokenBuffer(tmp_path / "o")

    assert line.has_mask
    assert line.index.format == "prompt_completion"
    assert 0 < line.index.tally["learned"] < line.num_tokens
    assert_same(line, in_memory(arguments))


def test_compressed_files_are_separate_units(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(3):
        content = "".join(json.dumps(row) + "\n" for row in texts(100, number))
        (folder / f"{number}.jsonl.gz").write_bytes(gzip.compress(content.encode()))
    arguments = arguments_for(folder)
    prepare.main(["--output", str(tmp_path / "o"), "--processes", "4", *arguments])

    assert_same(ShardTokenBuffer(tmp_path / "o"), in_memory(arguments))

    note = "has 3 parts (compressed files, row groups) with one reader each, so 3 of 4 processes have work"
    assert note in capsys.readouterr().err


def test_every_source_of_a_mixture_gets_a_folder(tmp_path: Path) -> None:
    for name in ("web", "code"):
        jsonl(tmp_path / f"{name}.jsonl", texts(20, len(name)))
    config = tmp_path / "run.toml"
    config.write_text(
        "".join(
            f'[data.sources.{n}]\ndataset_path = "{tmp_path}/{n}.jsonl"\n' for n in ("web", "code")
        )
    )
    assert prepare.main([str(config), "--output", str(tmp_path / "o"), "--processes", "1"]) == 0
    assert (
        ShardTokenBuffer(tmp_path / "o" / "web").num_documents
        == ShardTokenBuffer(tmp_path / "o" / "code").num_documents
        == 20
    )
    with pytest.raises(ConfigError, match="name one of its folders: code, web"):
        ShardTokenBuffer(tmp_path / "o")


def test_the_last_line_summarizes_the_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*texts(30), {"text": ""}])
    prepare.main(["--output", str(tmp_path / "o"), "--processes", "1", *arguments_for(path)])
    lines = capsys.readouterr().out.splitlines()

    assert "30 documents" in lines[0]
    assert "MB/s" in lines[0]
    assert "tokens/s" in lines[0]
    assert "skipped 1 row:" in lines[1]
    assert "a.jsonl:31" in lines[1]


def test_a_finished_folder_is_not_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--output",
        str(tmp_path / "o"),
        "--processes",
        "1",
        *arguments_for(jsonl(tmp_path / "a.jsonl", texts(30))),
    ]
    prepare.main(arguments)
    before = contents(tmp_path / "o")
    capsys.readouterr()
    assert prepare.main(arguments) == 0
    assert "is prepared already: 30 documents" in capsys.readouterr().out
    assert contents(tmp_path / "o") == before


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "begun"])
@pytest.mark.parametrize(
    ("more", "match"),
    [
        (["--shard_tokens", "123"], "was prepared from shard_tokens .*, not 123"),
        (["--data.text_field", "body"], "was prepared from another encoder"),
        (["--data.max_row_bytes", "5000"], "was prepared from max_row_bytes 16777216, not 5000"),
        (["rewrite"], r"was prepared from another content of a\.jsonl"),
    ],
)
def test_a_folder_of_other_options_is_refused(
    tmp_path: Path, more: list[str], match: str, finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts(30))
    folder = tmp_path / "o"
    arguments = ["--output", str(folder), "--processes", "1", *arguments_for(path)]
    with monkeypatch.context() as patch:
        if not finished:
            patch.setattr(prepare.ShardWriter, "finish", lambda *_, **__: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                prepare.main(arguments)
        else:
            prepare.main(arguments)
    before = contents(folder)
    if more == ["rewrite"]:
        jsonl(path, texts(30, seed=1))
        more = []

    with pytest.raises(ConfigError, match=match) as caught:
        prepare.main([*arguments, *more])
    assert "\n" not in str(caught.value)
    assert contents(folder) == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts(30))
    with pytest.raises(
        ConfigError, match=r"--output=.* is not empty \(a\.jsonl\); name a new or empty folder"
    ):
        prepare.main(["--output", str(tmp_path), *arguments_for(path)])
    with pytest.raises(ConfigError, match="is a file, not a folder; name another folder"):
        prepare.main(["--output", str(path), *arguments_for(path)])
    assert path.exists()


def test_planted_links_are_replaced_and_linked_folders_refused(tmp_path: Path) -> None:
    """An attacker may have created a folder that looks like the output of an interrupted command."""
    arguments = arguments_for(jsonl(tmp_path / "a.jsonl", texts(30)))
    prepare.main(["--output", str(tmp_path / "sound"), "--processes", "1", *arguments])

    # Replace every file with a link to a precious file, which must not be overwritten. Links of .json files
    # point to a nonexistent file instead, because prepare reads these files before it writes.
    precious = tmp_path / "precious"
    precious.write_text("kept")
    planted = tmp_path / "planted"
    (planted / "unfinished").mkdir(parents=True)
    for name in [*contents(tmp_path / "sound"), "unfinished/lock", "unfinished/progress.json"]:
        is_read_first = name.endswith(".json")
        (planted / name).symlink_to(tmp_path / "absent" if is_read_first else precious)
    prepare.main(["--output", str(planted), "--processes", "1", *arguments])

    assert precious.read_text() == "kept"
    assert not (tmp_path / "absent").exists()
    assert contents(planted) == contents(tmp_path / "sound")
    assert not any(path.is_symlink() for path in planted.rglob("*"))

    # Replace the folder of unfinished work with a link.
    elsewhere = tmp_path / "elsewhere"
    linked = tmp_path / "linked"
    elsewhere.mkdir()
    linked.mkdir()
    (linked / "unfinished").symlink_to(elsewhere)

    with pytest.raises(StorageError, match=f"unfinished is a link to {elsewhere}"):
        prepare.main(["--output", str(linked), "--processes", "1", *arguments])
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ([], "--output is required; write --output FOLDER"),
        (["--output"], "--output has no value"),
        (["--output", "a", "--output", "b"], "--output is given twice"),
        (["--output", "a", "--processes", "0"], '--processes="0" must be a whole number above 0'),
        (
            ["--output", "a", "--shard_tokens=many"],
            '--shard_tokens="many" must be a whole number above 0',
        ),
        (["--output", "a", "--training.datset", "x"], "training.datset"),
        (
            ["--output", "a", "--training.dataset", "tokens", "--training.dataset_path", "x"],
            "is prepared already",
        ),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match) as caught:
        prepare.main(arguments)
    assert "\n" not in str(caught.value)


def test_help_needs_no_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "prepare", "--help"]) == 0
    assert "--shard_tokens" in capsys.readouterr().out


def bad_rows(tmp_path: Path) -> Path:
    rows: list[Any] = texts(300)
    for place in (57, 123, 250):
        rows[place] = "{broken\n"
    return jsonl(tmp_path / "a.jsonl", rows)


@pytest.mark.parametrize("processes", ["1", "2", "4"])
def test_the_first_bad_row_of_the_source_stops_it(tmp_path: Path, processes: str) -> None:
    """Report the first bad row even if another process has already found a later one."""
    arguments = [
        "--output",
        str(tmp_path / "o"),
        "--processes",
        processes,
        *arguments_for(bad_rows(tmp_path)),
    ]

    with pytest.raises(DataError, match=r"a\.jsonl:58: .*data\.bad_rows=.skip.") as caught:
        prepare.main(arguments)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="is not completely prepared"):
        ShardTokenBuffer(tmp_path / "o")


@pytest.mark.parametrize("processes", ["1", "2", "4"])
def test_too_many_bad_rows_stop_it_with_the_same_count(tmp_path: Path, processes: str) -> None:
    arguments = [
        "--output",
        str(tmp_path / "o"),
        "--processes",
        processes,
        *arguments_for(bad_rows(tmp_path)),
    ]
    arguments += ["--data.bad_rows", "skip", "--data.bad_rows_max_fraction"]

    with pytest.raises(
        DataError, match=r"has 3 bad of 300 rows, more than .*a\.jsonl:58, .*a\.jsonl:124, .*251"
    ):
        prepare.main([*arguments, "0.005"])
    assert prepare.main([*arguments, "0.01"]) == 0  # continues with the finished units
    assert ShardTokenBuffer(tmp_path / "o").num_documents == 297


def test_a_source_without_usable_rows_stops_it(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [{"text": ""}] * 3)
    with pytest.raises(DataError, match="has 0 usable of 3 rows: 3 rows: "):
        prepare.main(["--output", str(tmp_path / "o"), "--processes", "1", *arguments_for(path)])


def test_a_file_that_changes_during_the_run_stops_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts(50))
    append = work_units.append_unit

    def append_and_touch(*arguments: Any) -> None:
        append(*arguments)
        os.utime(path, ns=(1, 1))

    monkeypatch.setattr(work_units, "append_unit", append_and_touch)

    with pytest.raises(ConfigError, match=r"a\.jsonl.* was changed"):
        prepare.main(["--output", str(tmp_path / "o"), "--processes", "1", *arguments_for(path)])
    assert not (tmp_path / "o" / "index.json").exists()


def test_a_folder_that_cannot_be_created_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts(3))

    def fail(*arguments: object, **options: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "folder")

    monkeypatch.setattr(Path, "mkdir", fail)

    with pytest.raises(
        StorageError,
        match="cannot write .*; the command continues where it stopped when it is repeated",
    ):
        prepare.main(["--output", str(tmp_path / "folder"), *arguments_for(path)])
