"""The page that a newcomer reads first names files that exist, and every file of the package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import forked

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_the_map_of_the_package_is_up_to_date() -> None:
    done = forked.run([sys.executable, str(ROOT / "docs" / "map.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_path_in_the_text_exists() -> None:
    text = PAGE.partition("<!-- map -->")[0]
    paths = [path for path in re.findall(r"`([a-z_0-9/]+/(?:[a-z_0-9]+\.py)?)`", text) if "my_" not in path]
    assert len(paths) > 30
    missing = [path for path in paths if not ((ROOT / "shardtrain" / path).exists() or (ROOT / path).exists())]
    assert not missing
