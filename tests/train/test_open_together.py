"""Ranks open data together: one lists the storage, all use its result, and files missing on a rank are an error."""

from __future__ import annotations

import builtins
import collections
import gzip
import io
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_tokenizers
import torch.distributed as dist
from ranks import run_ranks
from tiers import cases
from tiny import text_file

from shardtrain.config.schema import Config, Data, Training
from shardtrain.data import open_dataloader, shared_opening
from shardtrain.data.prepared.shard_writer import ShardWriter
from shardtrain.data.sources import Request, _data_files, _hub, every_row
from shardtrain.data.tokenizers.open_tokenizer import ByteTokenizer, open_tokenizer
from shardtrain.launch import failure
from shardtrain.train import open_together
from shardtrain.train.open_together import Together, together
from shardtrain.utils import activity
from shardtrain.utils.errors import ConfigError, DataError, ShardtrainError

COUNT = 12
LINE = '{{"text": "the words of document {}, which are some more than sixteen of them"}}\n'


def write(kind: str, folder: Path) -> dict[str, Any]:
    """Write a dataset into a folder, and return the options that select it."""
    folder.mkdir(parents=True)
    lines = []
    for number in range(COUNT):
        lines.append("".join(LINE.format(f"{number}-{line}") for line in range(6)))
    for number, text in enumerate(lines):
        path = folder / f"{number:03d}"
        if kind in ("jsonl", "many jsonl", "in memory"):
            path.with_suffix(".jsonl").write_text(text)
        elif kind == "arrays":
            path.with_suffix(".json").write_text(f"[{','.join(text.splitlines())}]")
        elif kind == "compressed":
            path.with_suffix(".jsonl.gz").write_bytes(gzip.compress(text.encode()))
        elif kind in ("tsv", "many tsv"):
            path.with_suffix(".tsv").write_text("text\tlabel\n" + text.replace("\n", "\t0\n"))
        elif kind == "text":
            path.with_suffix(".txt").write_text(text)
        elif kind == "parquet":
            _parquet(path, text)
    if kind == "tokens":
        writer = ShardWriter(folder / "shards", ByteTokenizer().vocab_size, 500)
        content = Path(text_file()).read_bytes()
        writer.add_documents(np.array([4000]))
        writer.add_tokens(np.frombuffer(content[:4000], dtype=np.uint8).astype(np.int64))
        writer.finish(tokenizer=ByteTokenizer.fingerprint, tokenizer_name="bytes")
        return {"dataset": "tokens", "dataset_path": str(folder / "shards")}
    datasets = {
        "arrays": "jsonl",
        "compressed": "jsonl",
        "many jsonl": "jsonl",
        "many tsv": "tsv",
        "in memory": "jsonl",
    }
    return {"dataset": datasets.get(kind, kind), "dataset_path": str(folder)}


def _parquet(path: Path, text: str) -> None:
    arrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.parquet")
    writer.write_table(
        arrow.table({"text": text.splitlines()}), path.with_suffix(".parquet"), row_group_size=4
    )


def config_of(options: dict[str, Any], mode: Any = "stream") -> Config:
    model = {"hf_assets_path": "bytes"}
    training = Training(seq_len=16, local_batch_size=2, on_data_end="repeat", **options)
    config = Config(training=training, data=Data(mode=mode, readers=3))
    return Config(training=training, data=config.data, model=type(config.model)(**model))


