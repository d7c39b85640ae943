"""Storage: write access and speed of the run's folders, visibility on all hosts, and free space."""

from __future__ import annotations

import contextlib
import functools
import glob
import math
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shardtrain.checkpoint import storage as checkpoint_storage
from shardtrain.checkpoint.storage import SPARE, Place
from shardtrain.config.assets import is_built_in
from shardtrain.config.rules.data_rules import datasets
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.outliers import equal, slow
from shardtrain.tools.doctor.result import (
    Facts,
    Finding,
    Judged,
    Reports,
    each,
    kernel_text,
    plural,
    warn_if,
)
from shardtrain.utils.errors import PeerError, ShardtrainError
from shardtrain.utils.majority import odd
from shardtrain.utils.units import GIB, MIB, format_bytes, format_seconds

AREA = "storage"

PREFIX = ".shardtrain-doctor-"
PIECE_BYTES = 4 * MIB
MOST_BYTES = 64 * MIB
MOST_SECONDS = 1.0
SEEN_SECONDS = 10.0
"""Maximum delay until a new file appears on another host, because network filesystems cache folders.

A run waits longer, and reports the delay.
"""
LEFT_SECONDS = 3600.0
ALL_WRITE = 64
"""Maximum number of ranks that all write to a folder. With more, one rank per host writes."""
MOST_SIGNERS = 64
"""Maximum number of ranks for whose files the others look."""

LITTLE_BYTES = GIB
FEW_INODES = 10_000
SLOW_BYTES_PER_SECOND = 20 * MIB
"""Minimum rate of one host. Below it, even a small model's checkpoint takes minutes."""


def collect(context: RankContext, facts: Facts) -> None:
    """Write a file to each folder of the run, look for the files of other ranks, then remove the file."""
    folders = writable(context)
    by_option: dict[str, Facts] = {}
    facts["folders"] = by_option

    # File names contain a common nonce, so ranks ignore the files of another doctor.
    line = context.line
    if context.rank == 0:
        line.send("nonce", secrets.token_hex(4))
    nonce = line.receive("nonce", line.limit_seconds / 2)
    if nonce is None:
        raise PeerError("rank 0 did not reach the storage check")
    prefix = f"{PREFIX}{nonce}-"

    is_signer = context.local_rank == 0 or context.size <= ALL_WRITE
    has_shared_storage = context.loaded.config.checkpoint.storage == "shared"
    signs: list[Place] = []
    try:
        for option, place in folders.items():
            line.mark(f"writing to {option}")
            folder = _write(place)
            by_option[option] = folder
            folder["must_share"] = option == "checkpoint.folder" and has_shared_storage
            if is_signer and not folder["error"]:
                sign = place / f"{prefix}{context.rank}"
                signs.append(sign)
                folder["error"] = _sign(sign)
                folder["signed"] = not folder["error"]
        if context.size > 1:
            _look(context, folders, by_option, prefix)
    finally:
        for sign in signs:
            with contextlib.suppress(OSError, ShardtrainError):
                sign.unlink(missing_ok=True)

    # Sizes suffice to find hosts with other files. Hashing a dataset would exceed the time limit.
    line.mark("looking at the data")
    facts["data"] = {}
    for option, path in readable(context).items():
        facts["data"][option] = _survey(path)


def writable(context: RankContext) -> dict[str, Place]:
    """Return the folders to which the run writes, by option.

    A folder that does not exist is replaced by its nearest parent.
    """
    config = context.loaded.config
    folders: dict[str, Place] = {"job.dump_folder": _existing(Path(config.job.dump_folder))}
    if config.checkpoint.enable:
        place = checkpoint_storage.folder_of(config.job.dump_folder, config.checkpoint.folder)
        if isinstance(place, Path):
            place = _existing(place)
        folders["checkpoint.folder"] = place
    folders["temporary folder"] = Path(tempfile.gettempdir())
    return folders


def readable(context: RankContext) -> dict[str, str]:
    """Return local paths of data and weights, by option. URLs and built-in datasets are skipped."""
    config = context.loaded.config
    paths: dict[str, str | None] = {}
    for name, source in datasets(context.loaded).items():
        paths[f"{name}.dataset_path"] = source.dataset_path
    paths["checkpoint.initial_load_path"] = config.checkpoint.initial_load_path
    if context.has_config:
        paths["model.hf_assets_path"] = config.model.hf_assets_path

    local_paths = {}
    for name, path in paths.items():
        if path and "://" not in path and not is_built_in(path):
            local_paths[name] = path
    return local_paths


