"""The page that a newcomer reads first names files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_every_path_in_the_text_exists() -> None:
    paths = [path for path in re.findall(r"`([a-z_0-9/]+/(?:[a-z_0-9]+\.py)?)`", PAGE) if "my_" not in path]
    assert len(paths) > 30
    missing = [path for path in paths if not ((ROOT / "shardtrain" / path).exists() or (ROOT / path).exists())]
    assert not missing


def test_the_table_of_changes_names_files_and_tests_that_exist() -> None:
    table = PAGE.partition("\n## To change one thing\n")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(rows) >= 15
    for row in rows:
        _, change, edited, tests, _ = row.split("|")
        files = re.findall(r"`([\w/]+(?:\.\w+|/))`", edited)
        runs = re.findall(r"`(tests/[\w/.]+)`", tests)
        assert files and runs, change
        assert all((ROOT / path).exists() for path in runs), row
        assert all((ROOT / "shardtrain" / path.replace("NAME.py", "")).exists() for path in files), row
