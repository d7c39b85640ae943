"""Data order depends only on the seed and the samples consumed, not on ranks, workers, mesh or resumes."""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiers import cases

from shardtrain.config.schema import (
    Config,
    Data,
    DataLoaderOptions,
    DataSource,
    DataStage,
    Debug,
    Training,
)
from shardtrain.data import IGNORE, open_dataloader
from shardtrain.tools.data import prepare

GLOBAL_BATCH = 8
SEQ_LEN = 32
STEPS = 9
TEXTS = ["".join(random.Random(i).choices("abcdefgh \n", k=20 + 37 * i % 160)) for i in range(150)]


def write(folder, name, data):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return str(folder / name)


def jsonl(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def make_jsonl(folder):
    return {"dataset": "jsonl", "dataset_path": write(folder, "a.jsonl", jsonl(TEXTS))}


def make_compressed(folder):
    for index in range(5):
        write(folder, f"gz/{index}.jsonl.gz", gzip.compress(jsonl(TEXTS[index::5])))
    return {"dataset": "jsonl", "dataset_path": str(folder / "gz")}


def make_text(folder):
    for index, text in enumerate(TEXTS):
        write(folder, f"texts/{index:03}.txt", text.encode())
    return {"dataset": "text", "dataset_path": str(folder / "texts")}


def make_tsv(folder):
    rows = "text\tlabel\n" + "".join(f"{text!r}\t1\n" for text in TEXTS)
    return {"dataset": "tsv", "dataset_path": write(folder, "a.tsv", rows.encode())}


def make_parquet(folder):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"text": TEXTS}), folder / "a.parquet", row_group_size=20)
    return {"dataset": "parquet", "dataset_path": str(folder / "a.parquet")}


def make_huggingface(folder):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(str(folder / "hf"))
    return {"dataset": "huggingface", "dataset_path": str(folder / "hf")}


def make_tokens(folder):
    make_jsonl(folder)
    arguments = [
        "--training.dataset",
        "jsonl",
        "--training.dataset_path",
        str(folder / "a.jsonl"),
        "--shard_tokens",
        "3000",
    ]
    assert (
        prepare.main(
            [*arguments, "--model.hf_assets_path", "bytes", "--output", str(folder / "shards")]
        )
        == 0
    )
    return {"dataset": "tokens", "dataset_path": str(folder / "shards")}


def single(make):
    return lambda folder: (make(folder), Data())


def streamed(make, **options):
    return lambda folder: (make(folder), Data(mode="stream", readers=8, **options))


def mixed(**options):
    def build(folder):
        sources = {
            "shards": DataSource(**make_tokens(folder), weight=0.5),
            "parquet": DataSource(**make_parquet(folder), weight=0.2),
            "files": DataSource(**make_text(folder), weight=0.3),
        }
        stages = [
            DataStage(until_tokens=700, weights={"shards": 1.0}),
            DataStage(weights={"files": 0.4, "parquet": 0.6}),
        ]
        return {}, Data(sources=sources, stages=stages, readers=4, **options)

    return build


KINDS = {
    "jsonl": single(make_jsonl),
    "text": single(make_text),
    "tsv": single(make_tsv),
    "parquet": single(make_parquet),
    "tokens": single(make_tokens),
    "huggingface": single(make_huggingface),
    "python_stdlib": single(lambda folder: {"dataset": "python_stdlib"}),
    "jsonl as a stream": streamed(make_jsonl),
    "compressed jsonl as a stream": streamed(make_compressed),
    "parquet as a stream": streamed(make_parquet),
    "huggingface as a stream": streamed(make_huggingface, streaming=True),
    "stream, documents fitted and masked": streamed(make_jsonl, packing="first_fit"),
    "documents fitted and masked": lambda folder: (make_jsonl(folder), Data(packing="first_fit")),
    "documents in the fullest rows": lambda folder: (make_jsonl(folder), Data(packing="best_fit")),
    "one document per row": lambda folder: (
        make_jsonl(folder),
        Data(packing="padded", long_documents="cut"),
    ),
    "mixture in stages": mixed(),
    "mixture with streams": mixed(mode="stream"),
}


def config_of(kind, folder):
    training, data = KINDS[kind](folder)
    return Config(
        training=Training(seq_len=SEQ_LEN, on_data_end="repeat", **training),
        data=data,
        debug=Debug(seed=11),
    )