def _existing(path: Path) -> Path:
    """Return a path, or its nearest parent that exists."""
    path = path.expanduser().absolute()
    for candidate in (path, *path.parents):
        if candidate.exists():
            return candidate
    return path


def _write(place: Place) -> Facts:
    """Write to one place. Return its free space, filesystem and durable write rate, or the error."""
    facts: Facts = {"place": str(place), "error": "", "rate": 0.0, "signed": False}
    try:
        if isinstance(place, Path):
            _sweep(place)
            facts["free"] = shutil.disk_usage(place).free
            # Filesystems without a fixed number of inodes report a total of 0.
            inodes = os.statvfs(place)
            facts["inodes"] = inodes.f_favail if inodes.f_files else -1
            facts["filesystem"] = filesystem_of(place)
            facts["rate"] = write_rate(place)
        else:
            facts["filesystem"] = "object store"
            facts["rate"] = _put_rate(place)
    except (OSError, ShardtrainError) as error:
        facts["error"] = _reason(error)
    return facts


def _reason(error: Exception) -> str:
    """Return the text of an error without the path, which the finding contains."""
    return str(getattr(error, "strerror", None) or error)


def write_rate(folder: Path) -> float:
    """Return the bytes per second of a durable write to a folder.

    The file is unlinked before the write, so a crash leaves nothing behind.
    """
    piece = memoryview(os.urandom(PIECE_BYTES))
    # Filesystems cannot compress random bytes, and fsync waits for the disk.
    descriptor, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    try:
        os.unlink(name)
        started = time.perf_counter()
        written = 0
        while written < MOST_BYTES and time.perf_counter() - started < MOST_SECONDS:
            written += os.write(descriptor, piece)
        os.fsync(descriptor)
        return written / (time.perf_counter() - started)
    finally:
        os.close(descriptor)


def _put_rate(place: Any) -> float:
    """Return the bytes per second of writing one object of a few MiB to an object store."""
    trial = place / f"{PREFIX}{secrets.token_hex(4)}"
    started = time.perf_counter()
    try:
        trial.write_hashed([memoryview(os.urandom(PIECE_BYTES))])
        return PIECE_BYTES / (time.perf_counter() - started)
    finally:
        with contextlib.suppress(OSError, ShardtrainError):
            trial.unlink(missing_ok=True)


def _sign(sign: Place) -> str:
    """Create the file by which other ranks recognize this rank. Return the error, or ""."""
    try:
        if isinstance(sign, Path):
            sign.touch()
        else:
            sign.put(b"x", new=False)
    except (OSError, ShardtrainError) as error:
        return _reason(error)
    return ""


def _look(
    context: RankContext, folders: dict[str, Place], by_option: dict[str, Facts], prefix: str
) -> None:
    """Record whose files this rank does not see in each folder, after all ranks have written."""
    line = context.line
    signed = {option: facts["signed"] for option, facts in by_option.items()}
    line.send(f"signed-{context.rank}", signed)
    line.meet("storage, written")

    # Rank 0 selects the ranks to look for, because thousands of ranks that each read all entries would be
    # slow.
    if context.rank == 0:
        keys = [f"signed-{rank}" for rank in range(context.size)]
        all_signed = line.receive_all(keys) or []
        samples = {}
        for option in folders:
            samples[option] = _sample(all_signed, option)
        line.send("signers", samples)
    signers = line.receive("signers", line.limit_seconds / 2) or {}

    # A network filesystem may show a new file late, so look repeatedly until all are visible. All
    # folders share the time limit.
    end = time.monotonic() + SEEN_SECONDS
    for option, place in folders.items():
        wanted = set(signers.get(option, ()))
        seen = _signs(place, prefix)
        while not seen >= wanted and time.monotonic() <= end:
            time.sleep(0.1)
            seen = _signs(place, prefix)
        by_option[option]["unseen"] = sorted(wanted - seen)
    line.meet("storage, seen")


def _sample(all_signed: Sequence[Facts], option: str) -> list[int]:
    """Return at most ``MOST_SIGNERS`` of the ranks that have written to a folder, evenly spaced.

    A rank whose folder is not that of the others does not see them, whether or not it is one of them.
    """
    signers = [rank for rank, signed in enumerate(all_signed) if signed.get(option)]
    step = math.ceil(len(signers) / MOST_SIGNERS)
    return signers[:: max(1, step)]