class Calls(collections.Counter[str]):
    """Count this process's calls on files below a folder, by Python function."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = f"{folder}/"
        self._own = set[int]()
        for name in ("open", "stat", "lstat", "scandir", "listdir", "pread", "preadv", "fstat"):
            setattr(os, name, self._counted(name, getattr(os, name)))
        builtins.open = io.open = self._counted("io.open", io.open)  # type: ignore[assignment]

    def _counted(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            target = arguments[0]
            is_path = isinstance(target, str | os.PathLike)
            is_ours = (
                f"{os.fspath(target)}/".startswith(self._folder) if is_path else target in self._own
            )
            self[name] += is_ours
            result = real(*arguments, **options)
            if name == "open":
                (self._own.add if is_ours else self._own.discard)(result)
            return result

        return call


def open_all(
    rank: int, folder: Path, datasets_to_open: dict[str, dict[str, Any]], many: int
) -> dict[str, Any]:
    """For each dataset, return the calls of this rank while opening, the fingerprint, and the rows of three batches."""
    calls = Calls(folder)
    results = {}
    for kind, options in datasets_to_open.items():
        _data_files.MANY_FILES = many if kind.startswith("many") else 10_000
        config = config_of(options, "memory" if kind == "in memory" else "stream")
        calls.clear()
        with together(config):
            stream = open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)
            stream.seek(0)
        opening = calls.total()
        rows = [next(stream).tokens_BT.tolist() for _ in range(3)]
        results[kind] = (
            opening,
            stream.fingerprint,
            dict(stream.files.items()),
            stream.sampled_files,
            rows,
        )
    return results


KINDS = [
    "jsonl",
    "many jsonl",
    "arrays",
    "compressed",
    "tsv",
    "many tsv",
    "text",
    "parquet",
    "tokens",
    "in memory",
]


@pytest.mark.parametrize("count", cases([4], nightly=[2, 3]))
def test_storage_calls_do_not_grow_with_ranks_and_all_ranks_have_the_same_rows(
    count: int, tmp_path: Path
) -> None:
    datasets_to_open = {kind: write(kind, tmp_path / kind.replace(" ", "_")) for kind in KINDS}
    (one_process,) = run_ranks(1, open_all, tmp_path, datasets_to_open, COUNT)
    ranks = run_ranks(count, open_all, tmp_path, datasets_to_open, COUNT)

    for kind in KINDS:
        expected_calls, *expected_rows = one_process[kind]
        num_calls = 0
        for results_of_rank in ranks:
            calls, *rows = results_of_rank[kind]
            num_calls += calls
            assert rows == expected_rows, kind
        assert num_calls == expected_calls > 0, kind


def open_hub_on_ranks(rank: int, folder: Path, streaming: bool, has_cache: bool) -> list[Any]:
    """Open a dataset of a fake hub. Return the requests of this rank and the rows of a batch."""
    datasets = pytest.importorskip("datasets")
    requests: list[str] = []

    def revision(name: str, streaming: bool) -> str:
        requests.append("revision")
        return f"commit-{rank}"

    def load_dataset(path: str, **options: Any) -> Any:
        requests.append(options["revision"])
        dataset = datasets.load_from_disk(str(folder / "cache"))
        return dataset.to_iterable_dataset(num_shards=2) if options["streaming"] else dataset

    _hub._revision = revision
    datasets.load_dataset = load_dataset
    cached = _hub._cached
    if not has_cache:
        _hub._cached = lambda library, files, rows: cached(
            library, [f"{file}.absent" for file in files], rows
        )
    request = Request(path="org/set", streaming=streaming)
    with together(config_of({})):
        source = _hub.open_hub(request, _hub.HubSet("org/set"))
    return [requests, [row["text"] for _, row in every_row(source)], dict(source.files())]


@pytest.mark.parametrize(("streaming", "has_cache"), [(False, True), (False, False), (True, True)])
def test_one_rank_contacts_the_hub_and_others_open_its_cache(
    streaming: bool, has_cache: bool, tmp_path: Path
) -> None:
    """All ranks use one revision, also if each rank must load it: with a stream, or on a node without the cache."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": f"row {number}"} for number in range(70)]).save_to_disk(
        tmp_path / "cache"
    )
    first, *others = run_ranks(3, open_hub_on_ranks, tmp_path, streaming, has_cache)

    assert first[0] == ["revision", "commit-0"]
    assert first[1] == [f"row {number}" for number in range(70)]
    for requests, texts, files in others:
        assert requests == ([] if has_cache and not streaming else ["commit-0"])
        assert (texts, files) == (first[1], first[2])


def open_tokenizers(rank: int, folder: Path, paths: list[str]) -> list[Any]:
    """For each tokenizer, return the calls of this rank while opening it, and its properties."""
    calls = Calls(folder)
    results = []
    for path in paths:
        calls.clear()
        with together(config_of({})):
            try:
                tokenizer = open_tokenizer(path)
            except ConfigError as error:
                results.append((calls.total(), str(error)))
                continue
        ids = [tokenizer.encode(text).tolist() for text in ("a cut mesh", "<s> and </s>", "日本")]
        num_calls = calls.total()
        properties = (
            tokenizer.fingerprint,
            tokenizer.vocab_size,
            tokenizer.bos_id,
            tokenizer.special_tokens,
            tokenizer.chat_template,
            tokenizer.tool_template,
            tokenizer.spec,
        )
        results.append((num_calls, *properties, ids))
    return results


