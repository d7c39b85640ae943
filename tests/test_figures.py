"""Each figure of README and the pages is the one in its result file."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch):
    """The module ``docs/figures.py``."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import figures

    return figures


def test_no_page_disagrees_with_its_result_file() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs/figures.py", "--check"], capture_output=True, text=True
    )

    assert done.returncode == 0, (
        f"run python docs/figures.py; these pages differ: {done.stdout}{done.stderr}"
    )


def test_every_figure_is_used(figures) -> None:
    names = {
        name for page in figures.pages() for name, _ in figures.MARKED.findall(page.read_text())
    }
    assert names == set(figures.FIGURES)


def test_no_figure_is_typed_by_hand(figures) -> None:
    """Figures of five or more digits are recognizable; shorter ones could be any number."""
    distinct = {name: value() for name, value in figures.FIGURES.items() if "table" not in name}
    distinct = {name: text for name, text in distinct.items() if len(re.sub(r"\D", "", text)) >= 5}
    history = ("CHANGELOG.md", "LOG.md")  # their entries keep the figures of their time
    for page in figures.pages():
        if page.name in history:
            continue
        unmarked = figures.MARKED.sub("", page.read_text())
        typed = [
            name
            for name, text in distinct.items()
            if re.search(rf"(?<![\d,.]){re.escape(text)}(?![\d,.]\d)", unmarked)
        ]
        assert not typed, f"{page.name} has {typed} without a marker"


def test_a_changed_figure_is_noticed_and_written(figures) -> None:
    text = "about <!--f:search.cases-->1<!--/f--> cases"
    assert (
        figures.filled(text)
        == f"about <!--f:search.cases-->{figures.FIGURES['search.cases']()}<!--/f--> cases"
    )


def test_a_table_stays_on_lines_of_its_own(figures) -> None:
    table = figures.filled("<!--f:cpu.peers_table-->old<!--/f-->")
    assert table.startswith("<!--f:cpu.peers_table-->\n| Program")
    assert table.endswith("|\n<!--/f-->")
