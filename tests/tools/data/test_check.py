"""``data check`` reports statistics of the data, and all of its problems in one run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardtrain import cli
from shardtrain.config import Config, derived, load
from shardtrain.data import open_dataloader
from shardtrain.data.documents import read_documents
from shardtrain.data.packing.packed_rows import Packing
from shardtrain.tasks import open_task
from shardtrain.tools.data import check, prepare
from shardtrain.tools.data.check import examine
from shardtrain.tools.data.survey import Survey
from shardtrain.utils.errors import ConfigError


def jsonl(path: Path, rows: list[Any]) -> Path:
    """Write rows as JSON lines. Strings are written unchanged."""
    lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    path.write_text("".join(lines))
    return path


def texts(count: int = 40) -> list[dict[str, str]]:
    return [{"text": f"document {number} " + "word " * (number % 11)} for number in range(count)]


def arguments_for(path: Path, *more: str) -> list[str]:
    return [
        "--training.dataset",
        "jsonl",
        "--training.dataset_path",
        str(path),
        "--training.seq_len",
        "64",
        *more,
    ]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = check.main([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["exit_code"] == code
    return code, report


def steps_of(config: Config, ranks: int) -> int | None:
    """Return the number of steps until training reaches the end of the data."""
    stream = open_dataloader(
        config,
        batch_rank=0,
        num_batch_ranks=derived.data_parallel_degree(config, ranks),
        accumulation=derived.accumulation_steps(config, ranks),
    )
    return stream.steps_left


def test_clean_data_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = texts()
    arguments = arguments_for(jsonl(tmp_path / "a.jsonl", rows))
    arguments[-1] = "32"
    code, report = run(capsys, *arguments)
    lengths = [len(row["text"]) + 2 for row in rows]
    table = report["datasets"]["jsonl"]

    assert code == 0
    assert not report["warnings"]
    assert not report["problems"]
    assert (table["rows"], table["documents"], table["tokens"]) == (40, 40, sum(lengths))
    assert (table["shortest document"], table["longest document"]) == (min(lengths), max(lengths))
    assert table["median document"] == int(np.median(lengths))
    assert table["longer than seq_len"] == sum(length > 33 for length in lengths) > 0
    assert table["largest id"] == 257
    assert table["learned tokens"] == table["tokens"]


@pytest.mark.parametrize("packing", ["concat", "first_fit", "best_fit", "padded"])
def test_sequences_per_epoch_are_those_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], packing: str
) -> None:
    arguments = arguments_for(jsonl(tmp_path / "a.jsonl", texts()), "--data.packing", packing)
    arguments += ["--training.local_batch_size", "2"]
    _, report = run(capsys, *arguments, "--world_size", "3")
    table = report["datasets"]["jsonl"]
    stream = open_dataloader(
        load(None, arguments).config, batch_rank=0, num_batch_ranks=3, accumulation=1
    )

    assert table["sequences per epoch"] == stream.num_samples
    assert table["sequences per step"] == 6
    assert (
        table["steps per epoch"]
        == -(-stream.num_samples // 6)
        == steps_of(load(None, arguments).config, 3)
    )


def test_every_kind_of_bad_row_is_reported_with_its_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad_rows: list[Any] = ["{broken\n", {"other": 1}, {"text": 7}, {"text": None}, "[1]\n"]
    empty_row = {"text": ""}
    rows = [*texts(10), *bad_rows, empty_row, *texts(5), "{broken\n"]
    path = jsonl(tmp_path / "a.jsonl", rows)
    code, report = run(capsys, *arguments_for(path))

    assert code == 3
    table = report["datasets"]["jsonl"]
    assert table["rows"] == 22
    assert table["documents"] == 15
    assert table["bad rows"] == 6
    assert table["empty rows"] == 1

    reasons = "\n".join(table["reasons"])
    for line in (11, 12, 13, 14, 15, 16, 22):
        assert f"a.jsonl:{line}" in reasons
    assert any("6 bad of 22 rows" in problem for problem in report["problems"])

    # 6 of 22 rows are 27 %: below a limit of 0.5, above a limit of 0.2.
    for fraction, expected_code in (("0.5", 0), ("0.2", 3)):
        options = ["--data.bad_rows", "skip", "--data.bad_rows_max_fraction", fraction]
        code, _ = run(capsys, *arguments_for(path, *options))
        assert code == expected_code


def test_file_without_a_usable_row_exits_with_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run(capsys, *arguments_for(jsonl(tmp_path / "a.jsonl", [{"text": ""}] * 3)))
    assert code == 3
    assert "has 0 usable of 3 rows" in report["problems"][0]
    assert report["datasets"]["jsonl"]["sequences per epoch"] == 0


def pairs_of_lines(table: dict[str, Any]) -> list[list[str]]:
    """Return the pairs of line numbers in a report, which lists duplicates as ``FILE:LINE = FILE:LINE``."""
    pairs = []
    for duplicates in table["first duplicates"]:
        places = duplicates.split(" = ")
        pairs.append([place.split(":")[-1] for place in places])
    return pairs


def test_duplicates_are_counted_and_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines 44 and 47 repeat lines 5 and 8. Bad and empty rows in between do not shift the reported lines."""
    rows: list[Any] = [
        *texts(40),
        "{broken\n",
        {"text": ""},
        "{broken\n",
        texts()[4],
        "{broken\n",
        {"x": 1},
        texts()[7],
    ]
    path = jsonl(tmp_path / "a.jsonl", rows)
    options = ["--data.bad_rows", "skip", "--data.bad_rows_max_fraction", "1.0"]
    _, report = run(capsys, *arguments_for(path, *options))
    table = report["datasets"]["jsonl"]

    assert table["duplicates"] == 2
    assert pairs_of_lines(table) == [["44", "5"], ["47", "8"]]
    for duplicates in table["first duplicates"]:
        assert duplicates.count(".jsonl:") == 2

    assert len(report["warnings"]) == 1
    assert "4.8 % of the documents are exact copies" in report["warnings"][0]


