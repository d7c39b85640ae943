"""Data files by the ending of their names: which dataset reads them, and which compressions they may have."""

from __future__ import annotations

import re

ENDINGS = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "text": (".txt",),
    "tsv": (".tsv", ".csv"),
    "parquet": (".parquet", ".pq"),
}
"""Dataset -> endings of the files that it reads in a folder. A file given by its path may have any ending."""

COMPRESSIONS: dict[str, tuple[bytes, ...]] = {
    ".gz": (b"\x1f\x8b",),
    ".bz2": (b"BZh",),
    ".xz": (b"\xfd7zXZ\x00",),
    ".zst": (b"\x28\xb5\x2f\xfd", *(bytes((low, 0x2A, 0x4D, 0x18)) for low in range(0x50, 0x60))),
}
"""Ending of a compressed file -> its possible first bytes. The later ones of zstandard are skippable frames."""

FOREIGN_CONFIGS = (".json", ".yml", ".yaml", ".sh", ".slurm", ".sbatch")
"""Endings of the configuration files of other systems that ``train`` reads."""

_DATASETS = {ending: dataset for dataset, endings in ENDINGS.items() for ending in endings}
# A folder is not searched for Markdown, but a file may be given by its path.
_DATASETS[".md"] = "text"


def dataset_of(file_name: str) -> str | None:
    """Return the dataset that reads a file, or None if its ending is unknown.

    >>> dataset_of("A.JSONL.gz"), dataset_of("notes.md"), dataset_of("x.pq"), dataset_of("weights.bin")
    ('jsonl', 'text', 'parquet', None)
    """
    # A compressed file has two endings.
    parts = re.findall(r"\.[^./]*", file_name.lower())
    if len(parts) > 1 and parts[-1] in COMPRESSIONS:
        del parts[-1]
    return _DATASETS.get(parts[-1]) if parts else None


def known_endings() -> str:
    """Return the endings for an error message: ".jsonl, .txt, ... (and with .gz, ... after it)"."""
    return f"{', '.join(_DATASETS)}, with or without {', '.join(COMPRESSIONS)} after it"
