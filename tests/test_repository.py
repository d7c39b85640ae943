"""Files for contributors exist and are correct, and no generated files are tracked."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import slurm_cluster
import yaml

import shardtrain

ROOT = Path(__file__).parents[1]


def tracked_files() -> list[Path]:
    """All files that git tracks and that exist."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    files = [ROOT / name for name in listed.split("\0") if name]
    if not files:
        pytest.skip("this is not a clone")
    return [path for path in files if path.is_file()]


def test_the_root_has_at_most_22_entries() -> None:
    """docs/decisions/root_entries.md lists the places of other files."""
    entries = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    assert len(entries) <= 22, sorted(entries)


def test_commands_for_contributors_name_scripts_that_exist() -> None:
    text = (ROOT / "docs/CONTRIBUTING.md").read_text()
    table = text.partition("## Commands")[2].partition("\n## ")[0]
    scripts = re.findall(r"\.?[\w./]+\.(?:sh|py|txt)\b", table)
    assert len(scripts) > 8
    assert [name for name in scripts if not (ROOT / name).exists()] == []


def test_hosted_ci_runs_pinned_actions_with_read_permission() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text()
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}, path
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used and all(
            re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) and "# v" in rest for name, rest in used
        ), path
        assert "${{ github." not in text, "the name of a branch could inject a command"


def test_tested_versions_are_pinned() -> None:
    for path in (ROOT / "scripts/constraints").glob("*.txt"):
        lines = [
            line.strip()
            for line in path.read_text().splitlines()
            if line.strip() and not line.startswith("#")
        ]
        assert all(re.fullmatch(r"[\w.-]+==[\w.+]+|-c \w+\.txt", line) for line in lines), path


def test_citation_has_this_version() -> None:
    citation = (ROOT / "README.md").read_text().partition("```bibtex\n")[2].partition("```")[0]
    assert f"version = {{{shardtrain.__version__}}}" in citation


def test_changelog_has_an_unreleased_section_and_names_existing_verbs() -> None:
    text = (ROOT / "docs/CHANGELOG.md").read_text()
    assert "## Unreleased" in text
    for verb in re.findall(r"`shardtrain ([a-z]+)", text):
        from shardtrain import cli

        assert verb in cli.VERBS, verb


def test_hosted_ci_and_hooks_run_existing_commands() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert {"run": ".ci/run"} in jobs["ci"]["steps"]
    assert (ROOT / ".ci/run").exists()

    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest
    assert oldest[1] in jobs["ci"]["strategy"]["matrix"]["python"]

    hooks = yaml.safe_load((ROOT / ".github/pre-commit-config.yaml").read_text())["repos"][0][
        "hooks"
    ]
    assert {hook["entry"].split()[0] for hook in hooks} == {
        ".venv/bin/ruff",
        ".venv/bin/lint-imports",
    }


def test_templates_ask_which_numbers_changed() -> None:
    for name in ("PULL_REQUEST_TEMPLATE.md", "ISSUE_TEMPLATE/wrong.md"):
        assert "Which numbers changed, and why" in (ROOT / ".github" / name).read_text()


def test_tests_that_a_plain_run_skips_are_listed_with_their_last_pass() -> None:
    page = (ROOT / "docs/CONTRIBUTING.md").read_text()
    text = page.partition("## What a plain run leaves out")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = [line for line in lines if not line.startswith(("| Variable", "| Needs"))]

    assert len(rows) > 20

    for row in rows:
        last_pass = row.split("|")[-2].strip()
        assert re.match(r"never$|\d+ [A-Z][a-z]{2} \d{4}", last_pass), row

    # Variables, programs and modules that tests read or require.
    read = r'environ(?:\.get\(|\[)\s*"(SHARDTRAIN_\w+)"|"(SHARDTRAIN_\w+)" not in os\.environ'
    variables = set()
    programs = {*slurm_cluster.PROGRAMS, "unshare", "nsenter", "ip", "kubectl", "openssl"}
    modules = set()
    for path in (ROOT / "tests").rglob("*.py"):
        source = path.read_text()
        variables |= {first or second for first, second in re.findall(read, source)}
        programs |= set(re.findall(r'\bwhich\(\s*"([\w-]+)"', source))
        modules |= set(re.findall(r'importorskip\(\s*"(\w+)', source))

    # set by the package or the test runner, not a switch for contributors
    variables -= {
        "SHARDTRAIN_AGENT",
        "SHARDTRAIN_PARENT",
        "SHARDTRAIN_TEST_COSTS",
        "SHARDTRAIN_TEST_FAILURES",
        "SHARDTRAIN_TEST_PATIENCE",
    }

    assert variables == set(re.findall(r"`(SHARDTRAIN_\w+)`", text))

    assert not {name for name in programs if f"`{name}`" not in text}

    # Each module is installed with the package or for its development.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    for module in modules - {*sys.stdlib_module_names}:
        package = module.replace("_", "-")
        assert any(requirement.startswith(package) for requirement in requirements), package


def test_no_generated_file_is_tracked() -> None:
    suffixes = {".log", ".pyc", ".pyo", ".out", ".err", ".tmp", ".swp"}
    folders = {
        "__pycache__",
        "outputs",
        "logs",
        ".pytest_cache",
        ".mypy_cache",
        ".ruff_cache",
        "build",
        "dist",
    }
    written = [
        path.relative_to(ROOT).as_posix()
        for path in tracked_files()
        if path.suffix in suffixes or folders & set(path.relative_to(ROOT).parts)
    ]

    assert not written


def test_no_tracked_file_contains_a_path_of_a_machine() -> None:
    home = re.escape(str(Path.home())) if Path.home() != Path("/root") else r"(?<![\w}])/root"
    machine_path = re.compile(rf"{re.escape(str(ROOT))}/|{home}/|(?<![\w./}}-])/work/")
    offenders = []
    for path in tracked_files():
        text = path.read_bytes().decode(errors="replace")
        if path != Path(__file__) and machine_path.search(text):
            offenders.append(path.relative_to(ROOT).as_posix())

    assert not offenders
