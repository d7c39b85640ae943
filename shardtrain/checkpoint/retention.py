"""Which checkpoints stay, and how the others go: renamed to trash first, so that none is ever half there."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import stat
from collections.abc import Collection, Sequence
from pathlib import Path

from shardtrain.checkpoint import files
from shardtrain.checkpoint.manifest import MANIFEST, read
from shardtrain.checkpoint.objects import ObjectPath, unlink_all
from shardtrain.utils import storage_errors
from shardtrain.utils.errors import CheckpointError
from shardtrain.utils.log import logger

_STEP = re.compile(r"step-(0|[1-9]\d{0,17})")
HUB = "-hf"
"""Ends the name of a folder that holds a checkpoint in Hugging Face format; it goes when the checkpoint does."""
_LEFT = re.compile(r"step-\d+(?:-hf)?\.tmp(?:-([0-9a-f]+))?")
_SMALL = re.compile(r"(?:lease|best)\.json\.([0-9a-f]+)(?:\.old)?")
_TRASH = re.compile(r"step-\d+(?:-hf)?\.trash-[0-9a-f]+")
LEFTOVER_SECONDS = 3600.0
"""A save cut short is swept away when nothing in it changed for an hour."""
_contents: dict[tuple[str, int, int], tuple[list[str], list[int], str]] = {}
"""Cache: (checkpoint, size and mtime of its manifest) -> (file names, file sizes in bytes, origin)."""
_MOST_REMEMBERED = 64


def step_of(path: Path | ObjectPath) -> int | None:
    """The step of a folder of a checkpoint by its name, or None."""
    match = _STEP.fullmatch(path.name)
    return int(match[1]) if match else None


def step_folders(folder: Path | ObjectPath) -> list[int]:
    """Return the steps that have an entry ``step-N`` of any kind, oldest first. For object stores see ``steps``."""
    if isinstance(folder, ObjectPath):
        return steps(folder)
    return sorted(s for path in folder.glob("step-*") if (s := step_of(path)) is not None)


def steps(folder: Path | ObjectPath) -> list[int]:
    """Steps with a manifest, oldest first. A folder gets its name when all in it is on disk."""
    if isinstance(folder, ObjectPath):
        folders = {path: step for path in folder.glob("step-*") if (step := step_of(path)) is not None}
        return sorted(step for path, step in folders.items() if (path / MANIFEST).is_file())
    return [step for step in step_folders(folder) if (folder / f"step-{step}" / MANIFEST).is_file()]


def no_such_step(folder: Path | ObjectPath, wanted: int, found: Sequence[int]) -> CheckpointError:
    """The error of a checkpoint.load_step that is not there; ``found`` are the steps that are."""
    rule = f"checkpoint.load_step={wanted}: {folder} has no such step"
    if not found:
        return CheckpointError(f"{rule}, nor any other; leave the option out to begin at step 0, or correct the folder")
    known = ", ".join(map(str, found))
    return CheckpointError(f"{rule}; use one of {known}, or -1 for the newest")


def unusable(path: Path | ObjectPath, damage: str) -> CheckpointError:
    """The error of a checkpoint that a run was to begin with."""
    damage = damage.removeprefix(f"checkpoint {path}: ").removesuffix("; use another one")
    fix = "" if "; " in damage else "; use another one"  # where something else can be done, that is said
    return CheckpointError(f"checkpoint {path} cannot be used: {damage}{fix}")


def is_whole(path: Path | ObjectPath, origin: str | None = None) -> bool:
    """True if a checkpoint has a valid manifest and its files have the recorded sizes. Contents are not read.

    With ``origin`` the manifest must name that run.
    """
    try:
        names, sizes, found = _content(path)
        return origin in (None, found) and files.sizes_of(path, names) == sizes
    except (CheckpointError, OSError):
        return False


def is_of(path: Path | ObjectPath, origin: str) -> bool:
    """True if the manifest of a checkpoint names the run ``origin``; False if it cannot be read."""
    try:
        return _content(path)[2] == origin
    except (CheckpointError, OSError):
        return False


def _content(path: Path | ObjectPath) -> tuple[list[str], list[int], str]:
    status = (path / MANIFEST).stat()
    # An object store reports no mtime; see ``forget``.
    key = (str(path), status.st_size, getattr(status, "st_mtime_ns", 0))
    if key not in _contents:
        stored = read(path)
        _contents[key] = [file.name for file in stored.files], [file.bytes for file in stored.files], stored.origin
        for old in list(_contents)[:-_MOST_REMEMBERED]:
            del _contents[old]
    return _contents[key]


def forget(path: Path | ObjectPath) -> None:
    """Drop what ``is_whole`` remembers of a checkpoint that was just written: a store of objects tells no time by which
    a new manifest of the same size could be told from the old one.
    """
    for key in [key for key in _contents if key[0] == str(path)]:
        del _contents[key]


def to_delete(own: Sequence[int], keep: int, whole: Collection[int]) -> list[int]:
    """Of a run's steps, oldest first, those to delete: all that are older than the ``keep`` newest whole ones.

    A damaged one does not count, and protects nothing, but is deleted only with age: it may be looked into.

    >>> to_delete([1, 2, 3, 4], keep=2, whole={1, 2, 3})
    [1]
    """
    good = [step for step in own if step in whole]
    if not keep or len(good) < keep:
        return []
    oldest_kept = good[-keep]
    return [step for step in own if step < oldest_kept]


def delete_old(folder: Path | ObjectPath, saved: int, keep: int, forever: int, spare: int, origin: str) -> None:
    """Delete what is not to be kept after the checkpoint of step ``saved``: see ``to_delete``.

    Step ``spare`` and multiples of ``forever`` (unless it is 0) are kept. Checkpoints whose manifest does not
    name the run ``origin`` are neither counted nor deleted.
    """
    if not keep:
        return
    # Steps after this one are another history, which the user went back from, and are not counted here.
    all_steps = (step_of(path) for path in folder.glob("step-*"))
    own = sorted(step for step in all_steps if step is not None and step <= saved)
    # From the newest on until there are enough: of those that stay for ever only names are looked at, since there may
    # be thousands, and a store is asked for each apart.
    whole: list[int] = []
    for step in reversed(own):
        if len(whole) < keep and is_whole(folder / f"step-{step}", origin):
            whole.append(step)
    for step in to_delete(own, keep, whole):
        if step == spare or (forever and step % forever == 0) or not is_of(folder / f"step-{step}", origin):
            continue
        try:
            discard(folder / f"step-{step}")
        except OSError as error:
            # The new one is safe, and the next save tries again.
            logger.warning(str(storage_errors.cannot("delete old checkpoint", folder / f"step-{step}", error)))


def discard(path: Path | ObjectPath) -> None:
    """Delete a checkpoint: from the rename on, or once its manifest is gone, it is none. Raises OSError before that."""
    if isinstance(path, ObjectPath):
        (path / MANIFEST).unlink()
        with contextlib.suppress(OSError):  # the rest is swept at the next start
            unlink_all(path.list_below())  # ranks may wait, and there may be a file of each of thousands
        return
    discard_hub(path)
    _to_trash(path)


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
    logger.warning(f"{path} was in the place of a new checkpoint, but is not of this run: renamed to {aside.name}")


def hub_folder(path: Path) -> Path:
    """Where a checkpoint is in Hugging Face format, if it was written so."""
    return path.with_name(f"{path.name}{HUB}")


def discard_hub(path: Path) -> None:
    """Delete what a checkpoint was written as in Hugging Face format, if it was. Raises OSError."""
    if hub_folder(path).is_dir():
        _to_trash(hub_folder(path))


def _to_trash(path: Path) -> None:
    trash = path.with_name(f"{path.name}.trash-{secrets.token_hex(4)}")
    files.rename(path, trash)
    remove(trash)


def remove(path: Path) -> None:
    """Delete a folder and what is in it, as far as possible; of a link the link alone, never what it leads to."""
    with contextlib.suppress(OSError):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def open_to_all(folder: Path) -> str:
    """The folder or the manifest in it that every user may write or replace; empty where there is none.

    A sticky folder, as /tmp is, lets nobody replace what is another's, but does let everybody add.
    """
    for path in (folder, folder / MANIFEST):
        with contextlib.suppress(OSError):
            if path.stat().st_mode & stat.S_IWOTH:
                return str(path)
    return ""


def sweep(folder: Path, own_nonce: str, now: float, dead: Collection[str] = ()) -> list[Path]:
    """Remove trash, and what saves cut short have left for an hour; ``now`` is the filesystem's time. Gives what went.

    What holders of the lease left that are known to be ``dead`` goes at once. Only the holder may call this.
    """
    gone = []
    for path in sorted(folder.iterdir()):
        # Small files that are written beside their place: leases and pointers of other holders.
        small = _SMALL.fullmatch(path.name)
        if small and small[1] != own_nonce:
            with contextlib.suppress(OSError):
                if small[1] in dead or now - path.lstat().st_mtime > LEFTOVER_SECONDS:
                    path.unlink()
                    gone.append(path)
            continue

        # Drafts: this holder's stay, and those of others who may still be writing.
        draft = _LEFT.fullmatch(path.name)
        if draft:
            holder = draft[1]
            if holder == own_nonce or (holder not in dead and now - _touched(path) < LEFTOVER_SECONDS):
                continue
        if draft or _TRASH.fullmatch(path.name):
            remove(path)
            gone.append(path)
    return gone


def _touched(path: Path) -> float:
    """When something in a folder last changed."""
    times = [0.0]
    with contextlib.suppress(OSError):
        times.append(path.stat().st_mtime)
        times += [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)]
    return max(times)
