"""SECURITY.md says what is so: every rule has a test that exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs/SECURITY.md").read_text(encoding="utf-8")


def test_every_rule_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (R\d+) \|.*\|(.*)\|$", TEXT, re.MULTILINE)
    assert [rule for rule, _ in rows] == [f"R{number}" for number in range(1, 17)]
    for rule, cell in rows:
        names = re.findall(r"`([^`]+)`", cell)
        assert names, rule
        for name in names:
            assert "def test_" in (ROOT / name).read_text(encoding="utf-8"), (rule, name)


def test_every_file_of_tests_of_security_is_named() -> None:
    assert all(path.name in TEXT for path in (ROOT / "tests/security").glob("test_*.py"))


def test_the_policy_says_what_a_reporter_needs() -> None:
    for word in ("private vulnerability reporting", "90 days", "What is a vulnerability", "opening an artefact"):
        assert word in TEXT
    for who in ("A1", "A2", "A3", "A4", "A5"):
        assert f"**{who}**" in TEXT
