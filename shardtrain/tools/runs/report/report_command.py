"""Verb ``report``: read run folders and write the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.report import page
from shardtrain.utils import atomic_io, output_target, storage_errors
from shardtrain.utils.arguments import StrictArgumentParser
from shardtrain.utils.errors import ConfigError, Problem

_MOST_RUNS = 50
_OTHER_SUFFIXES = (".pdf", ".png", ".svg", ".md", ".json", ".csv", ".txt")
"""Suffixes of formats that users may expect, but that the report does not write."""


def main(arguments: Sequence[str]) -> int:
    """Write the page of the given runs and return the exit status. Raises ConfigError and StorageError."""
    parser = StrictArgumentParser(
        "shardtrain report",
        "Write an HTML page about one or several runs: curves, validation, time, alerts and options. "
        "The page is one file and needs no network.",
        example="shardtrain report outputs outputs-2 -o report.html",
    )
    parser.add_argument("runs", nargs="*", metavar="RUN_FOLDER", help="job.dump_folder of a run")
    parser.add_argument(
        "-o",
        "--output",
        type=output_target.file_argument,
        default="report.html",
        metavar="FILE",
        help="default: report.html",
    )
    options = parser.read(arguments)
    if not 1 <= len(options.runs) <= _MOST_RUNS:
        given = len(options.runs) or None
        raise ConfigError(
            Problem(
                "shardtrain report",
                given,
                rule=f"requires 1 to {_MOST_RUNS} folders",
                fix="write it like shardtrain report outputs -o report.html",
                where="command line",
            )
        )
    path = Path(options.output)
    # A browser would not open the page under such a name. Names without a suffix are allowed.
    if path.suffix.lower() in _OTHER_SUFFIXES:
        raise ConfigError(
            Problem(
                "-o",
                options.output,
                rule="is not the name of an HTML file",
                fix=f"write -o {path.with_suffix('.html').name}, and print it from a browser",
                where="command line",
            )
        )

    # Read all runs before failing, so the error lists every unreadable folder.
    problems: list[Problem | str] = []
    records = []
    for folder in options.runs:
        try:
            records.append(run_files.read(Path(folder)))
        except ConfigError as error:
            problems += error.problems
        except OSError as error:
            problems.append(
                Problem(
                    "RUN_FOLDER",
                    folder,
                    rule=f"cannot be read: {error.strerror}",
                    fix="check its permissions",
                    where="command line",
                )
            )
    if problems:
        raise ConfigError(problems)

    text = page.build(records)
    with storage_errors.writing(path, "name another file with -o"):
        atomic_io.write(path, text)
    count = "1 run" if len(records) == 1 else f"{len(records)} runs"
    megabytes = len(text.encode()) / 1e6
    print(f"{path}: {count}, {megabytes:.2f} MB; open it in a browser")
    return 0
