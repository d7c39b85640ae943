"""The files of a dataset: list them, identify them, and detect changes during a run."""

from __future__ import annotations

import glob
import hashlib
import os
import stat
from array import array
from bisect import bisect_left
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from shardtrain.data import shared_opening
from shardtrain.data.file_hashes import FileToHash
from shardtrain.data.shared_opening import Listing, Witness
from shardtrain.data.sources import Request
from shardtrain.facts.file_kinds import COMPRESSIONS
from shardtrain.utils import atomic_io, bounded_reads
from shardtrain.utils.errors import ConfigError, DataError, Problem, ShardtrainError

MANY_FILES = 10_000
"""In a dataset with at least this number of files, a file is opened only when its rows are read, in sequence.

Opening, scanning and hashing a million files on each rank whenever a run starts would
take an hour and gigabytes.
"""
MAX_FILES = 2_000_000
_FILES_SAMPLED = 1000
"""With ``MANY_FILES``, number of files whose blocks are hashed."""
_SAMPLES = 16
_SAMPLE_BYTES = 64 * 1024
"""Number and size of the blocks of a file that its fingerprint hashes."""


@dataclass(frozen=True, slots=True)
class File:
    """A regular file, with its state when the dataset was opened.

    Attributes:
        name: path within the dataset. It stays the same if the dataset is moved to another folder.
        path: path of the file.
        option: the option that names the dataset, for errors.
        size, mtime_ns, inode: identity of the file when it was listed.
    """

    name: str
    path: str
    option: str
    size: int
    mtime_ns: int
    inode: int

    @property
    def compression(self) -> str | None:
        """``".gz"``, ``".bz2"``, ``".xz"``, ``".zst"`` or None, from the file's name."""
        ending = os.path.splitext(self.path)[1].lower()
        return ending if ending in COMPRESSIONS else None

    @property
    def kind(self) -> str:
        """Suffix of the name in lower case, ignoring compression: ``".jsonl"`` for ``A.JSONL.gz``."""
        path = self.path
        if self.compression:
            path = path[: -len(self.compression)]
        return os.path.splitext(path)[1].lower()

    def open(self) -> int:
        """Return a file descriptor for reading.

        Raises:
            ConfigError: the file has changed since it was listed.
            DataError: the file cannot be opened.
        """
        try:
            descriptor = atomic_io.without_waiting(self.path, os.O_RDONLY)
        except FileNotFoundError:
            raise self._gone() from None
        except OSError as error:
            raise self.unreadable(error, "make it readable") from error
        # Compare the opened file, because the path may be replaced between a check and the opening.
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
        """Raise ConfigError if the file was changed, replaced or removed since it was listed."""
        try:
            now = os.stat(self.path)
        except OSError as error:
            raise bounded_reads.trouble(self.path, error) or self._gone() from error
        if not self._is(now):
            raise self._changed()

    def fingerprint(self) -> str:
        """Return the file's size, and the SHA-256 of 16 blocks of 64 KiB. This reads at most 1 MiB.

        The blocks are evenly spread, and include the first and the last block.
        """
        digest = hashlib.sha256()
        descriptor = self.open()
        try:
            # A small file is hashed completely. In a larger one, the hashed blocks are spread from its
            # beginning to its end.
            starts: Sequence[int] = range(0, self.size, _SAMPLE_BYTES)
            if self.size > _SAMPLES * _SAMPLE_BYTES:
                last_start = self.size - _SAMPLE_BYTES
                starts = [k * last_start // (_SAMPLES - 1) for k in range(_SAMPLES)]
            for start in starts:
                digest.update(os.pread(descriptor, _SAMPLE_BYTES, start))
        except OSError as error:
            raise self.unreadable(error) from error
        finally:
            os.close(descriptor)
        return f"{self.size}:{digest.hexdigest()}"

    def unreadable(self, error: OSError, fix: str = "check the disk") -> ShardtrainError:
        """Return the error for a file that cannot be read.

        It is a StorageError if a later attempt may succeed, else a DataError.
        """
        return bounded_reads.unreadable(self.option, self.path, error, fix, DataError)

    def unusable(self, rule: str, fix: str) -> DataError:
        """Return the error for a file that cannot be used as data."""
        return DataError(str(Problem(self.option, self.path, rule, fix)))

    def _is(self, now: os.stat_result) -> bool:
        """True if a file's status is that of the listed file."""
        listed = (self.size, self.mtime_ns, self.inode)
        return (now.st_size, now.st_mtime_ns, now.st_ino) == listed

    def _changed(self) -> ConfigError:
        rule = "was changed since the run opened it"
        return ConfigError(
            Problem(self.option, self.path, rule, "restore the file, or start a new run")
        )

    def _gone(self) -> ConfigError:
        rule = "was removed or renamed since the run opened it"
        return ConfigError(
            Problem(self.option, self.path, rule, "restore the file, or start a new run")
        )


class FileList(Sequence[File]):
    """The files of a dataset, sorted by name.

    They are stored in arrays, which need 50 bytes per file. An object would need 500. ``place`` is the
    folder, file or pattern that names the files.
    """

    def __init__(self, place: str, option: str, arrays: Mapping[str, Any]) -> None:
        """Create the list from the result of ``arrays_of``, which may come from another rank."""
        self.place = place
        self.option = option
        self._root = arrays["root"]
        self._before = os.path.join(self._root, "")
        self.has_twins: bool = arrays["has_twins"]
        # Each name ends with a zero byte, which no file name contains.
        self._names: npt.NDArray[np.uint8] = arrays["names"]
        self._stops = np.flatnonzero(self._names == 0)
        self._sizes = arrays["sizes"]
        self._mtimes = arrays["mtimes"]
        self._inodes = arrays["inodes"]

    def __len__(self) -> int:
        return len(self._sizes)

    @overload
    def __getitem__(self, number: int) -> File: ...
    @overload
    def __getitem__(self, number: slice) -> list[File]: ...
    def __getitem__(self, number: int | slice) -> File | list[File]:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        # The range resolves negative numbers, and raises IndexError for numbers that are too large.
        number = range(len(self))[number]
        name = self.name(number)
        path = self._before + name
        size = int(self._sizes[number])
        mtime = int(self._mtimes[number])
        inode = int(self._inodes[number])
        return File(name, path, self.option, size, mtime, inode)

    def __iter__(self) -> Iterator[File]:
        facts = (column.tolist() for column in (self._sizes, self._mtimes, self._inodes))
        for name, *identity in zip(self.names(), *facts, strict=True):
            yield File(name, self._before + name, self.option, *identity)

    def name(self, number: int) -> str:
        """Return the name of a file."""
        start = int(self._stops[number - 1]) + 1 if number else 0
        return _text(self._names[start : int(self._stops[number])])

    def names(self) -> Iterator[str]:
        """Yield all names, sorted."""
        # Decoding a block of names is much faster than decoding each name.
        for first in range(0, len(self), _NAMES_AT_ONCE):
            last = min(first + _NAMES_AT_ONCE, len(self)) - 1
            start = int(self._stops[first - 1]) + 1 if first else 0
            stop = int(self._stops[last])
            yield from _text(self._names[start:stop]).split("\0")

    def number_of(self, name: str) -> int:
        """Return the number of the file with a name. Raises KeyError if it does not exist."""
        number = bisect_left(range(len(self)), name, key=self.name)
        if number == len(self) or self.name(number) != name:
            raise KeyError(name)
        return number

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """Size of each file in bytes."""
        return self._sizes

    def chosen(self, numbers: Sequence[int]) -> FileList:
        """Return a list of some of the files, in the given order."""
        picked = np.array(numbers, np.int64)
        names = [self.name(number) for number in numbers]
        arrays = arrays_of(
            self._root, names, self._sizes[picked], self._mtimes[picked], self._inodes[picked]
        )
        return FileList(self.place, self.option, arrays)

    def witnesses(self) -> list[Witness]:
        """Return some files, evenly spread, that a node compares with its own storage."""
        witnesses = []
        for number in shared_opening.spread(len(self)):
            file = self[number]
            witnesses.append(Witness(self.option, file.path, file.size, file.mtime_ns, file.inode))
        return witnesses

    def content(self) -> str:
        """Return a hash of the names and sizes, which are equal in all copies of the data."""
        digest = hashlib.sha256(self._names.data)
        digest.update(self._sizes.data)
        return digest.hexdigest()

    def difference(self, other: FileList) -> str:
        """Describe how another list of the same place differs, as the end of a sentence. Empty if it is equal."""
        sizes = dict(zip(self.names(), self._sizes.tolist(), strict=True))
        other_names = set(other.names())
        for name in sizes:
            if name not in other_names:
                return f"lacks {name}"
        for name, size in zip(other.names(), other._sizes.tolist(), strict=True):
            if name not in sizes:
                return f"has the additional file {name} of {size} bytes"
            if sizes[name] != size:
                return f"has {name} of {size} bytes instead of {sizes[name]}"
        return ""


_NAMES_AT_ONCE = 4096
_Numbers = Sequence[int] | npt.NDArray[Any]


def arrays_of(
    root: str, names: Sequence[str], sizes: _Numbers, mtimes: _Numbers, inodes: _Numbers
) -> dict[str, Any]:
    """Return the files below ``root`` as arrays, which ranks can send to each other.

    ``names`` must be sorted. In the result, ``has_twins`` is True if a pattern such as ``**/**`` has
    matched a file twice.
    """
    # Python represents file names that are not UTF-8 with surrogateescape.
    text = "".join(f"{name}\0" for name in names)
    encoded = text.encode("utf-8", "surrogateescape")
    return {
        "root": root,
        "names": np.frombuffer(encoded, np.uint8),
        "has_twins": any(name == other for name, other in pairwise(names)),
        "sizes": np.asarray(sizes, np.int64),
        "mtimes": np.asarray(mtimes, np.int64),
        "inodes": np.asarray(inodes, np.uint64),
    }


def _text(names: npt.NDArray[np.uint8]) -> str:
    return names.tobytes().decode("utf-8", "surrogateescape")


class Marks(Mapping[str, str]):
    """Fingerprints of many files, by name. Most are only the file's size, and some also hash blocks of it."""

    def __init__(self, files: FileList, sampled: Mapping[int, str]) -> None:
        self._files = files
        self._sampled = sampled

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[str]:
        return self._files.names()

    def __getitem__(self, name: str) -> str:
        return self._mark(self._files.number_of(name))

    def every(self, step: int) -> dict[str, str]:
        """Return every ``step``-th fingerprint, starting with the first."""
        fingerprints = {}
        for number in range(0, len(self), step):
            name = self._files.name(number)
            fingerprints[name] = self._mark(number)
        return fingerprints

    def items(self) -> ItemsView[str, str]:
        return _Items(self)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield all names and fingerprints in order. This is faster than looking up each name."""
        names_and_sizes = zip(self._files.names(), self._files.sizes.tolist(), strict=True)
        for number, (name, size) in enumerate(names_and_sizes):
            yield name, self._sampled.get(number) or f"{size}"

    def _mark(self, number: int) -> str:
        return self._sampled.get(number) or f"{self._files.sizes[number]}"


class _Items(ItemsView[str, str]):
    _mapping: Marks

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return self._mapping.pairs()


@dataclass
class FileSource:
    """Base class of all sources that read local files, see ``Source``."""

    members: Sequence[File]
    _fingerprints: Mapping[str, str] = field(default_factory=dict, init=False, repr=False)

    @property
    def listed_at(self) -> str:
        """The folder, file or pattern that names the files."""
        return place_listed(self.members)

    @cached_property
    def total_bytes(self) -> int:
        """Total size of the files on disk."""
        if isinstance(self.members, FileList):
            return int(self.members.sizes.sum())
        return sum(file.size for file in self.members)

    def files(self) -> Mapping[str, str]:
        """Return the fingerprints of the files.

        With many files, only a thousand, evenly spread, have block hashes.
        """
        if self._fingerprints:
            return self._fingerprints
        has_many = is_many(self.members)
        step = 1
        if has_many:
            # Round up, so there are at most ``_FILES_SAMPLED`` samples.
            step = max(1, -(-len(self.members) // _FILES_SAMPLED))
        numbers = range(0, len(self.members), step)
        samples = dict(zip(numbers, self._sample(numbers), strict=True))
        # ``Marks`` saves the memory of a dictionary, but a mapping cannot contain a name twice.
        if isinstance(self.members, FileList) and has_many and not self.members.has_twins:
            self._fingerprints = Marks(self.members, samples)
            return self._fingerprints
        fingerprints = {}
        for number, file in enumerate(self.members):
            fingerprints[file.name] = samples.get(number) or f"{file.size}"
        self._fingerprints = fingerprints
        return self._fingerprints

    def _sample(self, numbers: Sequence[int]) -> list[str]:
        def compute() -> list[str]:
            return [self.members[number].fingerprint() for number in numbers]

        # In a run with several ranks, only rank 0 reads the files.
        fingerprints: list[str] = shared_opening.once(self.listed_at, compute)
        return fingerprints

    def files_to_hash(self) -> list[FileToHash]:
        """Return the files to hash completely."""
        return [FileToHash(file.name, file.path, file.option) for file in self.members]

    def check_unchanged(self) -> None:
        for file in self.members:
            file.check_unchanged()


def is_many(files: Sequence[File]) -> bool:
    """True if there are so many files that each is opened only when it is read."""
    return len(files) >= MANY_FILES


def place_listed(files: Sequence[File]) -> str:
    """Return the folder, file or pattern that names the files."""
    return files.place if isinstance(files, FileList) else ""


def list_files(
    request: Request, dataset: str, endings: Sequence[str], *, empty: bool = False
) -> FileList:
    """List the files that ``request.path`` names, sorted by their POSIX paths.

    A path or a pattern (``data/*.jsonl``, ``data/**/*.gz``) may name files with any suffix. A folder means
    all files below it that have a suffix in ``endings``, compressed or not. In a folder, names that begin
    with a dot are skipped, and links are followed.

    Raises:
        ConfigError: the option is not set, or matches no file.
        DataError: a file is not a regular file, cannot be read, or is empty and ``empty`` is False.
    """
    wanted = ", ".join(f"*{ending}" for ending in endings)
    option = request.option
    path = request.path
    if not path:
        raise ConfigError(
            Problem(
                option,
                None,
                rule=f'is not set, and the dataset "{dataset}" requires it',
                fix=f"name a file, a folder of {wanted}, or a pattern",
            )
        )
    place = os.path.expanduser(path)

    def file_list(arrays: Any) -> FileList:
        return FileList(place, option, arrays)

    def witnesses(arrays: Any) -> list[Witness]:
        return file_list(arrays).witnesses()

    def content(arrays: Any) -> str:
        return file_list(arrays).content()

    def difference(arrays: Any, other_arrays: Any) -> str:
        return file_list(arrays).difference(file_list(other_arrays))

    def list_here() -> dict[str, Any]:
        return _list(place, request, wanted, endings, empty)

    # Ranks exchange arrays, because objects for many files are large and slow to send.
    listing = Listing(witnesses, content, difference)
    return file_list(shared_opening.once(place, list_here, listing))


def _list(
    place: str, request: Request, wanted: str, endings: Sequence[str], empty: bool
) -> dict[str, Any]:
    """List the files that a path names, and return them as ``arrays_of`` does."""
    # The path is a folder, a pattern or a file. An existing path is not a pattern, even if it contains a "*".
    names: Sequence[str]
    option = request.option
    path = request.path
    root = place
    kind = bounded_reads.kind(root)
    if kind == "folder":
        names = _walk(root, endings, option)
        if not names:
            raise ConfigError(
                Problem(
                    option,
                    path,
                    rule=f"is a folder without {wanted} files",
                    fix="name a folder that contains some",
                )
            )
    elif not kind and not os.path.lexists(root) and glob.has_magic(root):
        root, names = _match(root)
        if not names:
            raise ConfigError(
                Problem(
                    option,
                    path,
                    rule="matches no file",
                    fix="correct the pattern, or name a folder",
                )
            )
    elif kind or os.path.lexists(root):
        root, name = os.path.split(root)
        names = [name]
    else:
        raise ConfigError(
            Problem(
                option,
                path,
                rule="does not exist",
                fix=f"name a file, a folder of {wanted}, or a pattern",
            )
        )
    if len(names) > MAX_FILES:
        raise ConfigError(
            Problem(
                option,
                path,
                rule=f"names {len(names):,} files, but at most {MAX_FILES:,} are supported",
                fix="put more documents into each file",
            )
        )

    # Collect columns, because objects for a million files would need half a gigabyte.
    before = os.path.join(root, "")
    names = sorted(names)
    sizes = array("q")
    mtimes = array("q")
    inodes = array("Q")
    for name in names:
        status = _status(before + name, option, empty)
        sizes.append(status.st_size)
        mtimes.append(status.st_mtime_ns)
        inodes.append(status.st_ino)
    return arrays_of(root, names, sizes, mtimes, inodes)


def _walk(root: str, endings: Sequence[str], option: str) -> list[str]:
    """Return relative POSIX paths of the files below a folder that have one of these suffixes."""

    def stop(error: OSError) -> None:
        # Do not skip the folder: if only some hosts can list it, their ranks would read a different dataset.
        rule = f"cannot be listed ({error.strerror})"
        unreadable = DataError(
            str(Problem(option, error.filename, rule, "make the folder readable"))
        )
        raise bounded_reads.trouble(error.filename, error) or unreadable

    suffixes: tuple[str, ...] = ()
    for ending in endings:
        suffixes += (ending, *(ending + compression for compression in COMPRESSIONS))
    names: list[str] = []
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(root, onerror=stop, followlinks=True):
        try:
            status = os.stat(folder)
        except OSError as error:
            stop(error)
            raise
        # A link may lead to a folder that was visited already. Rows would then be read twice, or the walk
        # would never end.
        if (status.st_dev, status.st_ino) in seen:
            rule = "is found twice, because a link leads to it"
            fix = "remove the link, or name the files by a pattern"
            raise DataError(str(Problem(option, folder, rule, fix)))
        seen.add((status.st_dev, status.st_ino))
        # Changed in place, because ``os.walk`` reads this list to continue.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        relative = Path(folder).relative_to(root).as_posix()
        before = ""
        if relative != ".":
            before = f"{relative}/"
        for name in files:
            if name.lower().endswith(suffixes) and not name.startswith("."):
                names.append(f"{before}{name}")
    return names


def _match(pattern: str) -> tuple[str, list[str]]:
    """Return the folder before the first wildcard, and the matching files relative to it."""
    # Names relative to this folder stay the same if the dataset is moved.
    parts = Path(pattern).parts
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    root = ""
    if fixed:
        root = os.path.join(*parts[:fixed])
    start = root or "."
    files = []
    for match in glob.glob(pattern, recursive=True):
        if not os.path.isdir(match):
            files.append(Path(os.path.relpath(match, start)).as_posix())
    return root, files


def _status(path: str, option: str, empty: bool) -> os.stat_result:
    """Return the status of a file. Raises DataError if it cannot be used as data."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise bounded_reads.unreadable(
            option, path, error, "fix or remove the file or link", DataError
        ) from error
    if not stat.S_ISREG(status.st_mode):
        kind = bounded_reads.name_of_kind(status.st_mode)
        rule = f"is {kind}, not a regular file"
        fix = "name regular files, which support random access"
        raise DataError(str(Problem(option, path, rule, fix)))
    if not status.st_size and not empty:
        raise DataError(str(Problem(option, path, "is empty", "remove the file, or name another")))
    return status