def _signs(place: Place, prefix: str) -> set[int]:
    """Return the ranks whose files are in a folder."""
    ranks = set()
    try:
        for path in place.iterdir():
            if path.name.startswith(prefix):
                ranks.add(int(path.name.removeprefix(prefix)))
    except OSError:
        return set()
    return ranks


def _sweep(folder: Path) -> None:
    """Remove old files of a killed doctor."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFT_SECONDS:
                path.unlink()


def filesystem_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the filesystem type of a path, or "" if the system does not list its mount."""
    # The longest mount point that contains the path counts. A later mount on the same folder hides an
    # earlier one.
    resolved = os.path.realpath(path)
    longest = 0
    filesystem = ""
    for line in kernel_text(mounts).splitlines():
        _, mount, kind, *_ = line.split()
        contains_path = resolved == mount or resolved.startswith(mount.rstrip("/") + "/")
        if contains_path and len(mount) >= longest:
            longest = len(mount)
            filesystem = kind
    return filesystem


def _survey(path: str) -> str:
    """Describe the files at a data path. Equal files have an equal description."""
    path = os.path.expanduser(path)
    files = [path]
    # A path without a pattern is kept even if it does not exist, so that its error is reported.
    if glob.has_magic(path):
        files = sorted(glob.glob(path))
    try:
        sizes = [os.stat(file).st_size for file in files]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not sizes:
        return "matches no file"
    if len(files) == 1 and os.path.isdir(files[0]):
        return f"a folder of {len(os.listdir(files[0]))}"
    if not all(os.access(file, os.R_OK) for file in files):
        return "cannot be read: Permission denied"
    return f"{plural(len(sizes), 'file')}, {sum(sizes)} bytes"


def judge(reports: Reports) -> Iterator[Finding]:
    """Check that folders are writable, shared, fast and have space, and that data is equal on all hosts."""
    by_rank = reports.of(AREA)
    for option in _options(by_rank, "folders"):
        yield from each(reports, AREA, {option: functools.partial(_written, option)})
        # Each host has its own temporary folder, in which the run writes little.
        if option != "temporary folder":
            yield from _shared(reports, option)
            yield from _rate(reports, option)

    needs = _checkpoint_bytes(reports)
    if needs and "checkpoint.folder" in _options(by_rank, "folders"):
        room = functools.partial(_room, needs=needs)
        yield from each(reports, AREA, {"room for a checkpoint": room})
    for option in _options(by_rank, "data"):
        texts = {}
        for rank, facts in by_rank.items():
            texts[rank] = str(facts["data"].get(option, ""))
        yield _data(reports, option, texts)


def _options(by_rank: dict[int, Facts], kind: str) -> list[str]:
    """Return the options of all ranks, each once, in the order of the first rank."""
    options: dict[str, None] = {}
    for facts in by_rank.values():
        options.update(dict.fromkeys(facts[kind]))
    return list(options)


def _checkpoint_bytes(reports: Reports) -> int:
    """Return the size of a checkpoint, which rank 0 computed during the checks of the configuration, or 0."""
    return int(reports.facts.get(0, {}).get("config", {}).get("checkpoint_bytes", 0))


def _data(reports: Reports, option: str, texts: dict[int, str]) -> Finding:
    # All ranks may agree that a path cannot be read.
    if all(text.startswith(("cannot", "matches")) for text in texts.values()):
        first_text = next(iter(texts.values()))
        fix = "correct the path, or its permissions"
        return Finding(AREA, option, "fail", first_text, "readable", fix)
    return equal(reports, AREA, option, texts, "fail", "copy or mount the same files on every host")


def _written(option: str, facts: Facts) -> Judged | None:
    if option not in facts["folders"]:
        return None
    folder = facts["folders"][option]
    place = folder["place"]
    expected = "writable"
    if folder["error"]:
        fix = f"make it writable, or choose another {option}"
        return "fail", f"{place}: {folder['error']}", expected, fix
    # An object store has no limit.
    if "free" not in folder:
        return "pass", place, expected, ""
    filesystem = folder["filesystem"] or "unknown"
    text = f"{place} ({filesystem}), {format_bytes(folder['free'])} free"
    if folder["free"] < LITTLE_BYTES:
        expected = f"writable, {format_bytes(LITTLE_BYTES)} free"
        return "warn", text, expected, "free space, because a full disk ends a run during a save"
    if 0 <= folder["inodes"] < FEW_INODES:
        text += f", {folder['inodes']} free inodes"
        return "warn", text, f"writable, {FEW_INODES} free inodes", "remove small files"
    return "pass", text, expected, ""


