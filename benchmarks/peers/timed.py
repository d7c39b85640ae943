"""Run a program and write down the time after each step of its optimizer.

    python timed.py FOLDER (SCRIPT | -m MODULE) [ARGUMENT ...]

PyTorch calls a hook after each optimizer's step, so no program needs to be changed. Each process writes a
file of lines: optimizer, wall seconds since the epoch, CPU seconds of the process, peak memory in MiB.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


def main() -> None:
    folder, program, *arguments = sys.argv[1:]
    path = Path(folder) / f"{os.environ.get('RANK', '0')}-{os.getpid()}.jsonl"
    file = open(path, "w", buffering=1)  # noqa: SIM115

    def note(optimizer: Optimizer, *_: Any) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        file.write(
            json.dumps([type(optimizer).__name__, time.time(), time.process_time(), round(peak)])
            + "\n"
        )

    register_optimizer_step_post_hook(note)
    if program == "-m":
        program, *arguments = arguments
        sys.argv = [program, *arguments]
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        sys.argv = [program, *arguments]
        sys.path[0] = str(Path(program).parent)
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
