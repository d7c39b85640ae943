"""The documentation site has every page, no broken links, and a working search index."""

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


@pytest.mark.nightly(
    "a build of all pages", by="tests/test_docs.py::test_relative_links_lead_to_files_and_headings"
)
@pytest.mark.timeout(400)
def test_site_has_every_page_and_no_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    pytest.importorskip("furo")
    pytest.importorskip("myst_nb")
    site = tmp_path / "site"
    # -W: broken links, pages outside every table of contents and bad docstrings are errors
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-c",
        "docs",
        "-b",
        "html",
    ]
    done = subprocess.run(
        [*command, "-d", str(tmp_path / "doctrees"), ".", str(site)],
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

    index = re.search(r"Search\.setIndex\((.*)\)", (site / "searchindex.js").read_text(), re.DOTALL)
    assert index is not None
    assert {"checkpoint", "goodput"} <= json.loads(index[1])["terms"].keys()