def test_one_duplicate_in_many_is_not_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*texts(300), texts()[0]])
    code, report = run(capsys, *arguments_for(path))
    assert code == 0
    assert report["datasets"]["jsonl"]["duplicates"] == 1
    assert not report["warnings"]


def test_places_of_duplicates_hold_across_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_documents, "ROWS_AT_ONCE", 7)
    path = jsonl(tmp_path / "a.jsonl", [*texts(30), {"text": ""}, *texts(30)])
    _, report = run(capsys, *arguments_for(path))
    table = report["datasets"]["jsonl"]

    assert table["duplicates"] == 30
    assert pairs_of_lines(table) == [["32", "1"], ["33", "2"], ["34", "3"]]


def test_leakage_into_validation_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = jsonl(tmp_path / "a.jsonl", texts(40))
    validation_file = jsonl(
        tmp_path / "b.jsonl", [{"text": "unseen"}, texts()[3], {"text": "also unseen"}, texts()[20]]
    )
    arguments = arguments_for(
        path, "--validation.enable", "--validation.dataset", "jsonl", "--validation.seq_len", "64"
    )
    code, report = run(capsys, *arguments, "--validation.dataset_path", str(validation_file))

    assert code == 0
    assert report["datasets"]["validation: jsonl"]["documents"] == 4

    (warning,) = report["warnings"]
    assert "2 of 4 documents are in the training data" in warning
    assert "b.jsonl:2" in warning
    assert "b.jsonl:4" in warning


def test_ids_beyond_the_vocabulary_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = arguments_for(
        jsonl(tmp_path / "a.jsonl", texts()), "--model.overrides.vocab_size", "200"
    )
    report = examine(load(None, arguments).config, 1)
    assert report.exit_code == 2
    message = "the tokenizer has 258 ids, but the model's vocabulary has 200"
    assert any(message in line for line in report.problems)
    assert any("has the id 257" in line for line in report.problems)


def test_prepared_shards_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*texts(3000), texts()[0]])
    folder = tmp_path / "o"
    prepare.main(["--output", str(folder), "--processes", "1", *arguments_for(path)])
    capsys.readouterr()
    arguments = ["--training.dataset=tokens", f"--training.dataset_path={folder}"]
    arguments += ["--training.seq_len=64"]

    # Prepared shards have the same report as their rows, except for the positions of duplicates.
    code, report = run(capsys, *arguments)
    assert code == 0
    table = report["datasets"]["tokens"]
    _, report_on_rows = run(capsys, *arguments_for(path))
    table_of_rows = report_on_rows["datasets"]["jsonl"]
    assert table.pop("first duplicates") == ["document 3000 = document 0"]
    assert table == {key: table_of_rows[key] for key in table}

    # A changed token is detected.
    with (folder / "tokens-00000.bin").open("r+b") as file:
        file.seek(20_000)
        file.write(b"\x00\x01")
    code, report = run(capsys, *arguments)
    assert code == 3
    message = "tokens-00000.bin differs from its SHA-256"
    assert any(message in problem for problem in report["problems"])