def test_one_rank_reads_the_files_of_a_tokenizer_and_all_have_the_same_one(tmp_path: Path) -> None:
    bpe = tiny_tokenizers.bpe_folder(
        tmp_path / "bpe", add_bos_token=True, chat_template="{{ messages }}"
    )
    (bpe / "additional_chat_templates").mkdir()
    (bpe / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    (tmp_path / "piece").mkdir()
    (tmp_path / "piece/tokenizer.model").write_bytes(tiny_tokenizers.sentencepiece_bytes())
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/tokenizer.json").write_text("{")
    names = ("bpe", "bpe/tokenizer.json", "piece", "bad", "absent")
    paths = [str(tmp_path / name) for name in names]
    (one_process,) = run_ranks(1, open_tokenizers, tmp_path, paths)
    ranks = run_ranks(3, open_tokenizers, tmp_path, paths)

    for number, path in enumerate(paths):
        expected_calls, *expected_tokenizer = one_process[number]
        assert expected_calls > 0, path
        # Rank 0 reads as much as a single process, and the others read nothing.
        calls_of_ranks = [results_of_rank[number][0] for results_of_rank in ranks]
        assert calls_of_ranks == [expected_calls, 0, 0], path
        for results_of_rank in ranks:
            assert list(results_of_rank[number][1:]) == expected_tokenizer, path


def open_on_nodes(rank: int, folder: Path, options: dict[str, Any], per_node: int = 2) -> Any:
    """Open data on two nodes with separate folders: ranks 0 and 1, and ranks 2 and 3."""
    node = rank // per_node
    os.environ["LOCAL_RANK"] = str(rank % per_node)
    open_together._node_number = lambda: node
    os.chdir(folder / str(node))
    calls = Calls(Path("data"))
    config = config_of({**options, "dataset_path": "data"})
    try:
        with together(config):
            stream = open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)
    except ShardtrainError as error:
        return type(error).__name__, error.exit_code, str(error)
    opening = calls.total()
    next(stream)
    return opening, stream.fingerprint


@pytest.fixture
def nodes(tmp_path: Path) -> Path:
    """Two folders with equal data. The second is a copy, so its files have different inodes."""
    (tmp_path / "0").mkdir()
    write("jsonl", tmp_path / "0/data")
    shutil.copytree(tmp_path / "0/data", tmp_path / "1/data")
    return tmp_path


@pytest.mark.parametrize("per_node", cases([2], nightly=[1]))
def test_one_rank_checks_the_copy_of_a_node(nodes: Path, per_node: int) -> None:
    ranks = run_ranks(2 * per_node, open_on_nodes, nodes, {"dataset": "jsonl"}, per_node)
    assert len({fingerprint for _, fingerprint in ranks}) == 1
    calls = [count for count, _ in ranks]
    first = calls[0]
    second = calls[per_node]

    # Only the first rank of each node reads. The second node also compares files with those of the first.
    assert sum(calls) == first + second
    assert first < second <= first + shared_opening.MAX_WITNESSES


@pytest.mark.parametrize(
    ("change", "message"),
    cases(
        [
            (
                "a sampled file is missing",
                r'the data="data" is a copy on this node, which differs .* rank 0 \(host \S+\): it lacks 000\.jsonl;',
            )
        ],
        nightly=[
            (
                "an unsampled file is missing",
                r"differs from the copy of rank 0 \(host \S+\): it lacks 005\.jsonl;",
            ),
            (
                "one file is longer",
                r"it has 005\.jsonl of \d+ bytes instead of \d+;",
            ),
            (
                "an additional file",
                r"it has the additional file 999\.jsonl of \d+ bytes;",
            ),
            ("no folder", r"data/000\.jsonl\" does not exist on this host"),
        ],
    ),
)
def test_rank_that_lacks_listed_files_is_named_on_all(
    nodes: Path, change: str, message: str
) -> None:
    data = nodes / "1/data"
    if change == "a sampled file is missing":
        (data / "000.jsonl").unlink()
    elif change == "an unsampled file is missing":
        (data / "005.jsonl").unlink()
    elif change == "one file is longer":
        (data / "005.jsonl").write_text(LINE.format("longer") * 9)
    elif change == "an additional file":
        (data / "999.jsonl").write_text(LINE.format("more"))
    else:
        shutil.rmtree(data)
    (kind, code, text), *others = run_ranks(4, open_on_nodes, nodes, {"dataset": "jsonl"})

    assert (kind, code) == ("ConfigError", 2)
    assert "\n" not in text
    assert re.match(r"rank 2 on \S+: ", text), text
    assert re.search(message, text), text
    assert others == [(kind, code, text)] * 3


# data of each node -> the rank that the error names, and the rank to compare it with
NAMED = {
    "01": (1, 0), "001": (2, 0), "010": (1, 0), "100": (0, 1), "012": (1, 0), "0001": (3, 0), "0010": (2, 0),
    "0100": (1, 0), "1000": (0, 1), "0011": (2, 0), "0110": (1, 0), "0120": (1, 0), "1200": (0, 2),
}  # fmt: skip
CHANGES = ("another size", "another content", "a missing file")


def open_and_compare(rank: int, folder: Path) -> str:
    """Return the error of this rank, whose data are in its own folder."""
    os.environ["LOCAL_RANK"] = "0"
    open_together._node_number = lambda: rank
    os.chdir(folder / str(rank))
    config = config_of({"dataset": "jsonl", "dataset_path": "data"})
    try:
        with together(config):
            stream = open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)
        open_together.require_same_data(stream, "the data")
    except ShardtrainError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("variants", cases(["01", "100"], nightly=sorted({*NAMED} - {"01", "100"})))
