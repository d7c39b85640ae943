"""The files of a dataset: which they are, what they were when the run began, and whether they still are that."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from shardtrain.data.file_hashes import WholeFile
from shardtrain.data.sources import Request
from shardtrain.utils import reading
from shardtrain.utils.errors import ConfigError, DataError, Problem, StorageError

COMPRESSIONS: Mapping[str, tuple[bytes, ...]] = {
    ".gz": (b"\x1f\x8b",),
    ".bz2": (b"BZh",),
    ".xz": (b"\xfd7zXZ\x00",),
    ".zst": (b"\x28\xb5\x2f\xfd", *(bytes((low, 0x2A, 0x4D, 0x18)) for low in range(0x50, 0x60))),
}
"""Ending of a compressed file -> how its content may begin; the second of zstandard's are skippable frames."""

MANY_FILES = 10_000
"""From so many files on none is opened before a row of it is read, and each is read in sequence: opening, scanning and
hashing a million files at each start of each rank would take an hour, and gigabytes."""
MAX_FILES = 2_000_000
_FILES_SAMPLED = 1000
_SAMPLES, _SAMPLE_BYTES = 16, 64 * 1024
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


@dataclass(frozen=True, slots=True)
class File:
    """A regular file as it was when the dataset was opened.

    name:   its path within the dataset, which stays when the dataset moves to another folder.
    option: the option that led to it, for errors.
    """

    name: str
    path: str
    option: str
    size: int
    mtime_ns: int
    inode: int

    @property
    def compression(self) -> str | None:
        """``".gz"``, ``".bz2"``, ``".xz"``, ``".zst"`` or None, by the file's name."""
        ending = os.path.splitext(self.path)[1].lower()
        return ending if ending in COMPRESSIONS else None

    @property
    def kind(self) -> str:
        """Ending of the name in lower case, without that of the compression: ``".jsonl"`` of ``A.JSONL.gz``."""
        path = self.path[: -len(self.compression)] if self.compression else self.path
        return os.path.splitext(path)[1].lower()

    def open(self) -> int:
        """Return a file descriptor for reading.

        Raises:
            ConfigError: when the file is no longer the one that was listed.
            DataError: when it cannot be opened.
        """
        try:
            descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._gone() from None
        except OSError as error:
            raise self.unreadable(error, "make it readable") from error
        try:
            is_same = self._is(os.fstat(descriptor))
        except OSError as error:
            os.close(descriptor)
            raise self.unreadable(error) from error
        if not is_same:
            os.close(descriptor)
            raise self._changed()
        return descriptor

    def check_unchanged(self) -> None:
        """Raise ConfigError when the file was changed, replaced or removed since it was listed."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise reading.trouble(self.path, error) or self._gone() from error
        if not self._is(now):
            raise self._changed()

    def fingerprint(self) -> str:
        """Size and SHA-256 of 16 blocks of 64 KiB, evenly spread with the first and the last: a MiB read at most."""
        digest = hashlib.sha256()
        descriptor = self.open()
        try:
            if self.size <= _SAMPLES * _SAMPLE_BYTES:
                starts: Sequence[int] = range(0, self.size, _SAMPLE_BYTES)
            else:
                starts = [k * (self.size - _SAMPLE_BYTES) // (_SAMPLES - 1) for k in range(_SAMPLES)]
            for start in starts:
                digest.update(os.pread(descriptor, _SAMPLE_BYTES, start))
        except OSError as error:
            raise self.unreadable(error) from error
        finally:
            os.close(descriptor)
        return f"{self.size}:{digest.hexdigest()}"

    def unreadable(self, error: OSError, fix: str = "check the disk") -> DataError | StorageError:
        """Make the error of a file that cannot be read: of storage where a later try may find it as it was."""
        return reading.trouble(self.path, error) or self.unusable(f"cannot be read ({error.strerror})", fix)

    def unusable(self, rule: str, fix: str) -> DataError:
        """Make the error of a file that cannot serve as data."""
        return DataError(str(Problem(self.option, self.path, rule, fix)))

    def _is(self, now: os.stat_result) -> bool:
        return (now.st_size, now.st_mtime_ns, now.st_ino) == (self.size, self.mtime_ns, self.inode)

    def _changed(self) -> ConfigError:
        rule = "was changed since the run opened it, so what follows is not the data that the order was made of"
        return ConfigError(Problem(self.option, self.path, rule, "put the file back, or begin a new run"))

    def _gone(self) -> ConfigError:
        rule = "was removed or renamed since the run opened it"
        return ConfigError(Problem(self.option, self.path, rule, "put the file back, or begin a new run"))


@dataclass
class FileSource:
    """What all sources of local files share: see Source."""

    members: list[File]
    _fingerprints: dict[str, str] = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def total_bytes(self) -> int:
        """Bytes of the files as they are on disk."""
        return sum(file.size for file in self.members)

    def files(self) -> Mapping[str, str]:
        """See Source. Of many files a thousand are sampled, evenly spread, and of the others the sizes are known."""
        if not self._fingerprints:
            every = max(1, -(-len(self.members) // _FILES_SAMPLED)) if is_many(self.members) else 1
            self._fingerprints = {
                file.name: f"{file.size}" if number % every else file.fingerprint()
                for number, file in enumerate(self.members)
            }
        return self._fingerprints

    def whole_files(self) -> list[WholeFile]:
        """The files, to be hashed."""
        return [WholeFile(file.name, file.path, file.option) for file in self.members]

    def check_unchanged(self) -> None:
        for file in self.members:
            file.check_unchanged()


def is_many(files: Sequence[File]) -> bool:
    """Whether there are so many files that none is opened before it is read."""
    return len(files) >= MANY_FILES


def list_files(request: Request, dataset: str, endings: Sequence[str], *, empty: bool = False) -> list[File]:
    """Files that ``request.path`` names, sorted by their POSIX paths.

    A file or a pattern (``data/*.jsonl``, ``data/**/*.gz``) names files of any ending. A folder stands for all files
    below it with one of ``endings``, also compressed; what begins with a dot is left out, links are followed.

    Raises:
        ConfigError: when the option is not set, or leads to no file.
        DataError: when a file is not a regular file, cannot be read, or is empty and ``empty`` does not allow that.
    """
    names: Sequence[str]
    wanted = ", ".join(f"*{ending}" for ending in endings)
    option, path = request.option, request.path
    if not path:
        rule = f'is not set, and the dataset "{dataset}" needs it'
        raise ConfigError(Problem(option, None, rule, f"name a file, a folder of {wanted}, or a pattern"))
    root = os.path.expanduser(path)
    if os.path.isdir(root):
        names = _walk(root, endings, option)
        if not names:
            raise ConfigError(Problem(option, path, f"is a folder without {wanted} files", "name one that has some"))
    elif not os.path.lexists(root) and glob.has_magic(root):
        root, names = _match(root)
        if not names:
            raise ConfigError(Problem(option, path, "matches no file", "correct the pattern, or name a folder"))
    elif os.path.lexists(root):
        root, name = os.path.split(root)
        names = [name]
    else:
        raise ConfigError(Problem(option, path, "does not exist", f"name a file, a folder of {wanted}, or a pattern"))
    if len(names) > MAX_FILES:
        rule = f"is {len(names):,} files, and each rank looks at each of them when it starts: at most {MAX_FILES:,}"
        raise ConfigError(Problem(option, path, rule, "put many documents into one file"))
    before = os.path.join(root, "")
    return [_note(name, before + name, option, empty) for name in sorted(names)]


def _walk(root: str, endings: Sequence[str], option: str) -> list[str]:
    """Relative POSIX paths of the files below a folder that have one of these endings."""

    def stop(error: OSError) -> None:
        # a folder that one host cannot list would give its ranks another dataset
        rule = f"cannot be listed ({error.strerror})"
        unreadable = DataError(str(Problem(option, error.filename, rule, "make the folder readable")))
        raise reading.trouble(error.filename, error) or unreadable

    allowed = tuple(ending + more for ending in endings for more in ("", *COMPRESSIONS))
    found: list[str] = []
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, onerror=stop, followlinks=True):
        try:
            status = os.stat(folder)
        except OSError as error:
            stop(error)
            raise
        if (status.st_dev, status.st_ino) in seen:
            rule = "is reached twice, by a link"
            raise DataError(str(Problem(option, folder, rule, "remove the link, or name the files by a pattern")))
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        relative = Path(folder).relative_to(root).as_posix()
        before = "" if relative == "." else f"{relative}/"
        chosen = [name for name in files if name.lower().endswith(allowed) and not name.startswith(".")]
        found += [f"{before}{name}" for name in chosen]
    return found


def _match(pattern: str) -> tuple[str, list[str]]:
    """The folder before the first wildcard, and the files that match, relative to it."""
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = os.path.join(*parts[:fixed]) if fixed else ""
    matches = [match for match in glob.glob(pattern, recursive=True) if not os.path.isdir(match)]
    return root, [Path(os.path.relpath(match, root or ".")).as_posix() for match in matches]


def _note(name: str, path: str, option: str, empty: bool) -> File:
    try:
        status = os.stat(path)
    except OSError as error:
        rule = f"cannot be read ({error.strerror})"
        unreadable = DataError(str(Problem(option, path, rule, "fix or remove the file or link")))
        raise reading.trouble(path, error) or unreadable from error
    file = File(name, path, option, status.st_size, status.st_mtime_ns, status.st_ino)
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a device")
        raise file.unusable(f"is {kind}, no file", "name regular files, which can be read at any place")
    if not status.st_size and not empty:
        raise file.unusable("is empty", "remove the file, or name another")
    return file


def check_text(file: File) -> None:
    """Look at the head of a text file for what would make each of its rows bad.

    Raises:
        DataError: when the file is UTF-16, or is compressed in another way than its name says.
    """
    descriptor = file.open()
    try:
        head = os.pread(descriptor, 10, 0)
    except OSError as error:
        raise file.unreadable(error) from error
    finally:
        os.close(descriptor)
    if file.compression:
        if head and not head.startswith(COMPRESSIONS[file.compression]):
            rule = f"is named {file.compression} and does not begin as such a file does"
            raise file.unusable(rule, "give it the name of what it is")
        return
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise file.unusable("is UTF-16", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8")
    for ending, beginnings in COMPRESSIONS.items():
        plain_bz2 = ending == ".bz2" and head[4:] != b"1AY&SY"  # "BZh" may also begin a text
        if head.startswith(beginnings) and not plain_bz2:
            raise file.unusable(f"is compressed and not named {ending}", f"add {ending} to its name")
