"""Files and lines on the path of a real run: the functions of this package that it executes, by file.

    python benchmarks/reading_path.py [--nproc 2] [--files] [--functions]
    python benchmarks/reading_path.py --compare
    python benchmarks/reading_path.py --update "REASON"

Records two traces of rank 0 of ``shardtrain train debug`` with FSDP: from the command line to the first
update, and one steady step (the fifth). Every thread is traced. Lines are counted for entire files,
including docstrings and blank lines, because a reader opens files. ``entered`` counts the lines of executed
functions. ``compute`` excludes monitoring, checkpoints, logging and configuration; ``main thread`` excludes
threads next to the training, such as the watchdog.

``--compare`` traces a plain step (text in one file, a token per byte, PyTorch's kernels) and compares the
main thread with ``reading_path.json``. A new file or more than 100 new lines are an error. ``--update``
writes that file, with the reason why the step has grown.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
import shutil
import sys
import tempfile
import textwrap
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import shardtrain

PACKAGE = Path(shardtrain.__file__).parent
KEPT = Path(__file__).with_suffix(".json")
"""The files of a plain step, and the reasons of each update."""
MAX_NEW_LINES = 100
STEADY_STEP = 5
CHECKS = ("config/", "train/preflight/")
COMPUTE = ("train/", "models/", "distributed/", "ops/", "data/", "optim/", "tasks/", "layout.py")


Found = dict[str, list[tuple[str, int, int]]]
"""Executed functions by file of the package: name, first and last line."""


class Trace:
    """Record the code objects that all threads of this process execute between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._codes: set[CodeType] = set()
        self._main: set[CodeType] = set()

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self._codes.add(frame.f_code)
            if threading.get_ident() == threading.main_thread().ident:
                self._main.add(frame.f_code)

    def start(self) -> None:
        """Discard earlier records and start tracing."""
        self._codes = set()
        self._main = set()
        # setprofile_all_threads is new in Python 3.12. getattr satisfies the type checker, which assumes 3.11.
        start = getattr(threading, "setprofile_all_threads", threading.setprofile)
        start(self._note)
        sys.setprofile(self._note)

    def stop(self) -> dict[str, Found]:
        """Stop tracing. Return the executed functions by file, for all threads and for the main thread."""
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        # Copy: before Python 3.12, running threads keep their profile function and continue to add codes.
        return {"all": _by_file(self._codes.copy()), "main": _by_file(self._main.copy())}


def _by_file(codes: set[CodeType]) -> Found:
    found: Found = {}
    for code in sorted(codes, key=lambda code: code.co_firstlineno):
        path = Path(code.co_filename)
        # CO_OPTIMIZED is set for functions, but not for bodies of modules and classes.
        if path.is_relative_to(PACKAGE) and code.co_flags & inspect.CO_OPTIMIZED:
            last = max(line or 0 for _, _, line in code.co_lines())
            function = (code.co_name, code.co_firstlineno, last)
            found.setdefault(path.relative_to(PACKAGE).as_posix(), []).append(function)
    return found


