"""FMEngine's command line: flags of ``cli/train.py`` and of its launcher, used with a DeepSpeed JSON."""

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

SYSTEM = "FMEngine"
_LAUNCHER = Idle("where ranks are belongs to `shardtrain train` and `launch`")
_UNREAD = Idle("FMEngine does not read it either")
FLAG = "--deepspeed_config"
"""Flags that identify FMEngine's command line in a shell script."""

KEYS: Mapping[str, Rule] = {
    "init_ckpt": JOINED,
    "use_flash_attn": Idle("attention takes the fastest kernel that there is"),
    "use_fused_ops": Idle("fused operations are taken wherever they are"),
    "use_custom_llama": Idle("the model is Llama's own file"),
    "data_path": JOINED,
    "num_workers": _UNREAD,
    "cache_dir": _UNREAD,
    "output_dir": To("job.dump_folder", str),
    "max_seq_len": To("training.seq_len", int),
    "train_steps": To("training.steps", int),
    "eval_steps": Idle("FMEngine never evaluates; validation.freq does so here"),
    "save_steps": To("checkpoint.interval", int),
    "log_steps": To("metrics.log_freq", int),
    "pretrain": JOINED,
    "project_name": Idle("set WANDB_PROJECT in the environment"),
    "experiment_name": Idle("set WANDB_RUN_NAME in the environment"),
    "exp_name": Idle("set WANDB_RUN_NAME in the environment"),
    "wandb": Idle("metrics.enable_wandb turns it on"),
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
    """A command line: its flags and their places."""

    path: Path
    flags: dict[str, str] = field(default_factory=dict)
    lines: dict[tuple[str, ...], int] = field(default_factory=dict)

    @property
    def num_processes(self) -> int | None:
        """Number of ranks that the launcher starts, if the line sets it."""
        per_node = self._number("launcher\0num_gpus") or self._number("launcher\0nproc_per_node")
        nodes = self._number("launcher\0num_nodes") or self._number("launcher\0nnodes") or 1
        return per_node * nodes if per_node else None

    def num_copies(self, num_processes: int | None) -> int | None:
        """Return the number of data-parallel ranks: all ranks divided by the pipeline and tensor degrees."""
        each = (self._number("pipe_parallel_size") or 1) * (self._number("model_parallel_size") or 1)
        return num_processes // each if num_processes and num_processes % each == 0 else None

    def _number(self, key: str) -> int | None:
        text = self.flags.get(key, "")
        return int(text) if text.isdecimal() and 0 < len(text) < 8 else None

    def documents(self, given: Sequence[ForeignDocument]) -> list[ForeignDocument]:
        """Return the DeepSpeed file that the line names, unless one was given."""
        name = self.flags.get("deepspeed_config")
        if given or not name:
            return []
        places = [Path(name), self.path.parent / name, *(parent / name for parent in self.path.resolve().parents[:4])]
        found = next((place for place in places if place.is_file()), None)
        if found is None:
            rule = "names a file that is not here"
            raise ConfigError(
                Problem("deepspeed_config", name, rule, "give the JSON file beside this one", self.path.name)
            )
        return [read(found)]

    def refuse_stray(self, words: Sequence[str]) -> None:
        """Raise ConfigError for an argument without a flag, and for a flag with two different values."""
        taken = ""
        given: dict[str, str] = {}
        for word in words:
            name, equals, value = word.partition("=")
            if word.startswith("--"):
                key = name[2:].replace("-", "_")
                taken = "" if equals else key
                text = value if equals else self.flags.get(key, "")
                if key in given and equals and given[key] != value:
                    rule = f"is given twice, as {given[key]} before"
                    raise ConfigError(Problem(name, value, rule, "keep one", "command line"))
                given[key] = text
            elif taken:
                taken = ""
            else:
                rule = "belongs to no flag"
                raise ConfigError(Problem("the word", word, rule, "write --flag value", "command line"))

    def read(self, num_processes: int | None, parts: Sequence[FileMigration]) -> FileMigration:
        """Translate each flag."""
        found = FileMigration(ForeignDocument(self.path, self.flags, self.lines), SYSTEM, num_processes)
        found.values = dict(self.flags)
        apply(found, KEYS, "")
        if not found.problems:
            _finish(found, parts)
        return found


def command_line(path: Path, text: str) -> FlagLine:
    """Find the command of a shell script that starts FMEngine.

    Raises:
        ConfigError: there is none.
    """
    # A backslash joins the lines of a command. Replace it with a zero byte, so the line of each
    # argument stays known.
    joined: list[str] = []
    numbers: list[int] = []
    for number, piece in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if joined and joined[-1].endswith("\\"):
            joined[-1] = joined[-1][:-1] + "\0" + piece
        else:
            joined.append(piece)
            numbers.append(number)
    for start, command in zip(numbers, joined, strict=True):
        if command.lstrip().startswith("#"):
            continue
        words = []
        lines = []
        at = start
        for piece in command.split("\0"):
            try:
                new = shlex.split(piece.rstrip().removesuffix("&"), comments=True)
            except ValueError:
                new = []
            words += new
            lines += [at] * len(new)
            at += 1
        if any(word.partition("=")[0] == FLAG for word in words):
            return parse(words, path.name, path, lines)
    rule = f"has no command with {FLAG}, as FMEngine's scripts have"
    raise ConfigError(Problem("the file", str(path), rule, "give the file of the configuration itself"))


def parse(words: Sequence[str], where: str, path: Path | None = None, lines: Sequence[int] = ()) -> FlagLine:
    """Parse ``--flag value`` arguments.

    Flags before the program are the launcher's. A flag without a value is true.
    """
    # In "runner ... program.py flags", arguments before the program belong to the launcher or the shell.
    line = FlagLine(path or Path(where))
    end = next((number for number, word in enumerate(words) if word.partition("=")[0] == FLAG), len(words))
    programs = [number for number, word in enumerate(words[:end]) if word.endswith(".py")]
    start = programs[-1] + 1 if programs else 0
    runner = next((n for n, word in enumerate(words[:start]) if re.search(r"(^|/)(deepspeed|torchrun)$", word)), None)
    for number, word in enumerate(words):
        if not word.startswith("--") or (number < start and (runner is None or number < runner)):
            continue
        name, equals, value = word[2:].partition("=")
        name = name.replace("-", "_")
        after = words[number + 1] if number + 1 < len(words) else ""
        text = after
        if equals:
            text = value
        elif after.startswith("--") or not after or number + 1 == start - 1:  # the next word is the program
            text = "true"
        key = f"launcher\0{name}" if number < start else name
        if "$" in text:
            if number < start:
                continue  # what a cluster fills in when the job starts
            at = f"{where}:{lines[number]}" if lines else where
            rule = "takes its value from the shell, which is not run here"
            raise ConfigError(Problem(name, text, rule, "write the value itself", at))
        line.flags[key] = text
        if lines:
            line.lines[tuple(key.split("\0"))] = lines[number]
    return line


def require_deepspeed(document: ForeignDocument, system: str) -> None:
    """Raise ConfigError if the flags name a DeepSpeed file, but the file is from another system."""
    if system != deepspeed.SYSTEM:
        rule = f"was taken for a file of {system}, and not for DeepSpeed's JSON"
        fix = "name the one that has train_micro_batch_size_per_gpu"
        raise ConfigError(Problem("deepspeed_config", str(document.path), rule, fix, "command line"))


def before(found: FileMigration) -> None:
    """Translate keys of the DeepSpeed file that FMEngine's flags override: logging, and the division of ranks."""
    if found.has("steps_per_print"):
        found.settings = [s for s in found.settings if s.option != "metrics.log_freq"]
        found.entries = [entry for entry in found.entries if entry.key != "steps_per_print"]
        found.answer("steps_per_print", "ignored", "log_steps decides")


def _finish(found: FileMigration, parts: Sequence[FileMigration]) -> None:
    """Translate flags that depend on each other or on the DeepSpeed file, and set the defaults of FMEngine."""
    get = found.get
    stages = get("pipe_parallel_size", int, 1)
    tensor = get("model_parallel_size", int, 1)
    found.set("pipe_parallel_size", "parallelism.pipeline_parallel_degree", stages)
    found.set("model_parallel_size", "parallelism.tensor_parallel_degree", tensor)
    world = found.num_processes
    if world and world % (stages * tensor):
        rule = f"times model_parallel_size={tensor} does not divide the {world} processes"
        found.problems.append(
            Problem("pipe_parallel_size", stages, rule, "use divisors", found.where("pipe_parallel_size"))
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
            found.set(f"launcher\0{key}", option, count)

    # The model.
    folder = get("init_ckpt", str)
    if folder:
        found.set("init_ckpt", "model.hf_assets_path", folder, "a folder with config.json and tokenizer")
        found.default("model.flavor", "from_folder", "the folder says which model it holds")
        found.default("checkpoint.enable", True)
        if get("pretrain", bool, False):
            found.answer("pretrain", "honoured", "weights start from scratch, and the folder says their sizes")
        else:
            why = "from its files per layer and model-parallel rank, or its safetensors"
            found.default("checkpoint.initial_load_in_hf", True, why)
        if facts_of_folder(folder).get("model_type") == "mistral":
            for part in parts:
                if any(setting.option == "lora.target_modules" for setting in part.settings):
                    part.set("", "lora.target_modules", ["q_proj", "v_proj"], "FMEngine's of Mistral")
    found.answer("pretrain", "ignored", "weights come from init_ckpt")
    if get("dry_run", bool, False):
        found.set("dry_run", "checkpoint.load_only", True, "nothing is saved; memory is logged in any run")
    found.answer("dry_run", "ignored", "it asks for nothing")
    window = get("window_size", int, 0)
    if window > 0:
        found.set("window_size", "model.overrides.sliding_window", window, "tokens that a token sees")
    found.answer("window_size", "ignored", "0 means no limit" if not window else "it is below 0: no limit")
    if not get("use_deepspeed", bool, True):
        found.answer("use_deepspeed", "unsupported", "FMEngine required it to be true; leave it out")
    found.answer("use_deepspeed", "ignored", "it had to be true")
    found.default("checkpoint.enable", True)

    # FMEngine repeats the data endlessly and joins documents with line breaks.
    data = get("data_path", str)
    if data:
        local = "jsonl" in data
        found.set("data_path", "training.dataset_path", data)
        found.default("training.dataset", "jsonl" if local else "huggingface", "the path tells which")
        if not local:
            found.default("data.streaming", True)
        found.default("data.separator", "\n", "documents were joined by a line break")
        found.default("data.add_eos", False, "and by nothing else")
        found.default("training.on_data_end", "repeat", "the data repeated for ever")
    found.answer("data_path", "ignored", "it is empty")
    defaults = {"metrics.log_freq": 1, "training.seq_len": 128, "training.steps": 100, "checkpoint.interval": 100}
    for option, value in {**defaults, "debug.seed": 3407}.items():
        found.default(option, value)
    found.answer("deepspeed_config", "honoured", "read beside these flags")
    _batches(found, parts, stages, tensor)


def _batches(found: FileMigration, parts: Sequence[FileMigration], stages: int, tensor: int) -> None:
    """Set the batch of a pipeline: a rank passes all its rows of a step, in micro-batches of DeepSpeed's size."""
    settings = {setting.option: setting.value for part in parts for setting in part.settings}
    micro = settings.get("training.local_batch_size")
    total = settings.get("training.global_batch_size")
    if stages == 1 or micro is None:
        return
    found.default("parallelism.pipeline_parallel_microbatch_size", micro, "train_micro_batch_size_per_gpu")
    copies = max(1, (found.num_processes or stages * tensor) // (stages * tensor))
    if total is not None and total % (micro * copies) == 0:
        for part in parts:
            part.settings = [s for s in part.settings if s.option != "training.local_batch_size"]
        found.default(
            "training.local_batch_size", total // copies, "all rows of a step go through the pipeline at once"
        )
