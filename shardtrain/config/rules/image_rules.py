"""Rules of ``task.name = "image_text"``: requirements on the model and on images, and options without effect."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from shardtrain.config.folder_model import NAME
from shardtrain.config.load import Loaded
from shardtrain.config.rules.data_rules import is_changed
from shardtrain.config.rules.task_rules import OF_DOCUMENTS
from shardtrain.config.rules.values import problem
from shardtrain.config.schema.data_options import END_OPTIONS
from shardtrain.utils.errors import Problem

IMAGE_TEXT = "image_text"
_SIZE = re.compile(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})")
_OPTIONS = (
    "data.images_field",
    "data.image_folder",
    "data.max_image_pixels",
    "data.max_image_bytes",
    "task.frozen_modules",
    "task.planned_images",
)


def check_images(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of the task ``image_text``, and options of images that other tasks ignore."""
    config = loaded.config
    if config.task.name != IMAGE_TEXT:
        # A task file of the user may build on this task.
        if not config.task.name.endswith(".py"):
            yield from _check_options_of_images(loaded)
        return
    if config.model.name != NAME:
        yield problem(
            loaded,
            "model.name",
            rule=f'does not read images, which task.name = "{IMAGE_TEXT}" requires',
            fix=f'set it to "{NAME}" and model.hf_assets_path to the folder of a model that reads images',
        )
    if importlib.util.find_spec("PIL") is None:
        yield problem(
            loaded,
            "task.name",
            rule="needs the PIL library, which is not installed",
            fix='pip install "shardtrain[vision]"',
        )
    folder = config.data.image_folder
    if folder and not Path(folder).is_dir():
        yield problem(loaded, "data.image_folder", "is not a folder", "name the folder of images")
    for name in ("max_image_pixels", "max_image_bytes"):
        if getattr(config.data, name) < 1:
            yield problem(loaded, f"data.{name}", "must be at least 1", "remove it")
    for size in config.task.planned_images:
        pixels = image_pixels(size)
        if not 0 < pixels <= config.data.max_image_pixels:
            yield problem(
                loaded,
                "task.planned_images",
                rule=f"must contain sizes such as 1024x768 of at most {config.data.max_image_pixels} pixels, "
                f"and {size!r} is not one",
                fix="use width x height",
            )
    if config.data.packing not in ("auto", "first_fit"):
        yield problem(
            loaded,
            "data.packing",
            rule=f"is not supported with task.name={IMAGE_TEXT}, which does not cut rows",
            fix='use "first_fit" to pack short rows of a batch into sequences, or remove it',
        )
    without_effect = [option for option in OF_DOCUMENTS if option != "data.packing"]
    # Another rule reports these for conversations.
    if config.data.format != "chat":
        without_effect += [f"data.{name}" for name in END_OPTIONS]
    for option in without_effect:
        if is_changed(loaded, option):
            yield problem(loaded, option, f"has no effect with task.name={IMAGE_TEXT}", "remove it")
    if config.task.frozen_modules and config.lora.enable:
        yield problem(
            loaded,
            "task.frozen_modules",
            rule="has no effect with lora.enable, which freezes all modules",
            fix="remove it, and name the modules with adapters in lora.target_modules",
        )
    if config.task.options:
        yield problem(loaded, "task.options", "is for a task file of yours", "remove it")


def image_pixels(size: str) -> int:
    """Return the number of pixels of a size, or 0 if it is not valid.

    >>> image_pixels("1024x768"), image_pixels("1024")
    (786432, 0)
    """
    match = _SIZE.fullmatch(size)
    return int(match[1]) * int(match[2]) if match else 0


def _check_options_of_images(loaded: Loaded) -> Iterator[Problem]:
    for option in _OPTIONS:
        if is_changed(loaded, option):
            yield problem(
                loaded,
                option,
                rule=f'is only read by task.name = "{IMAGE_TEXT}"',
                fix="remove it",
            )
