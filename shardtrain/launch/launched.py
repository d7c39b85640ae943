"""List of the launches of this user from this machine, which ``launch status`` prints without an ID."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from pathlib import Path

from shardtrain.utils import atomic_io, bounded_reads
from shardtrain.utils.redact import redact, visible
from shardtrain.utils.units import format_seconds

MOST_LISTED = 20
_MOST_BYTES = 2**20


def _file() -> Path:
    root = os.environ.get("XDG_STATE_HOME") or os.path.join(
        os.path.expanduser("~"), ".local", "state"
    )
    return Path(root) / "shardtrain" / "launched.jsonl"


def note(job_id: str, run_folder: str) -> None:
    """Add a launch to the list. Ignore write errors."""
    line = json.dumps({"id": job_id, "run": run_folder, "time": round(time.time(), 3)}) + "\n"
    path = _file()
    with suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size > _MOST_BYTES:
            path.replace(path.with_suffix(".old.jsonl"))
        descriptor = atomic_io.open_file(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(line)


def table() -> list[str]:
    """Return lines for the launches, newest first, and a hint about the next command."""
    launches = []
    with suppress(OSError):
        for line in bounded_reads.end(_file(), 2 * _MOST_BYTES).splitlines():
            with suppress(ValueError, KeyError, TypeError, RecursionError):
                entry = json.loads(line)
                launches.append((float(entry["time"]), str(entry["id"]), str(entry["run"])))
    if not launches:
        return [
            f"nothing has been launched from this machine ({_file()}); launch a run with: "
            "shardtrain launch slurm my_run.toml"
        ]
    # The newest launch comes first.
    rows = [("LAUNCHED", "ID", "RUN")]
    for began, job_id, run in launches[::-1][:MOST_LISTED]:
        age_seconds = max(0, round(time.time() - began))
        rows.append(
            (f"{format_seconds(age_seconds)} ago", redact(visible(job_id)), redact(visible(run)))
        )
    age_width = max(len(age) for age, _, _ in rows)
    id_width = max(len(job_id) for _, job_id, _ in rows)
    lines = [
        f"{age.ljust(age_width)}  {job_id.ljust(id_width)}  {run}" for age, job_id, run in rows
    ]
    newest_id = rows[1][1]
    return [
        *lines,
        "",
        f"shardtrain launch status {newest_id} prints its state; launch logs and launch stop accept the ID, too",
    ]
