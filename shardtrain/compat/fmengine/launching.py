"""FMEngine's two ways to start a run: ``deepspeed ... cli/train.py ...`` and ``torchrun ... cli/train.py ...``."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from shardtrain import cli, config
from shardtrain.compat import migrate
from shardtrain.compat.migrate.fmengine import FLAG
from shardtrain.config.command_line import VerbOption, take
from shardtrain.utils import atomic_io, python_child, storage_errors
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.variables import is_whole_number

HOSTFILE = "/job/hostfile"
"""Default hostfile of DeepSpeed."""
_PROGRAM = re.compile(r"(^|.*/)cli/train\.py|train\.py")
_OPTIONS = (
    *(
        "--hostfile",
        "--include",
        "--exclude",
        "--num_nodes",
        "--num_gpus",
        "--master_port",
        "--master_addr",
    ),
    *("--launcher", "--launcher_args", "--ssh_port"),
)
_ALIASES = {
    "-H": "--hostfile",
    "-i": "--include",
    "-e": "--exclude",
    "--num_accelerators": "--num_gpus",
}
"""Other names of options."""
_IGNORED = {
    "--force_multi",
    "--no_local_rank",
    "--enable_each_rank_log",
    "--save_pid",
    "--no_ssh_check",
}
"""Options of DeepSpeed's launcher that do not affect training."""
_FORWARDED = ("NCCL_", "UCX_", "PYTHONPATH")
"""Prefixes of environment variables that DeepSpeed forwards to other hosts."""


def train(arguments: list[str]) -> int:
    """Run ``cli/train.py`` and return its exit status."""
    wants_help = "--help" in arguments or "-h" in arguments
    if not wants_help and not _has_flag(arguments):
        raise ConfigError(
            Problem(
                FLAG,
                None,
                rule="is required: the JSON file with optimizer, batch and precision",
                fix=f"write it like {FLAG} ./configs/llama.json",
                where="command line",
            )
        )
    return cli.main(["train", *arguments])


def _has_flag(arguments: Sequence[str]) -> bool:
    """True if the arguments contain FMEngine's flag for the DeepSpeed JSON."""
    return any(argument.partition("=")[0] == FLAG for argument in arguments)


def deepspeed(arguments: list[str]) -> int:
    """Run DeepSpeed's launcher with ``cli/train.py`` and return its exit status.

    Raises:
        ConfigError: an option does not exist, or the program is not ``cli/train.py``.
    """
    if not arguments or arguments[0] in ("--help", "-h"):
        print(
            "usage: deepspeed [--num_gpus N] [--num_nodes N] [--hostfile FILE] [--include ...] [--exclude ...]"
        )
        print("                 [--master_addr HOST] [--master_port PORT] cli/train.py FLAGS...")
        return 0
    options, flags = _split(list(arguments))
    for name in ("num_gpus", "num_nodes", "master_port"):
        text = options.get(name, "1")
        if not (is_whole_number(text) and 0 < int(text) < 10**6):
            raise ConfigError(
                Problem(
                    f"--{name}",
                    text,
                    rule="must be a positive integer",
                    fix="correct it",
                    where="command line",
                )
            )

    # Like DeepSpeed, run on the hosts of a hostfile, or only on this machine.
    host_options = _host_options(options)
    if host_options:
        return _on_hosts(options, flags, host_options)
    devices = _local_devices(options)
    num_processes = options.get("num_gpus", "")
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
        num_processes = num_processes or str(len(devices.split(",")))
    if num_processes:
        flags = ["--nproc", num_processes, *flags]
    return train(flags)


def torchrun(arguments: list[str]) -> int:
    """Replace this process with ``torchrun``, and FMEngine's ``cli/train.py`` with ``train`` of this package."""
    program = next(
        (index for index, argument in enumerate(arguments) if argument.endswith("cli/train.py")),
        None,
    )
    if program is not None and _has_flag(arguments[program:]):
        arguments = [
            *arguments[:program],
            "-m",
            "shardtrain.compat.fmengine",
            "train",
            *arguments[program + 1 :],
        ]

    # PyTorch's launcher then receives the signals of this process. Flush first, because execv discards
    # buffered output.
    sys.stdout.flush()
    os.execv(sys.executable, python_child.command("torch.distributed.run", *arguments))


def commands(arguments: list[str]) -> int:
    """Write the commands ``deepspeed`` and ``torchrun`` into a folder for PATH, and print the folder.

    Raises:
        ConfigError: the folder contains other programs with these names.
    """
    program = "shardtrain.compat.fmengine"
    if len(arguments) != 1 or arguments[0].startswith("-"):
        rule = "requires an output folder"
        fix = f'write it like export PATH="$(python -m {program} commands ~/.fmengine):$PATH"'
        raise ConfigError(Problem(f"{program} commands", None, rule, fix, "command line"))
    folder = Path(arguments[0]).expanduser().absolute()
    for name in ("deepspeed", "torchrun"):
        command = shlex.join(python_child.command(program, name))
        text = f'#!/bin/sh\nexec {command} "$@"\n'
        path = folder / name
        with storage_errors.writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            # Replace only a file that an earlier call has written, which names this program.
            if path.exists() and program not in path.read_text(errors="replace")[:1000]:
                rule = "exists and is another program"
                raise ConfigError(Problem(str(path), None, rule, "use another folder"))
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
    print(folder)
    return 0


