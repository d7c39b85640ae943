"""Output of a run at its start: the log, its first lines, and the resolved configuration."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardtrain import __version__
from shardtrain import config as configs
from shardtrain.config import Loaded, certificate, derived, json_schema, ramps
from shardtrain.config.schema import Config
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.utils import atomic_io, log, storage_errors
from shardtrain.utils.log import logger
from shardtrain.utils.redact import redact, visible
from shardtrain.utils.units import format_count

if TYPE_CHECKING:
    from shardtrain.distributed.mesh import Mesh
    from shardtrain.distributed.process_group import World
    from shardtrain.train.run import Run


def open_log(
    loaded: Loaded, world: World, notices: Iterable[str], model_check_lines: Iterable[str]
) -> None:
    """Open this rank's log, and log the messages from before: notices on options, and the model check."""
    config = loaded.config
    folder = Path(config.job.dump_folder)
    atomic_io.guard(folder, folder / config.checkpoint.folder)
    # LOG_RANK selects the ranks that log to the console. With several ranks, each line starts with its rank.
    ranks = log.console_ranks()
    color = not config.metrics.disable_color_printing
    file_pattern = config.metrics.save_log_file
    prefix = len(ranks) > 1
    logs_to_console = world.rank in ranks
    log.setup(world.rank, world.size, folder, file_pattern, logs_to_console, color, prefix)
    for notice in notices:
        if notice in loaded.renames:
            logger.info(notice)
        else:
            logger.warning(notice)
    for line in model_check_lines:
        if " NOT " in line:
            logger.warning(line)
        else:
            logger.info(line)


def certificate_line(loaded: Loaded, run: Run) -> str:
    """Log the state of ``job.certificate``, and store it for checkpoints.

    Return the logged line, or "" without a certificate.
    """
    state = certificate.of_run(loaded)
    if state is None:
        return ""
    run.certificate = {"path": state.path, "sha256": state.sha256, "applies": state.applies}
    line = f"certificate: {state}"
    if state.applies:
        logger.info(line)
    else:
        logger.warning(line)
    return line


def write_resolved_config(
    loaded: Loaded, folder: Path, world_size: int, certificate_line: str = ""
) -> None:
    """Write a file with the effective value of every option. Loading it results in the same configuration.

    Comments at its top contain the versions and the name of the JSON schema, which is written next to it.
    With the schema, editors can complete and check the file.
    """
    origin = loaded.path or "the defaults"
    comments = [f"{versions()}, {world_size} ranks, started from {origin}"]
    if certificate_line:
        comments.append(certificate_line)
    # A file may have a newline in its name, and the rest of the name would be options.
    lines = [f"# {visible(comment, lines=False)}" for comment in comments]
    header = "\n".join([json_schema.DIRECTIVE, *lines, ""])
    text = redact(header + configs.resolved_toml(loaded.config))
    paths = [folder / RESOLVED_CONFIG]
    if loaded.config.job.save_config_file:
        paths.append(folder / loaded.config.job.save_config_file)
    with storage_errors.writing(folder, "set job.dump_folder to another folder"):
        for path in paths:
            atomic_io.write(path, text, create_folder=True)
            atomic_io.write(path.with_name(json_schema.FILE), json_schema.json_schema_text())


def describe(
    loaded: Loaded,
    mesh: Mesh,
    num_params: int,
    total_steps: int,
    num_samples: int | None,
    places_per_epoch: int | None = None,
) -> list[str]:
    """Return the first lines of the log: versions, model, mesh, batch, data, precision, and folder.

    Args:
        loaded: the configuration.
        mesh: the mesh.
        num_params: number of parameters of the unsharded model.
        total_steps: number of steps of the run.
        num_samples: number of training rows. None if unknown.
        places_per_epoch: number of rows in an epoch, if it differs from ``num_samples``.
    """
    config = loaded.config
    data = f"data: {_describe_data(config)}"
    if num_samples is not None:
        rows = derived.step_sizes(config, mesh.device_mesh.size()).after(0, total_steps)
        epochs = rows / (places_per_epoch or num_samples)
        data += f"; {total_steps} steps = {epochs:.2f} epochs of {num_samples} rows"
    lines = [
        versions(),
        *describe_model(config, mesh, num_params),
        data,
        describe_precision(config),
        f"folder: {config.job.dump_folder}{_describe_checkpoints(config)}",
    ]
    if config.job.print_config:
        lines += configs.resolved_toml(config).splitlines()
    return lines


