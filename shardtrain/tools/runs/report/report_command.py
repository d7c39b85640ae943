"""Verb ``report``: read run folders and write the page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.report import page
from shardtrain.utils import atomic_io, storage_errors
from shardtrain.utils.arguments import StrictArgumentParser, output_name
from shardtrain.utils.errors import ConfigError, Problem

_MOST_RUNS = 50


def main(words: Sequence[str]) -> int:
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
        type=output_name,
        default="report.html",
        metavar="FILE",
        help="default: report.html",
    )
    asked = parser.read(words)
    if not 1 <= len(asked.runs) <= _MOST_RUNS:
        given = len(asked.runs) or None
        raise ConfigError(
            Problem(
                "shardtrain report",
                given,
                rule=f"requires 1 to {_MOST_RUNS} folders",
                fix="write it like shardtrain report outputs -o report.html",
                where="command line",
            )
        )
    if Path(asked.output).suffix.lower() in (
        ".pdf",
        ".png",
        ".svg",
        ".md",
        ".json",
        ".csv",
        ".txt",
    ):
        raise ConfigError(
            Problem(
                "-o",
                asked.output,
                rule="is not the name of an HTML file",
                fix=f"write -o {Path(asked.output).with_suffix('.html').name}, and print it from a browser",
                where="command line",
            )
        )
    problems: list[Problem | str] = []
    records = []
    for folder in asked.runs:
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
    path = Path(asked.output)
    with storage_errors.writing(path, "name another file with -o"):
        atomic_io.write(path, text)
    of = "1 run" if len(records) == 1 else f"{len(records)} runs"
    print(f"{path}: {of}, {len(text.encode()) / 1e6:.2f} MB; open it in a browser")
    return 0
