"""The ``shardtrain`` command: a table of verbs, each one small function that imports what it needs when it runs.

``--help``, ``config`` and a wrong configuration answer at once: torch is imported by ``train``, ``verify`` and those
verbs of ``data`` that need it, after the configuration has been found to work.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from shardtrain import __version__
from shardtrain.errors import ConfigError, Problem, ShardtrainError

if TYPE_CHECKING:
    from shardtrain.config import Loaded

USAGE = """\
usage: shardtrain VERB ...

  train [CONFIG.toml] [--nproc N] [--max_restarts N] [--section.key VALUE ...]
                                                              train on the devices of this machine
  verify [CONFIG.toml | model.py] [--mesh "tp=2,pp=2" ...]    prove that meshes change no number (--help: all options)
  config show  [CONFIG.toml] [--section.key VALUE ...]        print every option with its origin
  config check [CONFIG.toml] [--section.key VALUE ...]        report every problem; starts nothing
  config help  [SECTION[.KEY]]                                explain the options
  data VERB ...                                               prepare, check, show and probe data (data --help: all)
  checkpoint VERB ...                                         list, verify and compare checkpoints
  help, --help                                                this text
  --version                                                   print the version

Without CONFIG.toml the defaults train a small Llama on the Python standard library's own source text.
NGPU, LOG_RANK: number of ranks, and the ranks that write to the terminal ("0" unless set).
With --comm.mode fake_backend nothing is trained: one process builds rank RANK (0) of any number of ranks.
"""


DATA_USAGE = """\
usage: shardtrain data VERB ...

  prepare  [CONFIG.toml] --output FOLDER ...   turn text into shards of tokens, on all cores; goes on where it stopped
  check    [CONFIG.toml] ...                   count rows, tokens, steps; find bad rows, duplicates and leakage
  show     [CONFIG.toml] ...                   print decoded samples with what is learned, documents and positions
  probe    [CONFIG.toml] ...                   change one token and report which logits move: no leak between documents
  tokenizer train --input FILE ... ...         make a byte-level BPE tokenizer from files of yours
  download --repo_id NAME --local_dir FOLDER   fetch the tokenizer of a Hugging Face repository (HF_TOKEN is used)

