"""The measure of readability finds hard phrases and dense code, and never fails a run."""

from __future__ import annotations

from types import SimpleNamespace

import readability

CLEAR = '''def mean(values: list[float]) -> float:
    """Return the arithmetic mean of ``values``."""
    total = sum(values)
    return total / len(values)
'''
HARD = '''def mean(values: list[float]) -> float:
    """What the whole list gives, where it is asked for."""
    # as many as there are, of their own
    return 0.0
'''


def test_plain_code_gets_no_complaint():
    assert readability.measure(CLEAR).complaint() == ""


def test_hard_phrases_are_counted_in_docstrings_and_comments():
    assert readability.measure(HARD).phrases == 5
    assert "hard phrases per 1,000 words" in readability.measure(HARD).complaint()


def test_dense_code_is_reported():
    dense = (
        "x = [a if b else c for a, b, c in d if e or f(g(h(i))) and j[k] < l[m]]\n"
        * readability.FEWEST_LINES
    )
    assert "syntax nodes a line" in readability.measure(dense).complaint()


class Reporter:
    """Stand-in for pytest's terminal reporter that collects the printed lines."""

    def __init__(self):
        self.lines = []

    def section(self, title):
        self.lines.append(title)

    line = section


def test_hard_files_are_listed(tmp_path, monkeypatch):
    (tmp_path / "clear.py").write_text(CLEAR)
    (tmp_path / "hard.py").write_text(HARD)
    monkeypatch.setattr(
        readability, "changed_files", lambda root: [root / "clear.py", root / "hard.py"]
    )
    reporter = Reporter()

    readability.pytest_terminal_summary(reporter, SimpleNamespace(rootpath=tmp_path))

    title, hard = reporter.lines

    assert title == "readability of changed files"
    assert hard.startswith("hard.py: ")
    assert "hard phrases per 1,000 words" in hard


def test_a_folder_without_git_prints_nothing(tmp_path):
    reporter = Reporter()
    readability.pytest_terminal_summary(reporter, SimpleNamespace(rootpath=tmp_path))
    assert reporter.lines == []
