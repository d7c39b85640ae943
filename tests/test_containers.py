"""Container recipes: no root, no secrets, one installed copy, working signals, existing files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scripts/containers"
DOCKERFILES = [FOLDER / "Dockerfile", FOLDER / "Dockerfile.cpu"]
RECIPES = [*DOCKERFILES, FOLDER / "apptainer.def"]


def instructions(path: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, with continuation lines joined."""
    without_comments = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE)
    joined = re.sub(r"\\\n", " ", without_comments)
    result = []
    for line in joined.splitlines():
        if line.strip():
            name, value = line.split(maxsplit=1)
            result.append((name, value))
    return result


def last_stage(path: Path) -> list[tuple[str, str]]:
    lines = instructions(path)
    last_from = max(number for number, (name, _) in enumerate(lines) if name == "FROM")
    return lines[last_from:]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_runs_as_non_root_and_its_command_receives_signals(path):
    stage = last_stage(path)
    users = [value for name, value in stage if name == "USER"]
    assert users
    assert users[-1] not in ("0", "root")

    (entry,) = [value for name, value in stage if name == "ENTRYPOINT"]
    assert json.loads(entry) == ["shardtrain"], "a shell would not forward signals"

    (command,) = [value for name, value in stage if name == "CMD"]
    assert json.loads(command) == ["train"], "a file here would override the CONFIG_FILE of a job"

    (default,) = [re.search(r"CONFIG_FILE=(\S+)", value) for name, value in stage if name == "ENV"]
    assert default
    assert (ROOT / default[1]).is_file()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_image_has_one_copy_of_the_package(path):
    copies = [value for name, value in last_stage(path) if name == "COPY"]
    assert not [value for value in copies if value.split()[0] == "shardtrain"], (
        "a second copy would hide the first"
    )

    # Every source of a COPY exists, and the ignore file does not exclude it.
    not_ignored = path.with_name(f"{path.name}.dockerignore").read_text().split()
    for name, value in instructions(path):
        if name != "COPY" or "--from" in value:
            continue
        for source in value.split()[:-1]:
            assert (ROOT / source).exists()
            assert f"!{source}" in not_ignored


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_versions_are_pinned_and_no_secret_is_named(path):
    text = path.read_text()
    bases = re.findall(r"^(?:FROM (?!\$\{BASE\})|From: |ARG BASE=)(\S+)", text, re.MULTILINE)
    assert bases
    for base in bases:
        assert re.fullmatch(r"[a-z./]+:\d[\w.-]+", base), "a base without a version"
    assert not re.search(r"TOKEN|API_KEY|PASSWORD|SECRET", text)

    build_arguments = set(re.findall(r"^ARG (\w+)=", text, re.MULTILINE))
    assert build_arguments <= {"BASE", "TORCH_INDEX"}, "build arguments are stored in the image"

    # Each build argument has a default.
    for argument in re.findall(r"^ARG .*$", text, re.MULTILINE):
        assert re.fullmatch(r"ARG \w+=\S+", argument)
    assert not re.search(r"\bADD\b|curl|wget|sudo|latest|--privileged", text)

    installs = [line for line in re.sub(r"\\\n", " ", text).splitlines() if "pip install" in line]
    assert installs
    for line in installs:
        assert "--no-cache-dir" in line
        assert "--constraint" in line or "^torch==" in line, "an untested version"


def test_apptainer_copies_existing_files_and_ends_with_exec():
    text = (FOLDER / "apptainer.def").read_text()
    block = re.search(r"^%files\n(.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert block is not None
    for line in block[1].splitlines():
        assert (ROOT / line.split()[0]).exists()
    assert 'exec shardtrain "$@"' in text