def check_text(file: File) -> None:
    """Check the first bytes of a text file for problems that would make all of its rows bad.

    Raises:
        DataError: the file is UTF-16, or its compression does not match its name.
    """
    descriptor = file.open()
    try:
        head = os.pread(descriptor, 10, 0)
    except OSError as error:
        raise file.unreadable(error) from error
    finally:
        os.close(descriptor)
    if file.compression:
        # An empty file is no error here, because ``list_files`` decides about empty files.
        if head and not head.startswith(COMPRESSIONS[file.compression]):
            rule = f"is named {file.compression} but does not begin like such a file"
            raise file.unusable(rule, "rename it to match its format")
        return
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise file.unusable("is UTF-16", "convert it to UTF-8: iconv -f UTF-16 -t UTF-8")
    for ending, beginnings in COMPRESSIONS.items():
        # A text may also begin with "BZh", so test the bytes after it too.
        is_text = ending == ".bz2" and head[4:] != b"1AY&SY"
        if head.startswith(beginnings) and not is_text:
            raise file.unusable(
                f"is compressed but not named {ending}", f"add {ending} to its name"
            )


_MAX_FILES_NAMED = 4096


def sampled(files: Mapping[str, str]) -> dict[str, str]:
    """Return at most 4,096 fingerprints, evenly spread."""
    # Round up, so there are at most ``_MAX_FILES_NAMED`` files.
    step = max(1, -(-len(files) // _MAX_FILES_NAMED))
    if isinstance(files, Marks):
        return files.every(step)
    every_nth = islice(files.items(), 0, None, step)
    return dict(every_nth)
