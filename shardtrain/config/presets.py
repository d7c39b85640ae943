"""Configurations that come with the package and are named by a word: ``shardtrain train debug``."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "presets"
"""In a checkout it is a link to ``configs``; a wheel has the files themselves."""
FIRST = "debug"
"""What is trained where no configuration is named: small enough for any machine, and nothing is downloaded."""


def names() -> list[str]:
    """Names of the presets, in order."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def find(path: Path) -> Path:
    """The file of the preset that a word names; the path itself where it is not such a word, or a file is called so."""
    is_word = path.suffix == "" and len(path.parts) == 1
    preset = FOLDER / f"{path}.toml"
    return preset if is_word and not path.exists() and preset.is_file() else path


def name_of(path: Path) -> str:
    """What another machine that has the package calls this file: a preset's name, else its path."""
    return path.stem if path.parent == FOLDER else str(path)
