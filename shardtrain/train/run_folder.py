"""What a run says of itself at start: the resolved configuration on disk, and the header of the log."""

from __future__ import annotations

import contextlib
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardtrain import __version__
from shardtrain import config as configs
from shardtrain.config import Loaded, derived, json_schema
from shardtrain.config.schema import Config
from shardtrain.config.schema.task import OF_NEXT_TOKENS
from shardtrain.config.show import RESOLVED_CONFIG
from shardtrain.utils import atomic_io, log, storage_errors
from shardtrain.utils.log import logger
from shardtrain.utils.redact import redact
from shardtrain.utils.units import format_count

if TYPE_CHECKING:
    from shardtrain.distributed.mesh import Mesh
    from shardtrain.distributed.process_group import World


def open_log(loaded: Loaded, world: World, notices: Iterable[str], compared: Iterable[str]) -> None:
    """Open this rank's log, and say what was found before it: ``notices`` on options, and on models."""
    config = loaded.config
    # LOG_RANK names the ranks whose lines are shown; more than one need their numbers in front
    ranks = log.console_ranks()
    folder = Path(config.job.dump_folder)
    atomic_io.guard(folder, folder / config.checkpoint.folder)
    color = not config.metrics.disable_color_printing
    file_pattern = config.metrics.save_log_file
    prefix = len(ranks) > 1
    log.setup(world.rank, world.size, folder, file_pattern, world.rank in ranks, color, prefix)
    for notice in notices:
        (logger.info if notice in loaded.renames else logger.warning)(notice)
    for line in compared:
        (logger.warning if " NOT " in line else logger.info)(line)


def write_resolved_config(loaded: Loaded, folder: Path, world_size: int) -> None:
    """Write every option with its value in effect, versions as comments; loading the file gives the same config.

    Editors complete and check the file with the schema beside it, which its first line names.
    """
    header = (
        f"{json_schema.DIRECTIVE}\n# {versions()}, {world_size} ranks, started from {loaded.path or 'the defaults'}\n"
    )
    text = redact(header + configs.resolved_toml(loaded.config))
    paths = [folder / RESOLVED_CONFIG]
    if loaded.config.job.save_config_file:
        paths.append(folder / loaded.config.job.save_config_file)
    with storage_errors.writing(folder, "set job.dump_folder to another folder"):
        for path in paths:
            atomic_io.write(path, text, create_folder=True)
            atomic_io.write(path.with_name(json_schema.FILE), json_schema.json_schema_text())


def read_world_size(resolved: Path) -> int | None:
    """The number of ranks of the run that wrote a resolved configuration, or None where it does not say."""
    with resolved.open(encoding="utf-8", errors="replace") as file:
        # bounded: the file may be anything by now
        head = file.readline(4096) + file.readline(4096)  # the first names a schema, but for runs of before
    match = re.search(r", (\d{1,9}) ranks, started from ", head)
    return int(match[1]) if match else None


def describe(
    loaded: Loaded,
    mesh: Mesh,
    num_params: int,
    total_steps: int,
    num_samples: int | None,
    places_per_epoch: int | None = None,
) -> list[str]:
    """Lines for the log: versions, model and mesh, the arithmetic of the batch, precision and seed."""
    config = loaded.config
    batch = derived.global_batch_size(config, mesh.device_mesh.size())
    lines = [
        versions(),
        *describe_model(config, mesh, num_params),
        f"data: {_describe_data(config)}, {total_steps} steps"
        + (
            ""
            if num_samples is None
            else f" are {total_steps * batch / (places_per_epoch or num_samples):.2f} epochs of {num_samples} rows"
        ),
        describe_precision(config),
    ]
    return lines + (configs.resolved_toml(config).splitlines() if config.job.print_config else [])


def _describe_data(config: Config) -> str:
    """The datasets and how their documents become rows."""
    formats = {source.format or config.data.format for source in config.data.sources.values()} or {config.data.format}
    staged = bool(config.data.stages)
    names = ", ".join(
        f"{name} ({source.dataset})" + ("" if staged else f" weight {source.weight:g}")
        for name, source in config.data.sources.items()
    )
    if staged:
        names += f", weights of {len(config.data.stages)} stages"
    rows = (
        f"packed by {derived.packing_kind(config.data, formats)}"
        if config.task.name in OF_NEXT_TOKENS
        else config.task.name
    )
    return f"{names or config.training.dataset or 'rows of the task'}, {rows}"


def describe_model(config: Config, mesh: Mesh, num_params: int) -> list[str]:
    """Two lines: the model on its mesh, and the arithmetic of the batch."""
    from shardtrain.distributed.mesh import BATCH_AXES

    training = config.training
    world_size = mesh.device_mesh.size()
    axes = " x ".join(f"{axis} {size}" for axis, size in mesh.sizes.items() if size > 1) or "one process"
    batch = derived.global_batch_size(config, world_size)
    micro = derived.accumulation_steps(config, world_size)
    return [
        f"model {derived.model_label(config.model)}: {format_count(num_params)} parameters on {axes}",
        f"batch: {training.local_batch_size} sequences x {micro} accumulation x {mesh.size(*BATCH_AXES)} data ranks = "
        f"{batch} sequences x {training.seq_len} = {batch * training.seq_len} tokens per step",
    ]


def describe_precision(config: Config) -> str:
    """One line: types of numbers, and the seed."""
    return (
        f"precision: stored {config.training.dtype}, computed {derived.compute_dtype(config)}, reduced "
        f"{config.training.mixed_precision_reduce}; seed {config.debug.seed}"
    )


def versions() -> str:
    """One line: this package, its commit where it runs from a checkout, torch, Python."""
    commit = ""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / ".git").exists():  # an installed package inside somebody else's repository has no commit of its own
        command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            commit = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout.strip()
    return (
        f"shardtrain {__version__}{f' ({commit})' if commit else ''}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )
