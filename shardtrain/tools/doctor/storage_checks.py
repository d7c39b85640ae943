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
from shardtrain.tools.doctor.outliers import equal, odd, slow
from shardtrain.tools.doctor.result import Facts, Finding, Judged, Reports, each, kernel_text
from shardtrain.utils.errors import PeerError, ShardtrainError
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
    facts["folders"] = {}

    # File names contain a common nonce, so ranks ignore the files of another doctor.
    if context.rank == 0:
        context.line.send("nonce", secrets.token_hex(4))
    nonce = context.line.receive("nonce", context.line.limit_seconds / 2)
    if nonce is None:
        raise PeerError("rank 0 did not reach the storage check")

    signed: list[Place] = []
    try:
        for option, place in folders.items():
            context.line.mark(f"writing to {option}")
            facts["folders"][option] = written = _write(place)
            written["must_share"] = (
                option == "checkpoint.folder" and context.loaded.config.checkpoint.storage == "shared"
            )
            if not written["error"] and (context.local_rank == 0 or context.size <= ALL_WRITE):
                written["signed"] = _sign(place, written, f"{PREFIX}{nonce}-{context.rank}", signed)
        if context.size > 1:
            _look(context, folders, facts["folders"], f"{PREFIX}{nonce}-")
    finally:
        for sign in signed:
            with contextlib.suppress(OSError, ShardtrainError):
                sign.unlink(missing_ok=True)

    context.line.mark("looking at the data")
    facts["data"] = {name: _survey(path) for name, path in readable(context).items()}


def writable(context: RankContext) -> dict[str, Place]:
    """Return the folders to which the run writes, by option.

    A folder that does not exist is replaced by its nearest parent.
    """
    config = context.loaded.config
    found: dict[str, Place] = {"job.dump_folder": _existing(Path(config.job.dump_folder))}
    if config.checkpoint.enable:
        place = checkpoint_storage.folder_of(config.job.dump_folder, config.checkpoint.folder)
        found["checkpoint.folder"] = _existing(place) if isinstance(place, Path) else place
    found["temporary folder"] = Path(tempfile.gettempdir())
    return found


def readable(context: RankContext) -> dict[str, str]:
    """Return local paths of data and weights, by option. URLs and built-in datasets are skipped."""
    paths = {f"{name}.dataset_path": source.dataset_path for name, source in datasets(context.loaded).items()}
    paths["checkpoint.initial_load_path"] = context.loaded.config.checkpoint.initial_load_path
    if context.has_config:
        paths["model.hf_assets_path"] = context.loaded.config.model.hf_assets_path
    return {name: path for name, path in paths.items() if path and "://" not in path and not is_built_in(path)}


def _existing(path: Path) -> Path:
    path = path.expanduser().absolute()
    return next((one for one in (path, *path.parents) if one.exists()), path)


def _write(place: Place) -> Facts:
    """Write to one place. Return its free space, filesystem and durable write rate, or the error."""
    found: Facts = {"place": str(place), "error": "", "rate": 0.0, "signed": False}
    try:
        if isinstance(place, Path):
            _sweep(place)
            usage = shutil.disk_usage(place)
            inodes = os.statvfs(place)
            found["free"] = usage.free
            found["inodes"] = inodes.f_favail if inodes.f_files else -1
            found["filesystem"] = filesystem_of(place)
            found["rate"] = write_rate(place)
        else:
            found["filesystem"] = "object store"
            found["rate"] = _put_rate(place)
    except (OSError, ShardtrainError) as error:
        found["error"] = getattr(error, "strerror", None) or str(error)
    return found


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


def _sign(place: Place, found: Facts, name: str, signed: list[Place]) -> bool:
    sign = place / name
    signed.append(sign)
    try:
        if isinstance(sign, Path):
            sign.touch()
        else:
            sign.put(b"x", new=False)
    except (OSError, ShardtrainError) as error:
        found["error"] = getattr(error, "strerror", None) or str(error)
        return False
    return True


def _look(context: RankContext, folders: dict[str, Place], by_option: dict[str, Facts], prefix: str) -> None:
    """Record whose files this rank does not see in each folder, after all ranks have written."""
    context.line.send(f"signed-{context.rank}", {option: found["signed"] for option, found in by_option.items()})
    context.line.meet("storage, written")
    if context.rank == 0:
        all_signed = context.line.receive_all([f"signed-{rank}" for rank in range(context.size)]) or []
        context.line.send("signers", {option: _sample(all_signed, option) for option in folders})
    signers = context.line.receive("signers", context.line.limit_seconds / 2) or {}
    end = time.monotonic() + SEEN_SECONDS
    for option, place in folders.items():
        wanted = set(signers.get(option, ()))
        while True:
            seen = _signs(place, prefix)
            if seen >= wanted or time.monotonic() > end:
                break
            time.sleep(0.1)
        by_option[option]["unseen"] = sorted(wanted - seen)
    context.line.meet("storage, seen")


def _sample(all_signed: Sequence[Facts], option: str) -> list[int]:
    """Return at most ``MOST_SIGNERS`` of the ranks that have written to a folder, evenly spaced.

    A rank whose folder is not that of the others does not see them, whether or not it is one of them.
    """
    signers = [rank for rank, signed in enumerate(all_signed) if signed.get(option)]
    step = math.ceil(len(signers) / MOST_SIGNERS)
    return signers[:: max(1, step)]


def _signs(place: Place, prefix: str) -> set[int]:
    try:
        names = [path.name for path in place.iterdir() if path.name.startswith(prefix)]
    except OSError:
        return set()
    return {int(name.rpartition("-")[2]) for name in names}


def _sweep(folder: Path) -> None:
    """Remove old files of a killed doctor."""
    for path in folder.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > LEFT_SECONDS:
                path.unlink()


def filesystem_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """Return the filesystem type of a path, or "" if the system does not list its mount."""
    lines = [line.split() for line in kernel_text(mounts).splitlines()]
    # The longest mount point that contains the path counts. A later mount on the same folder hides an earlier one.
    resolved = str(path.resolve())
    holding = [(len(words[1]), number, words[2]) for number, words in enumerate(lines) if _below(resolved, words[1])]
    return max(holding)[2] if holding else ""


def _below(path: str, mount: str) -> bool:
    return path == mount or path.startswith(mount.rstrip("/") + "/")


def _survey(path: str) -> str:
    """Describe the files at a data path. Equal files have an equal description."""
    path = os.path.expanduser(path)
    files = sorted(glob.glob(path)) if any(mark in path for mark in "*?[") else [path]
    try:
        stats = [os.stat(file) for file in files]
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stats:
        return "matches no file"
    if len(files) == 1 and os.path.isdir(files[0]):
        return f"a folder of {len(os.listdir(files[0]))}"
    if not all(os.access(file, os.R_OK) for file in files):
        return "cannot be read: Permission denied"
    return f"{len(stats)} file{'s' if len(stats) > 1 else ''}, {sum(stat.st_size for stat in stats)} bytes"


def judge(reports: Reports) -> Iterator[Finding]:
    """Check that folders are writable, shared, fast and have space, and that data is equal on all hosts."""
    by_rank = reports.of(AREA)
    options = list(dict.fromkeys(option for facts in by_rank.values() for option in facts["folders"]))
    for option in options:
        yield from each(reports, AREA, {option: functools.partial(_written, option)})
        yield from _shared(reports, option)
        yield from _rate(reports, option)

    # Rank 0 computed the size of the model during the checks of the configuration.
    needs = reports.facts.get(0, {}).get("config", {}).get("checkpoint_bytes", 0)
    if needs and any("checkpoint.folder" in facts["folders"] for facts in by_rank.values()):
        yield from each(reports, AREA, {"room for a checkpoint": functools.partial(_room, needs=needs)})

    for option in dict.fromkeys(option for facts in by_rank.values() for option in facts["data"]):
        texts = {rank: str(facts["data"].get(option, "")) for rank, facts in by_rank.items()}
        fix = "copy or mount the same files on every host"
        bad = [rank for rank, text in texts.items() if text.startswith(("cannot", "matches"))]
        found = equal(reports, AREA, option, texts, "fail", fix)
        if len(bad) == len(texts):
            found = Finding(AREA, option, "fail", texts[bad[0]], "readable", "correct the path, or its permissions")
        yield found


