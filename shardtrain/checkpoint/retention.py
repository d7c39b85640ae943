"""Retention: choose the checkpoints to keep, and delete the others. A rename first makes a deletion
atomic.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from shardtrain.checkpoint import files
from shardtrain.checkpoint.manifest import MANIFEST, read
from shardtrain.checkpoint.objects import ObjectPath, unlink_all
from shardtrain.utils import storage_errors
from shardtrain.utils.atomic_io import LEFTOVER_SECONDS
from shardtrain.utils.errors import CheckpointError
from shardtrain.utils.log import logger

_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
HUB = "-hf"
"""Suffix of the folder with the export of a checkpoint to the Hugging Face format. Both are deleted
together.
"""
_LEFT = re.compile(r"step-\d+(?:-hf)?\.tmp(?:-([0-9a-f]+))?")
_SMALL = re.compile(r"(?:lease|best)\.json\.([0-9a-f]+)(?:\.old)?")
_TRASH = re.compile(r"step-\d+(?:-hf)?\.trash-[0-9a-f]+")
REMOVAL_SECONDS = 1.0
"""Longest wait for removals at the end of a run. The lease is held meanwhile, also after an error."""
_contents: dict[tuple[str, int, int], tuple[list[str], list[int], str]] = {}
"""Cache: (checkpoint, size and mtime of its manifest) -> (file names, file sizes in bytes, origin)."""
_MOST_REMEMBERED = 64


def step_of(path: Path | ObjectPath) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None."""
    match = _STEP.fullmatch(path.name)
    if match is None:
        return None
    return int(match[1])


def step_folders(folder: Path | ObjectPath) -> list[int]:
    """Return the steps that have an entry ``step-N`` of any kind, oldest first. For object stores
    see ``steps``.
    """
    if isinstance(folder, ObjectPath):
        return steps(folder)
    numbers = []
    for path in folder.glob("step-*"):
        step = step_of(path)
        if step is not None:
            numbers.append(step)
    return sorted(numbers)


def steps(folder: Path | ObjectPath) -> list[int]:
    """Return the steps with a manifest, in ascending order."""
    if not isinstance(folder, ObjectPath):
        numbers = step_folders(folder)
        return [step for step in numbers if (folder / f"step-{step}" / MANIFEST).is_file()]
    numbers = []
    for path in list(folder.glob("step-*")):
        step = step_of(path)
        if step is not None and (path / MANIFEST).is_file():
            numbers.append(step)
    return sorted(numbers)


def no_such_step(folder: Path | ObjectPath, wanted: int, steps: Sequence[int]) -> CheckpointError:
    """Return the error for a checkpoint.load_step that does not exist. ``found`` are the existing steps."""
    rule = f"checkpoint.load_step={wanted}: {folder} has no such step"
    if not steps:
        return CheckpointError(
            f"{rule}, nor any other; remove the option to start from step 0, or correct the folder",
        )
    known = ", ".join(map(str, steps))
    return CheckpointError(f"{rule}; use one of {known}, or -1 for the newest")


def unusable(path: Path | ObjectPath, damage: str) -> CheckpointError:
    """Return the error for a damaged checkpoint that a run was to start from."""
    damage = damage.removeprefix(f"checkpoint {path}: ").removesuffix("; use another checkpoint")
    fix = (
        "" if "; " in damage else "; use another checkpoint"
    )  # the damage may already come with a fix
    return CheckpointError(f"checkpoint {path} cannot be used: {damage}{fix}")


def is_complete(path: Path | ObjectPath, origin: str | None = None) -> bool:
    """True if a checkpoint has a valid manifest and files of the recorded sizes. Their contents are not read.

    With ``origin`` the manifest must name that run.
    """
    try:
        names, sizes, stored_origin = _content(path)
        if origin is not None and origin != stored_origin:
            return False
        return files.sizes_of(path, names) == sizes
    except (CheckpointError, OSError):
        return False


