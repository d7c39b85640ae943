"""CPU seconds that ``shardtrain watch`` needs for an update, for a run of N steps.

python benchmarks/watch.py [--steps 100000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from shardtrain.tools.runs.watch.following import FollowedRun
from shardtrain.tools.runs.watch.screen import Terminal, frame


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100_000)
    steps = parser.parse_args().steps
    fields = ", ".join(
        f'"goodput_{name}_seconds": 12.5' for name in ("productive", "checkpoint", "data", "start")
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "metrics.jsonl")
        line = (
            '{{"step": {}, "loss": 2.3, "grad_norm": 1.1, "tps": 10000.0, "memory_gib": 9.5, '
            + fields
            + "}}\n"
        )
        with path.open("w") as file:
            file.writelines(line.format(step) for step in range(1, steps + 1))
        followed = FollowedRun(Path(folder))
        begun = time.process_time()
        followed.look()
        print(
            f"{steps} steps, {path.stat().st_size >> 20} MiB: first look {time.process_time() - begun:.3f} CPU s"
        )
        begun = time.process_time()
        for step in range(steps + 1, steps + 101):
            with path.open("a") as file:
                file.write(line.format(step))
            followed.look()
            frame([followed], 0, Terminal(120, 40))
        print(f"each later look and frame {10 * (time.process_time() - begun):.2f} CPU ms")


if __name__ == "__main__":
    main()
