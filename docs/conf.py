"""Sphinx configuration: `sphinx-build -W -q -c docs -b html . build/site`. The pages are also readable without it.

The source folder is the repository, and ``include_patterns`` selects the pages. Links between pages therefore
lead to the same files on the site and in a checkout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardtrain

project = "shardtrain"
author = "the authors of shardtrain"
release = version = shardtrain.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/decisions/*.md",
    "docs/migrate/*.md",
    "docs/tutorials/*.md",
    "benchmarks/LOG.md",
    "configs/recipes/*.md",
    "examples/*/README.md",
    "examples/notebook.ipynb",
]
exclude_patterns = ["outputs"]
html_theme = "furo"
html_title = f"shardtrain {release}"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
# Set DOCS_REPOSITORY to the address of the repository for a link "edit this page" on each page.
repository = os.environ.get("DOCS_REPOSITORY", "")
html_theme_options = (
    {"source_repository": repository, "source_branch": "main", "source_directory": ""}
    if repository
    else {}
)
copybutton_prompt_text = "$ "
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "description"
autodoc_member_order = "bysource"
nb_execution_mode = "off"  # the notebook has what docs/notebook.py ran; a test compares
suppress_warnings = ["myst.header"]  # some pages begin sections below a table one level deeper


def setup(app: Any) -> None:
    """Let the root of the site lead to its first page."""

    def lead(app: Any, error: Exception | None) -> None:
        if error is None and app.builder.name == "html":
            refresh = '<meta http-equiv="refresh" content="0; url=docs/index.html">'
            page = f"<!doctype html>{refresh}<title>shardtrain</title>\n"
            (Path(app.outdir) / "index.html").write_text(page)

    app.connect("build-finished", lead)