def is_of(path: Path | ObjectPath, origin: str) -> bool:
    """True if the manifest of a checkpoint names the run ``origin``; False if it cannot be read."""
    try:
        _, _, stored_origin = _content(path)
    except (CheckpointError, OSError):
        return False
    return stored_origin == origin


def _content(path: Path | ObjectPath) -> tuple[list[str], list[int], str]:
    status = (path / MANIFEST).stat()
    # An object store reports no mtime; see ``forget``.
    key = (str(path), status.st_size, getattr(status, "st_mtime_ns", 0))
    if key not in _contents:
        stored = read(path)
        names = [file.name for file in stored.files]
        sizes = [file.bytes for file in stored.files]
        _contents[key] = (names, sizes, stored.origin)
        for old in list(_contents)[:-_MOST_REMEMBERED]:
            del _contents[old]
    return _contents[key]


def forget(path: Path | ObjectPath) -> None:
    """Remove a new checkpoint from the cache of ``is_complete``.

    Object stores report no modification time, so a new manifest of equal size would be taken for the old one.
    """
    keys = [key for key in _contents if key[0] == str(path)]
    for key in keys:
        del _contents[key]


def to_delete(steps: Sequence[int], keep: int, complete: Collection[int]) -> list[int]:
    """Return the steps to delete, which are older than the ``keep`` newest complete steps.

    ``steps`` are those of the run, in ascending order. A damaged checkpoint does not count as one
    of the newest, but is not deleted earlier than others, so a user can examine it.

    >>> to_delete([1, 2, 3, 4], keep=2, complete={1, 2, 3})
    [1]
    """
    newest_complete = [step for step in steps if step in complete]
    if not keep or len(newest_complete) < keep:
        return []
    oldest_kept = newest_complete[-keep]
    return [step for step in steps if step < oldest_kept]


class Removals:
    """Threads that remove renamed checkpoints. Ranks do not wait for the deletion of thousands of files.

    A process that ends before a thread leaves the renamed folder, which the next start removes.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def start(self, path: Path) -> None:
        """Remove a folder in a thread."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=remove, args=(path,), name="retention", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            # The system refuses another thread. The checkpoint is complete, so this must not end the run.
            remove(path)
            return
        self._threads.append(thread)

    def finish(self, limit_seconds: float = REMOVAL_SECONDS) -> None:
        """Wait until all folders are removed, at most ``limit_seconds``. The next start removes the others."""
        deadline = time.monotonic() + limit_seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


def delete_old(
    folder: Path | ObjectPath,
    saved: int,
    keep: int,
    forever: int,
    spare: int,
    origin: str,
    removals: Removals,
) -> None:
    """Delete old checkpoints after the checkpoint of step ``saved`` was written; see ``to_delete``.

    Keep step ``spare`` and multiples of ``forever``, unless it is 0. Checkpoints of other runs
    than ``origin`` are neither counted nor deleted. Files of a folder are removed by ``removals``
    after the folder was renamed.
    """
    if not keep:
        return
    # Ignore later steps: the user has resumed from an older step, and they belong to the abandoned history.
    own_steps = []
    for path in folder.glob("step-*"):
        step = step_of(path)
        if step is not None and step <= saved:
            own_steps.append(step)
    own_steps.sort()
    # Start with the newest and stop at ``keep`` complete ones. Checking one costs a request to an
    # object store, and there may be thousands that are kept forever.
    complete: list[int] = []
    for step in reversed(own_steps):
        if len(complete) == keep:
            break
        if is_complete(folder / f"step-{step}", origin):
            complete.append(step)
    for step in to_delete(own_steps, keep, complete):
        is_kept_forever = forever and step % forever == 0
        if step == spare or is_kept_forever:
            continue
        checkpoint = folder / f"step-{step}"
        if not is_of(checkpoint, origin):
            continue
        try:
            discard(checkpoint, removals.start)
        except OSError as error:
            # The new checkpoint is complete. The next save tries the deletion again.
            problem = storage_errors.cannot("delete old checkpoint", checkpoint, error)
            logger.warning(str(problem))