def trace(nproc: int, folder: Path, options: Sequence[str] = ()) -> dict[str, dict[str, Found]]:
    """Train a few steps in a separate process. Return both traces of rank 0: first update and steady step."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = _train(nproc, folder, options)
        finally:
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status:
        raise SystemExit(f"the run that was traced ended with {status}")
    return {
        name: json.loads((folder / f"{name}.json").read_text()) for name in ("first_update", "step")
    }


def _train(nproc: int, folder: Path, options: Sequence[str]) -> int:
    from shardtrain import cli
    from shardtrain.train import trainer

    tracer = Trace()
    original = trainer.step
    steps = 0

    def write(name: str, found: dict[str, Found]) -> None:
        (folder / f"{name}.json").write_text(json.dumps(found))

    def step(run: Any) -> Any:
        nonlocal steps
        steps += 1
        outcome = original(run)
        if os.environ.get("RANK", "0") == "0":
            if steps == 1:
                write("first_update", tracer.stop())
            elif steps == STEADY_STEP - 1:
                tracer.start()  # from the end of one step to the end of the next, including logging
            elif steps == STEADY_STEP:
                write("step", tracer.stop())
        return outcome

    trainer.step = step
    tracer.start()
    arguments = [
        "--training.steps",
        "6",
        "--training.seq_len",
        "64",
        "--job.dump_folder",
        str(folder / "run"),
        *options,
    ]
    return cli.main(["train", "debug", "--nproc", str(nproc), *arguments])


def table(traces: dict[str, dict[str, Found]], size_of: Callable[[str], int]) -> list[str]:
    """Return table lines with the numbers of files, functions, lines of files and lines of functions per trace."""
    lines = [f"{'':34}{'files':>7}{'functions':>11}{'lines':>8}{'entered':>9}"]
    for name, title in (
        ("step", "a steady step"),
        ("first_update", "from the command to the first update"),
    ):
        all_threads = traces[name]["all"]
        main = traces[name]["main"]
        compute = {file: names for file, names in all_threads.items() if file.startswith(COMPUTE)}
        checks = {file: names for file, names in all_threads.items() if file.startswith(CHECKS)}
        parts = (
            (title, all_threads),
            ("  of which in the main thread", main),
            ("  of which compute", compute),
        )
        if checks:
            parts = (*parts, ("  of which reads and checks options", checks))
        for label, files in parts:
            total = sum(size_of(file) for file in files)
            functions = sum(map(len, files.values()))
            entered = 0
            for functions_of_file in files.values():
                # Count each line once, because nested functions share lines with the outer function.
                entered_lines: set[int] = set()
                for _, first, last in functions_of_file:
                    entered_lines |= set(range(first, last + 1))
                entered += len(entered_lines)
            lines.append(f"{label:38}{len(files):>3}{functions:>11,}{total:>8,}{entered:>9,}")
    return lines


def plain_step(folder: Path) -> dict[str, int]:
    """Trace a plain step; return the number of lines of each file that its main thread executes."""
    text = folder / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    options = {
        "training.dataset": "text",
        "training.dataset_path": str(text),
        "training.cpu_kernels": "pytorch",
        "model.tokenizer_path": "bytes",
        "metrics.sample_prompt": "",
        "metrics.enable_tensorboard": "false",
    }
    arguments = []
    for name, value in options.items():
        arguments += [f"--{name}", value]
    return {file: size_of(file) for file in sorted(trace(2, folder, arguments)["step"]["main"])}


def growth(kept: Mapping[str, int], found: Mapping[str, int]) -> str:
    """Return an error text if a step executes new files or too many new lines, otherwise an empty string."""
    new_files = sorted(found.keys() - kept.keys())
    new_lines = sum(found.values()) - sum(kept.values())
    problems = []
    if new_files:
        problems.append(f"a training step executes new files: {', '.join(new_files)}")
    if new_lines > MAX_NEW_LINES:
        grown = {
            name: lines - kept.get(name, 0)
            for name, lines in found.items()
            if lines > kept.get(name, 0)
        }
        largest = sorted(grown.items(), key=lambda item: -item[1])[:5]
        places = ", ".join(f"{name} +{lines}" for name, lines in largest)
        problems.append(f"the files of a training step have {new_lines} more lines ({places})")
    if not problems:
        return ""
    fix = 'keep rare paths out of the step, or run: python benchmarks/reading_path.py --update "REASON"'
    return f"{'; '.join(problems)}; {fix}"


def compare(reason: str | None) -> int:
    """Compare a new trace with the stored one. If ``reason`` is set, store the new trace instead."""
    # No TemporaryDirectory: forked ranks inherit its finalizer, and the first one to exit would delete it.
    folder = Path(tempfile.mkdtemp())
    try:
        found = plain_step(folder)
    finally:
        shutil.rmtree(folder)
    kept = (
        json.loads(KEPT.read_text(encoding="utf-8"))
        if KEPT.exists()
        else {"updates": [], "files": {}}
    )
    print(f"a plain step: {len(found)} files, {sum(found.values()):,} lines")
    if reason is None:
        problem = growth(kept["files"], found)
        if problem:
            print(problem, file=sys.stderr)
        return int(bool(problem))
    update = {"reason": reason, "files": len(found), "lines": sum(found.values())}
    document = {"updates": [*kept["updates"], update], "files": found}
    KEPT.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return 0


def size_of(name: str) -> int:
    """Return the number of lines of a file of the package."""
    return len((PACKAGE / name).read_text(encoding="utf-8").splitlines())


def main() -> int:
    """Print the table, and its files or functions with ``--files`` or ``--functions``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument(
        "--files", action="store_true", help="print every file with its functions and lines"
    )
    parser.add_argument(
        "--functions", action="store_true", help="the same, and the names of the functions"
    )
    parser.add_argument(
        "--compare", action="store_true", help="compare a plain step with reading_path.json"
    )
    parser.add_argument("--update", metavar="REASON", help="write reading_path.json")
    options = parser.parse_args()
    if options.compare or options.update:
        return compare(options.update)

    # No TemporaryDirectory: forked ranks inherit its finalizer, and the first one to exit would delete it.
    folder = Path(tempfile.mkdtemp())
    try:
        traces = trace(options.nproc, folder)
    finally:
        shutil.rmtree(folder)
    print("\n".join(table(traces, size_of)))
    if options.files or options.functions:
        for name, found in traces.items():
            print(f"\n{name} (* is entered only by threads next to the training)")
            for file, functions in sorted(found["all"].items()):
                beside = "" if file in found["main"] else " *"
                print(f"  {file:52}{len(functions):>4}{size_of(file):>6}{beside}")
                if options.functions:
                    names = " ".join(name for name, _, _ in functions)
                    print(
                        textwrap.fill(names, 110, initial_indent=" " * 6, subsequent_indent=" " * 6)
                    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
