"""Every rule of SECURITY.md, and every promise of launch.md, names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/SECURITY.md").read_text(encoding="utf-8")


PAGES = ("SECURITY.md", "launch.md")
NAME = re.compile(r"tests/[\w/]+\.py(?:::(test_\w+))?")
PROMISES = {
    "SECURITY.md": ["| Rule | What holds | Test |"],
    "launch.md": ["| Code | Meaning | Retry | Test |", "| During | The run | Test |"],
}
"""Headers of the tables whose rows must name their tests."""


@pytest.mark.parametrize("page", PAGES)
def test_promises_name_existing_tests(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for name in NAME.finditer(text):
        file = name[0].partition("::")[0]
        tests = (ROOT / file).read_text(encoding="utf-8")
        assert f"def {name[1] or 'test_'}" in tests, name[0]

    # The last column of a table of promises names tests, not only files.
    for head in PROMISES.get(page, []):
        table = text[text.index(head) :].partition("\n\n")[0]
        rows = table.splitlines()[2:]
        assert len(rows) > 5
        for row in rows:
            last_column = row.rpartition(" | ")[2]
            test_names = [name[1] for name in NAME.finditer(last_column)]
            assert test_names, row
            assert all(test_names), row


def test_the_rules_are_numbered() -> None:
    assert re.findall(r"^\| R(\d+) \|", TEXT, re.MULTILINE) == [
        str(number) for number in range(1, 17)
    ]


def test_policy_names_every_file_of_security_tests() -> None:
    assert all(path.name in TEXT for path in (ROOT / "tests/security").glob("test_*.py"))


def test_policy_has_the_information_for_a_reporter() -> None:
    for phrase in (
        "private vulnerability reporting",
        "90 days",
        "What is a vulnerability",
        "opening an artefact",
    ):
        assert phrase in TEXT
    for attacker in ("A1", "A2", "A3", "A4", "A5"):
        assert f"**{attacker}**" in TEXT
