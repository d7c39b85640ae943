"""Hugging Face datasets: hub datasets by id, local copies in each form, and one-line errors."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path

import datasets
import patience
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from shardtrain.config.schema import Config
from shardtrain.config.schema.data_options import DataSource
from shardtrain.data import sources
from shardtrain.data.build_dataset import NamedDataset, request_for
from shardtrain.data.sources import Request, Shards, Table, every_row, huggingface, place_of
from shardtrain.utils.errors import ConfigError, DataError

ROWS = [{"text": f"row {n}", "meta": {"tags": ["a"] * (n % 3), "score": None}} for n in range(150)]
SECRET = "hf_thisIsTheSecretOfTheTest"


def opened(path, name="huggingface", **options):
    return sources.find(name).open_source(Request(str(path), **options))


def texts(source):
    return [row["text"] for _, row in every_row(source)]


def save_jsonl(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def saved(tmp_path):
    datasets.disable_progress_bars()
    path = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS).save_to_disk(path, num_shards=3)
    return path


def test_saved_dataset_is_read_as_a_table_or_as_shards(saved):
    table = opened(saved)
    shards = opened(saved, streaming=True)
    assert isinstance(table, Table)
    assert isinstance(shards, Shards)
    assert shards.num_shards == 3

    for source in (table, shards):
        assert [row for _, row in every_row(source)] == ROWS
        source.check_unchanged()
        assert source.total_bytes > 0
        assert list(source.files()) == list(opened(saved, streaming=source is shards).files())

    assert list(shards.rows(1, start=49)) == ROWS[99:100]
    assert place_of(table, (0, 7)) == f"{saved}: row 7 from 0"
    assert place_of(shards, (2, 7)) == f"{saved}: shard 2, row 7, both from 0"

    # Worker processes receive sources as pickles.
    for source in (table, shards):
        copy = pickle.loads(pickle.dumps(source))
        assert [row for _, row in every_row(copy)] == ROWS


def test_fingerprint_depends_on_rows_and_not_on_the_folder(saved, tmp_path):
    first = opened(saved).files()
    assert list(first) == ["saved"]

    (tmp_path / "elsewhere").mkdir()
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "elsewhere" / "saved", num_shards=1)
    assert opened(tmp_path / "elsewhere" / "saved").files() == first

    datasets.Dataset.from_list(ROWS[::-1]).save_to_disk(tmp_path / "other" / "saved")
    assert opened(tmp_path / "other" / "saved").files() != first


def test_changed_saved_dataset_is_named(saved):
    sources_ = opened(saved), opened(saved, streaming=True)
    (file, *_) = sorted(saved.glob("*.arrow"))
    os.utime(file, ns=(1, 1))

    for source in sources_:
        with pytest.raises(
            ConfigError, match=rf'training.dataset_path=".*{file.name}" was changed'
        ):
            source.check_unchanged()


def test_split_of_a_saved_dictionary_is_selected_and_a_missing_one_lists_the_existing(tmp_path):
    parts = {
        "train": datasets.Dataset.from_list(ROWS[:5]),
        "test": datasets.Dataset.from_list(ROWS[5:7]),
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "d")

    assert texts(opened(tmp_path / "d")) == [f"row {n}" for n in range(5)]
    assert texts(opened(tmp_path / "d", split="test")) == ["row 5", "row 6"]
    with pytest.raises(
        ConfigError, match=r'has no split "validation"; set data.split to train or test'
    ):
        opened(tmp_path / "d", split="validation")


def test_broken_saved_dataset_is_a_one_line_error(saved):
    for file in saved.glob("*.arrow"):
        file.write_bytes(b"no arrow")
    with pytest.raises(ConfigError, match=r"cannot be opened as a saved dataset") as error:
        opened(saved)
    assert "\n" not in str(error.value)


def test_images_are_not_decoded(tmp_path):
    features = datasets.Features({"text": datasets.Value("string"), "image": datasets.Image()})
    rows = [{"text": "a", "image": {"bytes": b"this is no image", "path": None}}] * 2
    datasets.Dataset.from_list(rows, features=features).save_to_disk(tmp_path / "d")

    assert (
        texts(opened(tmp_path / "d")) == texts(opened(tmp_path / "d", streaming=True)) == ["a", "a"]
    )


def test_row_above_max_row_bytes_is_a_bad_row(tmp_path):
    datasets.Dataset.from_list([{"text": "a"}, {"text": "b" * 9999}, {"text": "c"}]).save_to_disk(
        tmp_path / "d"
    )
    for streaming in (False, True):
        rows = [
            row
            for _, row in every_row(opened(tmp_path / "d", streaming=streaming, max_row_bytes=5000))
        ]
        assert (rows[0], rows[2]) == ({"text": "a"}, {"text": "c"})
        assert rows[1].reason == "is longer than data.max_row_bytes"


def test_interrupted_stream_is_an_error_and_not_a_bad_row(saved, monkeypatch):
    """A skipped row would be counted, but the rest of the shard would be lost silently."""
    monkeypatch.setenv("HF_TOKEN", SECRET)

    class Broken:
        def shard(self, **_):
            return self

        def iter(self, batch_size):
            yield pa.table({"text": ["a"] * batch_size})
            raise ConnectionError(f"token {SECRET} was\nrefused")

    source = opened(saved, streaming=True)
    source._dataset = Broken()
    rows_read = []

    with pytest.raises(
        DataError,
        match=r"shard 1, row 64, both from 0: cannot be read further \(.*token \*\*\* was refused\)",
    ):
        rows_read.extend(source.rows(1))
    assert len(rows_read) == 64

    # A second reader of the same shard is given the rows before the interruption too.
    rows = source.rows(1)
    assert [next(rows) for _ in range(64)] == [{"text": "a"}] * 64


class Shard(torch.utils.data.Dataset):
    """Rows of shard 0 as seen by each worker process."""

    def __init__(self, source):
        self.source = source

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return sum(1 for _ in self.source.rows(0))


def test_every_worker_process_reads_all_rows_of_a_shard(saved):
    """By default, the library distributes shards over PyTorch's workers, and some would get no rows."""
    loader = torch.utils.data.DataLoader(
        Shard(opened(saved, streaming=True)), batch_size=None, num_workers=2
    )
    assert [int(count) for count in loader] == [50] * 4


