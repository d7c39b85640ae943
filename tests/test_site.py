"""The site of the documentation: every page is in it, no link leads nowhere, and search knows its words."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import patience
import pytest

import shardtrain

ROOT = Path(shardtrain.__file__).parents[1]


@pytest.mark.nightly("a build of all pages", by="tests/test_docs.py::test_relative_links_lead_to_files_and_headings")
@pytest.mark.timeout(400)
def test_every_page_is_in_the_site_and_no_warning_is_left(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    site = tmp_path / "site"
    # -W: a link that leads nowhere, a page that no table of contents names and a bad docstring are errors
    words = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", "docs", "-b", "html"]
    done = subprocess.run(
        [*words, "-d", str(tmp_path / "doctrees"), ".", str(site)],
        cwd=ROOT, capture_output=True, text=True, timeout=patience.seconds(200), check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for page in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "configs/recipes").glob("*.md")):
        assert (site / page.relative_to(ROOT).with_suffix(".html")).is_file(), page
    assert "docs/index.html" in (site / "index.html").read_text()
    api = (site / "docs/api.html").read_text()
    for name in shardtrain.__all__:
        assert f'id="shardtrain.api.{name}"' in api, name
    found = re.search(r"Search\.setIndex\((.*)\)", (site / "searchindex.js").read_text(), re.DOTALL)
    assert found is not None and {"checkpoint", "goodput"} <= json.loads(found[1])["terms"].keys()
