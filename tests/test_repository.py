"""What a contributor looks for in a repository is there, and is true."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import patience
import pytest
import yaml

import shardtrain

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed here")
@pytest.mark.parametrize("target", ["setup", "check", "test", "test-all", "docs", "bench"])
def test_each_target_runs_scripts_that_are_there(target: str) -> None:
    limit = patience.seconds(60)
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=True, timeout=limit)
    named = re.findall(r"\./[\w./]+\.sh|[\w/]+\.py\b", done.stdout)
    assert all((ROOT / name).exists() for name in named) and done.stdout.strip()


def test_the_citation_names_this_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["version"] == shardtrain.__version__ and cited["license"] == "Apache-2.0"


def test_the_changelog_links_to_pages_that_are_there_and_has_what_is_unreleased() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "## Unreleased" in text
    for link in re.findall(r"\]\((docs/[^)#]+)", text):
        assert (ROOT / link).exists(), link
    for verb in re.findall(r"`shardtrain ([a-z]+)", text):
        from shardtrain import cli

        assert verb in cli.VERBS, verb


def test_hosted_ci_and_hooks_run_what_this_repository_has() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert {"run": ".ci/run"} in jobs["ci"]["steps"] and (ROOT / ".ci/run").exists()
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest and oldest[1] in jobs["ci"]["strategy"]["matrix"]["python"]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {".venv/bin/ruff", ".venv/bin/lint-imports"}


def test_templates_ask_which_numbers_changed() -> None:
    for name in ("PULL_REQUEST_TEMPLATE.md", "ISSUE_TEMPLATE/wrong.md"):
        assert "Which numbers changed, and why" in (ROOT / ".github" / name).read_text()