def test_a_mixture_is_checked_source_by_source(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.toml"
    jsonl(tmp_path / "web.jsonl", texts(40)), jsonl(tmp_path / "code.jsonl", texts(20))
    config.write_text(f"""
[training]
seq_len = 64
local_batch_size = 1
[data.sources.web]
dataset_path = "{tmp_path}/web.jsonl"
weight = 3.0
[data.sources.code]
dataset_path = "{tmp_path}/code.jsonl"
weight = 1.0
""")
    _, report = run(capsys, str(config))
    web = report["datasets"]["web"]
    code = report["datasets"]["code"]
    for name, table in (("web", web), ("code", code)):
        # let training end after one epoch of this source
        ends = [f"--data.sources.{name}.epochs=1"]
        for ranks in (1, 3):
            _, other = run(capsys, str(config), "--world_size", str(ranks))
            counted = other["datasets"][name]["steps per epoch"]
            assert counted == steps_of(load(config, ends).config, ranks), (name, ranks)

        assert (
            table["steps per epoch"] >= table["sequences per epoch"] / table["sequences per step"]
        )


def test_the_report_is_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(arguments_for(jsonl(tmp_path / "a.jsonl", texts()))) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "dataset jsonl"
    assert lines[-1] == "no problems"
    assert any(line.split() == ["documents", "40"] for line in lines)

    path = jsonl(tmp_path / "a.jsonl", [*texts(), "{broken\n"])
    assert check.main(arguments_for(path)) == 3
    assert "problem: dataset jsonl has 1 bad of 41 rows" in capsys.readouterr().out


@pytest.mark.parametrize("character", ["\x1b", "\x07", "\r", "\x9b", "\u202e", "\u2028", "\n"])
@pytest.mark.parametrize("place", ["column", "template", "folder"])
def test_text_of_a_dataset_is_printed_without_control_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, character: str
) -> None:
    text = f"planted{character}no problems"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows: list[Any] = [{"messages": turns}] * 3
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception(" + json.dumps(text) + ") }}")
    more = ["--data.format", "chat", "--data.chat_template", str(template)]
    folder = tmp_path
    if place != "template":
        rows = [{text: "a"}] * 3
        more = []
    if place == "folder":
        folder = tmp_path / text
        folder.mkdir()
    assert check.main(arguments_for(jsonl(folder / "a.jsonl", rows), *more)) == 3

    output = capsys.readouterr().out
    assert "planted" in output
    assert all(line.isprintable() for line in output.split("\n"))
    assert "no problems" not in output.split("\n")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--world_size", "none"], '--world_size="none" must be a whole number above 0'),
        (["--world_size", "3", "--parallelism.tensor_parallel_degree", "2"], "world size|3"),
        (["--training.dataset", "jsonl"], r"training\.dataset_path"),
        (["--training.dataset", "tokens", "--training.dataset_path", "no/such"], "does not exist"),
    ],
)
def test_unopenable_data_is_status_2(arguments: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        check.main(arguments)


def test_without_a_world_size_steps_follow_from_the_mesh(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = arguments_for(
        jsonl(tmp_path / "a.jsonl", texts()), "--training.local_batch_size", "2"
    )
    mesh = [
        "--parallelism.tensor_parallel_degree",
        "2",
        "--parallelism.data_parallel_shard_degree",
        "3",
    ]
    _, report = run(capsys, *arguments, *mesh)

    assert report["datasets"]["jsonl"]["sequences per step"] == 6


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "check", "--help"]) == 0
    assert "--world_size" in capsys.readouterr().out


def test_a_survey_of_nothing_has_no_rows() -> None:
    survey = Survey("empty")
    assert survey.rows(Packing(8)).num_rows == 0
    assert survey.duplicates() == (0, [])
    assert survey.shared_with([]) == (0, [])


def test_skipping_every_document_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted = ["--data.packing", "first_fit", "--data.long_documents", "drop"]
    arguments = arguments_for(
        jsonl(tmp_path / "a.jsonl", [{"text": "x" * 100}] * 2 + [{"text": "y" * 70}]), *fitted
    )
    code, report = run(capsys, *arguments)

    assert code == 3
    assert "has no sequence with packing first_fit" in report["problems"][0]
    assert "3 of 3 documents are longer than 65 tokens and are skipped" in " ".join(
        report["warnings"]
    )


def test_skipping_is_not_suggested_if_no_row_can_be_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run(capsys, *arguments_for(jsonl(tmp_path / "a.jsonl", [{"content": "x"}] * 3)))
    assert code == 3
    assert report["problems"] == [
        "dataset jsonl has 3 bad of 3 rows; check training.dataset, data.format and the names of the columns"
    ]