def _describe_data(config: Config) -> str:
    """Describe the datasets, and how documents are packed into rows."""
    sources = config.data.sources
    has_stages = bool(config.data.stages)
    names = []
    for name, source in sources.items():
        weight = "" if has_stages else f" weight {source.weight:g}"
        names.append(f"{name} ({source.dataset}){weight}")
    datasets = ", ".join(names)
    if has_stages:
        datasets += f", weights of {len(config.data.stages)} stages"
    if not datasets:
        datasets = config.training.dataset or "rows of the task"

    rows = config.task.name
    # Other tasks have one sample per row, so packing does not apply to them.
    if config.task.name in OF_NEXT_TOKENS:
        formats = {source.format or config.data.format for source in sources.values()}
        if not formats:
            formats = {config.data.format}
        rows = f"packed by {derived.packing_kind(config.data, formats)}"
    return f"{datasets}, {rows}"


def _describe_checkpoints(config: Config) -> str:
    options = config.checkpoint
    if not options.enable:
        return "; no checkpoints (checkpoint.enable=false)"
    if options.load_only:
        return "; no new checkpoints (checkpoint.load_only=true)"
    if options.interval_type == "automatic":
        return f"; checkpoints in {options.folder}, at automatic intervals"
    return f"; checkpoints in {options.folder}, every {options.interval} {options.interval_type}"


def describe_model(config: Config, mesh: Mesh, num_params: int) -> list[str]:
    """Return three lines: the model, the mesh, and how the batch size is computed."""
    from shardtrain.distributed.mesh import BATCH_AXES

    training = config.training
    world_size = mesh.device_mesh.size()
    used_axes = []
    for axis, size in mesh.sizes.items():
        if size > 1:
            used_axes.append(f"{axis} {size}")
    axes = " x ".join(used_axes) or "no parallelism"
    batch = derived.global_batch_size(config, world_size)
    accumulation = derived.accumulation_steps(config, world_size)
    tokens = batch * training.seq_len
    unit = "rank" if world_size == 1 else "ranks"
    return [
        f"model: {derived.model_label(config.model)}, {format_count(num_params)} parameters",
        f"mesh: {world_size} {unit}, {axes}",
        f"batch: {training.local_batch_size} sequences x {accumulation} accumulation x {mesh.size(*BATCH_AXES)} data "
        f"ranks = {batch} sequences x {training.seq_len} = {tokens} tokens per step",
        *ramps.describe(training),
    ]


def describe_precision(config: Config) -> str:
    """Return one line: the dtypes of parameters, computation and gradient reduction, and the seed."""
    return (
        f"precision: parameters {config.training.dtype}, compute {derived.compute_dtype(config)}, gradient reduction "
        f"{config.training.mixed_precision_reduce}; seed {config.debug.seed}"
    )


def versions() -> str:
    """Return one line with the versions of this package, torch and Python. In a checkout, with the commit."""
    commit = ""
    checkout = Path(__file__).resolve().parents[2]
    # Look for .git only in this folder, because the package may be installed inside another repository.
    if (checkout / ".git").exists():
        command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            commit = subprocess.run(
                command, capture_output=True, text=True, timeout=5, check=False
            ).stdout.strip()
    package = f"shardtrain {__version__} ({commit})" if commit else f"shardtrain {__version__}"
    return f"{package}, torch {torch.__version__}, Python {platform.python_version()}"
