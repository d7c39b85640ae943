"""Custom sinks receive all records, are refused before ranks start if invalid, and never stop training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardtrain.cli import main
from shardtrain.metrics import Metrics

SINK = """
import json

class Sink:
    def __init__(self, request):
        self.path = request.folder / f"mine-{request.facts.rank}.json"
        self.seen = [["open", [record["step"] for record in request.records]]]
        self.summary = f"mine in {self.path}"

    def write(self, record):
        self.seen.append(["step", record.step, record.loss])

    def validation(self, step, values):
        self.seen.append(["validation", step, values["loss"]])

    def close(self):
        self.path.write_text(json.dumps(self.seen))
"""


def written(folder, text, name="my_sink.py"):
    (folder / name).write_text(text)
    return str(folder / name)


def test_custom_sink_receives_all_records(tmp_path, kit, caplog):
    caplog.set_level("INFO")
    options = {"sinks": [written(tmp_path, SINK)]}
    kit.run(tmp_path, 5, options=options, total_steps=10)
    opened, *steps = json.loads((tmp_path / "mine-0.json").read_text())

    assert opened == ["open", []]
    assert [(kind, step) for kind, step, _ in steps] == [("step", 1), ("step", 5)]
    assert "mine in " in caplog.text

    with Metrics(
        kit.config(**options), tmp_path, kit.facts(start_step=5), kit.OneRank()
    ) as metrics:
        metrics.validation(6, {"loss": 2.5})
    assert json.loads((tmp_path / "mine-0.json").read_text()) == [
        ["open", [1, 5]],
        ["validation", 6, 2.5],
    ]


def test_other_ranks_open_it_with_save_for_all_ranks(tmp_path, kit):
    options = {"sinks": [written(tmp_path, SINK)]}
    kit.run(tmp_path, 1, options=options, rank=1, is_writer=False, world_size=2)
    assert not (tmp_path / "mine-1.json").exists()

    kit.run(
        tmp_path,
        1,
        options=options | {"save_for_all_ranks": True},
        rank=1,
        is_writer=False,
        world_size=2,
    )

    assert (tmp_path / "mine-1.json").exists()


@pytest.mark.parametrize(
    "place", ["self.path =", 'self.seen.append(["step"', "self.path.write_text"]
)
def test_failing_sink_is_one_warning_and_the_others_continue(
    tmp_path, kit, caplog, monkeypatch, place
):
    monkeypatch.setenv("MY_TOKEN", "canary-0123456789")
    line = next(line for line in SINK.splitlines() if place in line)
    # Replace the line of ``place`` with an error at the same indentation.
    indentation = line[: len(line) - len(line.lstrip())]
    raising_line = indentation + "raise OSError('no room, canary-0123456789')"
    failing_sink = written(tmp_path, SINK.replace(line, raising_line))
    good_sink = written(tmp_path, SINK, "good.py")
    kit.run(tmp_path, 12, options={"sinks": [failing_sink, good_sink]})

    assert caplog.text.count("my_sink.py failed: OSError: no room") == 1
    assert "canary" not in caplog.text
    assert len(json.loads((tmp_path / "mine-0.json").read_text())) == 5
    assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 4


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not a file; give the path of an existing file"),
        ("x = (", "cannot be read as Python"),
        ("x = 1", "has no Sink; define a class Sink"),
        (
            "class Sink:\n    def write(self, record): ...\n",
            "has a class Sink without validation, close",
        ),
        (f"import a_package_that_is_not_there\n{SINK}", "fails (line 1): No module named"),
    ],
)
def test_invalid_sink_file_is_refused_in_one_line_before_ranks_start(
    tmp_path, capsys, text, message
):
    path = str(tmp_path / "my_sink.py") if text is None else written(tmp_path, text)
    debug = Path(__file__).parents[2] / "configs/debug.toml"
    assert (
        main(["config", "check", str(debug), f"--metrics.sinks={path}", "--training.device=cpu"])
        == 2
    )

    (line,) = [line for line in "".join(capsys.readouterr()).splitlines() if "my_sink.py" in line]
    assert "metrics.sinks" in line
    assert message in line
