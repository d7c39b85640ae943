"""The verb ``plan``: parse arguments, plan or search, print."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardtrain import config as configs
from shardtrain.checkpoint.snapshot_folder import GENERATIONS
from shardtrain.config import Loaded, command_line
from shardtrain.config.command_line import VerbOption
from shardtrain.config.schema import Checkpoint
from shardtrain.utils import atomic_io, output_target, storage_errors
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import format_bytes, parse_count
from shardtrain.utils.variables import is_whole_number

if TYPE_CHECKING:
    from shardtrain.tools.plan.hardware import Device
    from shardtrain.tools.plan.planning import Plan

HELP = """\
usage: shardtrain plan [CONFIG.toml] [--gpus N | --nodes N] [--device NAME|FILE.toml] [--section.key VALUE ...]

Estimate a configuration on any machines: memory of each rank, seconds of a step, tokens per second, MFU and what
limits it. Nothing is trained; no GPU and no process group is used.

  --gpus N            number of devices (default: those of the configured mesh, in full nodes)
  --nodes N           number of nodes, instead of --gpus
  --device NAME       default: h100; or a TOML file with a table [devices.NAME] (docs/plan.md), or one of
{devices}
  --calibrate RUN     scale the device's rates to the step times of a finished run, or to the rates in the file
                      of shardtrain doctor --json
  --tokens N          also print days, device hours and energy for N tokens, such as 15T
  --price DOLLARS     per device and hour, for --tokens
  --largest           also print the longest sequence, the most rows and the most layers that fit, each alone
  --search            rank every legal mesh, schedule, recompute mode and micro-batch for the same batch of tokens
  --float8            with --search: also try float8 products in linear layers (changes numbers)
  --top N             number of candidates to print (default: 10)
  -o FILE.toml        with --search: write the best one as a configuration for train
  --json              print one JSON object

  shardtrain plan llama3_70b --gpus 64 --device h100
  shardtrain plan my_run.toml --gpus 32 --device a100-80gb --search -o best.toml