@pytest.mark.parametrize("change", CHANGES)
def test_node_that_differs_from_most_others_is_named(
    tmp_path: Path, variants: str, change: str
) -> None:
    for rank, variant in enumerate(variants):
        write("jsonl", tmp_path / str(rank) / "data")
        file = tmp_path / str(rank) / f"data/00{variant}.jsonl"
        if change == "another size":
            file.write_text(LINE.format("longer") * 9)
        elif change == "another content":
            for other in range(3):
                same_size = LINE.format(("y" if str(other) == variant else "x") * 50)
                (tmp_path / str(rank) / f"data/00{other}.jsonl").write_text(same_size)
        else:
            file.unlink()
    errors = run_ranks(len(variants), open_and_compare, tmp_path)
    named, other = NAMED[variants]
    assert len(set(errors)) == 1
    assert re.match(rf"rank {named} on \S+: ", errors[0]), errors[0]
    assert f"rank {other} (host " in errors[0]
    report = failure.describe(ConfigError(errors[0]), rank=9)
    assert report.rank == named, "exit.json names another rank than the message"


def test_error_of_the_opening_rank_is_raised_on_all(nodes: Path) -> None:
    for node in ("0", "1"):
        (nodes / node / "data/005.jsonl").write_text("")
    errors = run_ranks(4, open_on_nodes, nodes, {"dataset": "jsonl"})
    assert len(set(errors)) == 1
    assert errors[0][:2] == (DataError.__name__, 3)
    assert errors[0][2].startswith('training.dataset_path="data/005.jsonl" is ')


def look_slowly(rank: int) -> Any:
    """Return the values that rank 0 reads slowly and shares, of each type that can be shared."""
    ranks = Together(timeout_seconds=300)
    ranks._keep_alive_seconds = 0.02

    def look() -> Any:
        assert rank == 0
        time.sleep(0.2)
        return {
            "numbers": np.arange(3),
            "none": np.array([], np.int32),
            "words": ["a", None, 1.5],
            "empty": {},
        }

    result = ranks.once("place", look, None)
    assert rank == 0 or activity.now().ticks > 3, (
        "a waiting rank must report activity to the watchdog"
    )
    return {
        **result,
        "numbers": result["numbers"].tolist(),
        "none": [result["none"].dtype.str, len(result["none"])],
    }


def test_ranks_wait_for_a_slow_opening_rank(tmp_path: Path) -> None:
    expected = {"numbers": [0, 1, 2], "none": ["<i4", 0], "words": ["a", None, 1.5], "empty": {}}
    assert run_ranks(2, look_slowly) == [expected, expected]


def read_a_changed_file(rank: int, config: Config, file: Path) -> str:
    with together(config):
        stream = open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)
    dist.barrier()
    if rank == 0:
        file.write_text(LINE.format("another") * 6)
    dist.barrier()
    try:
        for _ in range(40):
            next(stream)
    except ConfigError as error:
        return str(error)
    return ""


def test_rank_that_did_not_list_files_detects_a_changed_file_when_reading(tmp_path: Path) -> None:
    config = config_of(write("jsonl", tmp_path / "data"))
    for text in run_ranks(2, read_a_changed_file, config, tmp_path / "data/003.jsonl"):
        assert "003.jsonl" in text
        assert "was changed since the run opened it" in text


def test_single_process_and_dry_run_need_no_other_ranks() -> None:
    from shardtrain.distributed import fake_backend

    with together(Config()):
        assert shared_opening.once("place", lambda: 1) == 1
    with fake_backend.join(5, 16384), together(Config()):
        assert shared_opening.once("place", lambda: 2) == 2
