"""The scripts that draw the pictures of the documentation work, and the pictures are current."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import re
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from types import ModuleType

import patience
import pytest
import small_checkpoint

ROOT = Path(__file__).parents[1]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    # dataclasses look up their module in sys.modules
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "docs"))  # the scripts import docs/svg.py
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "docs"))
    return module


cast = script("cast")
pictures = script("pictures")
drawings = script("drawings")
plots = script("plots")


def rows(svg: str) -> list[str]:
    return [
        "".join(text.itertext())
        for text in xml.etree.ElementTree.fromstring(svg)
        if text.tag.endswith("}text")
    ]


def test_command_is_recorded_replayed_and_drawn(tmp_path: Path) -> None:
    program = "import sys; print('a <b> & c'); print('\\x1b[32mgreen\\x1b[0m', sys.stdout.isatty())"
    output = tmp_path / "one.svg"
    recording = tmp_path / "one.cast"
    cast_command = [sys.executable, "docs/cast.py", "-o", str(output)]
    command = [
        "--columns",
        "40",
        "--record",
        str(recording),
        "--title",
        "program",
        "--",
        sys.executable,
        "-c",
        program,
    ]
    limit = patience.seconds(60)
    subprocess.run(
        [*cast_command, *command], cwd=ROOT, check=True, capture_output=True, timeout=limit
    )
    drawn = output.read_text()

    # without spaces: each colored span has its own position
    assert rows(drawn) == ["$program", "a <b> & c", "greenTrue"]
    assert f'fill="{cast.COLORS[32]}">green<' in drawn

    head, *events = map(json.loads, recording.read_text().splitlines())
    assert head["version"] == 2
    assert head["width"] == 40
    assert all(kind == "o" for _, kind, _ in events)

    subprocess.run(
        [*cast_command, "--replay", str(recording)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=limit,
    )

    assert rows(output.read_text()) == rows(drawn)


def test_redrawn_lines_have_their_final_content() -> None:
    events = [
        (0.0, "header\r\n"),
        (1.0, "bar 1"),
        (2.0, "\r\x1b[2Kstep 1\r\nbar 2\r\n"),
        (3.0, "\x1b[1A\x1b[2Kend\r\n"),
    ]

    assert [re.sub(r"\s", "", row) for row in rows(cast.draw("x", 20, events))] == [
        "$x",
        "header",
        "step1",
        "end",
    ]

    wide = cast.draw("x", 5, [(0.0, "1234567")])
    assert rows(wide)[1:] == ["12345", "67"]


def test_selected_rows_of_a_long_output_are_drawn() -> None:
    events = [(float(number), f"line{number}\r\n") for number in range(100)]
    assert rows(cast.draw("x", 20, events, "0:2 98:")) == [
        "$x",
        "line0",
        "line1",
        "...",
        "line98",
        "line99",
    ]


def test_picture_of_the_readme_shows_a_run() -> None:
    drawn = (ROOT / "docs/first_run.svg").read_text()
    shown = rows(drawn)
    assert shown[0] == "$shardtrain train debug"
    assert any(row.startswith("next:") for row in shown)
    assert any(row.startswith("sample after step") for row in shown)
    assert not re.search(r"<script|href|url\(|@import", drawn)
    assert len(drawn) < 50_000


def texts(svg: str) -> list[str]:
    """Return the texts in a drawing."""
    return [
        text.text or ""
        for text in xml.etree.ElementTree.fromstring(svg).iter()
        if text.tag.endswith("}text")
    ]


@pytest.mark.parametrize("module", [drawings, plots], ids=["drawings", "plots"])
def test_pictures_of_pages_are_current(module: ModuleType) -> None:
    """Drawings use the package's order of axes, schedules and data. Plots use benchmarks/results."""
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    for name, draw in module.ALL.items():
        stored = (ROOT / f"docs/pictures/{name}.svg").read_text()
        assert draw() == stored, f"run python docs/{module.__name__}.py"
        assert f"](pictures/{name}.svg)" in pages
        assert texts(stored)
        assert not re.search(r"<script|href|@import", stored)
        # legible on light and dark pages
        assert "prefers-color-scheme: dark" in stored
        assert 'class="ground"' in stored


def test_every_picture_has_a_script() -> None:
    assert {path.stem for path in (ROOT / "docs/pictures").iterdir()} == set(drawings.ALL) | set(
        plots.ALL
    )


def test_drawn_files_are_those_of_a_checkpoint(tmp_path: Path) -> None:
    with (
        small_checkpoint.world_of_one(),
        contextlib.closing(small_checkpoint.checkpoints(tmp_path)) as storage,
    ):
        small_checkpoint.save(storage, 500)
        real = {path.name for path in tmp_path.rglob("*")}
    drawn = {
        name.rstrip("/") for name, _, depth in drawings.FILES if depth or name == "checkpoint/"
    }

    assert drawn - {"rank-00001.bin"} == real  # the small checkpoint has one rank


def test_drawn_pipeline_actions_follow_their_inputs_and_never_overlap() -> None:
    for name, per_rank in drawings.SCHEDULES:
        placed, end = drawings.times(name, 4, per_rank, 8)
        spans = sorted(
            (rank, begin, begin + drawings.LENGTHS[action.kind]) for rank, begin, action in placed
        )
        for (rank, _, previous_end), (next_rank, next_begin, _) in itertools.pairwise(spans):
            assert rank < next_rank or previous_end <= next_begin
        assert spans[-1][2] <= end

        begins = {
            (action.kind, action.stage, action.microbatch): begin for _, begin, action in placed
        }
        for (kind, stage, number), begin in begins.items():
            if kind == "F" and stage:
                assert begin >= begins["F", stage - 1, number] + 1


PAGE = "tests/tools/runs/report/test_report.py::test_a_page_has_the_curves_and_the_last_numbers_of_its_run"


@pytest.mark.nightly("a browser starts", by=PAGE)
def test_screenshots_of_a_report_in_two_widths_and_print(tmp_path: Path) -> None:
    if pictures.browser() is None:
        pytest.skip("no Chromium here")
    from shardtrain import report

    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text(
        "".join(f'{{"step": {step}, "loss": {9 / step}}}\n' for step in range(1, 9))
    )
    taken = pictures.take(Path(report(run, tmp_path / "report.html")), tmp_path)
    starts = {".png": b"\x89PNG", ".pdf": b"%PDF"}

    assert [path.name for path in taken] == ["report.png", "report_phone.png", "report_print.pdf"]
    for path in taken:
        assert path.read_bytes().startswith(starts[path.suffix]), path
        assert path.stat().st_size > 3000, path
