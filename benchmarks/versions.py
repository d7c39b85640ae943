"""Run the default tier of the tests with other versions of Python and PyTorch.

    python benchmarks/versions.py --torch 2.11.0 2.14.1 --python python3.11 python3.12

Each pair gets a new environment in a temporary folder: this package with the extra ``dev``, the versions of
``scripts/constraints/tested.txt``, and the given PyTorch. ``--environment`` uses an existing environment
instead. A row per pair is appended to ``results/versions.jsonl``: date, versions, numbers of tests,
and the names of failed tests.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).parent / "results" / "versions.jsonl"
VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"


def create_environment(folder: Path, python: str, torch_version: str) -> Path:
    """Create an environment and return its interpreter."""
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    interpreter = folder / "bin" / "python"
    constraints = ROOT / "scripts" / "constraints" / "tested.txt"
    pip = [str(interpreter), "-m", "pip", "install", "--quiet", "-c", str(constraints)]
    subprocess.run([*pip, f"torch=={torch_version}"], check=True)
    subprocess.run([*pip, f"torch=={torch_version}", "-e", f"{ROOT}[dev]"], check=True)
    return interpreter


def run_tests(interpreter: Path, workers: int, selection: list[str]) -> dict[str, Any]:
    """Run the default tier. Return the row for ``results/versions.jsonl``."""
    shown = subprocess.run(
        [str(interpreter), "-c", VERSIONS], check=True, capture_output=True, text=True, cwd="/"
    )
    python_version, torch_version = shown.stdout.split()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [str(interpreter), "-m", "pytest", "-n", str(workers), "--dist", "worksteal"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        started_at = time.monotonic()
        subprocess.run([*command, f"--junitxml={report}", *selection], cwd=ROOT, env=environment)
        seconds = time.monotonic() - started_at
        failed, counts = read_report(report)
    return {
        "date": datetime.date.today().isoformat(),
        "python": python_version,
        "torch": torch_version,
        **counts,
        "seconds": round(seconds),
        "failed_tests": failed,
    }


def read_report(report: Path) -> tuple[list[str], dict[str, int]]:
    """Return the names of failed tests, and the numbers of tests that passed, failed and were skipped."""
    failed = []
    skipped = 0
    total = 0
    for case in ElementTree.parse(report).iter("testcase"):
        total += 1
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
    counts = {
        "passed": total - len(failed) - skipped,
        "failed": len(failed),
        "skipped": skipped,
    }
    return failed, counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=["2.11.0", "2.13.0"], metavar="VERSION")
    parser.add_argument("--python", nargs="+", default=[sys.executable], metavar="INTERPRETER")
    parser.add_argument("--environment", type=Path, help="existing environment to test")
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("tests", nargs="*", help="arguments of pytest, such as tests/ops")
    options = parser.parse_args()

    def record(interpreter: Path) -> None:
        row = run_tests(interpreter, options.workers, options.tests)
        print(json.dumps(row, indent=2))
        if not options.tests:
            with RESULTS.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    if options.environment:
        record(options.environment.absolute() / "bin" / "python")
        return
    for python in options.python:
        for version in options.torch:
            with tempfile.TemporaryDirectory() as folder:
                record(create_environment(Path(folder), python, version))


if __name__ == "__main__":
    main()
