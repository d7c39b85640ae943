"""``shardtrain config migrate``: translate files of other systems to one TOML file, with a report on each key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shardtrain import config
from shardtrain.compat.migrate.foreign_files import Migration, migrate, unnamed
from shardtrain.config import json_schema
from shardtrain.utils import atomic_io, output_target, storage_errors
from shardtrain.utils.arguments import print_requested_help
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.variables import is_whole_number

USAGE = """\
usage: shardtrain config migrate FILE... [-o NEW.toml] [--nproc N] [-- FLAG ...]

Translate files of other systems to one TOML file. Supported: parameters.yml of pytorch_universal_trainer, DeepSpeed's
JSON, shell scripts that start FMEngine, Hugging Face TrainingArguments (JSON or YAML), `accelerate config`, torchtune
and axolotl YAML, and TOML of any version of torchtitan. Give all files that configure one run together.

  -o NEW.toml   output file; without it the TOML goes to standard output, and the report to standard error
  --nproc N     number of processes of the run, for files with a batch size per process
  -- FLAG ...   flags of FMEngine's command line, used with its DeepSpeed JSON

Each key is honoured, renamed, ignored (it does not change numbers) or unsupported, with a reason or an alternative.
"""


def main(argv: Sequence[str]) -> int:
    """Run ``shardtrain config migrate`` and return its exit status.

    Raises:
        ConfigError: a file is invalid or its system is unknown.
    """
    # Arguments after "--" are flags of FMEngine.
    argv = list(argv)
    flags: list[str] = []
    if "--" in argv:
        place = argv.index("--")
        flags = argv[place + 1 :]
        argv = argv[:place]
    print_requested_help(argv, USAGE)
    files: list[Path] = []
    output: Path | None = None
    nproc: int | None = None
    while argv:
        argument = argv.pop(0)
        if not argument.startswith("-"):
            files.append(Path(argument))
            continue
        name, equals, text = argument.partition("=")
        if name not in ("-o", "--output", "--nproc"):
            fix = "run `shardtrain config migrate --help` for a list of options"
            raise _refusal(argument, None, "does not exist", fix)
        # The value follows "=" or is the next argument.
        if not equals and argv:
            text = argv.pop(0)
        if name == "--nproc":
            if not (is_whole_number(text) and 0 < int(text) < 10**7):
                raise _refusal(name, text, "must be a positive integer", "write it like --nproc 8")
            nproc = int(text)
        elif not text:
            raise _refusal(name, text, "requires the name of a file", "write it like -o new.toml")
        else:
            output_target.refuse_dash(text)
            output_target.require(name, text, "file")
            output = Path(text)
    if not files:
        fix = "write it like shardtrain config migrate parameters.yml -o new.toml"
        raise _refusal("shardtrain config migrate", None, "requires a file", fix)

    # Do not read the folders that the files name. They may not exist on this machine.
    migration = migrate(files, nproc, flags)
    loaded = config.load_settings(migration.settings, path=files[0], follow=False)
    text = f"{json_schema.DIRECTIVE}\n{config.set_toml(loaded)}"
    lines = report(migration, loaded)
    if output is None:
        import sys

        print(text, end="")
        print("\n".join(lines), file=sys.stderr)
        return 0
    if os.path.realpath(output) in map(os.path.realpath, files):
        raise _refusal("-o", str(output), "must not be an input file", "choose another file")
    with storage_errors.writing(output, "choose another file"):
        atomic_io.write(output, text, create_folder=True)
        json_schema.write_schema_next_to(output)
    print("\n".join([*lines, f"wrote {output}, and {json_schema.FILE} for editors"]))
    return 0


def _refusal(option: str, value: str | None, rule: str, fix: str) -> ConfigError:
    return ConfigError(Problem(option, value, rule, fix, where="command line"))


def report(migration: Migration, loaded: config.Loaded) -> list[str]:
    """Return the lines of the report: the system of each file, the result of each key, and remaining problems."""
    lines = []
    for file, system in zip(migration.files, migration.systems, strict=False):
        lines.append(f"{file} was recognized as a file of {system}")
    # An FMEngine command line names further files.
    for system in migration.systems[len(migration.files) :]:
        lines.append(f"also read: a file of {system}")
    verdicts = ("honoured", "renamed", "default", "ignored", "unsupported")
    num_keys = 0
    counts = []
    for verdict in verdicts:
        entries = [entry for entry in migration.entries if entry.verdict == verdict]
        lines += map(str, entries)
        # Do not count a system's defaults, which belong to no key.
        if verdict != "default":
            num_keys += len(entries)
            counts.append(f"{len(entries)} {verdict}")
    # If a key has an older name, the text of its entry reports that. Do not print the same notice again.
    reported = {(entry.where, entry.text) for entry in migration.entries}
    notices = (*migration.notices, *loaded.notices, *config.notes(loaded))
    for notice in dict.fromkeys(notices):
        where, _, text = notice.partition(": ")
        if (where, text) not in reported:
            lines.append(f"note: {notice}")
    lines += [f"note: {line}" for line in unnamed(loaded)]
    for problem in config.check(loaded):
        # Skip an unknown flavor: `train` determines it from the model's folder.
        if problem.option == "model.flavor" and problem.value == "from_folder":
            continue
        lines.append(f"before training: {problem}")
    lines.append(f"{num_keys} keys: {', '.join(counts)}")
    return lines