@pytest.mark.parametrize(("last_batch", "steps"), [("rollover", 3), ("keep", 3), ("discard", 2)])
def test_steps_of_a_row_task_match_its_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], last_batch: str, steps: int
) -> None:
    pairs = [{"prompt": "a", "chosen": f"good {number}", "rejected": "bad"} for number in range(10)]
    arguments = arguments_for(
        jsonl(tmp_path / "a.jsonl", pairs),
        "--task.name",
        "orpo",
        "--training.local_batch_size",
        "2",
    )
    arguments += ["--training.last_batch", last_batch]
    _, report = run(capsys, *arguments, "--world_size", "2")

    assert report["datasets"]["jsonl"]["steps per epoch"] == steps


ROWS_OF_TASKS: dict[str, tuple[dict[str, Any], list[Any], list[str]]] = {
    "classification": (
        {"text": "a text", "label": 1},
        [{"text": "a text", "label": 2}, {"text": "a text"}, {"text": 7, "label": 1}],
        ["--task.num_labels=2"],
    ),
    "masked_language_model": (
        {"text": "a text"}, [{"text": None}, {"other": ""}, "[]\n"],
        ["--task.options.mask_token_id=257", "--model.name=encoder"],
    ),
    "preference": (
        {"prompt": "p", "chosen": "good", "rejected": "bad"},
        [{"prompt": "p", "chosen": "good"}, {"prompt": "p", "chosen": 1, "rejected": "bad"}, {"text": "a text"}],
        [],
    ),
    "kto": (
        {"prompt": "p", "completion": "good", "label": True},
        [{"prompt": "p", "completion": "good", "label": "maybe"}, {"prompt": "p", "label": True}, "{broken\n"],
        ["--task.group_size=3"],
    ),
}  # fmt: skip
"""Task -> a good row, three bad rows, and options."""
TOKENS_OF_TASKS = {
    "classification": len("a text") + 2,
    "masked_language_model": len("a text") + 2,
    "preference": 2 * (len("p") + 2) + len("good") + len("bad"),
    "kto": len("p") + len("good") + 2,
}


@pytest.mark.parametrize("task", ROWS_OF_TASKS)
def test_rows_of_a_task_are_checked_with_the_task_s_reader(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], task: str
) -> None:
    good, wrong, options = ROWS_OF_TASKS[task]
    arguments = arguments_for(
        jsonl(tmp_path / "a.jsonl", [good] * 30), f"--task.name={task}", *options
    )
    arguments += ["--training.local_batch_size=1"]
    code, report = run(capsys, *arguments, "--world_size", "2")
    table = report["datasets"]["jsonl"]
    stream = open_task(load(None, arguments).config).open_dataloader(
        batch_rank=0, num_batch_ranks=2, accumulation=1
    )

    assert (code, report["problems"]) == (0, [])
    assert (table["rows"], table["documents"], table["bad rows"], table["duplicates"]) == (
        30,
        30,
        0,
        29,
    )
    assert table["tokens"] == 30 * TOKENS_OF_TASKS[task]
    assert table["sequences per epoch"] == stream.num_samples == (10 if task == "kto" else 30)
    assert table["steps per epoch"] == stream.num_samples // 2

    jsonl(tmp_path / "a.jsonl", [*[good] * 30, *wrong])
    code, report = run(capsys, *arguments)
    table = report["datasets"]["jsonl"]

    assert code == 3
    assert "has 3 bad of 33 rows" in report["problems"][0]
    assert (table["rows"], table["documents"], table["bad rows"]) == (33, 30, 3)
    assert table["sequences per epoch"] == stream.num_samples
    assert all(f"a.jsonl:{line}" in "\n".join(table["reasons"]) for line in (31, 32, 33))

    arguments += ["--data.bad_rows=skip", "--data.bad_rows_max_fraction=0.1"]
    assert run(capsys, *arguments)[0] == 0
    # Rows of a validation set must not be skipped.
    arguments += [
        "--validation.enable=true",
        "--validation.dataset=jsonl",
        f"--validation.dataset_path={tmp_path}/a.jsonl",
    ]
    code, report = run(capsys, *arguments)

    assert code == 3
    assert "has 3 bad of 33 rows" in report["problems"][0]
    assert report["datasets"]["validation: jsonl"]["sequences per pass"] == 30

    jsonl(tmp_path / "a.jsonl", wrong)
    code, report = run(capsys, *arguments)
    assert code == 3
    assert report["datasets"]["jsonl"]["sequences per epoch"] == 0
