"""Reader of FMEngine's command line: flags of ``cli/train.py`` and of its launcher, used with a DeepSpeed JSON."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardtrain.compat.migrate import deepspeed
from shardtrain.compat.migrate.document import ForeignDocument, facts_of_folder, read
from shardtrain.compat.migrate.migration_report import JOINED, FileMigration, Idle, Rule, To, apply
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.variables import is_whole_number

SYSTEM = "FMEngine"
_LAUNCHER = Idle("`shardtrain train` and `shardtrain launch` set it")
_UNREAD = Idle("FMEngine ignores it too")
FLAG = "--deepspeed_config"
"""Flag that identifies FMEngine's command line in a shell script."""

KEYS: Mapping[str, Rule] = {
    "init_ckpt": JOINED,
    "use_flash_attn": Idle("attention uses the fastest available kernel"),
    "use_fused_ops": Idle("fused operations are used where available"),
    "use_custom_llama": Idle("the native Llama implementation is always used"),
    "data_path": JOINED,
    "num_workers": _UNREAD,
    "cache_dir": _UNREAD,
    "output_dir": To("job.dump_folder", str),
    "max_seq_len": To("training.seq_len", int),
    "train_steps": To("training.steps", int),
    "eval_steps": Idle("FMEngine never evaluates; use validation.freq"),
    "save_steps": To("checkpoint.interval", int),
    "log_steps": To("metrics.log_freq", int),
    "pretrain": JOINED,
    "project_name": Idle("set WANDB_PROJECT in the environment"),
    "experiment_name": Idle("set WANDB_RUN_NAME in the environment"),
    "exp_name": Idle("set WANDB_RUN_NAME in the environment"),
    "wandb": Idle("set metrics.enable_wandb"),
    "dry_run": JOINED,
    "res_dir": _UNREAD,
    "use_deepspeed": JOINED,
    "rank": _LAUNCHER,
    "local_rank": _LAUNCHER,
    "world_size": _LAUNCHER,
    "pipe_parallel_size": JOINED,
    "model_parallel_size": JOINED,
    "seed": To("debug.seed", int),
    "deepspeed_config": JOINED,
    "window_size": JOINED,
    "launcher.num_gpus": JOINED,
    "launcher.num_nodes": JOINED,
    "launcher.nnodes": JOINED,
    "launcher.nproc_per_node": JOINED,
    "launcher.hostfile": To("launch.ssh.hostfile", str),
    "launcher.include": To("launch.ssh.include", str),
    "launcher.exclude": To("launch.ssh.exclude", str),
    "launcher.*": _LAUNCHER,
}


@dataclass
class FlagLine:
    """Flags of a command line, with the line number of each.

    Attributes:
        path: The script.
        flags: Value of each flat key. Keys of the launcher start with "launcher".
        lines: Line number of each key.
    """

    path: Path
    flags: dict[str, str] = field(default_factory=dict)
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def num_processes(self) -> int | None:
        """Number of ranks that the launcher starts. None if the command line does not set it."""
        per_node = self._number("launcher\0num_gpus") or self._number("launcher\0nproc_per_node")
        nodes = self._number("launcher\0num_nodes") or self._number("launcher\0nnodes") or 1
        return per_node * nodes if per_node else None

    def num_copies(self, num_processes: int | None) -> int | None:
        """Return the number of data-parallel ranks: all ranks divided by pipeline and tensor degree."""
        each = (self._number("pipe_parallel_size") or 1) * (
            self._number("model_parallel_size") or 1
        )
        return num_processes // each if num_processes and num_processes % each == 0 else None

    def _number(self, key: str) -> int | None:
        """Return a flag as an integer of at most seven digits, or None."""
        text = self.flags.get(key, "")
        return int(text) if is_whole_number(text) and len(text) < 8 else None

    def documents(self, given: Sequence[ForeignDocument]) -> list[ForeignDocument]:
        """Read the DeepSpeed file that the command line names. Return [] if ``given`` already contains it."""
        name = self.flags.get("deepspeed_config")
        if given or not name:
            return []

        # The path is relative to the folder where the script runs, often a parent of its own folder.
        places = [Path(name), self.path.parent / name]
        places += [parent / name for parent in self.path.resolve().parents[:4]]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise ConfigError(
                Problem(
                    "deepspeed_config",
                    name,
                    rule="does not exist here",
                    fix="add the JSON file to the command",
                    where=self.path.name,
                )
            )
        return [read(file)]

    def refuse_stray(self, argv: Sequence[str]) -> None:
        """Raise ConfigError for an argument without a flag, or for a flag with two different values."""
        # ``self.flags`` has the value of the last occurrence of each flag. Only the form --flag=value is
        # compared with earlier occurrences.
        values: dict[str, str] = {}
        expects_value = False
        for argument in argv:
            name, equals, value = argument.partition("=")
            if argument.startswith("--"):
                key = name[2:].replace("-", "_")
                expects_value = bool(key) and not equals
                if key in values and equals and values[key] != value:
                    raise ConfigError(
                        Problem(
                            name,
                            value,
                            rule=f"was already set to {values[key]}",
                            fix="keep only one",
                            where="command line",
                        )
                    )
                values[key] = value if equals else self.flags.get(key, "")
            elif expects_value:
                expects_value = False
            else:
                raise ConfigError(
                    Problem(
                        "the argument",
                        argument,
                        rule="does not belong to a flag",
                        fix="write --flag value",
                        where="command line",
                    )
                )

    def read(self, num_processes: int | None, parts: Sequence[FileMigration]) -> FileMigration:
        """Translate each flag."""
        migration = FileMigration(
            ForeignDocument(self.path, self.flags, self.lines), SYSTEM, num_processes
        )
        migration.values = dict(self.flags)
        apply(migration, KEYS, "")
        if not migration.problems:
            _finish(migration, parts)
        return migration


