"""Check a user's model file before parallel training.

Run a small copy of the model on a mesh and in one process, and compare the results. If the layout in a model
file is wrong, training computes wrong results without an error. For example, the layout may split a matrix
through the middle of a head, or apply different dropout to replicated activations. Rank 0 runs
``shardtrain.tools.verify.before_training`` in a child process on its CPU, and all ranks receive the result.
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
from shardtrain.utils import python_child, stop_signals
from shardtrain.utils.errors import ConfigError
from shardtrain.utils.temporary import temporary_folder

LIMIT_SECONDS = 240
"""Timeout of the comparison, which usually takes 10 seconds. ``comm.init_timeout_seconds`` may shorten it."""
_RANK_VARIABLES = (
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
_RANK_VARIABLE_PREFIXES = ("TORCHELASTIC_", "SLURM_", "PMI", "OMPI_")


def applies_to(config: Config) -> bool:
    """True if the model is a user's file and uses tensor, context, pipeline or expert parallelism."""
    p = config.parallelism
    degrees = (p.tensor_parallel_degree, p.context_parallel_degree, p.pipeline_parallel_degree)
    return config.model.name.endswith(".py") and max(*degrees, p.expert_parallel_degree) > 1


def check(config: Config, store: Any, rank: int, world_size: int) -> list[str]:
    """Check that a small copy of the model computes the same results on a mesh as in one process.

    Every rank calls this with the store of the job, before the process group exists.

    Returns:
        Lines for the log: the largest difference of each comparison, and why comparisons were skipped.

    Raises:
        ConfigError: the results differ. All ranks raise the same error.
    """
    if world_size == 1 or not applies_to(config):
        return []
    command = f"shardtrain verify {config.job.config_file or config.model.name}"
    if not config.model.check:
        return [
            f"model.check=false: {config.model.name} is NOT compared with one process; run `{command}` to do so"
        ]
    # There is no process group yet, so rank 0 sends the result through the store.
    # The others wait for the key.
    store = dist.PrefixStore("model check", store)
    if rank == 0:
        store.set("found", json.dumps(_compare(config)))
    result = json.loads(store.get("found"))
    if result["refused"]:
        raise ConfigError([_with_option(line, config.model.name) for line in result["refused"]])
    lines = [f"model.check: {line}" for line in result["compared"] + result["noticed"]]
    for reason in result["left_out"]:
        lines.append(f"model.check: NOT compared with one process: {reason}; try `{command}`")
    return lines


def _with_option(line: str, model_name: str) -> str:
    """Prefix a line with ``model.name=...``, unless the line already starts with an option or the layout."""
    if line.startswith(("model.", "parallelism.", "LAYOUT")):
        return line
    return f"model.name={model_name} {line}"


def _compare(config: Config) -> dict[str, list[str]]:
    """Run the comparison in a child process and return its result.

    If the child fails, the comparison counts as skipped.
    """

    def skipped(reason: str) -> dict[str, list[str]]:
        return {"refused": [], "compared": [], "noticed": [], "left_out": [reason]}

    limit_seconds = min(LIMIT_SECONDS, 0.8 * config.comm.init_timeout_seconds)
    with temporary_folder("model-check") as folder:
        path = folder / "config.toml"
        path.write_text(configs.resolved_toml(config), encoding="utf-8")
        # A request to stop is sent to all processes of a job. The child must ignore it. If it ended, the
        # comparison would be reported as skipped.
        with stop_signals.children_ignore_requests():
            process = subprocess.Popen(
                python_child.command("shardtrain.tools.verify.before_training", str(path)),
                env=_child_environment(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        try:
            output, errors = process.communicate(timeout=limit_seconds)
        except subprocess.TimeoutExpired:
            # Kill the child's entire session, because the child has forked ranks.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return skipped(f"the comparison took more than {limit_seconds:.0f} s")
    try:
        # The result is the last line. The model file may have printed lines before it.
        result: dict[str, list[str]] = json.loads(output.splitlines()[-1])
    except (ValueError, IndexError):
        error_lines = errors.strip().splitlines() or [f"exit status {process.returncode}"]
        return skipped(f"the comparison failed: {error_lines[-1]}")
    return result


def _child_environment() -> dict[str, str]:
    """Return this rank's environment without the job's variables and devices, and with one thread."""
    environment = {}
    for name, value in os.environ.items():
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_VARIABLE_PREFIXES):
            environment[name] = value
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["OMP_NUM_THREADS"] = "1"
    environment["SHARDTRAIN_HEARTBEAT_SECONDS"] = "0"
    return environment