The data are those of the configuration: [training] dataset and dataset_path or [data.sources.NAME], and [data].
Each verb explains itself with --help.
"""


@dataclass(frozen=True)
class Arguments:
    """What follows a verb: the configuration file, options of ours, and overrides for the configuration to read."""

    path: str | None
    nproc: int | None
    overrides: tuple[str, ...]
    help: bool = False
    max_restarts: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb; gives the exit status (see ``errors.py``). Every error a user can meet is one line each."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except ConfigError as error:
        return _complain(error.exit_code, [str(problem) for problem in error.problems])
    except ShardtrainError as error:
        return _complain(error.exit_code, [str(error)])
    except BrokenPipeError:
        # the reader of our output has left, as in `shardtrain config show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _dispatch(words: list[str]) -> int:
    verb, rest = (words[0], words[1:]) if words else ("help", [])
    if verb not in VERBS:
        names = [name for name in VERBS if not name.startswith("-")]
        near = difflib.get_close_matches(verb, names, 1)
        fix = (f"did you mean {near[0]}? " if near else "") + f"use one of {', '.join(names)}"
        raise ConfigError(Problem("shardtrain", verb, "is no verb", fix, "command line"))
    return VERBS[verb](rest)


def _complain(code: int, problems: Sequence[str]) -> int:
    from shardtrain.log import redact

    for problem in problems:
        print(f"error[{code}]: {redact(problem)}", file=sys.stderr)
    return code


def _split(words: Sequence[str]) -> Arguments:
    """Take the file, ``--nproc``, ``--max_restarts`` and ``--help`` out of the words; all others are overrides.

    The file stands before the first override, because an override may take several values.

    Raises:
        ConfigError: ``--nproc`` has no whole number above 0, or ``--max_restarts`` none.
    """
    path: str | None = None
    nproc: int | None = None
    max_restarts = 0
    overrides: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        name, equals, value = word.partition("=")
        if word in ("--help", "-h"):
            return Arguments(path, nproc, (), help=True)
        if name == "--max_restarts":
            text = value if equals else (remaining.pop(0) if remaining else "")
            if not text.isdecimal():
                rule = "must be a whole number of restarts"
                raise ConfigError(
                    Problem("--max_restarts", text, rule, "write it like --max_restarts 3", "command line")
                )
            max_restarts = int(text)
        elif name == "--nproc":
            text = value if equals else (remaining.pop(0) if remaining else "")
            if not text.isdecimal() or int(text) < 1:
                rule = "must be a whole number of processes above 0"
                raise ConfigError(Problem("--nproc", text, rule, "write it like --nproc 2", "command line"))
            nproc = int(text)
        elif path is None and not overrides and not word.startswith("-"):
            path = word
        else:
            overrides.append(word)
    return Arguments(path, nproc, tuple(overrides), max_restarts=max_restarts)


def _load(arguments: Arguments) -> Loaded:
    from shardtrain import config

    return config.load(arguments.path, arguments.overrides)


def _train(words: list[str]) -> int:
    """Train: as one rank where a launcher started this process, else with as many ranks as fit this machine."""
    arguments = _split(words)
    if arguments.help:
        print(USAGE, end="")
        return 0
    from shardtrain.launch import environment

    loaded = _load(arguments)
    if loaded.config.comm.mode == "fake_backend":
        return _train_nothing(loaded, arguments.nproc)
    if environment.is_rank(os.environ):
        if arguments.max_restarts and "SHARDTRAIN_PARENT" not in os.environ:
            rule = "is for ranks that this command starts, and a launcher has started this one"
            raise ConfigError(
                Problem("--max_restarts", arguments.max_restarts, rule, "use the launcher's own", "command line")
            )
        _train_rank(loaded)
    environment.refuse_one_of_several_nodes(os.environ)
    return _train_here(loaded, arguments, words)


def _train_rank(loaded: Loaded) -> NoReturn:
    """One rank of several, started by torchrun, by srun, or by ``_train_here`` as a fresh process."""
    from shardtrain.launch import environment, local

    if "SHARDTRAIN_PARENT" in os.environ:
        local.detach(int(os.environ["SHARDTRAIN_PARENT"]))
    environment.adopt_slurm(os.environ)
    world_size = int(os.environ["WORLD_SIZE"])
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    environment.set_allocator_default(os.environ)
    environment.set_process_defaults(os.environ, local_ranks, environment.usable_cores(), alone=False)
    if "SHARDTRAIN_PARENT" in os.environ:
        local.leave(local.run_child(loaded, _trainer()))
    _require(loaded, world_size)
    local.leave(local.run_rank(loaded, _trainer(), world_size))


def _train_here(loaded: Loaded, arguments: Arguments, words: list[str]) -> int:
    """Check the configuration, choose the number of ranks, and run them from this process."""
    from shardtrain.launch import environment, local

    environment.set_allocator_default(os.environ)
    accelerators = environment.count_accelerators(loaded.config.training.device)
    cores = environment.usable_cores()
    choice = environment.choose_processes(loaded.config, arguments.nproc, os.environ, accelerators, cores)
    _require(loaded, choice.count)  # what it has to tell without stopping is in the rank's log
    environment.set_process_defaults(os.environ, choice.count, cores, alone=True)
    ranks = "1 process" if choice.count == 1 else f"{choice.count} processes"
    print(f"shardtrain {__version__}: training with {ranks} ({choice.reason})", file=sys.stderr, flush=True)
    restarts = arguments.max_restarts
    if choice.count == 1 and not restarts:
        local.prepare(Path(loaded.config.job.dump_folder))
        return local.run_rank(loaded, _trainer())
    # A fork of a process that has used CUDA breaks, and macOS's libraries do not survive one. On Linux CPUs it saves
    # each rank the import of torch: measured in docs/launch.md.
    if accelerators == 0 and sys.platform == "linux":
        return local.launch(loaded, choice.count, main=_trainer(), max_restarts=restarts)
    command = (sys.executable, "-m", "shardtrain", "train", *words)
    return local.launch(loaded, choice.count, command=command, max_restarts=restarts)


def _train_nothing(loaded: Loaded, nproc: int | None) -> int:
    """Check the configuration for any number of ranks, and build one rank's share of it without memory."""
    from shardtrain import config
    from shardtrain.launch import environment

    accelerators = environment.count_accelerators(loaded.config.training.device)
    cores = environment.usable_cores()
    size = environment.choose_processes(loaded.config, nproc, os.environ, accelerators, cores).count
    rank = environment.simulated_rank(os.environ, size)
    notices = config.require(loaded, world_size=size)  # of this machine's devices nothing is asked
    environment.set_process_defaults(os.environ, 1, cores, alone=True)
    from shardtrain import dry_run

    for line in dry_run.main(loaded, rank, size, notices):
        print(line, flush=True)
    return 0


