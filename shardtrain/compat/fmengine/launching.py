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

HOSTFILE = "/job/hostfile"
"""Hostfile that DeepSpeed uses without --hostfile."""
_PROGRAM = re.compile(r"(^|.*/)cli/train\.py|train\.py")
_VALUES = (
    *("--hostfile", "--include", "--exclude", "--num_nodes", "--num_gpus", "--master_port", "--master_addr"),
    *("--launcher", "--launcher_args", "--ssh_port"),
)
_ALSO = {"-H": "--hostfile", "-i": "--include", "-e": "--exclude", "--num_accelerators": "--num_gpus"}
"""Aliases of options."""
_FLAGS = {"--force_multi", "--no_local_rank", "--enable_each_rank_log", "--save_pid", "--no_ssh_check"}
"""Options of DeepSpeed's launcher without effect on training."""
_CARRIED = ("NCCL_", "UCX_", "PYTHONPATH")
"""Prefixes of environment variables that DeepSpeed passes to other hosts."""


def train(words: list[str]) -> int:
    """Run ``cli/train.py`` and return its exit status."""
    if "--help" not in words and "-h" not in words and not any(word.partition("=")[0] == FLAG for word in words):
        rule = "is needed: the JSON file that says optimizer, batch and precision"
        raise ConfigError(Problem(FLAG, None, rule, f"write it like {FLAG} ./configs/llama.json", "command line"))
    return cli.main(["train", *words])


def deepspeed(words: list[str]) -> int:
    """Run DeepSpeed's launcher with ``cli/train.py`` and return its exit status.

    Raises:
        ConfigError: for an option that it does not have, or another program.
    """
    if not words or words[0] in ("--help", "-h"):
        print("usage: deepspeed [--num_gpus N] [--num_nodes N] [--hostfile FILE] [--include ...] [--exclude ...]")
        print("                 [--master_addr HOST] [--master_port PORT] cli/train.py FLAGS...")
        return 0
    options, flags = _split(list(words))
    for name in ("num_gpus", "num_nodes", "master_port"):
        text = options.get(name, "1")
        if not (text.isdecimal() and 0 < int(text) < 10**6):
            raise ConfigError(
                Problem(f"--{name}", text, "must be a whole number above 0", "correct it", "command line")
            )

    # Like DeepSpeed, run on the hosts of a hostfile, or only on this machine.
    several = _hosts(options)
    if several:
        return _on_hosts(options, flags, several)
    devices = _local_devices(options)
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    number = options.get("num_gpus") or (str(len(devices.split(","))) if devices else "")
    return train([*(["--nproc", number] if number else []), *flags])


def torchrun(words: list[str]) -> int:
    """Run ``torchrun`` and return its exit status. FMEngine's ``cli/train.py`` is replaced by ours."""
    at = next((n for n, word in enumerate(words) if word.endswith("cli/train.py")), None)
    if at is not None and any(word.partition("=")[0] == FLAG for word in words[at:]):
        words = [*words[:at], "-m", "shardtrain.compat.fmengine", "train", *words[at + 1 :]]
    # This process is replaced by PyTorch's launcher, which then gets its signals. So output must be
    # flushed now.
    sys.stdout.flush()
    os.execv(sys.executable, python_child.command("torch.distributed.run", *words))


def commands(words: list[str]) -> int:
    """Write ``deepspeed`` and ``torchrun`` into a folder for PATH, and return the exit status.

    Raises:
        ConfigError: where the folder has other files of these names.
    """
    if len(words) != 1 or words[0].startswith("-"):
        rule = "needs the folder that they are written into"
        fix = 'write it like export PATH="$(python -m shardtrain.compat.fmengine commands ~/.fmengine):$PATH"'
        raise ConfigError(Problem("shardtrain.compat.fmengine commands", None, rule, fix, "command line"))
    folder = Path(words[0]).expanduser().absolute()
    for name in ("deepspeed", "torchrun"):
        command = shlex.join(python_child.command("shardtrain.compat.fmengine", name))
        text = f'#!/bin/sh\nexec {command} "$@"\n'
        path = folder / name
        with storage_errors.writing(path):
            folder.mkdir(parents=True, exist_ok=True)
            if path.exists() and "shardtrain.compat.fmengine" not in path.read_text(errors="replace")[:1000]:
                raise ConfigError(Problem(str(path), None, "exists and is another program", "name another folder"))
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
    print(folder)
    return 0


