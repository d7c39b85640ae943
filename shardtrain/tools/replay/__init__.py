"""``shardtrain replay``: makes steps of a run again from the checkpoint before them, and compares every number.

This file reads the words and starts the ranks, without torch until they start; ``run`` is one rank of it.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shardtrain import config as configs
from shardtrain.checkpoint import manifest, retention
from shardtrain.checkpoint.manifest import Manifest
from shardtrain.config import Config, Loaded
from shardtrain.launch import environment, local
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem

__all__ = ["Plan", "main", "plan"]

USAGE = """\
usage: shardtrain replay STEP | FIRST:LAST [RUN_FOLDER | CONFIG.toml] [--nproc N] [--output FOLDER]
                         [--section.key VALUE ...]

Make steps again, from the newest good checkpoint before them or from the start, and compare with what the run recorded:
lines of metrics.jsonl, and every tensor where a checkpoint of the step is there. With as many ranks as the run had the
same bits are due. Nothing is written into the run's folder. Status 0: all the same. Status 4: the first difference.

  RUN_FOLDER  the run's job.dump_folder, whose config.resolved.toml is used; or a configuration, as for train
  --nproc     ranks; as many as the run had unless given
  --output    folder for the logs of the replay; a temporary one, removed when nothing differs, unless given
"""
RESOLVED_CONFIG = "config.resolved.toml"


@dataclass(frozen=True)
class Plan:
    """What is made again: steps ``base`` + 1 to ``last`` of the run in ``run_folder``."""

    run_folder: Path
    checkpoints: Path
    base: int
    """Step of the checkpoint that it starts from; 0 is the start of the run."""
    last: int
    world_size: int | None
    """Ranks of the run; None where nothing says so."""
    rewinds: tuple[tuple[int, ...], ...]
    """What the run left out of its data, as its newest checkpoint knows; see ``guard.Rewind``."""


@dataclass(frozen=True)
class _Request:
    first: int
    last: int
    path: str | None
    nproc: int | None
    output: str | None
    overrides: tuple[str, ...]


def main(words: Sequence[str]) -> int:
    """Run the verb; gives the exit status.

    Raises:
        ConfigError: a word or the configuration is wrong.
        CheckpointError: no checkpoint before the step can be used.
    """
    if not words or {"--help", "-h"} & set(words):
        print(USAGE, end="")
        return 0
    request = _read(words)
    loaded = _load(request)
    found = plan(loaded.config, request.first, request.last)
    output = Path(request.output or tempfile.mkdtemp(prefix="shardtrain-replay-"))
    if output.resolve() == found.run_folder.resolve():
        rule = "is the run's own folder, into which nothing is written"
        raise ConfigError(Problem("--output", str(output), rule, "name another folder", "command line"))
    replayed = dataclasses.replace(loaded, config=config_of(loaded.config, found, output))
    command = (
        sys.executable,
        "-m",
        "shardtrain",
        "replay",
        *words,
        *(() if request.output else ("--output", str(output))),
    )
    status = _start(replayed, found, request, command)
    if status == 0 and not request.output:
        shutil.rmtree(output, ignore_errors=True)
    return status


def plan(config: Config, first: int, last: int) -> Plan:
    """Where to start, and what is known of the run."""
    run_folder = Path(config.job.dump_folder)
    folder = run_folder / config.checkpoint.folder
    known: dict[int, Manifest] = {}
    damages = []
    for step in retention.steps(folder):
        try:
            known[step] = manifest.read(folder / f"step-{step}")
        except CheckpointError as error:
            damages.append(str(error))
    if not known and not (run_folder / "metrics.jsonl").is_file():
        text = f"{run_folder} holds neither metrics.jsonl nor a checkpoint: nothing to compare with"
        raise CheckpointError(f"{text}{'; ' + damages[0] if damages else ''}; name the run's job.dump_folder")
    usable = [step for step, stored in known.items() if step < first and not stored.facts.get("weights_only")]
    usable = [step for step in usable if retention.is_whole(folder / f"step-{step}")]
    base, guard = max(usable, default=0), known[max(known)].facts.get("guard", {}) if known else {}
    rewinds = guard.get("rewinds", []) if isinstance(guard, dict) else []
    size = known[base].world_size if base else _world_size(run_folder / RESOLVED_CONFIG)
    return Plan(run_folder, folder, base, last, size, tuple(map(tuple, rewinds)))


def config_of(config: Config, found: Plan, output: Path) -> Config:
    """The run's configuration, reading its checkpoint and writing its own log alone."""
    path = str(found.checkpoints / f"step-{found.base}") if found.base else config.checkpoint.initial_load_path
    # from its start a run takes the weights that it took then, in the way that it took them
    part = {"initial_load_model_only": False, "exclude_from_loading": []} if found.base else {}
    checkpoint = dataclasses.replace(
        config.checkpoint,
        enable=bool(found.base) or config.checkpoint.enable,
        load_only=bool(found.base) or config.checkpoint.enable,  # without checkpoints there is nothing to save either
        load_step=-1,
        initial_load_path=config.checkpoint.initial_load_path if config.lora.enable else path,
        create_seed_checkpoint=False,
        keep_best="",  # which needs a validation, and none is made
        accept_changes=[*config.checkpoint.accept_changes, "training.spike_policy"],  # see below
        **part,  # type: ignore[arg-type]
    )
    # spikes that made the run go back are not part of what is left of it
    lora = config.lora
    if lora.enable and found.base:
        lora = dataclasses.replace(lora, initial_load_path=path)
    policy = "log" if config.training.spike_policy == "rewind" else config.training.spike_policy
    return dataclasses.replace(
        config,
        job=dataclasses.replace(config.job, dump_folder=str(output), save_config_file=None),
        checkpoint=checkpoint,
        lora=lora,
        training=dataclasses.replace(config.training, spike_policy=policy),
        validation=dataclasses.replace(config.validation, enable=False),
        profiling=dataclasses.replace(config.profiling, enable_profiling=False, enable_memory_snapshot=False),
        metrics=dataclasses.replace(config.metrics, enable_tensorboard=False, enable_wandb=False, sinks=[]),
    )