def _written(option: str, facts: Facts) -> Judged | None:
    if option not in facts["folders"]:
        return None
    found = facts["folders"][option]
    place = found["place"]
    expected = "writable"
    if found["error"]:
        return "fail", f"{place}: {found['error']}", expected, f"make it writable, or choose another {option}"
    if "free" not in found:
        return "pass", place, expected, ""
    text = f"{place} ({found['filesystem'] or 'unknown'}), {format_bytes(found['free'])} free"
    fix = "free space, because a full disk ends a run during a save"
    if found["free"] < LITTLE_BYTES:
        return "warn", text, f"writable, {format_bytes(LITTLE_BYTES)} free", fix
    if 0 <= found["inodes"] < FEW_INODES:
        text += f", {found['inodes']} free inodes"
        return "warn", text, f"writable, {FEW_INODES} free inodes", "remove small files"
    return "pass", text, expected, ""


def _shared(reports: Reports, option: str) -> Iterator[Finding]:
    by_rank = {rank: facts["folders"][option] for rank, facts in reports.of(AREA).items() if option in facts["folders"]}
    by_rank = {rank: one for rank, one in by_rank.items() if not one["error"] and "unseen" in one}
    if len(by_rank) < 2 or option == "temporary folder":
        return
    subject = f"{option} shared"
    expected = "one folder for all ranks"
    if not any(one["unseen"] for one in by_rank.values()):
        yield Finding(AREA, subject, "pass", "all ranks see the files of all ranks", expected)
        return
    alone = odd({rank: tuple(one["unseen"]) for rank, one in by_rank.items()})
    text = "ranks see only their own files"
    if len(alone) < len(by_rank):
        text = f"{reports.who(alone)} does not see the files of other ranks"
    if any(one["must_share"] for one in by_rank.values()):
        fix = 'mount one filesystem on all hosts, or set checkpoint.storage = "first_node"'
        if any(one["filesystem"] == "object store" for one in by_rank.values()):
            fix = "use a store that all hosts can reach"
        yield Finding(AREA, subject, "fail", text, expected, fix, tuple(alone))
    else:
        yield Finding(AREA, subject, "pass", f"{text}: each host has its own folder", "either", "", ())


def _rate(reports: Reports, option: str) -> Iterator[Finding]:
    """Compare the write rates of hosts.

    All ranks write simultaneously, so a host's rate is the sum over its ranks.
    """
    by_rank = {rank: facts["folders"].get(option, {}) for rank, facts in reports.of(AREA).items()}
    first: dict[int, str] = {}  # host by its first rank
    rates: dict[int, float] = {}
    for host, ranks_of_host in reports.hosts().items():
        first[ranks_of_host[0]] = host
        of_host = [by_rank[rank]["rate"] for rank in ranks_of_host if by_rank.get(rank, {}).get("rate")]
        if of_host:
            rates[ranks_of_host[0]] = sum(of_host)
    if not rates or option == "temporary folder":
        return
    least = min(rates, key=lambda rank: (rates[rank], rank))
    text = f"{rates[least] / MIB:.0f} MiB/s" + (f" on {first[least]}, the slowest host" if len(rates) > 1 else "")
    needs = reports.facts.get(0, {}).get("config", {}).get("checkpoint_bytes", 0)
    if needs and option == "checkpoint.folder":
        text += f"; a checkpoint of {format_bytes(needs)} takes {format_seconds(needs / sum(rates.values()))} or more"
    behind = slow(rates)
    expected = f"{SLOW_BYTES_PER_SECOND / MIB:.0f} MiB/s or more on each host"
    if behind:
        ranks = [rank for host_rank in behind for rank in reports.hosts()[first[host_rank]]]
        fix = "check its mount options, its network and other users of its disk"
        yield Finding(AREA, f"{option} rate", "warn", text, "as on other hosts", fix, tuple(ranks))
    elif rates[least] < SLOW_BYTES_PER_SECOND:
        fix = "choose a faster filesystem, or save less often with checkpoint.interval"
        yield Finding(AREA, f"{option} rate", "warn", text, expected, fix)
    else:
        yield Finding(AREA, f"{option} rate", "pass", text, expected)


def _room(facts: Facts, needs: int) -> Judged | None:
    free = facts["folders"].get("checkpoint.folder", {}).get("free")
    if free is None:
        return None
    expected = f"{format_bytes(SPARE * needs)} for each"
    fix = "free space, or keep fewer checkpoints with checkpoint.keep_latest_k"
    count = int(free / (SPARE * needs))
    if count < 1:
        return "fail", f"{format_bytes(free)} free, too little for one", expected, fix
    return ("warn" if count < 2 else "pass"), f"for {count}", expected, fix if count < 2 else ""