def command_line(path: Path, text: str) -> FlagLine:
    """Find and parse the command in a shell script that starts FMEngine.

    Raises:
        ConfigError: the script contains no such command.
    """
    # A backslash continues a command on the next line. Join the lines with a zero byte instead of
    # the backslash, to keep the line number of each argument.
    commands: list[str] = []
    first_lines: list[int] = []
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if commands and commands[-1].endswith("\\"):
            commands[-1] = commands[-1][:-1] + "\0" + line
        else:
            commands.append(line)
            first_lines.append(number)

    # Parse the first command that contains ``FLAG``.
    for first_line, command in zip(first_lines, commands, strict=True):
        if command.lstrip().startswith("#"):
            continue
        arguments: list[str] = []
        line_numbers: list[int] = []
        for number, line in enumerate(command.split("\0"), first_line):
            try:
                arguments_of_line = shlex.split(line.rstrip().removesuffix("&"), comments=True)
            except ValueError:
                arguments_of_line = []
            arguments += arguments_of_line
            line_numbers += [number] * len(arguments_of_line)
        if any(argument.partition("=")[0] == FLAG for argument in arguments):
            return parse(arguments, path.name, path, line_numbers)
    raise ConfigError(
        Problem(
            "the file",
            str(path),
            rule=f"contains no command with {FLAG}, FMEngine's flag",
            fix="use the configuration file itself",
        )
    )


def parse(
    arguments: Sequence[str], where: str, path: Path | None = None, lines: Sequence[int] = ()
) -> FlagLine:
    """Parse ``--flag value`` arguments. A flag without a value is true.

    Args:
        words: All arguments of a command.
        where: Place for error messages.
        path: The script that contains the command.
        lines: Line number of each argument in the script.

    Raises:
        ConfigError: the value of a flag is a shell variable.
    """
    # In "launcher ... program.py flags", flags before the program belong to the launcher, and
    # arguments before the launcher to the shell.
    line = FlagLine(path or Path(where))
    start = 0
    for number, argument in enumerate(arguments):
        # The program comes before FMEngine's own flag.
        if argument.partition("=")[0] == FLAG:
            break
        if argument.endswith(".py"):
            start = number + 1
    launcher = start
    for number, argument in enumerate(arguments[:start]):
        if re.search(r"(^|/)(deepspeed|torchrun)$", argument):
            launcher = number
            break
    for number, argument in enumerate(arguments):
        if not argument.startswith("--") or number < launcher:
            continue
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        next_word = arguments[number + 1] if number + 1 < len(arguments) else ""
        is_program_next = number + 1 == start - 1
        text = next_word
        if equals:
            text = value
        elif not next_word or next_word.startswith("--") or is_program_next:
            text = "true"
        is_launcher_flag = number < start
        key = f"launcher\0{name}" if is_launcher_flag else name
        if "$" in text and is_launcher_flag:
            # Ignore a launcher flag with a shell variable, which the cluster sets when the job starts.
            continue
        if "$" in text:
            rule = "must not be a shell variable, because the shell is not run"
            place = f"{where}:{lines[number]}" if lines else where
            raise ConfigError(Problem(name, text, rule, "write the value", place))
        line.flags[key] = text
        if lines:
            line.lines[tuple(key.split("\0"))] = lines[number]
    return line


def require_deepspeed(document: ForeignDocument, system: str) -> None:
    """Raise ConfigError if the file that the flags pass as DeepSpeed's configuration is from another system."""
    if system != deepspeed.SYSTEM:
        raise ConfigError(
            Problem(
                "deepspeed_config",
                str(document.path),
                rule=f"must be DeepSpeed's JSON, but its keys are those of {system}",
                fix="use the file with train_micro_batch_size_per_gpu",
                where="command line",
            )
        )


def before(migration: FileMigration) -> None:
    """Translate keys of the DeepSpeed file that FMEngine's flags override: the logging interval."""
    if migration.has("steps_per_print"):
        migration.settings = [s for s in migration.settings if s.option != "metrics.log_freq"]
        migration.entries = [entry for entry in migration.entries if entry.key != "steps_per_print"]
        migration.record("steps_per_print", "ignored", "log_steps takes precedence")