def discard(path: Path | ObjectPath, remove_folder: Callable[[Path], None] | None = None) -> None:
    """Delete a checkpoint. The rename, or removing the manifest, invalidates it first.
    Raises OSError if that fails.

    ``remove_folder`` removes the renamed folder; the default is ``remove``.
    """
    if isinstance(path, ObjectPath):
        (path / MANIFEST).unlink()
        # Delete the files with few requests, because ranks wait for it and each of thousands may
        # have a file. The next start removes the rest.
        with contextlib.suppress(OSError):
            unlink_all(path.list_below())
        return
    discard_hub(path, remove_folder)
    _to_trash(path, remove_folder)


def make_room(path: Path, origin: str) -> None:
    """Free the path of a new checkpoint. Raises OSError.

    An earlier checkpoint of the run ``origin`` is deleted. Anything else is renamed: a link, a file, or a
    checkpoint of another run or version.
    """
    if not os.path.lexists(path):
        return
    if not path.is_symlink() and is_of(path, origin):
        discard(path)
        return
    aside = path.with_name(f"{path.name}.aside-{secrets.token_hex(4)}")
    files.rename(path, aside)
    logger.warning(
        f"{path} had the name of a new checkpoint, but does not belong to this run: renamed to {aside.name}",
    )


def hub_folder(path: Path) -> Path:
    """Return the folder of a checkpoint's export to the Hugging Face format."""
    return path.with_name(f"{path.name}{HUB}")


def discard_hub(path: Path, remove_folder: Callable[[Path], None] | None = None) -> None:
    """Delete a checkpoint's export to the Hugging Face format, if there is one. Raises OSError."""
    if hub_folder(path).is_dir():
        _to_trash(hub_folder(path), remove_folder)


def _to_trash(path: Path, remove_folder: Callable[[Path], None] | None) -> None:
    trash = path.with_name(f"{path.name}.trash-{secrets.token_hex(4)}")
    files.rename(path, trash)
    (remove_folder or remove)(trash)


def remove(path: Path) -> None:
    """Delete a folder and its content and skip files that cannot be deleted. If it is a link, delete only the link."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def open_to_all(folder: Path) -> str:
    """Return the folder, or its manifest, if every user can write it; otherwise "".

    A sticky folder, such as /tmp, counts too: users cannot replace files of others there, but can add files.
    """
    for path in (folder, folder / MANIFEST):
        with contextlib.suppress(OSError):
            if path.stat().st_mode & stat.S_IWOTH:
                return str(path)
    return ""


def sweep(folder: Path, own_nonce: str, now: float, dead: Collection[str] = ()) -> list[Path]:
    """Remove trash, and leftovers of interrupted saves that are at least an hour old. Return the
    removed paths.

    Only the holder of the lease may call this.

    Args:
        now: The current time of the filesystem.
        dead: Nonces of processes that have ended. Their leftovers are removed regardless of their age.
    """
    gone = []
    for path in sorted(folder.iterdir()):
        # Temporary files of leases and of best.json, of other processes.
        small = _SMALL.fullmatch(path.name)
        if small and small[1] != own_nonce:
            with contextlib.suppress(OSError):
                if small[1] in dead or now - path.lstat().st_mtime > LEFTOVER_SECONDS:
                    path.unlink()
                    gone.append(path)
            continue

        # Keep the drafts of this process, and those of others who may still be writing.
        draft = _LEFT.fullmatch(path.name)
        if draft:
            holder = draft[1]
            if holder == own_nonce:
                continue
            if holder not in dead and now - _touched(path) < LEFTOVER_SECONDS:
                continue
        if draft or _TRASH.fullmatch(path.name):
            remove(path)
            gone.append(path)
    return gone


def _touched(path: Path) -> float:
    """Return the time of the last change in a folder."""
    times = [0.0]
    with contextlib.suppress(OSError):
        times.append(path.stat().st_mtime)
        times += [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)]
    return max(times)