def _start(loaded: Loaded, found: Plan, request: _Request, command: Sequence[str]) -> int:
    """Be one rank of several, or start them."""

    def rank(replayed: Loaded) -> None:
        from shardtrain.tools.replay import run

        run.main(replayed, found)

    environment.set_allocator_default(os.environ)
    cores = environment.usable_cores()
    if environment.is_rank(os.environ):
        environment.adopt_slurm(os.environ)
        count = int(os.environ["WORLD_SIZE"])
        environment.set_process_defaults(os.environ, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), cores, alone=False)
        if "SHARDTRAIN_PARENT" in os.environ:
            local.detach(int(os.environ["SHARDTRAIN_PARENT"]))
            local.leave(local.run_child(loaded, rank))
        local.leave(local.run_rank(loaded, rank, count))
    accelerators = environment.count_accelerators(loaded.config.training.device)
    asked = request.nproc or found.world_size
    count = environment.choose_processes(loaded.config, asked, os.environ, accelerators, cores).count
    device = loaded.config.training.device
    device = ("cuda" if accelerators else "cpu") if device == "auto" else device
    configs.require(loaded, world_size=count, device=device, num_devices=accelerators)
    environment.set_process_defaults(os.environ, count, cores, alone=True)
    if count == 1:
        local.prepare(Path(loaded.config.job.dump_folder))
        return local.run_rank(loaded, rank)
    if accelerators == 0 and sys.platform == "linux":
        from shardtrain.tools.replay import run  # noqa: F401 - torch is imported once, before the ranks are forked

        return local.launch(loaded, count, main=rank)
    return local.launch(loaded, count, command=command)


def _load(request: _Request) -> Loaded:
    """The configuration of the run, with its folder where it lies now."""
    path = Path(request.path) if request.path else None
    if path is None or not path.is_dir():
        return configs.load(request.path, request.overrides)
    resolved = path / RESOLVED_CONFIG
    if not resolved.is_file():
        rule = f"is not a run's folder: it has no {RESOLVED_CONFIG}"
        raise ConfigError(Problem("RUN_FOLDER", str(path), rule, "name job.dump_folder of the run", "command line"))
    return configs.load(resolved, (*request.overrides, "--job.dump_folder", str(path)))


def _read(words: Sequence[str]) -> _Request:
    taken: dict[str, str] = {}
    overrides: list[str] = []
    places: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if name in ("--nproc", "--output"):
            taken[name] = value if equals else (remaining.pop(0) if remaining else "")
        elif not overrides and not word.startswith("-") and len(places) < 2:
            places.append(word)
        else:
            overrides.append(word)
    steps = re.fullmatch(r"(\d{1,15})(?::(\d{1,15}))?", places[0] if places else "")
    first, last = (int(steps[1]), int(steps[2] or steps[1])) if steps else (0, 0)
    if not 1 <= first <= last:
        rule, fix = "is not a step above 0, and no range of them", "write it like 120 or 100:120"
        raise ConfigError(Problem("STEP", places[0] if places else None, rule, fix, "command line"))
    nproc = taken.get("--nproc")
    if nproc is not None and (not nproc.isdecimal() or int(nproc) < 1):
        rule = "must be a whole number of processes above 0"
        raise ConfigError(Problem("--nproc", nproc, rule, "write it like --nproc 2", "command line"))
    if taken.get("--output") == "":
        raise ConfigError(
            Problem("--output", None, "needs a folder", "write it like --output replayed", "command line")
        )
    path = places[1] if len(places) > 1 else None
    return _Request(first, last, path, int(nproc) if nproc else None, taken.get("--output"), tuple(overrides))


def _world_size(resolved: Path) -> int | None:
    from shardtrain.train.run_folder import read_world_size

    return read_world_size(resolved) if resolved.is_file() else None
