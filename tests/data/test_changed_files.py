"""Files changed, replaced or removed during a run stop it with an error that names them."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace

import pytest

from shardtrain.config.schema import Config, Data, DataLoaderOptions, Training
from shardtrain.data import open_dataloader
from shardtrain.tools.data import prepare
from shardtrain.utils.errors import ConfigError

TEXTS = [f"{number} bottles on the wall, " * 8 for number in range(200)]


def as_jsonl():
    return "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def make(kind, folder):
    """Create a dataset. Return its options and one of its files."""
    plain = folder / "a.jsonl"
    plain.write_bytes(as_jsonl())
    if kind == "stream":
        return (
            {"dataset": "jsonl", "dataset_path": str(plain)},
            Data(mode="stream", readers=4),
            plain,
        )
    if kind == "compressed stream":
        packed = folder / "b.jsonl.gz"
        packed.write_bytes(gzip.compress(as_jsonl()))
        return {"dataset": "jsonl", "dataset_path": str(packed)}, Data(mode="stream"), packed
    arguments = [
        "--training.dataset",
        "jsonl",
        "--training.dataset_path",
        str(plain),
        "--shard_tokens",
        "20000",
    ]
    assert (
        prepare.main(
            [*arguments, "--model.hf_assets_path", "bytes", "--output", str(folder / "shards")]
        )
        == 0
    )
    tokens = {"dataset": "tokens", "dataset_path": str(folder / "shards")}
    return tokens, Data(), folder / "shards" / "tokens-00001.bin"


def edit(file):
    data = bytearray(file.read_bytes())
    data[1000:1004] = b"....".translate(bytes(255 - i for i in range(256)))
    with file.open("r+b") as opened:  # in place, visible through open descriptors
        opened.write(data)
    # an edit after the start of the run has a later time
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1_000_000))


def replace_by_a_copy(file):
    copy = file.with_suffix(".copy")
    copy.write_bytes(file.read_bytes())
    copy.replace(file)


def rename(file):
    file.rename(file.with_suffix(".gone"))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("change", [edit, replace_by_a_copy, rename, os.remove])
@pytest.mark.parametrize("kind", ["stream", "compressed stream", "tokens"])
def test_file_changed_during_a_run_stops_it(kind, change, workers, tmp_path):
    options, data, file = make(kind, tmp_path)
    loader = DataLoaderOptions(num_workers=workers)
    training = Training(
        seq_len=32, local_batch_size=4, on_data_end="repeat", dataloader=loader, **options
    )
    one_rank = {"batch_rank": 0, "num_batch_ranks": 1, "accumulation": 1}
    stream = open_dataloader(Config(training=training, data=data), **one_rank)
    next(stream)
    change(file)

    with pytest.raises(ConfigError) as caught:
        for _ in range(40):
            next(stream)
    message = str(caught.value)
    assert str(file) in message
    assert "\n" not in message
    assert caught.value.exit_code == 2

    # Without the file, starting or resuming a run fails too.
    if change not in (replace_by_a_copy, edit):
        reopened = replace(training, dataloader=DataLoaderOptions())
        with pytest.raises(ConfigError):
            open_dataloader(Config(training=reopened, data=data), **one_rank)
