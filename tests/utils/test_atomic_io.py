"""Files are never opened through links, and planted links and pipes are replaced without changing their targets."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shardtrain.utils import atomic_io

APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """A guarded run folder, next to a folder with a precious file."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("kept")
    (tmp_path / "run/logs").mkdir(parents=True)
    atomic_io.guard(tmp_path / "run")
    yield tmp_path / "run"
    atomic_io.guard()


def append(path: Path) -> None:
    descriptor = atomic_io.open_file(path, APPEND, create_folder=True)
    os.write(descriptor, b"new")
    os.close(descriptor)


def fresh(path: Path) -> None:
    os.close(
        atomic_io.open_file(
            path, os.O_RDWR | os.O_CREAT | os.O_EXCL, fresh=True, create_folder=True
        )
    )


def replace(path: Path) -> None:
    atomic_io.write(path, "new", durable=True, create_folder=True)


def library(path: Path) -> None:
    with atomic_io.for_library(path) as name, open(name, "w") as file:
        file.write("new")


def link(path: Path, precious: Path) -> None:
    path.symlink_to(precious)


def link_to_nothing(path: Path, precious: Path) -> None:
    path.symlink_to(precious.with_name("made by nobody"))


def hard_link(path: Path, precious: Path) -> None:
    path.hardlink_to(precious)


def pipe(path: Path, _: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("plant", [link, link_to_nothing, hard_link, pipe])
@pytest.mark.parametrize("write", [append, fresh, replace, library])
def test_planted_file_is_replaced(
    run: Path, plant: Callable[[Path, Path], None], write: Callable[[Path], None]
) -> None:
    precious = run.parent / "precious/file"
    path = run / "logs/file"
    plant(path, precious)
    write(path)

    assert precious.read_text() == "kept"
    assert [other.name for other in precious.parent.iterdir()] == ["file"]
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.stat().st_nlink == 1
    assert [other.name for other in path.parent.iterdir()] == ["file"], "there are leftover files"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can create devices")
@pytest.mark.parametrize("kind", [stat.S_IFCHR, stat.S_IFBLK])
@pytest.mark.parametrize("write", [append, fresh, replace, library])
def test_device_is_kept(run: Path, kind: int, write: Callable[[Path], None]) -> None:
    """As root, ``-o /dev/null`` must not replace the null device of the machine or container with a file."""
    path = run / "logs/device"
    minor = 3 if kind == stat.S_IFCHR else 0  # /dev/null, or the first RAM disk
    try:
        os.mknod(path, kind | 0o600, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("this container forbids devices")
    device = path.lstat()

    with pytest.raises(OSError, match="it is a device, which a file must not replace") as caught:
        write(path)
    assert str(caught.value.filename) == str(path)
    assert os.path.samestat(path.lstat(), device)
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("name", ["stdout", "new"])
@pytest.mark.parametrize("write", [append, fresh, replace, library])
def test_nothing_is_written_into_the_folder_of_devices(
    run: Path, name: str, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Links such as ``/dev/stdout`` are not devices, but other programs need them."""
    # The real folder would lose its links if this test failed.
    monkeypatch.setattr(atomic_io, "_DEVICES", str(run / "logs"))
    (run / "logs/stdout").symlink_to("/proc/self/fd/1")
    with pytest.raises(OSError, match="/dev is for devices, not for files"):
        write(run / "logs" / name)
    assert [path.name for path in (run / "logs").iterdir()] == ["stdout"]


def test_appending_to_a_hard_linked_file_does_not_change_its_other_name(run: Path) -> None:
    """A folder copied with ``cp -al`` has hard links, but each copy must continue with its own history."""
    path = run / "metrics.jsonl"
    second = run.parent / "second"
    path.write_text("old ")
    path.chmod(0o640)
    second.hardlink_to(path)
    append(path)

    assert path.read_text() == "old new"
    assert second.read_text() == "old "
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("folder", ["logs", "logs/deeper", "tb/20260131-1200"])
@pytest.mark.parametrize("write", [append, fresh, replace, library])
def test_linked_folder_is_refused_with_its_target(
    run: Path, folder: str, write: Callable[[Path], None]
) -> None:
    precious = run.parent / "precious"
    link_path = run / folder
    if link_path.exists():
        link_path.rmdir()
    link_path.parent.mkdir(parents=True, exist_ok=True)
    link_path.symlink_to(precious)

    with pytest.raises(
        OSError, match=f"{link_path} is a link to {precious}, which a run does not follow"
    ):
        write(link_path / "new file")
    assert [path.name for path in precious.iterdir()] == ["file"]


def test_run_folder_itself_may_be_a_link(run: Path) -> None:
    (run.parent / "alias").symlink_to(run)
    atomic_io.guard(run.parent / "alias")
    append(run.parent / "alias/logs/file")
    assert (run / "logs/file").read_text() == "new"


def test_folder_instead_of_a_file_is_an_error_that_names_it(run: Path) -> None:
    with pytest.raises(IsADirectoryError) as caught:
        append(run / "logs")
    assert caught.value.filename == str(run / "logs") or caught.value.filename == run / "logs"


def test_failing_library_leaves_no_file(run: Path) -> None:
    with pytest.raises(RuntimeError), atomic_io.for_library(run / "traces/trace.json") as name:
        Path(name).write_text("half of it")
        raise RuntimeError("out of space")
    assert not list((run / "traces").iterdir())


def test_mode_respects_the_umask(run: Path) -> None:
    before = os.umask(0o027)
    try:
        append(run / "appended")
        replace(run / "replaced")
    finally:
        os.umask(before)

    assert {stat.S_IMODE((run / name).stat().st_mode) for name in ("appended", "replaced")} == {
        0o640
    }


@pytest.mark.parametrize("write", [append, fresh, replace, library])
@pytest.mark.parametrize(
    "path", ["link/../run", "link/.././run", "elsewhere/inner/../run", "link/x/../../run"]
)
def test_dots_after_a_link_lead_to_the_folder_that_the_system_uses(
    path: str, write: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``os.path.abspath`` would lead to ``run`` in the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere/inner/x").mkdir(parents=True)
    (tmp_path / "link").symlink_to("elsewhere/inner")
    (tmp_path / "run").mkdir()
    atomic_io.guard(path)
    try:
        atomic_io.make_folder(path)
        write(Path(path, "file"))
    finally:
        atomic_io.guard()

    assert Path(path, "file").read_text() in ("new", "")
    assert (tmp_path / "elsewhere/run/file").exists()
    assert not list((tmp_path / "run").iterdir())
