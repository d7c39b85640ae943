"""Streamed datasets: each document once per epoch, and small cursors restore any position."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain.data.documents.encoded import Document
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.sources import BadRow
from shardtrain.data.streaming.stream import StreamFeed, rows_of_reader
from shardtrain.ops.cross_entropy import IGNORE
from shardtrain.utils.errors import ConfigError, DataError


class Letters:
    """Encoder for rows that already contain a list of tokens."""

    fingerprint = "letters"

    def encode(self, rows):
        return [
            Document(np.array(row["tokens"], np.int32)) if row["tokens"] else BadRow("empty", True)
            for row in rows
        ]


class ListTable:
    total_bytes = None

    def __init__(self, rows):
        self._rows, self.num_rows = rows, len(rows)

    def row(self, index):
        return self._rows[index]

    def place(self, index):
        return f"list:{index + 1}"

    def files(self):
        return {"list": str(len(self._rows))}

    def check_unchanged(self):
        return None


class ListShards:
    total_bytes = None

    def __init__(self, shards):
        self._shards, self.num_shards = shards, len(shards)

    def rows(self, shard, start=0):
        return iter(self._shards[shard][start:])

    def shard_place(self, shard, number):
        return f"shard{shard}:{number + 1}"

    def files(self):
        return {"shards": str(self.num_shards)}

    def check_unchanged(self):
        return None


def rows_with(lengths):
    rows = []
    token = 1
    for length in lengths:
        rows.append({"tokens": list(range(token, token + length))})
        token += length
    return rows


def table(lengths):
    return ListTable(rows_with(lengths))


def shards(lengths, count):
    rows = rows_with(lengths)
    return ListShards([rows[index::count] for index in range(count)])


def feed_of(source, packing=None, readers=4, seed=7, passes=1):
    options = {
        "readers": readers,
        "seed": seed,
        "passes": passes,
        "vocab_size": 60_000,
        "name": "rows",
    }
    return StreamFeed(source, Letters(), packing or Packing(8), **options)


def take(feed, start, stop):
    """Return rows ``start`` to ``stop - 1`` of a feed as (sample id, tokens, targets, moved cursor)."""
    result = []
    for k in range(start, stop):
        out = PackedSequences(1, feed.packing)
        sample, moved = feed.write(k, out, 0)
        result.append((sample, out.tokens_BT[0].tolist(), out.targets_BT[0].tolist(), moved))
    return result


@pytest.mark.parametrize(
    ("packing", "fates"),
    [
        pytest.param(Packing(8), [], id="concat"),
        pytest.param(
            Packing(8, kind="first_fit", masked=True, long_documents="drop"),
            ["are longer than 9 tokens and are skipped"],
            id="first_fit",
        ),
        pytest.param(
            Packing(8, kind="padded", long_documents="cut"),
            ["are cut to 9 tokens"],
            id="padded",
        ),
    ],
)
def test_cut_and_skipped_documents_are_counted(packing, fates, caplog):
    """Each count is logged at powers of two. With concatenation, a single token is a target, so it is no warning."""
    caplog.set_level("INFO")
    lengths = [1, 0, 4, 1, 12, 0, 1, 0, 5, 12, 0, 1, 12, 1]
    feed = feed_of(table(lengths), packing, readers=1)
    take(feed, 0, len(lengths))
    messages = [record.getMessage() for record in caplog.records]

    # Cut documents are counted once per block, and all documents are one block. Empty rows are
    # counted one by one.
    expected = [f"dataset rows: {count} documents so far are skipped: empty" for count in (1, 2, 4)]
    expected += [f"dataset rows: 3 documents so far {fate}" for fate in fates]
    if packing.kind != "concat":
        expected.append("dataset rows: 5 documents so far have a single token, and so no target")
    assert messages == expected


sources = st.builds(
    lambda lengths, count: shards(lengths, count) if count else table(lengths),
    st.lists(st.integers(0, 30), min_size=6, max_size=40).filter(lambda values: sum(values) > 4),
    st.sampled_from([0, 0, 1, 3]),
)
packings = st.sampled_from(
    [
        Packing(8),
        Packing(5, masked=True),
        Packing(9, kind="first_fit", masked=True),
        Packing(9, kind="best_fit"),
        Packing(7, kind="padded"),
    ]
)


@settings(max_examples=40)
@given(sources, packings, st.integers(1, 6))
def test_one_pass_reads_every_token_once(source, packing, readers):
    feed = feed_of(source, packing, readers)
    counts_of_tokens = Counter()
    counts_of_targets = Counter()
    k = 0
    while k < 10_000:
        round_of_readers = take(feed, k, k + feed.num_readers)
        k += feed.num_readers
        if all(sample == -1 for sample, *_ in round_of_readers):
            break
        for sample, tokens, targets, _ in round_of_readers:
            if sample == -1:
                assert set(targets) == {IGNORE}
                continue
            for token, target in zip(tokens, targets, strict=True):
                if target != IGNORE:
                    counts_of_tokens[token] += 1
                    counts_of_targets[target] += 1

    rows = source._rows if isinstance(source, ListTable) else itertools.chain(*source._shards)
    # with concatenation, the first token of a document is a target too, except for the first document of each reader
    for row in rows:
        for token in row["tokens"][1:]:
            assert counts_of_targets[token] == 1
    assert max(counts_of_targets.values()) == 1
    assert max(counts_of_tokens.values()) <= 1


def without_cursors(rows):
    """Return the sample, tokens and targets of each row."""
    return [row[:3] for row in rows]


@settings(max_examples=40)
@given(sources, packings, st.integers(1, 6), st.integers(0, 40), st.booleans())
def test_cursors_restore_any_row(source, packing, readers, stop, repeat):
    options = {"packing": packing, "readers": readers, "passes": None if repeat else 1}
    straight = take(feed_of(source, **options), 0, stop + 20)
    expected = without_cursors(straight[stop:])

    # Resume from the last cursor of each reader.
    cursors = np.zeros((feed_of(source, **options).num_readers, 3), dtype=np.int64)
    for *_, moved in straight[:stop]:
        cursors[moved.reader] = moved.cursor
    resumed = feed_of(source, **options)
    resumed.seek(stop, cursors)
    assert without_cursors(take(resumed, stop, stop + 20)) == expected

    # Without cursors, the readers repeat the rows before.
    replayed = feed_of(source, **options)
    replayed.seek(stop, None)
    assert without_cursors(take(replayed, stop, stop + 20)) == expected


@settings(max_examples=30)
@given(sources, st.integers(1, 6), st.integers(1, 5))
def test_row_does_not_depend_on_the_feed_that_reads_it(source, readers, workers):
    straight = take(feed_of(source, readers=readers, passes=None), 0, 30)
    for worker in range(workers):
        feed_of_worker = feed_of(source, readers=readers, passes=None)
        for k in range(worker, 30, workers):
            assert take(feed_of_worker, k, k + 1)[0][:3] == straight[k][:3]


def test_epochs_and_seeds_have_different_orders():
    feed = feed_of(table([9] * 12), Packing(8, kind="padded"), readers=1, passes=None)
    rows = take(feed, 0, 24)
    first_tokens = [tokens[0] for _, tokens, *_ in rows]
    epochs = first_tokens[:12], first_tokens[12:]

    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]

    other_seed = feed_of(table([9] * 12), Packing(8, kind="padded"), readers=1, seed=8)
    assert [row[1][0] for row in take(other_seed, 0, 12)] != epochs[0]

    plain = feed_of(table([9] * 12), Packing(8, kind="padded"), readers=1, seed=None)
    assert [row[1][0] for row in take(plain, 0, 12)] == list(range(1, 109, 9))


@given(st.integers(0, 500), st.integers(1, 40))
def test_rows_of_all_readers_add_up(rows, readers):
    assert sum(rows_of_reader(rows, reader, readers) for reader in range(readers)) == rows


@pytest.mark.parametrize(
    "source",
    [
        ListTable([{"tokens": []}] * 5),
        ListShards([[{"tokens": []}], [{"tokens": []}]]),
        ListShards([[], []]),
    ],
)
def test_readers_without_documents_end_with_a_warning(source, caplog):
    rows = take(feed_of(source, readers=2, passes=None), 0, 4)
    assert [row[0] for row in rows] == [-1] * 4
    assert "reader 0 of 2 found no" in caplog.text
    assert "reader 1 of 2 found no" in caplog.text


def test_reader_without_documents_does_not_stop_others():
    shard = [{"tokens": list(range(1, 10))}]
    rows = take(feed_of(ListShards([shard, []]), Packing(8), readers=2, passes=None), 0, 6)
    assert [row[0] for row in rows] == [0, -1, 2, -1, 4, -1]


def test_bad_row_is_reported_with_its_place():
    rows = rows_with([9, 9, 9])
    rows[1] = BadRow("is not JSON")
    with pytest.raises(
        DataError,
        match='list:2: is not JSON; correct or remove the row, or run "shardtrain data prepare"',
    ):
        take(feed_of(ListTable(rows), readers=1), 0, 4)
    with pytest.raises(DataError, match="shard1:1: is not JSON"):
        take(feed_of(ListShards([[rows[0]], [rows[1]]]), readers=2), 0, 2)


@settings(max_examples=20)
@given(
    st.lists(st.integers(2, 9), min_size=6, max_size=40),
    st.sampled_from([0, 3]),
    st.integers(0, 30),
)
def test_rows_of_an_epoch_do_not_depend_on_a_following_epoch(lengths, count, stop):
    packing = Packing(9, kind="first_fit", masked=True)
    source = shards(lengths, count) if count else table(lengths)
    ending = feed_of(source, packing, readers=2, passes=1)
    repeating = feed_of(source, packing, readers=2, passes=None)
    rows_of_one_pass = take(ending, 0, 60)
    sample_ids = {row[0] for row in rows_of_one_pass if row[0] >= 0}
    expected = {row[0]: row[:3] for row in take(repeating, 0, 60)}

    rows_of_samples = [row for row in rows_of_one_pass if row[0] in sample_ids]
    assert without_cursors(rows_of_samples) == [expected[k] for k in sorted(sample_ids)]

    # A finished run that is continued with more passes resumes from cursors written without a next
    # epoch.
    cursors = np.zeros((2, 3), dtype=np.int64)
    for *_, moved in rows_of_one_pass[:stop]:
        cursors[moved.reader] = moved.cursor
    resumed = feed_of(source, packing, readers=2, passes=None)
    resumed.seek(stop, cursors)

    for row in take(resumed, stop, 60):
        if row[0] in sample_ids:
            assert row[:3] == expected[row[0]]


def test_reader_whose_documents_never_fit_ends_with_a_warning(caplog):
    source = ListShards([rows_with([40]), rows_with([5, 5])])
    packing = Packing(8, kind="first_fit", masked=True, long_documents="drop")
    rows = take(feed_of(source, packing, readers=2, passes=None), 0, 6)

    assert [row[0] for row in rows] == [-1, 1, -1, 3, -1, 5]
    assert caplog.text.count("found no document that fits") == 1


def test_bad_row_in_a_changed_file_is_reported_as_the_changed_file():
    class Changed(ListTable):
        def check_unchanged(self):
            raise ConfigError("a.jsonl was changed")

    with pytest.raises(ConfigError, match=r"a\.jsonl was changed"):
        take(feed_of(Changed([BadRow("is not JSON")]), readers=1), 0, 1)


@pytest.mark.parametrize("packing", [Packing(8), Packing(8, kind="padded")])
def test_row_reports_its_epoch(packing):
    rows = take(feed_of(table([9] * 6), packing, readers=2, passes=None), 0, 24)
    epochs = [row[3].epoch for row in rows]
    assert (epochs[0], sorted(set(epochs)), sorted(epochs)) == (
        0,
        list(range(max(epochs) + 1)),
        epochs,
    )
    assert max(epochs) == 3
