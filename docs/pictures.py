"""Draw the report of a run for these pages: screenshots at the width of a desktop and of a phone, and a print.

    python docs/pictures.py outputs docs

Arguments are the run's folder and the output folder, for report.png, report_phone.png and report_print.pdf. It requires
Chromium, which opens only a local file.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_SECONDS = 120
SIZES = {"report.png": (1200, 1100), "report_phone.png": (412, 900)}


def browser() -> str | None:
    """Return the path of Chromium, or None."""
    return shutil.which("chromium") or shutil.which("google-chrome")


def take(page: Path, folder: Path) -> list[Path]:
    """Write the pictures of a page and return their paths. Raises CalledProcessError if the browser fails."""
    program = browser()
    if program is None:
        raise SystemExit("no Chromium is here: install chromium")
    written = []
    with tempfile.TemporaryDirectory() as profile:
        common = [program, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
                  "--hide-scrollbars", "--virtual-time-budget=2000"]  # fmt: skip
        asked = [
            *(
                (name, [f"--window-size={width},{height}"])
                for name, (width, height) in SIZES.items()
            ),
            ("report_print.pdf", ["--no-pdf-header-footer"]),
        ]
        for name, options in asked:
            path = folder.absolute() / name
            kind = "--print-to-pdf" if name.endswith(".pdf") else "--screenshot"
            subprocess.run(
                [*common, *options, f"{kind}={path}", page.absolute().as_uri()],
                check=True, capture_output=True, timeout=LIMIT_SECONDS,
            )  # fmt: skip
            written.append(path)
    return written


def main() -> None:
    """Report the run of the first argument, and take pictures into the second."""
    from shardtrain import report

    run, folder = Path(sys.argv[1]), Path(sys.argv[2])
    with tempfile.TemporaryDirectory() as scratch:
        for path in take(Path(report(run, Path(scratch) / "report.html")), folder):
            print(path)


if __name__ == "__main__":
    main()