def _shared(reports: Reports, option: str) -> Iterator[Finding]:
    """Check that ranks see each other's files in a folder, if the run requires it."""
    # Skip ranks that could not write, or gave up before they looked. Their errors are separate findings.
    folders: dict[int, Facts] = {}
    unseen: dict[int, tuple[int, ...]] = {}
    for rank, facts in reports.of(AREA).items():
        folder = facts["folders"].get(option)
        if folder and not folder["error"] and "unseen" in folder:
            folders[rank] = folder
            unseen[rank] = tuple(folder["unseen"])
    if len(folders) < 2:
        return
    subject = f"{option} shared"
    expected = "one folder for all ranks"
    if not any(unseen.values()):
        yield Finding(AREA, subject, "pass", "all ranks see the files of all ranks", expected)
        return

    # Ranks of one folder miss the same files, so the ranks with another set of missing files are isolated.
    isolated = odd(unseen)
    text = "ranks see only their own files"
    if len(isolated) < len(folders):
        text = f"{reports.who(isolated)} does not see the files of other ranks"
    # Without shared storage, a folder per host is a supported setup.
    if not any(folder["must_share"] for folder in folders.values()):
        yield Finding(AREA, subject, "pass", f"{text}: each host has its own folder", "either")
        return
    fix = 'mount one filesystem on all hosts, or set checkpoint.storage = "first_node"'
    filesystems = {folder["filesystem"] for folder in folders.values()}
    if "object store" in filesystems:
        fix = "use a store that all hosts can reach"
    yield Finding(AREA, subject, "fail", text, expected, fix, tuple(isolated))


def _rate(reports: Reports, option: str) -> Iterator[Finding]:
    """Compare the write rates of hosts.

    All ranks write simultaneously, so a host's rate is the sum over its ranks.
    """
    by_rank = reports.of(AREA)
    hosts = reports.hosts()
    # Identify a host by its first rank.
    host_of: dict[int, str] = {}
    rates: dict[int, float] = {}
    for host, ranks in hosts.items():
        rate = 0.0
        for rank in ranks:
            if rank in by_rank:
                folder = by_rank[rank]["folders"].get(option, {})
                rate += folder.get("rate", 0.0)
        if rate:
            host_of[ranks[0]] = host
            rates[ranks[0]] = rate
    if not rates:
        return

    slowest = min(rates, key=lambda rank: (rates[rank], rank))
    text = f"{rates[slowest] / MIB:.0f} MiB/s"
    if len(rates) > 1:
        text += f" on {host_of[slowest]}, the slowest host"
    needs = _checkpoint_bytes(reports)
    if needs and option == "checkpoint.folder":
        save_time = format_seconds(needs / sum(rates.values()))
        text += f"; a checkpoint of {format_bytes(needs)} takes {save_time} or more"

    behind = []
    for rank in slow(rates):
        behind += hosts[host_of[rank]]
    subject = f"{option} rate"
    expected = f"{SLOW_BYTES_PER_SECOND / MIB:.0f} MiB/s or more on each host"
    if behind:
        fix = "check its mount options, its network and other users of its disk"
        yield Finding(AREA, subject, "warn", text, "as on other hosts", fix, tuple(behind))
    elif rates[slowest] < SLOW_BYTES_PER_SECOND:
        fix = "choose a faster filesystem, or save less often with checkpoint.interval"
        yield Finding(AREA, subject, "warn", text, expected, fix)
    else:
        yield Finding(AREA, subject, "pass", text, expected)


def _room(facts: Facts, needs: int) -> Judged | None:
    """Judge the number of checkpoints that fit.

    A save needs room for a second one before it deletes the first.
    """
    free = facts["folders"].get("checkpoint.folder", {}).get("free")
    if free is None:
        return None
    bytes_per_checkpoint = SPARE * needs
    count = int(free / bytes_per_checkpoint)
    expected = f"{format_bytes(bytes_per_checkpoint)} for each"
    fix = "free space, or keep fewer checkpoints with checkpoint.keep_latest_k"
    if count < 1:
        return "fail", f"{format_bytes(free)} free, too little for one", expected, fix
    return warn_if(count < 2, f"for {count}", expected, fix)
