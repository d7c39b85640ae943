"""A command refuses an output that it cannot write: the name ``-``, a target of the wrong kind, and a wrong parent."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from shardtrain.cli import main
from shardtrain.utils import output_target


@pytest.mark.parametrize("command", [
    "report run -o -", "report run --output=-", "plan debug --search --gpus 1 -o -", "plan debug --search --output -",
    "config migrate old.yaml -o -", "config migrate old.yaml --output=-", "generate run --prompt a --output -",
    "evaluate run --data a=b --output -", "data prepare debug --output -", "data tokenizer train x --output -",
    "data download --repo_id a/b --local_dir -", "import x --to -", "export x --to -", "merge x --to -",
    "test debug --output -", "replay 1 run --output -", "checkpoint to-dcp x -", "checkpoint from-fmengine x -",
    "checkpoint to-fmengine x -", "init -",
])  # fmt: skip
def test_output_named_dash_is_refused_in_one_line(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error[2]: ")
    assert "- is not an output" in line or "NEW.toml" in line
    assert not list(tmp_path.iterdir())


def folder(path: Path) -> None:
    path.mkdir()


def file(path: Path) -> None:
    path.write_text("kept")


def pipe(path: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path) -> None:
    # The path of a socket has at most 107 bytes, so bind a short relative one.
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/null")


def dangling_link(path: Path) -> None:
    path.symlink_to("gone")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def link_to_a_pipe(path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    path.symlink_to("pipe")


# The kinds that are wrong for any output, and the one that is wrong for a file or for a folder.
SPECIAL_KINDS = {
    pipe: "is a pipe",
    unix_socket: "is a socket",
    device: "is a device",
    dangling_link: "is a link to gone, which does not exist",
    link_to_itself: "is a link that leads to itself",
    link_to_a_pipe: "is a pipe",
}
TO_FILES = [
    "report run -o {}", "plan debug --search --gpus 1 -o {}", "config migrate old.yaml -o {}",
    "config migrate old.yaml --output={}", "generate run --prompt a --output {}",
    "evaluate run --data a=b --output {}", "checkpoint weights run {}", "init {}",
    "verify debug --certificate {}",
]  # fmt: skip
TO_FOLDERS = [
    "data prepare debug --output {}", "data tokenizer train x --output {}",
    "data download --repo_id a/b --local_dir {}", "import x --to {}", "export x --to {}", "merge x --to {}",
    "test debug --output {}", "replay 1 run --output {}", "checkpoint to-dcp x {}", "checkpoint from-dcp x {}",
    "checkpoint from-fmengine x {}", "checkpoint to-fmengine x {}",
]  # fmt: skip


def refusal(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command whose input does not exist, and return the only line of its error."""
    assert main(command.format("./target.toml").split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error[2]: ")
    return line


@pytest.mark.parametrize(
    ("command", "kind"),
    [
        *itertools.product(TO_FILES, [*SPECIAL_KINDS, folder]),
        *itertools.product(TO_FOLDERS, [*SPECIAL_KINDS, file]),
    ],
)
def test_target_of_the_wrong_kind_is_refused_before_any_work(
    command: str, kind: Callable[[Path], None], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    kind(tmp_path / "target.toml")
    before = sorted(tmp_path.iterdir())
    line = refusal(command, capsys)

    assert "target.toml" in line
    assert SPECIAL_KINDS.get(kind, f"is a {kind.__name__}, not a ") in line
    assert "name another" in line
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize("command", [*TO_FILES, *TO_FOLDERS])
def test_target_below_a_file_is_refused_before_any_work(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").write_text("kept")
    (tmp_path / "loop").symlink_to("loop")
    for parent in ("a", "a/b", "loop", "loop/b"):
        line = refusal(command.replace("{}", f"{parent}/new.toml"), capsys)
        assert "which is not a folder" in line
        assert parent.partition("/")[0] in line


@pytest.mark.parametrize("command", [*TO_FILES, *TO_FOLDERS])
def test_target_with_a_name_that_is_too_long_is_refused_before_any_work(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "n" * 300 + ".toml"
    for path in (name, f"{name}/new.toml", f"new/{name}"):
        line = refusal(command.replace("{}", path), capsys)
        assert output_target.TOO_LONG in line

    assert not list(tmp_path.iterdir())


def test_valid_targets(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link to file").symlink_to("file")
    (tmp_path / "link to folder").symlink_to("folder")

    for name in ("file", "link to file", "new", "folder/new", "link to folder/new", "new/new"):
        assert output_target.violated_rule(tmp_path / name, "file") == ""
    for name in ("folder", "link to folder", "new", "folder/new", "new/new"):
        assert output_target.violated_rule(tmp_path / name, "folder") == ""