@pytest.mark.parametrize(
    "name",
    [
        "huggingface",
        "c4",
        "c4_mini",
        "c4_test",
        "alpaca",
        "openwebtext",
        "minipile",
        "c4_validation",
    ],
)
def test_every_dataset_name_reads_a_local_copy_in_each_form(tmp_path, saved, name):
    save_jsonl(tmp_path / "lines" / "data.json")
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=1))
    (tmp_path / "parquet").mkdir()
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "parquet" / "data.parquet")
    paths = [
        tmp_path / "lines",
        tmp_path / "lines" / "data.json",
        tmp_path / "array.json",
        tmp_path / "parquet",
        saved,
    ]
    if name == "c4_validation":
        paths.remove(saved)

    for path in paths:
        assert [row for _, row in every_row(opened(path, name))] == ROWS


def test_folder_of_arrow_files_is_read(saved, tmp_path):
    (tmp_path / "arrow").mkdir()
    for file in saved.glob("*.arrow"):
        file.rename(tmp_path / "arrow" / file.name)

    assert [row for _, row in every_row(opened(tmp_path / "arrow"))] == ROWS

    (tmp_path / "arrow" / "x.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match=r"cannot be read as Arrow \(.*x\.arrow") as error:
        opened(tmp_path / "arrow")
    assert "\n" not in str(error.value)


def test_files_of_the_split_are_selected_by_name(tmp_path, caplog):
    for name, rows in (
        ("train-00000-of-00002", ROWS[:2]),
        ("train-00001-of-00002", ROWS[2:4]),
        ("test", ROWS[4:5]),
    ):
        save_jsonl(tmp_path / "data" / f"{name}.jsonl", rows)
    save_jsonl(tmp_path / "dev" / "x.jsonl", ROWS[5:6])
    (tmp_path / "dataset_infos.json").write_text("{}")
    with caplog.at_level("INFO"):
        assert texts(opened(tmp_path)) == ["row 0", "row 1", "row 2", "row 3"]

    assert "reading 2 of 4 files, which belong to the split train" in caplog.text
    assert texts(opened(tmp_path, split="test")) == ["row 4"]
    assert texts(opened(tmp_path, split="validation")) == ["row 5"]
    with pytest.raises(
        ConfigError,
        match=r'no files of the split "other"; set data.split to test or train or validation',
    ):
        opened(tmp_path, split="other")


def test_files_without_a_split_in_their_name_are_train(tmp_path):
    # split names within longer words do not count
    save_jsonl(tmp_path / "pretrained" / "latest.jsonl", ROWS[:2])
    assert texts(opened(tmp_path)) == ["row 0", "row 1"]
    with pytest.raises(ConfigError, match=r'no files of the split "test"; set data.split to train'):
        opened(tmp_path, split="test")

    save_jsonl(tmp_path / "my-test.jsonl", ROWS[:2])
    # a single file that the user names
    assert texts(opened(tmp_path / "my-test.jsonl")) == [
        "row 0",
        "row 1",
    ]


SPLITS = [
    # The dataset, the option, the split that it selects, and the error, or None if its rows are read.
    ("c4_mini", "data.split", "train", None),
    ("c4_mini", "validation.split", "validation", None),
    ("c4_mini", "task.test_split", "test", None),
    ("c4_test", "validation.split", "validation", None),
    ("c4_validation", "data.split", "train", None),
    ("c4_validation", "validation.split", "validation", None),
    (
        "c4_mini",
        "data.split",
        "validation",
        'data.split="validation" has no effect with this dataset',
    ),
    (
        "c4_mini",
        "validation.split",
        "test",
        'validation.split="test" has no effect with this dataset',
    ),
    (
        "c4_mini",
        "data.sources.web.split",
        "test",
        'data.sources.web.split="test" has no effect with this dataset',
    ),
    (
        "c4_validation",
        "validation.split",
        "train",
        'validation.split="train" has no effect with this dataset',
    ),
    ("huggingface", "validation.split", "validation", "; set validation.split to train"),
    ("huggingface", "data.sources.web.split", "x", "; set data.sources.web.split to train"),
]


@pytest.mark.parametrize(("name", "option", "split", "error"), SPLITS)
def test_dataset_with_one_split_rejects_a_split_option_but_ignores_its_default(
    tmp_path, name, option, split, error
):
    save_jsonl(tmp_path / "en.jsonl", ROWS[:2])
    save_jsonl(tmp_path / "more.jsonl", ROWS[2:3])
    if error is None:
        assert len(texts(opened(tmp_path, name, split=split, split_option=option))) == 3
        return

    with pytest.raises(ConfigError, match=re.escape(error)):
        opened(tmp_path, name, split=split, split_option=option)


def test_subset_is_a_folder_of_the_local_copy(tmp_path):
    save_jsonl(tmp_path / "en" / "x.jsonl", ROWS[:1])
    save_jsonl(tmp_path / "de" / "x.jsonl", ROWS[1:2])
    assert texts(opened(tmp_path, "c4", subset="de")) == ["row 1"]
    with pytest.raises(
        ConfigError, match=r"has no folder fr, the requested subset; remove data\.subset, or"
    ):
        opened(tmp_path, "c4", subset="fr")

    # If the subset is set in the TOML table of a source, the message names that table.
    of_source = DataSource("c4", str(tmp_path), subset="fr")
    named = NamedDataset(
        "web", of_source, "data.sources.web.dataset", "data.sources.web.dataset_path"
    )

    with pytest.raises(ConfigError, match=r"remove data\.sources\.web\.subset, or correct it"):
        sources.find("c4").open_source(request_for(Config(), named))


def test_folder_with_several_or_no_formats_is_rejected(tmp_path):
    (tmp_path / "script.py").write_text("raise SystemExit('code of a dataset was run')")
    with pytest.raises(ConfigError, match=r"is a folder without \*.parquet, .* files"):
        opened(tmp_path)

    save_jsonl(tmp_path / "x.jsonl")
    (tmp_path / "y.txt").write_text("text")
    with pytest.raises(
        ConfigError,
        match=r"contains files in several formats \(\*.jsonl, \*.txt\); select one format by a pattern",
    ):
        opened(tmp_path)
    assert len(texts(opened(tmp_path / "*.jsonl"))) == 150
    with pytest.raises(ConfigError, match=r"has no known format \(\*.py\)"):
        opened(tmp_path / "script.py")


@pytest.mark.parametrize("path", ["/no/such/folder", "./no", "~/no/such", "a/b/c", "no*"])
def test_missing_local_path_is_not_searched_on_the_hub(path, monkeypatch):
    monkeypatch.setattr(
        huggingface._hub, "open_hub", lambda *_: pytest.fail("the hub was contacted")
    )

    with pytest.raises(ConfigError, match=r"does not exist|matches no file"):
        opened(path)


def test_missing_required_path_is_reported():
    rules = {
        "huggingface": 'training.dataset_path is not set, and the dataset "huggingface"',
        "c4_test": r'training.dataset="c4_test" is a local dataset.*; name its folder .*, or use "python_stdlib"',
    }

    for name, rule in rules.items():
        with pytest.raises(ConfigError, match=rule):
            sources.find(name).open_source(Request(None))


def test_hub_id_as_dataset_name_is_reported_by_its_name(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError, match=r'^training.dataset="allenai/c4" needs the datasets library'
    ):
        sources.find("c4_mini").open_source(Request(None))


def test_missing_datasets_library_is_reported_with_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ConfigError,
        match=r'datasets library, which is not installed; pip install "shardtrain\[hf\]"',
    ):
        opened("org/name")

    save_jsonl(tmp_path / "x.jsonl")
    assert len(texts(opened(tmp_path))) == 150  # local files do not need the library


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    command = [
        sys.executable,
        str(Path(__file__).parent / "hub_session.py"),
        str(tmp_path_factory.mktemp("home")),
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(huggingface.__file__).parents[3])}
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=patience.seconds(300)
    )
    assert result.returncode == 0, result.stderr
    assert SECRET not in result.stderr
    assert SECRET not in result.stdout.rpartition('"tokens"')[0]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.nightly(
    "against a server",
    by="tests/data/sources/test_source_huggingface.py::test_every_worker_process_reads_all_rows_of_a_shard",
)
def test_hub_stream_has_the_shards_of_the_hub_at_one_pinned_revision(hub):
    result = hub["c4"]
    assert (result["table"], result["shards"], result["rows"]) == (False, 2, 50_100)
    assert result["texts"] == ["row 0", "row 50099"]
    assert result["files"] == {"allenai/c4/en/train": "0123456789abcdef0123456789abcdef01234567::2"}
    assert result["place"] == "allenai/c4/en/train: shard 1, row 99, both from 0"
    # The requests contain the token from the environment.
    assert f"Bearer {SECRET}" in hub["tokens"]


