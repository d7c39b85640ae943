"""Fit tables of prepared shards: the same rows as fitting at start, and a damaged table is rejected."""

from __future__ import annotations

import numpy as np
import pytest

from shardtrain.data.packing import fit_table, fitted
from shardtrain.data.packing.fit_table import FitTableWriter
from shardtrain.data.packing.fitted import pack, table_of
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.prepared.shard_writer import ShardWriter
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.tools.data import prepare
from shardtrain.tools.data.data_command import main
from shardtrain.utils.errors import ConfigError

PACKINGS = [
    Packing(16, kind, masked=True, long_documents=long)
    for kind in ("first_fit", "best_fit", "padded")
    for long in ("split", "cut", "drop")
]
COUNTS = ("num_rows", "num_targets", "cut", "dropped", "single")


@pytest.fixture
def line(tmp_path, monkeypatch):
    """Forty documents in blocks of six. Some have one token, some are longer than a row."""
    monkeypatch.setattr(fitted, "BLOCK_DOCUMENTS", 6)
    lengths = np.random.default_rng(0).integers(1, 40, 40)
    writer = ShardWriter(tmp_path / "shards", 60_000, 200)
    writer.add_documents(lengths)
    writer.add_tokens(np.arange(lengths.sum(), dtype=np.int32))
    writer.finish(tokenizer="0" * 64, tokenizer_name="bytes")
    return ShardTokenBuffer(tmp_path / "shards")


def write_table(line, packing):
    writer = FitTableWriter(
        line.folder, packing, line.fingerprint, fitted.BLOCK_DOCUMENTS, fitted.num_blocks(line)
    )
    for block in range(fitted.num_blocks(line)):
        fit = fitted.fit_block(line, block, packing)
        counts = {name: getattr(fit, name) for name in COUNTS}
        writer.add([(counts, fit.to_bytes())])
    writer.finish()
    return line.folder / fit_table.table_name(packing)


def rows_of(rows, packing):
    out = PackedSequences(rows.num_rows, packing)
    for row in np.random.default_rng(1).permutation(rows.num_rows).tolist():
        rows.write(row, out, row)
    return out


@pytest.mark.parametrize("packing", PACKINGS, ids=lambda p: f"{p.kind}-{p.long_documents}")
def test_table_yields_the_same_rows_as_fitting_at_start(line, packing):
    at_start = pack(line, packing)
    assert table_of(line, packing, option="o") is None

    write_table(line, packing)
    by_table = pack(line, packing, table_of(line, packing, option="o"))
    for name in COUNTS:
        assert getattr(by_table, name) == getattr(at_start, name), name

    rows_at_start = rows_of(at_start, packing)
    rows_by_table = rows_of(by_table, packing)
    for name in ("tokens_BT", "targets_BT", "positions_BT", "documents_BT", "lengths_B"):
        assert np.array_equal(getattr(rows_at_start, name), getattr(rows_by_table, name)), name


def test_every_changed_byte_of_a_table_is_rejected(line):
    packing = PACKINGS[0]
    path = write_table(line, packing)
    intact = path.read_bytes()
    for place in [*range(0, 4096, 13), *range(4096, len(intact))]:
        flipped_bit = bytes([intact[place] ^ 1])
        path.write_bytes(intact[:place] + flipped_bit + intact[place + 1 :])
        with pytest.raises(ConfigError, match="data prepare") as refused:
            rows_of(pack(line, packing, table_of(line, packing, "training.dataset_path")), packing)
        assert str(path) in str(refused.value)

    # A table that is cut
    path.write_bytes(intact[:-1])
    with pytest.raises(ConfigError, match="is damaged in block 6"):
        rows_of(pack(line, packing, table_of(line, packing, "o")), packing)


def test_table_of_different_tokens_is_not_used(line):
    packing = PACKINGS[0]
    write_table(line, packing)
    line.fingerprint = "f" * 64
    assert table_of(line, packing, "o") is None


def test_too_many_documents_without_a_table_are_rejected_with_the_command_that_creates_it(
    line, monkeypatch
):
    monkeypatch.setattr(fitted, "MAX_DOCUMENTS", 39)
    with pytest.raises(
        ConfigError,
        match=r'has 40 documents without a table.*more than 39 .*"shardtrain data prepare"',
    ):
        table_of(line, PACKINGS[0], "o")

    write_table(line, PACKINGS[0])
    assert table_of(line, PACKINGS[0], "o") is not None

    padded = next(packing for packing in PACKINGS if packing.kind == "padded")
    assert table_of(line, padded, "o") is None, "padded rows need no table"


def test_prepare_creates_a_table_for_each_sequence_length(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(prepare, "FIT_DOCUMENTS", 3)
    (tmp_path / "a.jsonl").write_text('{"text": "one two three"}\n{"text": "four"}\n' * 3)
    arguments = ["prepare", "--training.dataset", "jsonl"]
    arguments += ["--training.dataset_path", str(tmp_path / "a.jsonl")]
    arguments += ["--data.packing", "first_fit", "--output", str(tmp_path / "out")]
    arguments += ["--processes", "2"]
    for length in (32, 64):
        assert main([*arguments, "--training.seq_len", str(length)]) == 0
        assert f"rows of {length} (first_fit)" in capsys.readouterr().out

        # The prepared table must give the rows that a run without it computes at its start.
        line = ShardTokenBuffer(tmp_path / "out")
        packing = Packing(length, "first_fit")
        table = table_of(line, packing, "o")
        assert table is not None
        by_table = rows_of(pack(line, packing, table), packing)
        at_start = rows_of(pack(line, packing), packing)
        assert np.array_equal(by_table.tokens_BT, at_start.tokens_BT)

    assert main([*arguments, "--training.seq_len", "64"]) == 0
    assert "fitted" not in capsys.readouterr().out, "the existing table must be used"
