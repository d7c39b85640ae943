"""Reports show the content of run folders, escape all text, keep every spike, and load nothing remote."""

from __future__ import annotations

import html.parser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import patience
import pytest

import shardtrain
from shardtrain import cli
from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.report import page

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">'\"&<b>"


def run_folder(
    path: Path, steps: int = 20, more: dict[str, Any] | None = None, **options: Any
) -> Path:
    path.mkdir(parents=True)
    lines = [
        {"step": step, "loss": 4.0 / step, "grad_norm": 1.0 + step % 3, "lr": 1e-3, "tokens_per_second": 100.0,
         "tokens_seen": 64 * step, "spikes": 0, "order_hash": "0f", **(more or {})}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = "\n".join(f"{name} = {json.dumps(value)}" for name, value in options.items())
    (path / "config.resolved.toml").write_text(f"[training]\nseq_len = 64\n{text}\n")
    return path


def written(folder: Path, *runs: Path) -> str:
    output = folder / "report.html"
    assert cli.main(["report", *map(str, runs), "-o", str(output)]) == 0
    return output.read_text()


class Elements(html.parser.HTMLParser):
    """The tags of a page with their attributes, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def charts(text: str) -> dict[str, Any]:
    match = re.search(
        r'<script type="application/json" id="charts">(.*?)</script>', text, re.DOTALL
    )
    assert match
    return {chart["title"]: chart for chart in json.loads(match[1])}


def test_a_page_has_the_curves_and_the_last_numbers_of_its_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "first", more={"my_metric": 7.5})
    (folder / "validation.jsonl").write_text('{"step": 10, "loss": 1.25, "perplexity": 3.49}\n')
    (folder / "exit.json").write_text('{"code": 0}')
    text = written(tmp_path, folder)
    charts_of_page = charts(text)
    train, validation = charts_of_page["Loss"]["lines"]

    assert train["x"] == list(range(1, 21))
    assert train["y"][0] == 4.0
    assert train["y"][-1] == 0.2
    assert validation["name"] == "first (validation)"
    assert validation["y"] == [1.25]
    assert charts_of_page["my_metric"]["lines"][0]["y"] == [7.5] * 20  # a metric added by a task
    assert "perplexity (validation)" in charts_of_page
    assert "order_hash" not in charts_of_page

    elements = Elements(text)
    assert sum(tag == "svg" for tag, _ in elements.tags) == len(charts_of_page)
    assert "first" in elements.text
    assert "ended" in elements.text
    assert "training.seq_len" in elements.text


def test_samples_sources_and_planned_values_are_shown(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "run",
        more={"rows_of/web": 3, "rows_of/books": 1, "loss_of/web": 2.5, "targets_of/web": 64},
    )
    samples = []
    for step in range(1, 100):
        samples.append(json.dumps({"step": step, "prompt": "def ", "text": f"f_{step}(<b>)"}))
    invalid_samples = ["{", '{"step": 1, "prompt": 2}', '{"step": 100']
    (folder / "samples.jsonl").write_text("\n".join([*samples, *invalid_samples]))
    planned = '{"peak memory in GiB": [2.0, 3.0], "wrong": "x", "none": [0, 1]}'
    (folder / "planned.json").write_text(planned)
    text = written(tmp_path, folder)
    page_text = Elements(text).text

    # The page shows the first, the last and a few other samples, with escaped markup.
    assert "f_1(<b>)" in page_text
    assert "f_99(<b>)" in page_text
    assert 2 <= page_text.count("def f_") <= 8

    # The page shows planned values, and their difference from the measured ones.
    assert "peak memory in GiB" in page_text
    assert "+50%" in page_text
    assert "wrong" not in page_text

    # Metrics of sources share one chart per metric.
    charts_of_page = charts(text)
    for title, names in (
        ("Rows read of each source", ["run books", "run web"]),
        ("Loss of each source", ["run web"]),
        ("Target tokens of each source", ["run web"]),
    ):
        assert [line["name"] for line in charts_of_page[title]["lines"]] == names
    for metric in ("rows_of/web", "loss_of/web", "targets_of/web"):
        assert metric not in charts_of_page


def test_compared_runs_show_only_the_options_that_differ(tmp_path: Path) -> None:
    first = run_folder(tmp_path / "a" / "run", steps=5, lr=0.1)
    second = run_folder(tmp_path / "b" / "run", steps=9, lr=0.2)
    text = written(tmp_path, first, second)
    lines = charts(text)["Loss"]["lines"]

    # full paths are shown, because both folders are named "run"
    assert [line["name"] for line in lines] == [
        str(first),
        str(second),
    ]
    assert [len(line["x"]) for line in lines] == [5, 9]
    assert lines[0]["color"] != lines[1]["color"]

    page_text = Elements(text).text
    assert "training.lr" in page_text
    assert "training.seq_len" not in page_text


def test_text_of_a_run_is_never_markup(tmp_path: Path) -> None:
    folder = run_folder(
        tmp_path / "<img src=x>", more={HOSTILE[:90]: 1.0, "text": HOSTILE}, note=HOSTILE
    )
    (folder / "exit.json").write_text(json.dumps({"code": 3, "message": HOSTILE}))
    (folder / "logs").mkdir()
    (folder / "logs/rank-0.log").write_text(f"2026-01-01 00:00:00 WARNING {HOSTILE}\n")
    clean = written(tmp_path, run_folder(tmp_path / "clean"))
    text = written(tmp_path, folder)
    kinds = {tag for tag, _ in Elements(clean).tags}
    elements = Elements(text)

    assert {tag for tag, _ in elements.tags} == kinds
    for _, attributes in elements.tags:
        for attribute in attributes:
            assert not attribute.startswith("on")
            assert attribute not in ("src", "href")
    assert sum(tag == "script" for tag, _ in elements.tags) == 2
    assert HOSTILE in elements.text  # the markup is shown as text
    assert charts(text)[HOSTILE[:90]]["lines"]


def test_no_control_character_of_a_run_is_in_the_page(tmp_path: Path) -> None:
    obeyed = "".join(
        map(
            chr,
            [*range(1, 9), *range(11, 32), *range(127, 160), 0x61C, 0x200E, 0x202E, 0x2066, 0x2028],
        )
    )
    # Put the control characters into every name and text of a run. (obeyed has no newline, for file names.)
    folder = run_folder(
        tmp_path / f"a{obeyed}", more={f"b{obeyed}": 1.0, "text": obeyed}, note=f"c{obeyed}"
    )
    (folder / "exit.json").write_text(json.dumps({"code": 3, "message": obeyed}))
    (folder / "logs").mkdir()
    (folder / "logs/rank-0.log").write_text(f"2026-01-01 00:00:00 WARNING {obeyed}\n")
    text = written(tmp_path, folder)

    assert not set(text) & set(obeyed)
    assert "\\x1b" in text
    assert "\\u202e" in text
    assert charts(text)[f"b{obeyed}"]["lines"]


def test_the_page_makes_no_network_requests(tmp_path: Path) -> None:
    text = written(tmp_path, run_folder(tmp_path / "run"))
    (rules,) = [names["content"] for tag, names in Elements(text).tags if names.get("http-equiv")]
    assert rules is not None
    assert rules.startswith("default-src 'none'; script-src 'sha256-")
    # the SVG namespace is an identifier, and is never loaded
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("place", [0, 1, 49_999, 77_777, 99_999])
def test_downsampling_keeps_every_spike(place: int) -> None:
    series = run_files.Series()
    series.steps.extend(range(100_000))
    series.values.extend([1.0] * 100_000)
    series.values[place] = 9.0
    steps, values = series.thinned()

    assert len(steps) <= 2 * run_files.POINTS
    assert steps == sorted(set(steps))
    assert values[steps.index(place)] == 9.0


def test_a_page_of_100_000_steps_stays_below_5_mb(tmp_path: Path) -> None:
    record = run_files.RunRecord("long", tmp_path)
    for number in range(20):
        series = record.metrics.setdefault(f"metric_{number}", run_files.Series())
        series.steps.extend(range(100_000))
        series.values.extend((7919 * step * (number + 1) % 10_007) / 7 for step in range(100_000))

    assert len(page.build([record])) < 5_000_000


DAMAGED = {
    "no JSON": b"{\n",
    "a list": b"[1]\n",
    "no step": b'{"loss": 1.0}\n',
    "a step that is text": b'{"step": "1", "loss": 1.0}\n',
    "a step below zero": b'{"step": -1, "loss": 1.0}\n',
    "deeply nested": b"[" * 50_000 + b"\n",
    "a long line": b'{"step": 1, "a": "' + b"x" * 200_000 + b'"}\n',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_lines_are_counted_and_the_rest_is_drawn(tmp_path: Path, name: str) -> None:
    folder = run_folder(tmp_path / "run", steps=3)
    with open(folder / "metrics.jsonl", "ab") as file:
        file.write(
            DAMAGED[name]
            + b'{"step": 4, "loss": 1.0, "inf": Infinity, "none": null}\n{"step": 5, "lo'
        )
    record = run_files.read(folder)

    assert record.bad_lines == 1
    assert list(record.metrics["loss"].steps) == [1, 2, 3, 4]  # the last line is incomplete
    assert "inf" not in record.metrics
    assert "none" not in record.metrics
    assert "1 lines of its files are damaged" in page.build([record])


def test_a_run_that_is_under_way_and_has_few_files_is_shown(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("")
    assert "under way, or killed" in written(tmp_path, folder)
    assert charts(written(tmp_path, folder)) == {}


def test_wrong_folders_are_reported_together_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run_folder(tmp_path / "run")
    output = tmp_path / "report.html"
    arguments = ["report", str(folder), str(tmp_path / "none"), str(tmp_path), "-o", str(output)]
    assert cli.main(arguments) == 2

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("has no metrics.jsonl; name the folder of a run" in line for line in lines)
    assert not output.exists()
    assert cli.main(["report"]) == 2
    assert "requires 1 to 50 folders" in capsys.readouterr().err
    assert cli.main(["report", str(folder), "-o", str(tmp_path / "no" / "where.html")]) == 8
    assert "name another file with -o" in capsys.readouterr().err


def test_the_python_api_writes_the_same_page(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    text = written(tmp_path, folder)
    assert shardtrain.report(folder, tmp_path / "other.html").read_text() == text
    assert charts(shardtrain.report([folder, folder], tmp_path / "two.html").read_text())["Loss"][
        "lines"
    ][1]


def in_browser(folder: Path, text: str) -> str:
    """Return the document after its scripts have run."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no Chromium: pages are only checked as text")
    (folder / "page.html").write_text(text)
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
               "--virtual-time-budget=2000", "--dump-dom", (folder / "page.html").as_uri()]  # fmt: skip
    return subprocess.run(
        command, capture_output=True, text=True, timeout=patience.seconds(120), check=True
    ).stdout


def test_a_browser_redraws_the_page_and_runs_no_code_of_the_run(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", more={HOSTILE[:90]: 1.0}, note=HOSTILE)
    text = written(tmp_path, folder)
    page_text = in_browser(tmp_path, text)
    assert page_text.count("<clipPath") == len(charts(text))  # drawn by the script
    assert "<title>Run run</title>" in page_text