def test_subset_split_and_slice_are_downloaded(hub):
    result = hub["c4 de"]
    assert (result["table"], result["rows"], result["texts"]) == (
        True,
        5,
        ["row 80000", "row 80004"],
    )
    assert list(result["files"]) == ["allenai/c4/de/train"]
    assert hub["c4 part"]["texts"] == ["row 90000", "row 90002"]
    assert (hub["c4_validation"]["rows"], hub["c4_validation"]["table"]) == (10, False)
    assert (hub["c4_mini"]["rows"], hub["c4_mini"]["texts"]) == (45_000, ["row 0", "row 44999"])


@pytest.mark.parametrize(
    ("case", "text"),
    [
        (
            "c4 no subset",
            r'="allenai/c4" has no subset xx \(.*Available: \[.en., .de.\]\); set data.subset',
        ),
        (
            "c4 no split",
            r'has no split "nope" \(.*train.*validation.*\); set data.split to an existing split',
        ),
        (
            "c4 part streamed",
            r"data.streaming=true is not supported for a part of a split \(validation\[:3\]\)",
        ),
        ("c4_mini streamed", r"data.streaming=true is not supported for a part of a split"),
        ("c4_mini split", r'data.split="validation" has no effect with this dataset'),
        ("c4_mini subset", r'data.subset="de" has no effect with this dataset'),
        ("script", r"requires its own code, which is never run"),
        ("none False", r'="none/set" is not a dataset on the hub, or is private'),
        ("none True", r'="none/set" is not a dataset on the hub, or is private'),
        ("closed False", r"requires permission .* set HF_TOKEN to a token that may read it"),
        ("closed True", r"requires permission .* set HF_TOKEN to a token that may read it"),
        (
            "gated False",
            r"is gated .* accept its terms on https://huggingface.co/datasets/gated/set and set HF_TOKEN",
        ),
        (
            "gated True",
            r"is gated .* accept its terms on https://huggingface.co/datasets/gated/set and set HF_TOKEN",
        ),
        ("busy False", r"too many requests .* wait"),
        ("busy True", r"too many requests .* wait"),
        ("broken False", r"the hub reports a server error .* try again later"),
        ("broken True", r"the hub reports a server error .* try again later"),
        (
            "gone",
            r"the hub cannot be reached .* set HF_HUB_OFFLINE=1 to use what was downloaded before",
        ),
        ("offline streamed", r"is not in the local cache, and HF_HUB_OFFLINE forbids access"),
    ],
)
def test_hub_errors_are_one_line_with_the_fix(hub, case, text):
    error = hub[case]["error"]
    assert error.startswith("ConfigError: ")
    assert "\n" not in error
    assert re.search(text, error), error
