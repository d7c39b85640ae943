"""What a contributor looks for in a repository is there, and is true."""

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
    """See docs/decisions/root_entries.md for the place of everything else."""
    entries = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    assert len(entries) <= 22, sorted(entries)


def test_commands_for_contributors_name_scripts_that_exist() -> None:
    text = (ROOT / "docs/CONTRIBUTING.md").read_text()
    table = text.partition("## Commands")[2].partition("\n## ")[0]
    named = re.findall(r"\.?[\w./]+\.(?:sh|py|txt)\b", table)
    assert len(named) > 8
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_hosted_ci_runs_actions_of_a_known_commit_and_may_only_read() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        text = path.read_text()
        assert yaml.safe_load(text)["permissions"] == {"contents": "read"}, path
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", name) and "# v" in rest for name, rest in used), path
        assert "${{ github." not in text, "a branch's name may be a command"


def test_each_version_that_is_tested_is_one_version() -> None:
    for path in (ROOT / "scripts/constraints").glob("*.txt"):
        lines = [line.strip() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
        assert all(re.fullmatch(r"[\w.-]+==[\w.+]+|-c \w+\.txt", line) for line in lines), path


def test_the_citation_names_this_version() -> None:
    citation = (ROOT / "README.md").read_text().partition("```bibtex\n")[2].partition("```")[0]
    assert f"version = {{{shardtrain.__version__}}}" in citation


def test_the_changelog_has_an_unreleased_section_and_names_verbs_that_exist() -> None:
    text = (ROOT / "docs/CHANGELOG.md").read_text()
    assert "## Unreleased" in text
    for verb in re.findall(r"`shardtrain ([a-z]+)", text):
        from shardtrain import cli

        assert verb in cli.VERBS, verb


def test_hosted_ci_and_hooks_run_what_this_repository_has() -> None:
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    assert {"run": ".ci/run"} in jobs["ci"]["steps"] and (ROOT / ".ci/run").exists()
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest and oldest[1] in jobs["ci"]["strategy"]["matrix"]["python"]
    hooks = yaml.safe_load((ROOT / ".github/pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert {hook["entry"].split()[0] for hook in hooks} == {".venv/bin/ruff", ".venv/bin/lint-imports"}


def test_templates_ask_which_numbers_changed() -> None:
    for name in ("PULL_REQUEST_TEMPLATE.md", "ISSUE_TEMPLATE/wrong.md"):
        assert "Which numbers changed, and why" in (ROOT / ".github" / name).read_text()


def test_what_a_plain_run_of_the_tests_leaves_out_is_listed_with_its_last_pass() -> None:
    text = (
        (ROOT / "docs/CONTRIBUTING.md").read_text().partition("## What a plain run leaves out")[2].partition("\n## ")[0]
    )
    rows = [
        line for line in text.splitlines() if line.startswith("| ") and not line.startswith(("| Variable", "| Needs"))
    ]
    assert len(rows) > 20
    for row in rows:
        last = row.split("|")[-2].strip()
        assert re.match(r"never$|\d+ [A-Z][a-z]{2} \d{4}", last), row
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.py")]
    read = r'environ(?:\.get\(|\[)\s*"(SHARDTRAIN_\w+)"|"(SHARDTRAIN_\w+)" not in os\.environ'
    asked = {one or other for source in sources for one, other in re.findall(read, source)}
    # of the package, and of the runner of the tests itself
    asked -= {"SHARDTRAIN_PARENT", "SHARDTRAIN_TEST_COSTS", "SHARDTRAIN_TEST_FAILURES", "SHARDTRAIN_TEST_PATIENCE"}
    assert asked == set(re.findall(r"`(SHARDTRAIN_\w+)`", text))
    programs = {name for source in sources for name in re.findall(r'\bwhich\(\s*"([\w-]+)"', source)}
    programs |= {*slurm_cluster.PROGRAMS, "unshare", "nsenter", "ip", "kubectl", "openssl"}
    assert not {name for name in programs if f"`{name}`" not in text}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*extras["dependencies"], *extras["optional-dependencies"]["dev"]]
    modules = {name for source in sources for name in re.findall(r'importorskip\(\s*"(\w+)', source)}
    modules -= {*sys.stdlib_module_names}
    assert not {name for name in modules if not any(one.startswith(name.replace("_", "-")) for one in wanted)}


def test_no_file_that_a_program_wrote_while_running_is_tracked() -> None:
    suffixes = {".log", ".pyc", ".pyo", ".out", ".err", ".tmp", ".swp"}
    folders = {"__pycache__", "outputs", "logs", ".pytest_cache", ".mypy_cache", ".ruff_cache", "build", "dist"}
    written = [
        path.relative_to(ROOT).as_posix()
        for path in tracked_files()
        if path.suffix in suffixes or folders & set(path.relative_to(ROOT).parts)
    ]
    assert not written


def test_no_tracked_file_contains_a_path_of_the_machine_that_it_was_written_on() -> None:
    home = re.escape(str(Path.home())) if Path.home() != Path("/root") else r"(?<![\w}])/root"
    machine_path = re.compile(rf"{re.escape(str(ROOT))}/|{home}/|(?<![\w./}}-])/work/")
    found = []
    for path in tracked_files():
        text = path.read_bytes().decode(errors="replace")
        if path != Path(__file__) and machine_path.search(text):
            found.append(path.relative_to(ROOT).as_posix())
    assert not found