def _require(loaded: Loaded, world_size: int) -> None:
    """Stop unless this configuration works on this machine; every problem is told at once."""
    from shardtrain import config
    from shardtrain.launch import environment

    found = environment.count_accelerators(loaded.config.training.device)
    device = loaded.config.training.device
    device = ("cuda" if found else "cpu") if device == "auto" else device
    config.require(loaded, world_size=world_size, device=device, num_devices=found)


def _trainer() -> Callable[[Loaded], object]:
    from shardtrain.train import main as train

    return train


def _verify(words: list[str]) -> int:
    """Compare meshes with one process, through the trainer's own step."""
    from shardtrain import verify

    return verify.main(words, _train_module)


def _train_module() -> Any:
    from shardtrain import train

    return train


def _config(words: list[str]) -> int:
    """Show, check or explain the configuration."""
    action, rest = (words[0], words[1:]) if words else ("", [])
    if action not in CONFIG_ACTIONS:
        fix = f"use one of {', '.join(CONFIG_ACTIONS)}"
        raise ConfigError(Problem("shardtrain config", action or None, "needs an action", fix, "command line"))
    return CONFIG_ACTIONS[action](rest)


def _config_show(words: list[str]) -> int:
    from shardtrain import config

    print(config.show(_load(_split(words))))
    return 0


def _config_check(words: list[str]) -> int:
    """Print errors, then notes; only errors make the status 2. This machine counts with ``--nproc`` alone."""
    from shardtrain import config

    arguments = _split(words)
    loaded = _load(arguments)
    extra = config.machine_notes(loaded, arguments.nproc, None, None) if arguments.nproc else ()
    report, code = config.check_report(loaded, extra)
    print(report)
    return code


def _config_help(words: list[str]) -> int:
    from shardtrain import config

    name = words[0].lstrip("-") if words else ""
    try:
        print(config.help_text(name))
    except KeyError as error:
        raise ConfigError(str(error.args[0])) from None
    return 0


def _data(words: list[str]) -> int:
    """Work with data: one module of ``data_tools`` per verb."""
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if verb in ("", "help", "--help", "-h"):
        print(DATA_USAGE, end="")
        return 0
    if verb not in DATA_VERBS:
        near = difflib.get_close_matches(verb, DATA_VERBS, 1)
        fix = (f"did you mean {near[0]}? " if near else "") + f"verbs are {', '.join(DATA_VERBS)}"
        raise ConfigError(Problem("shardtrain data", verb, "is no verb", fix, "command line"))
    tool = importlib.import_module(f"shardtrain.data_tools.{verb}")
    return int(tool.main(rest))


def _checkpoint(words: list[str]) -> int:
    """Look at checkpoints."""
    from shardtrain.checkpoint import command

    return command.main(words)


def _import(words: list[str]) -> int:
    """Take weights from a Hugging Face folder."""
    from shardtrain.hub import command

    return command.import_main(words)


def _export(words: list[str]) -> int:
    """Give weights to a Hugging Face folder."""
    from shardtrain.hub import command

    return command.export_main(words)


def _help(_words: list[str]) -> int:
    print(USAGE, end="")
    return 0


def _version(_words: list[str]) -> int:
    print(f"shardtrain {__version__}")
    return 0


CONFIG_ACTIONS: dict[str, Callable[[list[str]], int]] = {
    "show": _config_show,
    "check": _config_check,
    "help": _config_help,
}

DATA_VERBS = ("prepare", "check", "show", "probe", "tokenizer", "download")

VERBS: dict[str, Callable[[list[str]], int]] = {
    "train": _train,
    "verify": _verify,
    "config": _config,
    "data": _data,
    "checkpoint": _checkpoint,
    "import": _import,
    "export": _export,
    "help": _help,
    "--help": _help,
    "-h": _help,
    "--version": _version,
}
