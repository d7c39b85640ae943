"""A temporary folder is removed with its process or at the next start. Foreign entries next to it are not touched."""

from __future__ import annotations

import os
import signal
import socket
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from shardtrain.utils import temporary
from shardtrain.utils.process_identity import boot_id

OTHER_USER = 65534


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The parent folder of temporary folders."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def killed_holder(purpose: str = "", child_lives: bool = False) -> tuple[Path, int]:
    """Start a process with a temporary folder and kill it. Return the folder, and the process id of its fork or 0."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        folder = temporary.make(purpose)
        (folder / "meeting/deeper").mkdir(parents=True)
        (folder / "meeting/store").write_text("left")
        child = os.fork() if child_lives else 0
        if child or not child_lives:
            os.write(writer, f"{folder} {child}".encode())
        while True:
            signal.pause()
    os.close(writer)
    with open(reader) as file:
        folder, child = os.read(file.fileno(), 4096).decode().split()
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return Path(folder), int(child)


@pytest.mark.parametrize("purpose", ["", "doctor", "model-check"])
def test_next_start_removes_the_folder_of_a_killed_process(purpose: str, place: Path) -> None:
    abandoned, _ = killed_holder(purpose)
    assert (abandoned / "meeting/store").exists()
    with temporary.temporary_folder() as folder:
        assert [*place.iterdir()] == [folder]
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [*place.iterdir()] == []


def test_folder_of_a_live_process_is_not_removed(place: Path) -> None:
    first = temporary.make()
    second = temporary.make("verify")
    assert {*place.iterdir()} == {first, second}

    temporary.remove(first)
    temporary.remove(second)
    assert [*place.iterdir()] == []


def test_folder_is_kept_while_a_fork_of_its_process_lives(place: Path) -> None:
    abandoned, child = killed_holder(child_lives=True)
    try:
        with temporary.temporary_folder():
            assert (abandoned / "meeting/store").exists()
    finally:
        os.kill(child, signal.SIGKILL)
    while (
        Path(f"/proc/{child}").exists()
        and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]
    ):
        pass
    with temporary.temporary_folder():
        assert not abandoned.exists()


def test_exit_of_a_fork_removes_nothing(place: Path) -> None:
    with temporary.temporary_folder() as folder:
        pid = os.fork()
        if not pid:
            temporary.remove(folder)
            os._exit(0)
        os.waitpid(pid, 0)

        assert folder.exists()

        with temporary.temporary_folder():
            assert folder.exists(), "the lock was lost"


def test_folder_kept_for_the_user_is_not_removed(place: Path) -> None:
    pid = os.fork()
    if not pid:
        temporary.keep(temporary.make("verify"))
        os._exit(0)
    os.waitpid(pid, 0)
    with temporary.temporary_folder():
        assert len([*place.glob("shardtrain-verify-*")]) == 1


def marked(path: Path, mode: int = 0o700, text: str = "") -> None:
    path.mkdir()
    path.chmod(mode)
    (path / temporary.MARK).write_text(text or boot_id())
    (path / "data").write_text("precious")


def a_folder_of_the_user(path: Path) -> None:
    path.mkdir(mode=0o700)
    (path / "data").write_text("precious")


def a_file(path: Path) -> None:
    path.write_text("precious")


def a_pipe(path: Path) -> None:
    os.mkfifo(path)


def a_socket(path: Path) -> None:
    os.chdir(path.parent)
    socket.socket(socket.AF_UNIX).bind(path.name)


def a_link_to_a_marked_folder(path: Path) -> None:
    marked(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def a_folder_for_all(path: Path) -> None:
    marked(path, mode=0o777)


def a_folder_of_another_boot(path: Path) -> None:
    marked(path, text="0" * 36)


def a_linked_mark(path: Path) -> None:
    a_folder_of_the_user(path)
    path.with_name("mark").write_text(boot_id())
    (path / temporary.MARK).symlink_to(path.with_name("mark"))


def a_pipe_as_mark(path: Path) -> None:
    a_folder_of_the_user(path)
    os.mkfifo(path / temporary.MARK)


def a_folder_of_another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    marked(path)
    os.chown(path, OTHER_USER, OTHER_USER)


ENTRIES = [
    a_folder_of_the_user, a_file, a_pipe, a_socket, a_link_to_a_marked_folder, a_folder_for_all,
    a_folder_of_another_boot, a_linked_mark, a_pipe_as_mark, a_folder_of_another_user,
]  # fmt: skip


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(
    "name", ["shardtrain-abcdefgh", "shardtrain-\n; rm -rf x", b"shardtrain-\xff\x1b[2J"]
)
def test_foreign_entries_are_not_touched(
    name: str | bytes, entry: Callable[[Path], None], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    entry(place / os.fsdecode(name))
    before = sorted(path.as_posix() for path in place.rglob("*"))
    with temporary.temporary_folder() as folder:
        assert (
            sorted(
                path.as_posix() for path in place.rglob("*") if folder not in (path, path.parent)
            )
            == before
        )


def test_link_inside_an_abandoned_folder_is_not_followed(place: Path) -> None:
    (place / "precious").mkdir()
    (place / "precious/data").write_text("kept")
    abandoned, _ = killed_holder()
    (abandoned / "link").symlink_to(place / "precious")
    (abandoned / "meeting/link").symlink_to(place / "precious")
    with temporary.temporary_folder():
        assert not abandoned.exists()

    assert (place / "precious/data").read_text() == "kept"


def test_a_fork_removes_no_folder_of_its_parent(place: Path) -> None:
    folder = temporary.make()
    pid = os.fork()
    if not pid:
        temporary.remove_all()
        os._exit(0)
    os.waitpid(pid, 0)

    assert [*place.iterdir()] == [folder]

    temporary.remove_all()
    assert [*place.iterdir()] == []
