"""Cached tokens equal freshly computed ones, or the cache is not used."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtrain.config.schema import Config, Data, DataSource, Model, Training
from shardtrain.data import build_dataset, file_hashes
from shardtrain.data.documents import token_cache
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer

HOUR_NS = 3600 * 10**9


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a temporary cache folder, and cache even datasets that tokenize quickly."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "_MIN_SECONDS", 0.0)
    # Do not wait after a file change.
    monkeypatch.setattr(file_hashes, "SETTLED_SECONDS", -1.0)
    return tmp_path / "cache/shardtrain/tokens"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(
            json.dumps({"text": f"row {number} " * (number % 7 + 1)}) + "\n"
            for number in range(200)
        )
    )
    return path


class Count:
    """Count how often a dataset was tokenized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = 0
        original = build_dataset._read

        def read(*arguments: Any) -> Any:
            self.times += 1
            return original(*arguments)

        monkeypatch.setattr(build_dataset, "_read", read)


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> Count:
    return Count(monkeypatch)


def opened(file: Path, tokenizer: str = "bytes", **data: Any) -> MemoryTokenBuffer:
    """Open a dataset with one file and return its token buffer."""
    training = Training(dataset="jsonl", dataset_path=str(file), seq_len=16)
    config = Config(training=training, data=Data(**data), model=Model(hf_assets_path=tokenizer))
    (feed,) = build_dataset.open_data(config, training, shuffle=True, loop=None).feeds
    assert isinstance(feed._tokens, MemoryTokenBuffer)  # type: ignore[attr-defined]
    return feed._tokens  # type: ignore[attr-defined]


