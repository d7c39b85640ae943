"""An option that an override makes ineffective is a note if a preset sets it, and an error in a user's file."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardtrain import config
from shardtrain.config import presets
from shardtrain.config.toml_writer import RESOLVED_CONFIG, resolved_toml

OVERRIDES = {
    "lr_scheduler.decay_ratio": ["--lr_scheduler.name", "linear_linear"],
    "lr_scheduler.min_lr_factor": ["--lr_scheduler.name", "linear_by_proportion"],
    "metrics.sample_freq": ["--metrics.sample_prompt="],
}


@pytest.mark.parametrize("option", OVERRIDES)
def test_an_idle_option_is_a_note_in_a_preset_and_an_error_in_a_file(
    tmp_path: Path, option: str
) -> None:
    arguments = OVERRIDES[option]
    loaded = config.load("debug", arguments)
    assert config.check(loaded) == []
    notes_on_option = [note for note in config.notes(loaded) if note.startswith(f"{option}=")]
    assert any("of the preset" in note for note in notes_on_option)

    # In a user's copy of the preset, the option is an error.
    copied = tmp_path / "copy.toml"
    shutil.copyfile(presets.FOLDER / "debug.toml", copied)
    problems = config.check(config.load(copied, arguments))
    assert option in [problem.option for problem in problems]

    # The option is also an error if the user repeats its value on the command line.
    written = config.load("debug", [*arguments, f"--{option}", str(loaded.value(option))])
    assert option in [problem.option for problem in config.check(written)]


def problems_after_writing(loaded: config.Loaded, folder: Path) -> list[str]:
    """Return the problems of the file that a run writes. ``data show``, ``replay`` and ``plan`` load it."""
    written = folder / RESOLVED_CONFIG
    written.write_text(resolved_toml(loaded.config))
    return [problem.option for problem in config.check(config.load(written))]


@pytest.mark.parametrize("option", OVERRIDES)
def test_a_run_accepts_the_overrides_in_the_file_that_it_wrote(tmp_path: Path, option: str) -> None:
    assert problems_after_writing(config.load("debug", OVERRIDES[option]), tmp_path) == []


@pytest.mark.parametrize("name", presets.names())
def test_a_run_accepts_the_preset_in_the_file_that_it_wrote(tmp_path: Path, name: str) -> None:
    """A run writes all options to its file, so options with default values count as set there."""
    loaded = config.load(name)
    expected = [problem.option for problem in config.check(loaded)]
    assert problems_after_writing(loaded, tmp_path) == expected


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_by_itself_has_no_idle_option(name: str) -> None:
    assert not [note for note in config.notes(config.load(name)) if "of the preset" in note]
