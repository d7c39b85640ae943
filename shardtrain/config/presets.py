"""Built-in configurations, selected by name: ``shardtrain train debug``."""

from __future__ import annotations

from pathlib import Path

from shardtrain.utils.errors import ConfigError, Problem

FOLDER = Path(__file__).parents[1] / "presets"
"""In a checkout, a link to ``configs``. A wheel contains the files."""
FIRST = "debug"
"""Default preset. It fits any machine and downloads nothing."""


def names() -> list[str]:
    """Return the sorted names of the presets."""
    return sorted(file.stem for file in FOLDER.glob("*.toml"))


def find(path: Path) -> Path:
    """Return the file of a preset. Return other paths unchanged.

    Raises:
        ConfigError: the current directory has a file of the preset's name. A configuration names code that
            runs, so such a file must not replace a preset without notice.
    """
    is_word = path.suffix == "" and len(path.parts) == 1
    preset = file_of(str(path))
    if not is_word or not preset.is_file():
        return path
    if path.exists() and not path.is_dir():
        rule = "is the name of a preset and of a file in this folder"
        fix = "rename the file, or name it by its absolute path"
        raise ConfigError(Problem("job.config_file", str(path), rule, fix))
    return preset


def file_of(name: str) -> Path:
    """Return the path of the preset of this name. The file may not exist."""
    return FOLDER / f"{name}.toml"


def name_of(path: Path) -> str:
    """Return the name of a preset file, which is valid on other machines, or the path of another file."""
    return path.stem if path.parent == FOLDER else str(path)
