"""How much one must read to follow a step is measured on a real run and printed; nothing limits it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import forked
import pytest

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "reading_path.py"


@pytest.mark.nightly("it reports what a run executes, and holds nobody to it")
def test_the_files_that_a_step_executes_are_traced_and_printed() -> None:
    done = forked.run([sys.executable, str(PROGRAM), "--files"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {
        title: int(files) for title, files in re.findall(r"^(\S.*?)\s{2,}(\d+)(?:\s+[\d,]+){3}$", done.stdout, re.M)
    }
    print(done.stdout[done.stdout.index("files  functions") - 34 :].partition("\n\n")[0])
    step = re.search(r"\nstep \([^\n]*\n(.*?)(?:\n\n|\Z)", done.stdout, re.S)
    assert step and {"train/trainer.py", "distributed/grad_clip.py", "models/llama.py"} <= set(step[1].split())
    # all of a step but the watchdog and the log happens in the first step too
    assert 20 <= found["a steady step"] < found["from the command to the first update"]
