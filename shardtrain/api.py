"""Python API for notebooks and scripts, exported by ``shardtrain``. See ``docs/python.md``.

Each function corresponds to the verb of the same name. It raises the errors of that verb
(``shardtrain.utils.errors``) instead of ending the process. The trainer does not depend on this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardtrain import config as configs
from shardtrain.checkpoint.choice import step_name
from shardtrain.config import Loaded
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.distributed import LOSS_AXES
from shardtrain.facts.dtypes import COMPUTE_DTYPES
from shardtrain.facts.file_kinds import known_endings
from shardtrain.launch import failure, local
from shardtrain.ops import chosen_kernels
from shardtrain.ops.accelerator import sum_dtype
from shardtrain.resilience.resilience import Resilience
from shardtrain.tools.evaluate import sets
from shardtrain.tools.evaluate.evaluate_request import RowOptions, data_options
from shardtrain.tools.generate.answer import Answers
from shardtrain.tools.generate.generate_request import TextOptions, check
from shardtrain.tools.generate.prompts import read_row
from shardtrain.tools.generate.trained_model import OpenedModel, open_model
from shardtrain.tools.plan import hardware, planning
from shardtrain.tools.plan.planning import Plan
from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.report import page
from shardtrain.tools.verify.verify_report import MeshResult as MeshResult
from shardtrain.train import compatibility, preflight, shutdown, trainer
from shardtrain.utils import atomic_io, log, python_child, storage_errors, variables
from shardtrain.utils.errors import ConfigError, Problem, ShardtrainError
from shardtrain.utils.python_api import accepts_fields, python_function

if TYPE_CHECKING:
    from shardtrain.checkpoint.folder import Checkpoints
    from shardtrain.checkpoint.train_state import TrainState
    from shardtrain.distributed.process_group import World
    from shardtrain.train.run import Run

__all__ = [
    "StepResult",
    "Trainer",
    "evaluate",
    "generate",
    "load_config",
    "load_model",
    "plan",
    "report",
    "verify",
]


@python_function
def load_config(path: str | Path | None = None, options: Mapping[str, Any] | None = None) -> Loaded:
    """Read a TOML file or a preset (``"debug"``), and set options over it.

    >>> load_config("debug", {"training.steps": 3}).config.training.steps
    3

    Raises:
        ConfigError: an option is unknown or a value is wrong. The message lists all of them.
    """
    return configs.load(path, _arguments(options))


def _as_list(texts: str | Sequence[str]) -> list[str]:
    """Convert to a list. A plain str becomes a single item."""
    return [texts] if isinstance(texts, str) else list(texts)


def _loaded(config: Loaded | str | Path | None, options: Mapping[str, Any] | None) -> Loaded:
    """Load the configuration, unless the argument is already loaded."""
    if not isinstance(config, Loaded):
        return configs.load(config, _arguments(options))
    if options:
        raise ConfigError(
            Problem(
                "options",
                dict(options),
                rule="cannot be combined with a loaded configuration",
                fix="pass them to load_config",
            )
        )
    return config


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on all ranks."""

    step: int
    loss: float
    """Mean over the target tokens of the step."""
    grad_norm: float
    """Before clipping."""
    lr: float
    num_tokens: int
    """Target tokens over all ranks."""


