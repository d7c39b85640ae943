"""Built-in configurations, selected by name: ``shardtrain train debug``."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "presets"
"""In a checkout, a link to ``configs``. A wheel contains the files."""
FIRST = "debug"
"""Default preset. It fits any machine and downloads nothing."""


def names() -> list[str]:
    """Return the sorted names of the presets."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def find(path: Path) -> Path:
    """Return the file of a preset. Return other paths, and names of existing files, unchanged."""
    is_word = path.suffix == "" and len(path.parts) == 1
    preset = FOLDER / f"{path}.toml"
    if is_word and not path.exists() and preset.is_file():
        return preset
    return path


def name_of(path: Path) -> str:
    """Return the name of a preset file, which is valid on other machines, or the path of another file."""
    return path.stem if path.parent == FOLDER else str(path)