def _split(words: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the launcher's options by name without dashes, and the program's flags."""
    at = next((n for n, word in enumerate(words) if _PROGRAM.fullmatch(word)), len(words))
    taken = take(words[:at], dict.fromkeys((*_VALUES, *_ALSO), VerbOption()), sorted(_FLAGS))
    for word in ("--help",) if taken.help else taken.rest:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            known = ", ".join([*_VALUES, *_ALSO, *sorted(_FLAGS)])
            raise ConfigError(Problem(name, value or None, "is not followed here", f"known are {known}", "deepspeed"))
        rule = "is not FMEngine's cli/train.py, which alone is started so"
        raise ConfigError(Problem("deepspeed", word, rule, "start other programs with DeepSpeed itself"))
    if at == len(words):
        raise ConfigError(
            Problem("deepspeed", None, "names no program", "write cli/train.py and its flags", "command line")
        )
    given = {_ALSO.get(name, name): value for name, value in taken.own.items() if name not in _FLAGS}
    return {name[2:]: value for name, value in given.items()}, words[at + 1 :]


def _hosts(options: dict[str, str]) -> list[str]:
    """Return options of ``launch ssh`` if there are other hosts. Empty for this host only."""
    given = options.get("hostfile")
    file = given or HOSTFILE
    is_local = any(options.get(name, "").startswith("localhost") for name in ("include", "exclude"))
    if is_local or not Path(file).is_file():
        if given and not is_local:
            raise ConfigError(Problem("--hostfile", given, "is not a file here", "give one, or leave it out"))
        if int(options.get("num_nodes", "1")) > 1:
            rule = f"needs a hostfile, and {HOSTFILE} is not here"
            raise ConfigError(Problem("--num_nodes", options["num_nodes"], rule, "give --hostfile FILE"))
        return []
    words = ["--hostfile", file]
    for name, option in (
        ("include", "--include"),
        ("exclude", "--exclude"),
        ("num_nodes", "--nodes"),
        ("master_port", "--master_port"),
        ("master_addr", "--master_addr"),
    ):
        if name in options:
            words += [option, options[name]]
    if options.get("launcher", "pdsh") not in ("pdsh", "ssh"):
        rule = "is not used here"
        fix = "hosts are reached by ssh; under Slurm use `shardtrain launch slurm`"
        raise ConfigError(Problem("--launcher", options["launcher"], rule, fix, "command line"))
    return words


def _on_hosts(options: dict[str, str], flags: Sequence[str], words: list[str]) -> int:
    """Write the configuration of the flags to the shared output folder, and start it on all hosts by ssh."""
    from shardtrain.launch import hostfile, launch_command

    # Select the hosts as `launch ssh` will, to know the number of processes.
    named: dict[str, str] = {"hostfile": words[1]}
    named.update({name: options[name] for name in ("include", "exclude") if name in options})
    launch = config.load(None, [f"--launch.ssh.{name}={text}" for name, text in named.items()]).config.launch
    count = int(options["num_nodes"]) if "num_nodes" in options else None
    chosen = hostfile.chosen(launch, count)
    each = int(options.get("num_gpus", chosen[0].slots or 1))

    # DeepSpeed treats a single host as this machine, whatever its name, and uses no ssh.
    if len(chosen) == 1:
        if chosen[0].devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, chosen[0].devices))
        return train(["--nproc", str(each), *flags])

    # --num_gpus selects the first devices of each host.
    if "num_gpus" in options and chosen[0].slots and each < chosen[0].slots and "include" not in options:
        devices = ",".join(map(str, range(each)))
        words = [*words, "--include", "@".join(f"{host.name}:{devices}" for host in chosen)]
    elif "num_gpus" in options:
        words = [*words, "--nproc", options["num_gpus"]]

    # Write the flags as a TOML file to the output folder, which all hosts share.
    loaded = migrate.load_flags(flags, each * len(chosen), follow=False)
    folder = Path(loaded.config.job.dump_folder)
    file = folder / "fmengine.toml"
    with storage_errors.writing(file, "name another --output_dir"):
        atomic_io.write(file, config.set_toml(loaded), create_folder=True)
    for notice in loaded.notices:
        print(notice, file=sys.stderr)

    # Use the same folder, interpreter and environment variables as here.
    carried = sorted(name for name in os.environ if name.startswith(_CARRIED))
    words = [*words, "--launch.workdir", os.getcwd(), "--launch.python", sys.executable]
    if carried:
        words += ["--launch.forward_env", *carried]
    return launch_command.main(["ssh", str(file.absolute()), *words])


def _local_devices(options: dict[str, str]) -> str:
    """Return the devices of this machine in ``--include localhost:0,1``. Empty if there are none."""
    for name in ("include", "exclude"):
        text = options.get(name, "")
        if not text:
            continue
        found = re.fullmatch(r"localhost(?::(\d+(?:,\d+)*))?", text)
        if not found or name == "exclude":
            rule = "is followed for the hosts of a hostfile, and as --include localhost:0,1 on this machine"
            raise ConfigError(Problem(f"--{name}", text, rule, "name devices by --include", "command line"))
        return found[1] or ""
    return ""