class Trainer:
    """A run in this process. ``train()`` completes the run, ``step()`` takes a single optimizer step.

    The process is the only rank, or one of the ranks that torchrun started. Like ``shardtrain train``, a run
    resumes from the newest checkpoint in its folder. Use the trainer as a context manager, or call
    ``close()``.

        with shardtrain.Trainer(shardtrain.load_config("debug", {"training.steps": 20})) as trainer:
            while (result := trainer.step()) is not None:
                print(result.step, result.loss)
    """

    @python_function
    def __init__(
        self, config: Loaded | str | Path | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Check the configuration on this machine. The model is built on first use.

        Raises:
            ShardtrainError: with all problems that ``shardtrain train`` would report.
        """
        self._loaded = _loaded(config, options)
        # undone in the opposite order by close()
        self._stack = ExitStack()
        self._environment = _EnvironmentChanges()
        self._stack.callback(self._environment.undo)
        self._stack.callback(_restore, (log.logger.level, log.logger.propagate), _switches())
        # a process group puts its rank before traces
        self._stack.callback(setattr, sys, "excepthook", sys.excepthook)
        self._open: tuple[World, Run, Checkpoints] | None = None
        self._closed = False
        # as torchrun has set them; a notebook has none of both, and is the only rank
        _, size = variables.rank_and_size(os.environ)
        local_size = variables.number(os.environ, "LOCAL_WORLD_SIZE", "1", least=1)
        try:
            with self._environment.noted():
                preflight.require(
                    self._loaded, preflight.this_machine(self._loaded, None, size, local_size)
                )
        except BaseException:
            self.close()
            raise

    @property
    def config(self) -> configs.Config:
        """The configuration of the run."""
        return self._loaded.config

    @property
    def state(self) -> TrainState:
        """Counters of the run: ``step``, ``tokens_seen``, ``samples_consumed``."""
        return self._opened()[1].state

    @property
    def model(self) -> nn.Module:
        """The sharded model of this rank. With pipeline parallelism, the rank's first stage."""
        return self._opened()[1].runner.parts[0]

    def step(self) -> StepResult | None:
        """Take one optimizer step on all ranks, and save a checkpoint if due. Return None after the last step.

        Only ``train()`` writes metrics.
        """
        _, run, checkpoints = self._opened()
        if run.state.step >= run.total_steps:
            return None
        try:
            outcome = trainer.step(run)
        except Exception as error:
            raise shutdown.explain(error, run) from error
        if outcome is None:
            return None
        checkpoints.poll()
        if checkpoints.is_due(run.state.step, run.total_steps):
            shutdown.save_after_step(run, checkpoints, nullcontext)
        # the ranks of these axes have other tokens or, in a pipeline, no loss; the sum over them is that of the step
        total = run.mesh.sum(
            outcome.loss_sum.detach().to(sum_dtype(run.mesh.device)), over=("pp", *LOSS_AXES)
        ).item()
        tokens = outcome.global_tokens
        return StepResult(
            run.state.step, total / max(tokens, 1), outcome.grad_norm, outcome.lr, tokens
        )

    def train(self) -> TrainState:
        """Train to the end with metrics, validation and checkpoints, then close. Return the final counters.

        Raises:
            ShardtrainError: the error that would end ``shardtrain train``. ``exit.json`` in the run's folder
                records it, unless the error requires leaving the folder unchanged.
        """
        world, run, checkpoints = self._opened()
        folder = Path(self.config.job.dump_folder)
        try:
            if self.config.checkpoint.create_seed_checkpoint:
                shutdown.save_seed(run, checkpoints)
                state = run.state
            else:
                state = trainer.run_to_end(self._loaded, world, run, checkpoints)
        except BaseException as error:
            report = failure.describe(error, world.rank)
            if not report.leaves_folder_alone:
                failure.write_exit(folder, report, report.exit_code)
            raise
        else:
            if world.rank == 0:
                failure.write_exit(folder, None, 0)
        finally:
            self.close()
        return state

    def close(self) -> None:
        """Leave the process group, release the folder, and restore logging, environment and PyTorch settings.

        Further calls have no effect.
        """
        self._closed = True
        self._open = None
        self._stack.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _opened(self) -> tuple[World, Run, Checkpoints]:
        if self._closed:
            raise ShardtrainError(
                "this Trainer is closed; make another one, which continues from the last checkpoint"
            )
        if self._open is None:
            # The constructor only checks the configuration. The first use joins the process group and builds the model.
            resilience = Resilience()
            try:
                with self._environment.noted():
                    local.prepare(
                        Path(self.config.job.dump_folder), not local.has_live_run(self._loaded)
                    )
                    world = self._stack.enter_context(trainer.joined(self._loaded, resilience))
                    self._loaded = compatibility.keep_batch_size(self._loaded, world)
                    run, checkpoints = self._stack.enter_context(
                        trainer.opened(self._loaded, world, resilience)
                    )
            except BaseException:
                self.close()
                raise
            self._open = world, run, checkpoints
        return self._open


@python_function
def load_model(
    path: str | Path,
    dtype: str | None = None,
    tokenizer: str | None = None,
    config: str | Path | None = None,
    step: str | int | None = None,
    use_ema: bool = False,
) -> OpenedModel:
    """Load a trained model with its tokenizer (``.model``, ``.tokenizer``, ``.config``) on the CPU.

    Args:
        path: the folder of a run, of a checkpoint, or in Hugging Face format.
        dtype: "float32", "bfloat16" or "float16"; the run's own compute dtype if None.
        tokenizer: path of a tokenizer, or "bytes", for a Hugging Face folder that has none. Only text needs one:
            ``generate``, ``evaluate`` and ``.tokenizer`` raise without one.
        config: the run's TOML file. A run of your own model file needs it, because a file of code that a folder names
            is executed only if you name the configuration yourself.
        step: checkpoint of a run: "latest", "best" or a number. None is the best if the run keeps one
            (``checkpoint.keep_best``), else the latest. The name of the model has the step: ``print(model)``.
        use_ema: load the averaged weights of ``training.ema_decay``.

    Raises:
        ConfigError, CheckpointError: there is no model, or it is damaged.
    """
    if not Path(path).exists():
        raise ConfigError(
            Problem(
                "path",
                str(path),
                rule="does not exist",
                fix="name a run's folder or a checkpoint",
            )
        )
    if dtype not in (None, *COMPUTE_DTYPES):
        raise ConfigError(
            Problem(
                "dtype",
                dtype,
                rule=f"must be one of {', '.join(COMPUTE_DTYPES)}",
                fix="omit it to use the run's dtype",
            )
        )
    config_file = None if config is None else Path(config)
    wanted = None if step is None else step_name(step)
    return open_model(
        Path(path),
        config_file,
        dtype,
        tokenizer_path=tokenizer,
        step=wanted,
        use_ema=use_ema,
        needs_text=False,
    )


@python_function
@accepts_fields(TextOptions)
def generate(model: OpenedModel, prompts: str | Sequence[str], text: TextOptions) -> list[str]:
    """Return the text that follows each prompt. With ``temperature`` 0 each token is the most likely one.

    A plain str is one prompt, and one ``stop`` text. With ``no_cache`` keys and values are computed again for each new
    token, which every attention core allows. The other parameters are the options of ``shardtrain generate --help``.
    """
    texts = _as_list(prompts)
    if not texts:
        return []
    check(text)
    rows = [
        read_row(
            json.dumps({"prompt": prompt}).encode(), f"prompts[{number}]", "prompt", "prediction"
        )
        for number, prompt in enumerate(texts)
    ]
    return Answers(text, model, is_first=False).of(rows, "prompt")


@python_function
@accepts_fields(RowOptions)
def evaluate(
    model: OpenedModel,
    dataset: str | Path | Mapping[str, Any],
    rows: RowOptions,
    options: Mapping[str, Any] | None = None,
) -> dict[str, float | int | None]:
    """Return the mean ``loss`` per target token in nats, ``perplexity`` and ``bits_per_byte`` on a set of rows.

    ``dataset`` is a file (.jsonl, .txt, .parquet, ...), a folder of prepared tokens, or options of ``[validation]``.
    Each row is measured by itself, and the format of the rows is detected by their columns. ``options`` of ``[data]``
    change this: ``{"data.format": "chat", "data.packing": "concat"}``. The other parameters are options of
    ``shardtrain evaluate --help``.

    Raises:
        ConfigError, DataError: the set cannot be opened, or has nothing to predict.
    """
    seq_len = sets.seq_len_of(model, rows)
    if isinstance(dataset, Mapping):
        of_validation = {"validation": {"seq_len": seq_len, **dataset}}
        section = configs.load(None, _arguments(of_validation)).config.validation
    else:
        path = Path(dataset)
        if not path.exists():
            raise ConfigError(
                Problem(
                    "dataset",
                    str(dataset),
                    rule="does not exist",
                    fix="name a file or a folder of tokens",
                )
            )
        section = sets.section_of(path, rows.batch_size, seq_len)
        if not section.dataset:
            raise ConfigError(
                Problem(
                    "dataset",
                    str(dataset),
                    rule="has an ending that no dataset reads",
                    fix=f"name a file that ends with {known_endings()}, or pass options of [validation] as a dict",
                )
            )
    given = data_options(load_config(None, options))
    if rows.text_field is not None:
        given["text_field"] = rows.text_field
    return sets.measure(sets.row_by_row(model.with_data(**given), section, given), section)


@python_function
def report(runs: str | Path | Sequence[str | Path], output: str | Path = "report.html") -> Path:
    """Write an HTML report of one or more run folders, like ``shardtrain report``. Return its path.

    Raises:
        ConfigError: a folder is not a run folder or has no metrics, or ``output`` is in a missing folder.
    """
    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    if not folders:
        raise ConfigError(
            Problem(
                "runs",
                folders,
                rule="must have at least one folder",
                fix="name that of a run",
            )
        )
    path = Path(output)
    if not path.parent.is_dir():
        raise ConfigError(
            Problem(
                "output",
                str(output),
                rule="is in a folder that does not exist",
                fix="create the folder",
            )
        )
    for folder in folders:
        # Trainer.step() writes no metrics
        if (Path(folder) / RESOLVED_CONFIG).is_file() and not (
            Path(folder) / "metrics.jsonl"
        ).is_file():
            raise ConfigError(
                Problem(
                    "runs",
                    str(folder),
                    rule="is a run without metrics.jsonl, so there is nothing to report: only train() writes metrics",
                    fix="run it with train()",
                )
            )
    with storage_errors.writing(path, "name another file with output="):
        atomic_io.write(path, page.build([run_files.read(Path(folder)) for folder in folders]))
    return path


@python_function
def plan(
    config: Loaded | str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    gpus: int | None = None,
    device: str = "h100",
) -> Plan:
    """Estimate memory, time and bottlenecks of a configuration, like ``shardtrain plan``.

    The devices need not be present on this machine.

    Args:
        config: a loaded configuration, a TOML file or a preset.
        options: options that override the file or preset.
        gpus: number of devices. None is the smallest number that fits the configured mesh.
        device: a name from ``shardtrain plan --help``, or a TOML file that describes a device (docs/plan.md).

    Raises:
        ConfigError: the configuration is invalid for this number of ranks, or the device is unknown.
    """
    loaded = _loaded(config, options)
    row = hardware.find(device)
    if gpus is not None and not 1 <= gpus <= planning.MOST_DEVICES:
        raise ConfigError(
            Problem(
                "gpus",
                gpus,
                rule=f"must be an integer from 1 to {planning.MOST_DEVICES}",
                fix="write it like gpus=64",
            )
        )
    world_size = planning.smallest_world(loaded.config, row) if gpus is None else gpus
    configs.require_to_build(loaded, world_size)
    return planning.make(loaded.config, world_size, row)


@python_function
def verify(
    path: str | Path | None = None,
    options: Mapping[str, Any] | None = None,
    *,
    meshes: str | Sequence[str] = (),
    steps: int = 3,
) -> list[MeshResult]:
    """Compare meshes with a single process, like ``shardtrain verify``. Return one result per mesh.

    The ``verdict`` of a result is "same" if the mesh matches. The comparison runs in a separate process,
    because ranks cannot be forked from a process that has already computed.

    Args:
        path: a TOML file, a preset or a model file.
        options: options that override the file or preset.
        meshes: meshes to compare, such as ``"tp=2,pp=2"``.
        steps: number of training steps.

    Raises:
        ConfigError: a mesh is not possible, or the model file violates its contract.
    """
    given = [str(path)] if path is not None else []
    if given and given[0].startswith("-"):
        given = [f"./{given[0]}"]  # a file, and not an option of the command
    arguments = [
        *given,
        "--json",
        "--steps",
        str(steps),
        *(("--mesh", *_as_list(meshes)) if meshes else ()),
        *_arguments(options),
    ]
    command = python_child.command("shardtrain", "verify", *arguments)
    done = subprocess.run(command, capture_output=True, text=True)
    # Status 4 means that a mesh differs. The table is complete then too.
    if done.returncode not in (0, 4):
        # of "error[2]: text" the text; other lines are progress
        lines = [
            line.partition(": ")[2]
            for line in done.stderr.splitlines()
            if line.startswith("error[")
        ]
        raise ConfigError("\n".join(lines) or done.stderr.strip())
    rows = json.loads(done.stdout)["rows"]
    return [
        MeshResult(**{k: v for k, v in row.items() if k in MeshResult.__annotations__})
        for row in rows
    ]


def _arguments(options: Mapping[str, Any] | None) -> list[str]:
    arguments: list[str] = []
    for name, value in (options or {}).items():
        if isinstance(value, Mapping):
            arguments += _arguments({f"{name}.{key}": one for key, one in value.items()})
        elif isinstance(value, list | tuple) and value:
            arguments += [f"--{name.lstrip('-')}", *map(_text, value)]
        else:
            arguments.append(f"--{name.lstrip('-')}={_text(value)}")
    return arguments


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def _switches() -> tuple[bool, bool, bool, bool]:
    cudnn = torch.backends.cudnn
    deterministic = torch.are_deterministic_algorithms_enabled()
    return (
        deterministic,
        torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn.deterministic,
        cudnn.benchmark,
    )


class _EnvironmentChanges:
    """Environment variables that the trainer has set. Later changes by the user are kept."""

    def __init__(self) -> None:
        self._changes: dict[str, tuple[str | None, str | None]] = {}
        """Name -> values before and after. None if the variable was not set."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Record the variables that change inside the block."""
        before = dict(os.environ)
        try:
            yield
        finally:
            for name in before.keys() | os.environ.keys():
                was = before.get(name)
                now = os.environ.get(name)
                if was != now:
                    self._changes[name] = (self._changes.get(name, (was, None))[0], now)

    def undo(self) -> None:
        """Restore each variable that still has the value set by the trainer."""
        for name, (was, now) in self._changes.items():
            if os.environ.get(name) != now:
                continue
            if was is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = was
        self._changes.clear()


def _restore(logging_was: tuple[int, bool], switches: tuple[bool, bool, bool, bool]) -> None:
    log.reset()
    log.logger.setLevel(logging_was[0])
    log.logger.propagate = logging_was[1]
    chosen_kernels.use(chosen_kernels.PYTORCH)
    torch.use_deterministic_algorithms(switches[0], warn_only=switches[1])
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = switches[2:]
