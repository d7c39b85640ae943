"""Plain text files: one file is one document."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from shardtrain.errors import DataError, Problem

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def documents(path: str | None = None, option: str = "training.dataset_path") -> Iterator[str]:
    """One text per file: the file at ``path``, or all ``*.txt`` below that folder in the order of their paths.

    Files are UTF-8; a byte order mark is removed and line ends are kept as they are.

    Raises:
        DataError: when the path is missing, a folder holds no ``*.txt``, or a file is empty or no UTF-8 (with the
            offset of the first wrong byte).
    """
    if path is None:
        rule, fix = 'is not set, and the dataset "text" needs it', "name a text file, or a folder of *.txt"
        raise DataError(str(Problem(option, None, rule, fix)))
    root = Path(path)
    if root.is_dir():
        files = sorted((file for file in root.rglob("*.txt") if file.is_file()), key=lambda file: file.as_posix())
        if not files:
            raise DataError(
                str(Problem(option, path, "is a folder without *.txt files", "name a folder that has some"))
            )
    elif root.is_file():
        files = [root]
    else:
        raise DataError(str(Problem(option, path, "does not exist", "name a text file, or a folder of *.txt")))
    return (_text(file, option) for file in files)


def _text(file: Path, option: str) -> str:
    try:
        content = file.read_bytes()
    except OSError as error:
        problem = Problem(option, str(file), f"cannot be read ({error.strerror})", "make the file readable")
        raise DataError(str(problem)) from error
    marked = content.startswith(_BYTE_ORDER_MARK)
    try:
        text = content.removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        offset = error.start + len(_BYTE_ORDER_MARK) * marked
        rule = f"is not UTF-8 at byte {offset} (0x{content[offset]:02x})"
        raise DataError(str(Problem(option, str(file), rule, "convert the file to UTF-8, or remove it"))) from error
    if not text:
        raise DataError(str(Problem(option, str(file), "is empty", "remove the file, or name another")))
    return text
