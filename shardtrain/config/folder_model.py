"""Models defined by a Hugging Face folder: ``flavor = "from_folder"`` or ``name = "transformers"``."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.config.assets import is_built_in
from shardtrain.config.schema import Config
from shardtrain.config.settings import DEFAULT
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import Problem, ShardtrainError

NAME = "transformers"
FROM_FOLDER = "from_folder"
_FOLDER_FLAVOR = "folder"
"""Flavor of all ``transformers`` models."""


@dataclass(frozen=True)
class FolderModel:
    """A configuration whose model was read from a folder.

    Attributes:
        origins: The origin of each value that the folder set.
        notices: Messages for the user.
    """

    config: Config
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    notices: tuple[str, ...] = ()


def with_folder(config: Config, origins: Mapping[str, str]) -> FolderModel | Problem:
    """Set the model from the folder in ``model.hf_assets_path``, if requested or if no flavor is set.

    The user's ``model.overrides`` take precedence over the folder. Return a Problem if the folder cannot be
    used.
    """
    model = config.model

    def named(option: str) -> bool:
        return origins.get(option, DEFAULT) != DEFAULT

    folder = Path(model.hf_assets_path)
    is_requested = model.flavor == FROM_FOLDER
    where = origins.get("model.flavor", "") if is_requested else ""
    has = bool(model.hf_assets_path) and bounded_reads.is_present(folder / "config.json")

    # Reject "from_folder" if the folder has no config.json.
    if is_requested and model.name.endswith(".py"):
        return Problem(
            "model.flavor",
            model.flavor,
            rule=f"takes sizes from a folder, and {model.name} is a model file of yours",
            fix="name one of its flavors",
            where=where,
        )
    if is_requested and not has and "path" not in model.overrides:
        is_there = folder.exists() or is_built_in(model.hf_assets_path)
        what = "has no config.json" if is_there else "does not exist"
        rule = f"takes sizes from model.hf_assets_path={model.hf_assets_path!r}, which {what}"
        fix = "name a Hugging Face folder there, or a flavor"
        # The folder of a recipe does not exist before the recipe's first command.
        if not is_there:
            fix = "fetch it (shardtrain data download --repo_id OWNER/NAME --all), export it, or name a flavor"
        return Problem("model.flavor", model.flavor, rule, fix, where)

    # A transformers model uses the folder unchanged. Without a folder, the configured model stays.
    if named("model.name") and model.name == NAME:
        return _as_it_is(config, {}, _FOLDER_FLAVOR if is_requested else model.flavor)
    wanted = not named("model.flavor") and named("model.hf_assets_path") and has
    if not is_requested and (not wanted or model.name.endswith(".py")):
        return FolderModel(config)

    # Import late, because most configurations name no folder.
    from shardtrain.config.describe_folder import HUBS, describe
    from shardtrain.hub_formats.config_json import in_transformers, read_json
    from shardtrain.hub_formats.format import OnlyInTransformers

    is_free = not named("model.name")
    if not is_requested and not is_free and model.name not in HUBS:
        return FolderModel(config)
    try:
        described = describe(folder, "" if is_free else model.name)
    except OnlyInTransformers as reason:
        kind = read_json(folder / "config.json").get("model_type")
        if is_free and importlib.util.find_spec(NAME) is not None and not in_transformers(kind):
            return Problem(
                "model.hf_assets_path",
                model.hf_assets_path,
                rule=f"holds a model of model_type {kind!r}, which neither this package nor transformers has",
                fix="install a transformers that has it, or write a model file",
                where=where,
            )
        if is_free:
            why = str(reason).partition("; use model.name")[0]
            notice = f"{why}: taken as it is, with model.name={NAME}"
            return _as_it_is(config, {}, _FOLDER_FLAVOR, (notice,))
        return Problem(
            "model.name",
            model.name,
            rule=f"is not what the folder holds ({reason})",
            fix="leave model.name out",
            where=origins.get("model.name", ""),
        )
    except ShardtrainError as error:
        return Problem(
            "model.hf_assets_path",
            model.hf_assets_path,
            rule=f"describes no model ({error})",
            fix="use another folder, or set model.flavor if the folder only contains a tokenizer",
            where=where,
        )
    if not is_free and model.name != described.name:
        return Problem(
            "model.name",
            model.name,
            rule=f"is not what {folder} holds, which is {described.name}",
            fix=f'set it to "{described.name}", or remove it',
            where=origins.get("model.name", ""),
        )

    # Use the folder's model. The user's overrides take precedence over config.json.
    overrides = {**described.overrides, **model.overrides}
    taken = dataclasses.replace(
        model, name=described.name, flavor=described.flavor, overrides=overrides
    )
    file = f"{folder / 'config.json'}"
    from_file = {
        f"model.overrides.{key}": file for key in described.overrides if key not in model.overrides
    }
    notice = f"model {described.name}/{described.flavor}, as {file} describes it"
    if overrides:
        fields = ", ".join(f"{key}={value!r}" for key, value in overrides.items())
        notice = (
            f"model {described.name} with the sizes of {file}: {fields}; "
            f"all others as in flavor {described.flavor}"
        )
    return FolderModel(
        dataclasses.replace(config, model=taken),
        {"model.name": file, "model.flavor": file, **from_file},
        (notice, *described.notices),
    )


def _as_it_is(
    config: Config,
    origins: dict[str, str],
    flavor: str,
    notices: tuple[str, ...] = (),
) -> FolderModel:
    model = config.model
    overrides: dict[str, Any] = {"path": model.hf_assets_path, **model.overrides}
    taken = dataclasses.replace(model, name=NAME, flavor=flavor, overrides=overrides)
    return FolderModel(dataclasses.replace(config, model=taken), origins, notices)
