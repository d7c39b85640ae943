"""Before a model file of a user's is trained in parts, a small copy of it is compared with one process.

The words of a layout are its author's promise, and a wrong one trains without an error: a matrix that is cut across
heads, dropout of what every rank holds. The first rank has ``shardtrain.tools.verify.before_training`` look, in a
process of its own, on this machine's CPU; all ranks get what it found.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any

import torch.distributed as dist

from shardtrain import config as configs
from shardtrain.config.schema import Config
from shardtrain.utils import python_child
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.temporary import temporary_folder

LIMIT_SECONDS = 240
"""Of the comparison, which takes some ten; less where the ranks would not wait for each other so long."""
_OF_A_RANK = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SHARDTRAIN_STORE",
    "SHARDTRAIN_NETWORK",
)


def is_about(config: Config) -> bool:
    """Whether the model is a user's file and is cut: its layers, their tensors, its sequences or its experts."""
    p = config.parallelism
    degrees = (p.tensor_parallel_degree, p.context_parallel_degree, p.pipeline_parallel_degree)
    return config.model.name.endswith(".py") and max(*degrees, p.expert_parallel_degree) > 1


def check(config: Config, store: Any, rank: int, world_size: int) -> list[str]:
    """Stop where a small copy of the model gives other numbers on a mesh; each rank calls it with the store of all.

    Gives lines for the log: what was compared and how far off it is, and what was not compared and why.

    Raises:
        ConfigError: on all ranks the same: what differs, and the fix.
    """
    if world_size == 1 or not is_about(config):
        return []
    fix = f"shardtrain verify {config.job.config_file or config.model.name}"
    if not config.model.check:
        return [f"model.check=false: {config.model.name} is NOT compared with one process; {fix} does so"]
    # over the store, since no process group is there yet; waiting for the key is the barrier
    store = dist.PrefixStore("model check", store)
    if rank == 0:
        store.set("found", json.dumps(_compare(config)))
    found = json.loads(store.get("found"))
    name = config.model.name
    if found["refused"]:
        # lines about an option begin with it; all others are about the file
        raise ConfigError(
            [
                line if line.startswith(("model.", "parallelism.", "LAYOUT")) else f"model.name={name} {line}"
                for line in found["refused"]
            ]
        )
    lines = [f"model.check: {line}" for line in found["compared"] + found["noticed"]]
    return lines + [f"model.check: NOT compared with one process: {line}; try {fix}" for line in found["left_out"]]


def _compare(config: Config) -> dict[str, list[str]]:
    """What the other process found; a process that fails has compared nothing, and says so."""

    def unknown(why: str) -> dict[str, list[str]]:
        return {"refused": [], "compared": [], "noticed": [], "left_out": [why]}

    limit = min(LIMIT_SECONDS, 0.8 * config.comm.init_timeout_seconds)
    # the child is not one of the ranks: it takes neither their devices nor their cores
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_A_RANK and not name.startswith(("TORCHELASTIC_", "SLURM_", "PMI", "OMPI_"))
    } | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "SHARDTRAIN_HEARTBEAT_SECONDS": "0"}
    with temporary_folder("model-check") as folder:
        path = folder / "config.toml"
        path.write_text(configs.resolved_toml(config), encoding="utf-8")
        command = python_child.command("shardtrain.tools.verify.before_training", str(path))
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            # its own session, so that the ranks that it has forked end with it
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return unknown(f"the comparison took more than {limit:.0f} s")
    try:
        # the last line is the answer; a model file may print lines of its own before it
        found: dict[str, list[str]] = json.loads(out.splitlines()[-1])
    except (ValueError, IndexError):
        last = (errors.strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return unknown(f"the comparison failed: {last}")
    return found
