"""The verb ``init``: write an initial configuration with a comment for each option."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from shardtrain.config import presets
from shardtrain.config.command_line import split
from shardtrain.config.folder_model import FROM_FOLDER, with_folder
from shardtrain.config.json_schema import DIRECTIVE, FILE, write_schema_next_to
from shardtrain.config.load import Loaded, load, value_of
from shardtrain.config.options import options
from shardtrain.config.schema import Config, Model
from shardtrain.config.settings import DEFAULT
from shardtrain.config.toml_writer import set_toml
from shardtrain.facts.file_kinds import dataset_of
from shardtrain.utils import atomic_io, output_target, storage_errors
from shardtrain.utils.errors import COMMAND_LINE, ConfigError, Problem
from shardtrain.utils.redact import visible

USAGE = """usage: shardtrain init NEW.toml [PRESET] [--section.key VALUE ...]

Write a first configuration: a preset (default: debug) with your overrides, and the options that most runs set, each
with a line that explains it. TOML editors (Taplo, Even Better TOML) complete and check the file with the schema that
is written next to it. On a terminal, without a preset and overrides, the command asks four questions.

  shardtrain init my_run.toml llama3_8b --training.dataset text --training.dataset_path "data/*.txt"

{presets}
"""
FIRST = (
    "job.dump_folder",
    "model.name", "model.flavor", "model.hf_assets_path",
    "training.dataset", "training.dataset_path", "training.seq_len", "training.local_batch_size",
    "training.global_batch_size", "training.steps",
    "optimizer.name", "optimizer.lr", "lr_scheduler.warmup_steps",
    "parallelism.data_parallel_shard_degree", "parallelism.data_parallel_replicate_degree",
    "parallelism.tensor_parallel_degree", "parallelism.pipeline_parallel_degree", "parallelism.context_parallel_degree",
    "activation_checkpoint.mode",
    "checkpoint.enable", "checkpoint.interval", "checkpoint.keep_latest_k",
    "metrics.log_freq",
)  # fmt: skip
"""Options that most runs set."""
QUESTIONS = (
    ("preset", "which preset? ({presets})", presets.FIRST),
    (
        "--training.dataset_path",
        "files to train on: text or .jsonl (empty: the data of the preset)",
        "",
    ),
    ("--model.hf_assets_path", "folder of the tokenizer, or bytes (empty: as in the preset)", ""),
    ("--training.steps", "number of steps (empty: as in the preset)", ""),
)
_WIDTH = 100


def main(argv: Sequence[str], ask: Callable[[str], str] = input) -> int:
    """Write the file and its schema, and return the exit status.

    Raises:
        ConfigError: an argument or option is invalid.
        StorageError: the file cannot be written.
    """
    arguments = [argument for argument in argv if argument not in ("--help", "-h")]
    if len(arguments) < len(argv):
        known = textwrap.fill(f"presets: {', '.join(presets.names())}", 100, subsequent_indent="  ")
        print(USAGE.format(presets=known), end="")
        return 0
    if not arguments or arguments[0].startswith("--"):
        raise ConfigError(
            Problem(
                "shardtrain init",
                None,
                rule="needs the file to write",
                fix="shardtrain init my_run.toml",
                where="command line",
            )
        )
    path = Path(arguments[0])
    rest = list(arguments[1:])
    if path.suffix != ".toml":
        raise ConfigError(
            Problem(
                "NEW.toml",
                str(path),
                rule="does not end in .toml",
                fix=f"write {path.with_suffix('.toml')}",
                where="command line",
            )
        )
    output_target.require("NEW.toml", path, "file")
    # Never overwrite a file, because it may have been edited.
    if path.exists():
        raise ConfigError(
            Problem(
                "NEW.toml",
                str(path),
                rule="exists",
                fix="name a new file",
                where="command line",
            )
        )
    # Ask questions only in a terminal and only if the command line has no choice. Scripts must not wait.
    if not rest and sys.stdin.isatty() and sys.stdout.isatty():
        rest = _asked(ask)
    line = split(rest)
    loaded = _with_folder_model(load(line.path, line.overrides, preset=presets.FIRST))
    name = "the defaults"
    if loaded.path:
        name = presets.name_of(Path(loaded.path))
    written_by = f"Written by `shardtrain init` from {name}."
    next_command = f"Train it with `shardtrain train {shlex.quote(path.name)}`."
    head = [
        DIRECTIVE,
        # A file may have a newline in its name, and the rest of the name would be options.
        visible(f"# {written_by} {next_command}", lines=False),
        "# Override options there, for example --training.steps 100. All options: `shardtrain config help`.",
        "",
    ]
    text = "\n".join([*head, *_explained(loaded)]) + "\n"
    with storage_errors.writing(path, "name another file"):
        atomic_io.write(path, text, create_folder=True)
        write_schema_next_to(path)
    print(f"wrote {path}, and {FILE} for editors; next:")
    print(
        "\n".join(
            f"  shardtrain {verb} {shlex.quote(str(path))}"
            for verb in ("config check", "plan", "train")
        )
    )
    return 0


def _with_folder_model(loaded: Loaded) -> Loaded:
    """Replace the preset's model by the model of a Hugging Face folder.

    This applies if the command line names a folder and no flavor.

    The preset's description and sample prompt become unset, because they refer to the preset's model and
    data.

    Raises:
        ConfigError: the folder does not describe a supported model.
    """
    given = {option for option, origin in loaded.origins.items() if origin == COMMAND_LINE}
    folder = ""
    if "model.hf_assets_path" in given:
        folder = loaded.config.model.hf_assets_path
    elif "checkpoint.initial_load_path" in given and loaded.config.checkpoint.initial_load_in_hf:
        folder = str(loaded.config.checkpoint.initial_load_path)
    if "model.flavor" in given or not (Path(folder) / "config.json").is_file():
        return loaded

    # Read the model only from the folder. Overrides of the preset belong to the preset's model.
    origins = dict.fromkeys(("model.flavor", "model.hf_assets_path"), COMMAND_LINE)
    wanted = Model(flavor=FROM_FOLDER, hf_assets_path=folder)
    if "model.name" in given:
        origins["model.name"] = COMMAND_LINE
        wanted = dataclasses.replace(wanted, name=loaded.config.model.name)
    described = with_folder(Config(model=wanted), origins)
    if isinstance(described, Problem):
        raise ConfigError(described)

    overrides = {}
    for key, value in loaded.config.model.overrides.items():
        if f"model.overrides.{key}" in given:
            overrides[key] = value
    model = dataclasses.replace(
        loaded.config.model,
        name=described.config.model.name,
        flavor=FROM_FOLDER,
        hf_assets_path=folder,
        overrides=overrides,
    )
    # The preset's texts describe the preset's model and data, so replace them by the defaults.
    unset = {"job.description", "metrics.sample_prompt", "metrics.sample_freq"} - given
    sections: dict[str, Any] = {"job": loaded.config.job, "metrics": loaded.config.metrics}
    for option in unset:
        section, key = option.split(".")
        default = value_of(Config(), option)
        sections[section] = dataclasses.replace(sections[section], **{key: default})
    origins = {
        **loaded.origins,
        **dict.fromkeys(unset, DEFAULT),
        "model.name": COMMAND_LINE,
        **origins,
    }
    config = dataclasses.replace(loaded.config, model=model, **sections)
    return dataclasses.replace(loaded, config=config, origins=origins)


def _asked(ask: Callable[[str], str]) -> list[str]:
    arguments: list[str] = []
    for option, question, usual in QUESTIONS:
        text = question.format(presets=", ".join(presets.names()))
        answer = ask(f"{text}{f' [{usual}]' if usual else ''}: ").strip() or usual
        if option == "preset":
            arguments.append(answer)
        elif answer:
            arguments += [option, answer]
        if option == "--training.dataset_path" and answer:
            arguments += ["--training.dataset", dataset_of(answer) or "text"]
    return arguments


def _explained(loaded: Loaded) -> Iterator[str]:
    """Yield the lines of the options as TOML, each option below the first sentence of its help."""
    section = ""
    for line in set_toml(loaded, FIRST).rstrip().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        key = line.removeprefix("# ").partition(" = ")[0].partition(":")[0]
        option = options().get(f"{section}.{key}")
        if option is not None and not line.startswith("["):
            sentence = re.split(
                r"(?<=[.;])\s",
                option.help.replace(" (shardtrain)", ""),
                maxsplit=1,
            )[0].rstrip(".;")
            yield from textwrap.wrap(sentence, _WIDTH, initial_indent="# ", subsequent_indent="# ")
        yield line