exit status: 0; 2 if the configuration, or with --search every candidate, does not fit
"""
DOES_NOT_FIT = 2
ASSUMED_STALL_SECONDS = 5.0
"""Assumed time that a save blocks training, to estimate an automatic interval."""


def _count(text: str) -> int:
    # planning.MOST_DEVICES, which would import torch
    if not is_whole_number(text) or not 0 < int(text) <= 1_000_000:
        raise ValueError("must be a whole number from 1 to 1000000")
    return int(text)


def _amount(read: Callable[[str], float]) -> Callable[[str], float]:
    def amount(text: str) -> float:
        try:
            number = read(text)
        except ValueError:
            number = -1
        if not 0 < number < 1e18:
            raise ValueError("must be a number above 0")
        return number

    return amount


OPTIONS = {
    "--gpus": VerbOption(_count, "64"),
    "--nodes": VerbOption(_count, "8"),
    "--top": VerbOption(_count, "10"),
    "--tokens": VerbOption(_amount(parse_count), "15T"),
    "--price": VerbOption(_amount(float), "2"),
    "--device": VerbOption(example="h100"),
    "--calibrate": VerbOption(example="outputs, the folder of a run"),
    "--output": VerbOption(output_target.file_value, "best.toml"),
    "-o": VerbOption(output_target.file_value, "best.toml"),
}
FLAGS = ("--search", "--json", "--largest", "--float8")


@dataclass
class PlanOptions:
    """Options of the verb."""

    gpus: int | None = None
    nodes: int | None = None
    device: str = "h100"
    calibrate: str | None = None
    tokens: float | None = None
    price: float | None = None
    search: bool = False
    float8: bool = False
    top: int = 10
    output: str | None = None
    json: bool = False
    largest: bool = False

    @classmethod
    def of(cls, given: dict[str, Any]) -> PlanOptions:
        """Build from options by name.

        Raises:
            ConfigError: two options contradict each other, or one has no effect.
        """
        if "-o" in given:
            given["--output"] = given.pop("-o")

        def wrong(option: str, rule: str, fix: str, value: object = None) -> ConfigError:
            # The user wrote "-o".
            name = "-o" if option == "--output" else option
            return ConfigError(Problem(name, value, rule, fix, "command line"))

        if {"--gpus", "--nodes"} <= given.keys():
            raise wrong(
                "--nodes", "cannot be combined with --gpus", "use one of them", given["--nodes"]
            )
        needs = {
            "--float8": "--search",
            "--top": "--search",
            "--output": "--search",
            "--price": "--tokens",
        }
        for option, other in needs.items():
            if option in given and other not in given:
                raise wrong(option, f"has no effect without {other}", f"add {other} or remove it")
        for option in ("--largest", "--tokens"):
            if "--search" in given and option in given:
                rule = "is for one configuration, but --search plans many"
                raise wrong(option, rule, "use it in a second command with the best configuration")
        fields = {name.removeprefix("--"): value for name, value in given.items()}
        return cls(**fields)


def main(argv: Sequence[str]) -> int:
    """Run the verb and return its exit status.

    Raises:
        ConfigError: an argument is wrong, the device is unknown, or ``train`` would reject the configuration.
    """
    from shardtrain.facts import devices
    from shardtrain.tools.plan import hardware

    taken = command_line.take(argv, OPTIONS, FLAGS)
    if taken.help:
        margin = " " * 22
        names = ", ".join(devices.names())
        wrapped = textwrap.fill(names, 100, initial_indent=margin, subsequent_indent=margin)
        print(HELP.format(devices=wrapped), end="")
        return 0

    # Check all arguments before torch is imported.
    options = PlanOptions.of(taken.verb_options)
    arguments = command_line.split(taken.rest)
    for name in ("nproc", "nnodes", "node_rank", "rdzv_endpoint", "max_restarts"):
        value = getattr(arguments, name)
        if value is not None:
            raise ConfigError(
                Problem(
                    f"--{name}",
                    value,
                    rule="is for starting processes, but plan starts none",
                    fix="use --gpus or --nodes",
                    where="command line",
                )
            )
    device = hardware.find(options.device)
    loaded = configs.load(arguments.path, arguments.overrides)
    if options.output:
        _require_writable(Path(options.output), loaded.path)
    from shardtrain.tools.plan import planning

    # Choose the device, with measured rates if requested, and the number of devices.
    if options.calibrate is not None:
        device = _calibrated(options.calibrate, device)
    if options.nodes is not None:
        options.gpus = options.nodes * device.devices_per_node
    world_size = options.gpus or planning.smallest_world(loaded.config, device)
    columns = None
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
    if options.search:
        return _search(loaded, world_size, device, options, columns)
    return _plan(loaded, world_size, device, options, columns)


def _calibrated(source: str, device: Device) -> Device:
    """Return the device with the rates of a report of the doctor, or of a run. Print what changed."""
    from shardtrain.tools.plan import calibrate

    path = Path(source)
    learn = calibrate.learn_report if path.is_file() else calibrate.learn
    learned = learn(path, device)
    print(learned.line(source), file=sys.stderr)
    return learned.device


def _search(
    loaded: Loaded, world_size: int, device: Device, options: PlanOptions, columns: int | None
) -> int:
    """Rank variations of the configuration, print them, and write the best one. Return the exit status."""
    from shardtrain.tools.plan import search

    result = search.run(loaded, world_size, device, options.float8)
    if options.json:
        print(json.dumps(result.as_dict(options.top)))
    else:
        print("\n".join(search.lines(result, options.top, columns)))
    if not result.ranked:
        return DOES_NOT_FIT
    if options.output:
        text = search.as_toml(loaded, result.ranked[0])
        path = Path(options.output)
        with storage_errors.writing(path, "name another file with -o"):
            path.parent.mkdir(parents=True, exist_ok=True)
            atomic_io.write(path, text)
        # JSON must be the only output.
        if not options.json:
            print(f"wrote {options.output}: shardtrain train {shlex.quote(options.output)}")
    return 0


def _plan(
    loaded: Loaded, world_size: int, device: Device, options: PlanOptions, columns: int | None
) -> int:
    """Plan the configuration itself, and print the plan. Return the exit status."""
    from shardtrain.tools.plan import picture, planning

    configs.require_to_build(loaded, world_size)
    plan = planning.make(loaded.config, world_size, device)
    largest = None
    if options.largest:
        largest = planning.largest(loaded.config, world_size, device)
    save_seconds = _seconds_between_saves(loaded.config.checkpoint, plan.time.seconds)
    if options.json:
        facts = plan.as_dict()
        if largest:
            facts["largest"] = largest
        if loaded.config.checkpoint.snapshot_interval:
            facts["snapshot_bytes_per_node"] = snapshot_bytes(plan)
        if options.tokens:
            facts["budget"] = _budget(plan, options.tokens, save_seconds)
        print(json.dumps(facts))
    else:
        print("\n".join(picture.lines(plan, options.tokens, options.price, save_seconds, columns)))
        if loaded.config.checkpoint.snapshot_interval:
            size = format_bytes(snapshot_bytes(plan))
            print(f"snapshots: {size} of host memory on each node (checkpoint.snapshot_interval)")
        if largest:
            print("largest values that fit on this layout, if only one is changed:")
            for option, number in largest.items():
                print(f"  {option}={number}")
    return 0 if plan.fits else DOES_NOT_FIT


def snapshot_bytes(plan: Plan) -> int:
    """Return the host memory that snapshots need on a node: two generations, each with a copy for another node."""
    devices = min(plan.world_size, plan.device.devices_per_node)
    copies = 1 if plan.world_size <= plan.device.devices_per_node else 2
    # Replicas divide what a checkpoint contains.
    replicas = plan.sizes.get("dp_replicate", 1)
    share = (plan.fullest.parameters + plan.fullest.optimizer) // replicas
    return len(GENERATIONS) * copies * devices * share


def _budget(plan: Plan, tokens: float, save_seconds: float) -> dict[str, Any]:
    """Return the days for a number of tokens, and the failures in them, as JSON values."""
    num_failures: float | None = None
    days_with_failures: float | None = None
    if save_seconds:
        num_failures, days = plan.failures(tokens, save_seconds)
        # JSON has no infinity.
        if not math.isinf(days):
            days_with_failures = days
    return {
        "tokens": tokens,
        "days": plan.days(tokens),
        "seconds_between_saves": save_seconds,
        "failures": num_failures,
        "days_with_failures": days_with_failures,
    }


def _seconds_between_saves(saves: Checkpoint, step_seconds: float) -> float:
    """Return the seconds between checkpoints. 0 without checkpoints."""
    if not saves.enable or saves.load_only:
        return 0.0
    # Young's interval, which a run computes from the measured stall of a save
    if saves.interval_type == "automatic":
        return math.sqrt(2 * ASSUMED_STALL_SECONDS * saves.mean_time_to_failure_hours * 3600)
    if saves.interval_type == "steps":
        return saves.interval * step_seconds
    return float(saves.interval)


def _require_writable(path: Path, configuration: Path | None) -> None:
    """Reject an output file that cannot be written or would replace the configuration, before the
    search starts.
    """
    fix = "name another file, such as -o best.toml"
    if path.is_dir():
        raise ConfigError(Problem("-o", str(path), "is a folder", fix, "command line"))
    if configuration is not None and path.exists() and path.samefile(configuration):
        raise ConfigError(
            Problem(
                "-o",
                str(path),
                rule="is the configuration that is planned",
                fix=fix,
                where="command line",
            )
        )