def _finish(migration: FileMigration, parts: Sequence[FileMigration]) -> None:
    """Translate flags that depend on each other or on the DeepSpeed file, and set FMEngine's defaults."""
    # A flag keeps its first result. So special values come first, and the general case needs no condition.
    get = migration.get
    stages = get("pipe_parallel_size", int, 1)
    tensor = get("model_parallel_size", int, 1)
    migration.set("pipe_parallel_size", "parallelism.pipeline_parallel_degree", stages)
    migration.set("model_parallel_size", "parallelism.tensor_parallel_degree", tensor)
    world = migration.num_processes
    if world and world % (stages * tensor):
        migration.problems.append(
            Problem(
                "pipe_parallel_size",
                stages,
                rule=f"times model_parallel_size={tensor} must divide the {world} processes",
                fix="use divisors",
                where=migration.where("pipe_parallel_size"),
            )
        )
        return

    # Nodes and processes are options of the launcher.
    for key, option in (
        ("num_nodes", "launch.nodes"),
        ("nnodes", "launch.nodes"),
        ("num_gpus", "launch.nproc_per_node"),
        ("nproc_per_node", "launch.nproc_per_node"),
    ):
        count = get(f"launcher\0{key}", int)
        if count is not None:
            migration.set(f"launcher\0{key}", option, count)

    # The model.
    folder = get("init_ckpt", str)
    if folder:
        migration.set(
            "init_ckpt", "model.hf_assets_path", folder, "a folder with config.json and tokenizer"
        )
        migration.default(
            "model.flavor", "from_folder", "the folder's config.json determines the model"
        )
        migration.default("checkpoint.enable", True)
        if get("pretrain", bool, False):
            migration.record(
                "pretrain",
                "honoured",
                "weights are initialized from scratch with the sizes in config.json",
            )
        else:
            why = "from files per layer and model-parallel rank, or from safetensors"
            migration.default("checkpoint.initial_load_in_hf", True, why)
        if facts_of_folder(folder).get("model_type") == "mistral":
            for part in parts:
                if any(setting.option == "lora.target_modules" for setting in part.settings):
                    part.set(
                        "",
                        "lora.target_modules",
                        ["q_proj", "v_proj"],
                        "FMEngine's modules for Mistral",
                    )
    migration.record("pretrain", "ignored", "weights are loaded from init_ckpt")
    if get("dry_run", bool, False):
        migration.set(
            "dry_run", "checkpoint.load_only", True, "no checkpoint is saved; every run logs memory"
        )
    migration.record("dry_run", "ignored", "it is off")
    window = get("window_size", int, 0)
    if window > 0:
        migration.set(
            "window_size",
            "model.overrides.sliding_window",
            window,
            "number of tokens that each token attends to",
        )
    migration.record("window_size", "ignored", "0 or less means no limit")
    if not get("use_deepspeed", bool, True):
        migration.record(
            "use_deepspeed", "unsupported", "FMEngine requires it to be true; remove it"
        )
    migration.record("use_deepspeed", "ignored", "it must be true in FMEngine")
    migration.default("checkpoint.enable", True)

    # FMEngine repeats the data indefinitely, and joins documents with line breaks.
    data = get("data_path", str)
    if data:
        is_local = "jsonl" in data
        migration.set("data_path", "training.dataset_path", data)
        kind = "jsonl" if is_local else "huggingface"
        migration.default("training.dataset", kind, "from the path")
        if not is_local:
            migration.default("data.streaming", True)
        migration.default("data.separator", "\n", "FMEngine joins documents with a line break")
        migration.default("data.add_eos", False, "FMEngine adds no end-of-text token")
        migration.default(
            "training.on_data_end", "repeat", "FMEngine repeats the data indefinitely"
        )
    migration.record("data_path", "ignored", "it is empty")
    defaults = {
        "metrics.log_freq": 1,
        "training.seq_len": 128,
        "training.steps": 100,
        "checkpoint.interval": 100,
        "debug.seed": 3407,
    }
    for option, value in defaults.items():
        migration.default(option, value)
    migration.record("deepspeed_config", "honoured", "read together with these flags")
    _batches(migration, parts, stages, tensor)


def _batches(
    migration: FileMigration, parts: Sequence[FileMigration], stages: int, tensor: int
) -> None:
    """Set the batch of a pipeline.

    Each rank passes all rows of its step, in micro-batches of DeepSpeed's size.
    """
    settings = {setting.option: setting.value for part in parts for setting in part.settings}
    micro = settings.get("training.local_batch_size")
    total = settings.get("training.global_batch_size")
    if stages == 1 or micro is None:
        return
    migration.default(
        "parallelism.pipeline_parallel_microbatch_size", micro, "train_micro_batch_size_per_gpu"
    )
    # a copy of the model occupies this many ranks
    ranks_per_copy = stages * tensor
    copies = max(1, (migration.num_processes or ranks_per_copy) // ranks_per_copy)
    if total is not None and total % (micro * copies) == 0:
        for part in parts:
            part.settings = [s for s in part.settings if s.option != "training.local_batch_size"]
        why = "all rows of a step pass through the pipeline together"
        migration.default("training.local_batch_size", total // copies, why)