def open_ranks(config, ranks, workers, samples_consumed, cursors):
    # accumulation changes with the ranks, because the global batch is fixed
    accumulation = 2 if ranks == 2 else 1
    local = GLOBAL_BATCH // ranks // accumulation
    training = replace(
        config.training, local_batch_size=local, dataloader=DataLoaderOptions(num_workers=workers)
    )
    options = {"num_batch_ranks": ranks, "accumulation": accumulation}
    streams = [
        open_dataloader(replace(config, training=training), batch_rank=rank, **options)
        for rank in range(ranks)
    ]
    for stream in streams:
        stream.seek(samples_consumed, cursors)
    return streams, accumulation


def rows_of(batch):
    for sample, tokens, targets in zip(
        batch.sample_ids_B.tolist(), batch.tokens_BT, batch.targets_BT, strict=True
    ):
        yield (
            sample,
            hashlib.sha256(torch.stack((tokens, targets)).numpy().tobytes()).hexdigest()[:16],
        )


def sequence(config, plan, workers):
    """Return rows in training order, and the sum of their hashes.

    ``plan`` lists (ranks, steps) for each resume, or (ranks, steps, workers) to override ``workers``.
    """
    result = []
    order_hash = 0
    samples = 0
    cursors = None
    for ranks, steps, *own_workers in plan:
        streams, accumulation = open_ranks(
            config, ranks, *(own_workers or [workers]), samples, cursors
        )
        for _ in range(steps):
            for stream in streams:
                for _ in range(accumulation):
                    result += rows_of(next(stream))
                order_hash += stream.step_hash
        samples = streams[0].samples_consumed
        # like the trainer, merge the cursors that any rank has of a reader
        merged = np.max([stream.cursors() for stream in streams], axis=0)
        assert (merged >= 0).all()
        cursors = merged
    return result, order_hash % 2**64


FIRST = ("tokens", "jsonl as a stream", "documents fitted and masked", "mixture with streams")


@pytest.mark.parametrize(
    "kind", cases(FIRST, nightly=[kind for kind in KINDS if kind not in FIRST])
)
def test_ranks_workers_and_resumes_change_no_samples_or_tokens(kind, tmp_path):
    config = config_of(kind, tmp_path)
    expected = sequence(config, [(1, STEPS)], workers=0)
    assert len({sample for sample, _ in expected[0]}) > STEPS
    for ranks in (1, 2, 4):
        for workers in (0, 2) if ranks < 4 else (0,):
            assert sequence(config, [(ranks, STEPS)], workers) == expected, (ranks, workers)

    for workers in (0, 2):
        resumed = [(2, 2), (4, 1), (1, 3), (2, 3)]
        assert sequence(config, resumed, workers) == expected, workers
    other_workers = [(1, 3, 2), (1, 2, 8), (1, 4, 2)]

    assert sequence(config, other_workers, workers=0) == expected


def test_seed_changes_the_order_and_its_hash(tmp_path):
    config = config_of("jsonl", tmp_path)
    first = sequence(config, [(1, 4)], 0)
    other_sequence = sequence(replace(config, debug=Debug(seed=12)), [(1, 4)], 0)

    assert first[0] != other_sequence[0]
    assert first[1] != other_sequence[1]


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "mixture" not in kind and kind != "python_stdlib"]
)
def test_every_token_is_a_target_once_per_epoch_on_any_number_of_ranks(kind, tmp_path):
    config = config_of(kind, tmp_path)
    training = replace(config.training, on_data_end="stop", local_batch_size=3)
    config = replace(config, training=training)
    counted = {}
    for ranks in (1, 3):
        streams = []
        for rank in range(ranks):
            streams.append(
                open_dataloader(config, batch_rank=rank, num_batch_ranks=ranks, accumulation=1)
            )
        digests = {}
        num_targets = 0
        num_empty = 0
        while not streams[0].has_unknown_end or num_empty < streams[0].num_readers:
            try:
                batches = [next(stream) for stream in streams]
            except StopIteration:
                break
            # like the trainer: the data ends when no reader has another row
            is_empty = all(batch.num_rows == 0 for batch in batches)
            num_empty = num_empty + streams[0].global_batch if is_empty else 0
            for batch in batches:
                for (sample, digest), targets in zip(rows_of(batch), batch.targets_BT, strict=True):
                    assert sample == -1 or sample not in digests
                    digests[sample] = digest
                    num_targets += int((targets != IGNORE).sum())
        digests.pop(-1, None)
        counted[ranks] = digests, num_targets

    assert counted[1] == counted[3]