def _split(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the launcher's options by name without dashes, and the program's flags."""
    program = next(
        (index for index, argument in enumerate(argv) if _PROGRAM.fullmatch(argument)), len(argv)
    )
    parsed = take(
        argv[:program], dict.fromkeys((*_OPTIONS, *_ALIASES), VerbOption()), sorted(_IGNORED)
    )
    unknown = ["--help"] if parsed.help else parsed.rest
    for argument in unknown:
        if argument.startswith("-"):
            name, _, value = argument.partition("=")
            supported = ", ".join([*_OPTIONS, *_ALIASES, *sorted(_IGNORED)])
            raise ConfigError(
                Problem(
                    name,
                    value or None,
                    rule="is not supported by this launcher",
                    fix=f"supported are {supported}",
                    where="deepspeed",
                )
            )
        raise ConfigError(
            Problem(
                "deepspeed",
                argument,
                rule="must be FMEngine's cli/train.py, the only supported program",
                fix="start other programs with DeepSpeed itself",
            )
        )
    if program == len(argv):
        raise ConfigError(
            Problem(
                "deepspeed",
                None,
                rule="requires a program",
                fix="write cli/train.py and its flags",
                where="command line",
            )
        )
    options = {}
    for name, value in parsed.verb_options.items():
        if name not in _IGNORED:
            options[_ALIASES.get(name, name).removeprefix("--")] = value
    return options, argv[program + 1 :]


def _host_options(options: dict[str, str]) -> list[str]:
    """Translate DeepSpeed's options for hosts to options of ``launch ssh``.

    Return [] to use only this machine.
    """
    hostfile = options.get("hostfile")
    file = hostfile or HOSTFILE
    is_local = any(options.get(name, "").startswith("localhost") for name in ("include", "exclude"))
    if is_local or not Path(file).is_file():
        if hostfile and not is_local:
            raise ConfigError(
                Problem(
                    "--hostfile",
                    hostfile,
                    rule="does not exist",
                    fix="correct or remove it",
                )
            )
        if int(options.get("num_nodes", "1")) > 1:
            raise ConfigError(
                Problem(
                    "--num_nodes",
                    options["num_nodes"],
                    rule=f"requires a hostfile, and {HOSTFILE} does not exist",
                    fix="add --hostfile FILE",
                )
            )
        return []
    arguments = ["--hostfile", file]
    for name, option in (
        ("include", "--include"),
        ("exclude", "--exclude"),
        ("num_nodes", "--nodes"),
        ("master_port", "--master_port"),
        ("master_addr", "--master_addr"),
    ):
        if name in options:
            arguments += [option, options[name]]
    if options.get("launcher", "pdsh") not in ("pdsh", "ssh"):
        raise ConfigError(
            Problem(
                "--launcher",
                options["launcher"],
                rule="is not supported; hosts are connected by ssh",
                fix="remove it, or use `shardtrain launch slurm` under Slurm",
                where="command line",
            )
        )
    return arguments


def _on_hosts(options: dict[str, str], flags: Sequence[str], argv: list[str]) -> int:
    """Write the configuration of the flags to the shared output folder, and start the run on all hosts by ssh.

    ``argv`` are options of ``launch ssh``.
    """
    from shardtrain.launch import hostfile, launch_command

    # Select the hosts as `launch ssh` will, to find the number of processes.
    arguments = [f"--launch.ssh.hostfile={argv[1]}"]
    for name in ("include", "exclude"):
        if name in options:
            arguments.append(f"--launch.ssh.{name}={options[name]}")
    launch = config.load(None, arguments).config.launch
    num_nodes = int(options["num_nodes"]) if "num_nodes" in options else None
    hosts = hostfile.chosen(launch, num_nodes)
    first = hosts[0]
    processes_per_host = int(options.get("num_gpus", first.slots or 1))

    # Like DeepSpeed, treat a single host as this machine, whatever its name, and do not use ssh.
    if len(hosts) == 1:
        if first.devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, first.devices))
        return train(["--nproc", str(processes_per_host), *flags])

    # --num_gpus selects the first devices of each host.
    if "num_gpus" in options:
        uses_fewer = first.slots is not None and processes_per_host < first.slots
        if uses_fewer and "include" not in options:
            devices = ",".join(map(str, range(processes_per_host)))
            argv = [*argv, "--include", "@".join(f"{host.name}:{devices}" for host in hosts)]
        else:
            argv = [*argv, "--nproc", options["num_gpus"]]

    # Write the flags as a TOML file to the output folder, which all hosts share.
    loaded = migrate.load_flags(flags, processes_per_host * len(hosts), follow=False)
    folder = Path(loaded.config.job.dump_folder)
    file = folder / "fmengine.toml"
    with storage_errors.writing(file, "choose another --output_dir"):
        atomic_io.write(file, config.set_toml(loaded), create_folder=True)
    for notice in loaded.notices:
        print(notice, file=sys.stderr)

    # Use the current folder, interpreter and environment variables on all hosts.
    variables = sorted(name for name in os.environ if name.startswith(_FORWARDED))
    argv = [*argv, "--launch.workdir", os.getcwd(), "--launch.python", sys.executable]
    if variables:
        argv += ["--launch.forward_env", *variables]
    return launch_command.main(["ssh", str(file.absolute()), *argv])


def _local_devices(options: dict[str, str]) -> str:
    """Return the devices in ``--include localhost:0,1``, such as "0,1". "" if the option selects none."""
    for name in ("include", "exclude"):
        text = options.get(name, "")
        if not text:
            continue
        match = re.fullmatch(r"localhost(?::(\d+(?:,\d+)*))?", text)
        if not match or name == "exclude":
            raise ConfigError(
                Problem(
                    f"--{name}",
                    text,
                    rule="is only supported with a hostfile; on this machine use --include localhost:0,1",
                    fix="select devices with --include",
                    where="command line",
                )
            )
        return match[1] or ""
    return ""