def test_cached_tokens_equal_computed_ones(
    file: Path, tokenized: Count, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first = opened(file)
    assert (tokenized.times, len(list(own_cache.iterdir()))) == (1, 1)

    second = opened(file)
    assert tokenized.times == 1
    assert f"dataset jsonl: tokens from the cache in {own_cache}" in caplog.text
    assert first.fingerprint == second.fingerprint
    assert np.array_equal(first.tokens(0, first.num_tokens), second.tokens(0, second.num_tokens))
    assert np.array_equal(first.document_starts(), second.document_starts())


def test_masks_and_skipped_rows_are_cached(
    tmp_path: Path, tokenized: Count, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [json.dumps({"prompt": f"question {n}", "completion": f"answer {n}"}) for n in range(99)]
    file.write_text("\n".join([*rows, "no JSON"]) + "\n")
    bad = {"format": "prompt_completion", "bad_rows": "skip", "bad_rows_max_fraction": 0.1}
    first = opened(file, **bad)
    caplog.clear()
    second = opened(file, **bad)

    assert tokenized.times == 1
    assert "skipped 1 row: " in caplog.text
    assert first.has_mask
    assert first.fingerprint == second.fingerprint


def test_changed_file_with_equal_size_and_time_is_tokenized_again(
    file: Path, tokenized: Count
) -> None:
    before = opened(file)
    status = file.stat()
    file.write_bytes(file.read_bytes().replace(b"row 7", b"row 8"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))

    assert (file.stat().st_size, file.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert opened(file).fingerprint != before.fingerprint
    assert tokenized.times == 2


@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
def test_changed_chat_template_with_equal_size_and_time_tokenizes_again(
    tmp_path: Path, tokenized: Count, form: str
) -> None:
    pytest.importorskip("jinja2")
    turns = [{"role": "user", "content": "Sea?"}, {"role": "assistant", "content": "Blue."}]
    row = {"messages": turns, "prompt": turns[:1], "completion": turns[1:]}
    rows = tmp_path / "chats.jsonl"
    rows.write_text(json.dumps(row) + "\n")
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }};{% endfor %}")
    before = opened(rows, format=form, chat_template=str(template))

    # Change one character of the template, and restore its times.
    status = template.stat()
    template.write_text(template.read_text().replace(";", "|"))
    os.utime(template, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = opened(rows, format=form, chat_template=str(template))

    assert tokenized.times == 2
    assert after.fingerprint != before.fingerprint
    assert bytes(after.tokens(0, after.num_tokens).tolist()) == b"Sea?|Blue.|"

    opened(rows, format=form, chat_template=str(template))
    assert tokenized.times == 2


def test_file_with_another_inode_is_tokenized_again(file: Path, tokenized: Count) -> None:
    opened(file)
    copy = file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes().replace(b"row 7", b"row 8"))
    os.utime(copy, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    copy.replace(file)
    opened(file)

    assert tokenized.times == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"tokenizer": "python_bpe"},
        {"text_field": "other"},
        {"add_bos": True},
        {"separator": "\n"},
        {"template": {"text": "{{ text }}!"}},
        {"max_row_bytes": 1000},
        {"bad_rows": "skip"},
        {"artefact_seconds": 31},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_every_option_that_changes_tokens_is_part_of_the_key(
    file: Path, tokenized: Count, changed: dict[str, Any]
) -> None:
    file.write_text(file.read_text().replace("}", ', "other": "text"}'))
    opened(file)
    opened(file, **changed)
    assert tokenized.times == 2


def test_options_applied_after_tokenization_are_not_part_of_the_key(
    file: Path, tokenized: Count
) -> None:
    """A search for the best packing, length or mixture reuses the tokens."""
    opened(file)
    opened(file, packing="first_fit", document_mask="on", long_documents="drop", readers=3)
    for weight in (1.0, 2.0):
        source = DataSource(dataset="jsonl", dataset_path=str(file), weight=weight)
        opened(file, sources={"only": source})
    longer = Training(dataset="jsonl", dataset_path=str(file), seq_len=64)
    model = Model(hf_assets_path="bytes")
    build_dataset.open_data(Config(training=longer, model=model), longer, shuffle=False, loop=True)

    assert tokenized.times == 1


def test_dataset_with_very_many_files_is_not_cached(
    file: Path, tokenized: Count, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_cache, "_MAX_FILES", 0)
    opened(file)
    assert tokenized.times == 1
    assert not own_cache.exists()


def test_changed_code_or_library_tokenizes_again(
    file: Path, tokenized: Count, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened(file)
    with monkeypatch.context() as changed:
        changed.setattr(token_cache.metadata, "version", lambda name: "0.0.1")
        opened(file)

    assert tokenized.times == 2

    monkeypatch.setattr(token_cache, "__file__", str(tmp_path / "data/documents/token_cache.py"))
    # code in any folder is part of the key
    for times, folder in enumerate(("documents", "tokenizers"), start=3):
        (tmp_path / "data" / folder).mkdir(parents=True)
        (tmp_path / "data" / folder / "code.py").write_text("# other code\n")
        opened(file)
        assert tokenized.times == times


def test_damaged_entry_is_tokenized_again(file: Path, tokenized: Count, own_cache: Path) -> None:
    first = opened(file)
    (entry,) = own_cache.iterdir()
    intact = entry.read_bytes()
    damages = [intact[:-1], intact[:70], b"", intact + b"0"]
    for place in range(0, len(intact), len(intact) // 20):
        flipped_bit = bytes([intact[place] ^ 4])
        damages.append(intact[:place] + flipped_bit + intact[place + 1 :])
    for number, damage in enumerate(damages):
        entry.write_bytes(damage)
        assert opened(file).fingerprint == first.fingerprint
        assert tokenized.times == number + 2, f"damage {number}"
        assert entry.read_bytes() == intact  # the damaged entry is replaced


def test_cached_ids_outside_the_vocabulary_are_rejected(
    file: Path, tokenized: Count, own_cache: Path
) -> None:
    """An entry with a valid checksum, written by another program."""
    opened(file)
    (entry,) = own_cache.iterdir()
    tokens = token_cache._read(entry, vocab_size=10**6)

    assert tokens is not None

    tokens["line"] = {**tokens["line"], "tokens": tokens["line"]["tokens"] + np.uint16(60_000)}
    token_cache._write(entry, tokens)
    opened(file)

    assert tokenized.times == 2


def test_recently_changed_files_are_not_cached(
    file: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as new:
        new.setattr(file_hashes, "SETTLED_SECONDS", 3600.0)
        opened(file)

    assert not own_cache.exists()

    original = build_dataset._read

    def read(*arguments: Any) -> Any:
        documents = original(*arguments)
        os.utime(file, ns=(0, file.stat().st_mtime_ns))  # changes its ctime during tokenization
        return documents

    monkeypatch.setattr(build_dataset, "_read", read)
    opened(file)
    assert not own_cache.exists()


def test_cache_can_be_disabled_and_never_stores_datasets_defined_by_code(
    file: Path, tmp_path: Path, tokenized: Count, own_cache: Path
) -> None:
    opened(file, cache_tokens=False)
    code = tmp_path / "mine.py"
    code.write_text(
        "from shardtrain.data.sources.jsonl import open_source as jsonl\n\n\n"
        "def open_source(request):\n    from dataclasses import replace\n"
        f"    return jsonl(replace(request, path={str(file)!r}))\n"
    )
    training = Training(dataset=str(code), seq_len=16)
    build_dataset.open_data(Config(training=training), training, shuffle=True, loop=None)

    assert tokenized.times == 2
    assert not own_cache.exists()


def test_entries_are_private_and_the_oldest_are_deleted_first(
    file: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(file)
    (first,) = own_cache.iterdir()
    assert (first.stat().st_mode & 0o777, own_cache.stat().st_mode & 0o777) == (0o600, 0o700)

    os.utime(first, ns=(0, first.stat().st_mtime_ns - HOUR_NS))
    # four entries of equal size fit; max_row_bytes changes the key but not the tokens
    monkeypatch.setattr(token_cache, "MAX_BYTES", 4 * first.stat().st_size)
    for number in range(5):
        opened(file, max_row_bytes=10_000 + number)

    assert not first.exists()
    assert sum(entry.stat().st_size for entry in own_cache.iterdir()) <= token_cache.MAX_BYTES

    monkeypatch.setattr(token_cache, "MAX_BYTES", 100)
    before = set(own_cache.iterdir())
    opened(file, separator="too large to be kept")

    assert set(own_cache.iterdir()) == before
    assert len(before) == 4


def test_unwritable_cache_folder_only_disables_caching(
    file: Path, tokenized: Count, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a file"))
    assert opened(file).fingerprint == opened(file).fingerprint
    assert tokenized.times == 2
