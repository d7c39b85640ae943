"""``shardtrain config migrate``: translate files of other systems to one TOML file, with a report on each key."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shardtrain import config
from shardtrain.compat.migrate.foreign_files import Migration, migrate, unnamed
from shardtrain.config import json_schema
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.arguments import help_if_asked, output_path
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


def main(words: Sequence[str]) -> int:
    """Run ``shardtrain config migrate`` and return its exit status.

    Raises:
        ConfigError: a file is invalid or its system is unknown.
    """
    # Arguments after "--" are flags of FMEngine.
    words = list(words)
    flags: list[str] = []
    if "--" in words:
        place = words.index("--")
        flags = words[place + 1 :]
        words = words[:place]
    help_if_asked(words, USAGE)
    files: list[Path] = []
    output: Path | None = None
    nproc: int | None = None
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        if name in ("-o", "--output", "--nproc"):
            text = value if equals else (words.pop(0) if words else "")
            if name == "--nproc":
                if not (is_whole_number(text) and 0 < int(text) < 10**7):
                    raise ConfigError(
                        Problem(
                            name,
                            text,
                            rule="must be a positive integer",
                            fix="write it like --nproc 8",
                            where="command line",
                        )
                    )
                nproc = int(text)
            elif not text:
                raise ConfigError(
                    Problem(
                        name,
                        text,
                        rule="requires the name of a file",
                        fix="write it like -o new.toml",
                        where="command line",
                    )
                )
            else:
                output = output_path(text)
        elif word.startswith("-"):
            raise ConfigError(
                Problem(
                    word,
                    None,
                    rule="does not exist",
                    fix="run `shardtrain config migrate --help` for a list of options",
                    where="command line",
                )
            )
        else:
            files.append(Path(word))
    if not files:
        raise ConfigError(
            Problem(
                "shardtrain config migrate",
                None,
                rule="requires a file",
                fix="write it like shardtrain config migrate parameters.yml -o new.toml",
                where="command line",
            )
        )

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
    if any(os.path.realpath(output) == os.path.realpath(file) for file in files):
        raise ConfigError(
            Problem(
                "-o",
                str(output),
                rule="must not be an input file",
                fix="choose another file",
                where="command line",
            )
        )
    with storage_errors.writing(output, "choose another file"):
        atomic_io.write(output, text, create_folder=True)
        json_schema.write_schema_next_to(output)
    print("\n".join([*lines, f"wrote {output}, and {json_schema.FILE} for editors"]))
    return 0


def report(migration: Migration, loaded: config.Loaded) -> list[str]:
    """Return the lines of the report: the system of each file, the result of each key, and remaining problems."""
    lines = [
        f"{file} was recognized as a file of {system}"
        for file, system in zip(migration.files, migration.systems, strict=False)
    ]
    lines += [
        f"also read: a file of {system}" for system in migration.systems[len(migration.files) :]
    ]
    order = ("honoured", "renamed", "default", "ignored", "unsupported")
    by_verdict = {
        verdict: [entry for entry in migration.entries if entry.verdict == verdict]
        for verdict in order
    }
    lines += [str(entry) for entries in by_verdict.values() for entry in entries]
    # If a key has an older name, the text of its entry reports that. Do not print the same notice again.
    reported = {(entry.where, entry.text) for entry in migration.entries}
    notices = (*migration.notices, *loaded.notices, *config.notes(loaded))
    for notice in dict.fromkeys(notices):
        where, _, text = notice.partition(": ")
        if (where, text) not in reported:
            lines.append(f"note: {notice}")
    lines += [f"note: {line}" for line in unnamed(loaded)]
    # Skip an unknown flavor: `train` determines it from the model's folder.
    lines += [
        f"before training: {problem}"
        for problem in config.check(loaded)
        if not (problem.option == "model.flavor" and problem.value == "from_folder")
    ]
    # Do not count a system's defaults, which belong to no key.
    del by_verdict["default"]
    counts = ", ".join(f"{len(entries)} {verdict}" for verdict, entries in by_verdict.items())
    return [*lines, f"{sum(map(len, by_verdict.values()))} keys: {counts}"]
