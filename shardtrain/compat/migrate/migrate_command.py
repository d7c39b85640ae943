"""``shardtrain config migrate``: files of other systems, written as one TOML, with an answer to each of their keys."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from shardtrain import config
from shardtrain.compat.migrate.foreign_files import Migration, migrate, unnamed
from shardtrain.config import json_schema
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.arguments import help_if_asked
from shardtrain.utils.errors import ConfigError, Problem

USAGE = """\
usage: shardtrain config migrate FILE... [-o NEW.toml] [--nproc N] [-- FLAG ...]

Files of other systems become one TOML. Known are parameters.yml of pytorch_universal_trainer, DeepSpeed's JSON, shell
scripts that start FMEngine, Hugging Face TrainingArguments (JSON or YAML), `accelerate config`, torchtune and axolotl
YAML, and TOML of torchtitan of any age. Files that configure one run together are given together.

  -o NEW.toml   where to write; without it the TOML goes to standard output, and the report to standard error
  --nproc N     processes of the run, where the files write a batch per process
  -- FLAG ...   flags of FMEngine's command line, beside its DeepSpeed JSON

Each key is honoured, renamed, ignored (it changes no number) or unsupported, with the reason and the nearest way.
"""


def main(words: Sequence[str]) -> int:
    """Read, report and write; raises ConfigError where a file cannot be taken."""
    # what follows "--" are flags of FMEngine's
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
                if not (text.isdecimal() and 0 < int(text) < 10**7):
                    fix = "write it like --nproc 8"
                    raise ConfigError(
                        Problem(name, text, "must be a whole number of processes above 0", fix, "command line")
                    )
                nproc = int(text)
            elif not text:
                raise ConfigError(
                    Problem(name, text, "needs the name of a file", "write it like -o new.toml", "command line")
                )
            else:
                output = Path(text)
        elif word.startswith("-"):
            fix = "`shardtrain config migrate --help` lists them"
            raise ConfigError(Problem(word, None, "is not an option of migrate", fix, "command line"))
        else:
            files.append(Path(word))
    if not files:
        fix = "write it like shardtrain config migrate parameters.yml -o new.toml"
        raise ConfigError(Problem("shardtrain config migrate", None, "needs a file", fix, "command line"))

    # Folders of the machine that trains need not be here, so nothing that the files name is followed.
    found = migrate(files, nproc, flags)
    loaded = config.load_settings(found.settings, path=files[0], follow=False)
    text = f"{json_schema.DIRECTIVE}\n{config.set_toml(loaded)}"
    lines = report(found, loaded)
    if output is None:
        import sys

        print(text, end="")
        print("\n".join(lines), file=sys.stderr)
        return 0
    if any(os.path.realpath(output) == os.path.realpath(file) for file in files):
        raise ConfigError(Problem("-o", str(output), "is the file that is read", "name another one", "command line"))
    with storage_errors.writing(output, "name another file"):
        atomic_io.write(output, text, create_folder=True)
        json_schema.write_schema_next_to(output)
    print("\n".join([*lines, f"written to {output}, with {json_schema.FILE} for editors"]))
    return 0


def report(found: Migration, loaded: config.Loaded) -> list[str]:
    """The lines of the report: how each file was taken, the answer to each key, and what is left to do."""
    lines = [
        f"{file} was taken for a file of {system}" for file, system in zip(found.files, found.systems, strict=False)
    ]
    lines += [f"read beside it: a file of {system}" for system in found.systems[len(found.files) :]]
    order = ("honoured", "renamed", "default", "ignored", "unsupported")
    by_verdict = {verdict: [entry for entry in found.entries if entry.verdict == verdict] for verdict in order}
    lines += [str(entry) for entries in by_verdict.values() for entry in entries]
    done = {entry.where for entry in found.entries}
    lines += [f"note: {notice}" for notice in loaded.notices if notice.partition(": ")[0] not in done]
    lines += [f"note: {line}" for line in unnamed(loaded)]
    # whether a check complains of the flavor that the folder will name: the folder is looked into by `train`
    lines += [
        f"before training: {problem}"
        for problem in config.check(loaded)
        if not (problem.option == "model.flavor" and problem.value == "from_folder")
    ]
    # what a system does by default is the answer to no key of the files
    del by_verdict["default"]
    counts = ", ".join(f"{len(entries)} {verdict}" for verdict, entries in by_verdict.items())
    return [*lines, f"{sum(map(len, by_verdict.values()))} keys: {counts}"]
