"""CPU seconds of the first commands of a new user: help, config check, report of a long run, watch.

``first_commands.py [--steps 100000] [--rounds 3] [--output FILE.json]``. CPU seconds are the user and
system time of the command and its children; the minimum and maximum of all rounds are reported. The long
run is a run of a few steps whose lines of metrics.jsonl are repeated with increasing steps.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from processor import processor_facts

from shardtrain.cli import VERBS

ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
WATCHED_SECONDS = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    results: dict[str, object] = {"processor": processor_facts(), "rounds": options.rounds}
    for verb in ("", *(verb for verb in VERBS if not verb.startswith("-") and verb != "help")):
        results[f"{verb} --help".strip()] = measured(
            [*([verb] if verb else []), "--help"], options.rounds
        )
    results["config check llama3_8b --for-machine none"] = measured(
        ["config", "check", "llama3_8b", "--for-machine", "none"], options.rounds
    )
    results["config check debug"] = measured(["config", "check", "debug"], options.rounds)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name, "run")
        page = Path(name, "report.html")
        lengthen(run, options.steps)
        results["steps"], results["metrics_mb"] = (
            options.steps,
            round((run / "metrics.jsonl").stat().st_size / 1e6, 1),
        )
        results["report"] = measured(["report", str(run), "-o", str(page)], options.rounds)
        results["report_mb"] = round(page.stat().st_size / 1e6, 2)
        results["watch_share_of_a_core"] = watched(run)
    text = json.dumps(results, indent=1)
    print(text)
    if options.output:
        options.output.write_text(text + "\n", encoding="utf-8")


def measured(arguments: list[str], rounds: int) -> list[float]:
    """Return the minimum and maximum CPU seconds of a command over the rounds."""
    seconds = []
    for _ in range(rounds):
        before = spent()
        subprocess.run(
            [sys.executable, "-m", "shardtrain", *arguments],
            env=ENVIRONMENT,
            check=True,
            capture_output=True,
        )
        seconds.append(spent() - before)
    return [round(min(seconds), 2), round(max(seconds), 2)]


def spent() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lengthen(run: Path, steps: int) -> None:
    """Train two steps, and repeat the last line of the metrics up to ``steps``."""
    small = "--training.steps=2 --training.seq_len=32 --training.local_batch_size=1 --model.overrides.num_layers=1"
    arguments = [
        "train",
        "debug",
        "--nproc=1",
        f"--job.dump_folder={run}",
        *small.split(),
        "--metrics.sample_freq=0",
    ]
    subprocess.run(
        [sys.executable, "-m", "shardtrain", *arguments],
        env=ENVIRONMENT,
        check=True,
        capture_output=True,
    )
    metrics = run / "metrics.jsonl"
    record = json.loads(metrics.read_text().splitlines()[-1])
    with metrics.open("w") as file:
        for step in range(1, steps + 1):
            loss = 8.0 / step**0.1 + 0.05 * ((step * 7919) % 101 / 101 - 0.5)
            file.write(
                json.dumps({**record, "step": step, "loss": loss, "tokens_seen": 1024 * step})
                + "\n"
            )


def watched(run: Path) -> float:
    """Return the fraction of a core that ``watch`` uses, for a run that logs once per second."""
    command = ["script", "-qfec", f"{sys.executable} -m shardtrain watch {run}", "/dev/null"]
    watch = subprocess.Popen(
        command,
        env={**ENVIRONMENT, "TERM": "xterm"},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        time.sleep(5)  # let ``watch`` start and read the existing metrics
        begun = time.monotonic()
        before = of_tree(watch.pid)
        record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
        for _ in range(WATCHED_SECONDS):
            record["step"] += 1
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            time.sleep(1)
        assert watch.poll() is None, "watch ended by itself"
        return round((of_tree(watch.pid) - before) / (time.monotonic() - begun), 4)
    finally:
        watch.terminate()
        watch.wait()


def of_tree(pid: int) -> float:
    """Return CPU seconds of a process and all its live descendants."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    seconds = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return seconds + sum(of_tree(int(child)) for child in children)


if __name__ == "__main__":
    main()
