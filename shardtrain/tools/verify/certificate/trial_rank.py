"""Run trials as one rank: train, record the numbers, and write their distance from the reference's numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardtrain import models
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.data import DataLoader
from shardtrain.distributed import BATCH_AXES, LOSS_AXES
from shardtrain.distributed.process_group import World
from shardtrain.layout import Draw
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import to_full
from shardtrain.optim import LossScaler
from shardtrain.tools.verify import dropout
from shardtrain.tools.verify.certificate.trial import (
    AVERAGE,
    INITIAL_SCALE,
    METRIC,
    RATE,
    SCALE,
    SHAKEN,
    SKIPPED_STEP,
    TRAINING_MODE,
    Trial,
    TrialFacts,
    errors_file,
    replaced,
)
from shardtrain.tools.verify.certificate.trial_batches import TrialBatches, end_after
from shardtrain.tools.verify.certificate.trial_causes import first_difference_of
from shardtrain.tools.verify.compare import SMALL, same_bits
from shardtrain.tools.verify.verify_rank import shake
from shardtrain.train import trainer, validation
from shardtrain.train.validation import Evaluation, Validator
from shardtrain.utils import log

VALIDATION_ROWS = 21
"""Number of validation rows. Few batch sizes divide it, so the last batch is not full."""
ROUNDING_OF_UPDATE = 1e-6
"""Norm of the rounding errors of an update, relative to that of the weights."""
MATCH = 1e-4
"""Relative distance of a gradient from a multiple of the reference that counts as rounding."""
Key = tuple[str, int, str]
"""Kind, step and tensor of a number: see ``trial.NumberError``."""


class _Stopped(Exception):
    """Ends a run between two steps, as a kill would."""


@dataclass
class TrialNumbers:
    """Numbers of a trial: scalars, and unsharded tensors. A pipeline rank has only the tensors of its stages."""

    scalars: dict[Key, float] = field(default_factory=dict)
    tensors: dict[Key, Tensor] = field(default_factory=dict)


def run_trials(rank: int, num_ranks: int, trials: Sequence[Trial], folder: str) -> None:
    """Run trials as one rank, and write their errors to ``folder``. Collective."""
    # Dropout differs between meshes by design, and a model file may import its function by name.
    dropout.switch_off()
    references: dict[str, TrialNumbers] = {}
    for trial in trials:
        numbers, facts = _run(rank, num_ranks, trial)
        if trial.is_reference:
            _write(numbers, Path(folder), trial.name)
        if trial.compared_with not in references:
            references[trial.compared_with] = _read(Path(folder), trial.compared_with)
        reference = references[trial.compared_with]
        # Numbers that some rank must have. A pipeline rank has only those of its stages.
        wanted = []
        for key in (*reference.scalars, *reference.tensors):
            if _is_compared(key, trial):
                wanted.append(key)
        # Also numbers that the reference lacks, whose error is infinite.
        errors = []
        for key, error in errors_of(numbers, reference):
            if _is_compared(key, trial):
                factor = _factor_of(key, numbers, reference)
                errors.append((*key, error, factor))
        text = json.dumps({"wanted": wanted, "errors": errors, "facts": asdict(facts)})
        errors_file(Path(folder), trial.name, rank).write_text(text, encoding="utf-8")


def _is_compared(key: Key, trial: Trial) -> bool:
    """True if a trial must have the same number as its reference."""
    kind, step, _ = key
    if kind == "initial":
        # A resumed run starts from the weights of a checkpoint, and a shaken run from changed weights.
        return trial.name != SHAKEN and 1 in trial.steps
    if kind == "validation" and not trial.loaded.config.validation.enable:
        return False
    return step in trial.steps


def _run(rank: int, num_ranks: int, trial: Trial) -> tuple[TrialNumbers, TrialFacts]:
    """Train as one rank with the trainer, and return what it recorded."""
    # Compiled code and sequence lengths of an earlier trial must not affect this one.
    torch.compiler.reset()
    numbers = TrialNumbers()
    config = trial.loaded.config
    world = World(rank, num_ranks, rank, torch.device("cpu"))
    original_step = trainer.step
    original_validation = Validator.run
    started: list[trainer.Run] = []
    averages: list[Averages] = []
    outputs = OutputSizes()
    targets: dict[str, int] = {}
    rates: dict[str, float] = {}
    scales: dict[str, list[float]] = {}

    def step(run: trainer.Run) -> trainer.Outcome | None:
        if run.state.step == trial.stop_after:
            raise _Stopped
        if not started:
            started.append(run)
            if run.moving_average is not None:
                averages.append(Averages(run, trial.is_reference))
            _begin(run, numbers, trial)
            outputs.begin(run, trial)
        if trial.leaves_out and run.state.step + 1 == SKIPPED_STEP:
            _leave_out_step(run)
        if trial.overflows and run.state.step + 1 == SKIPPED_STEP:
            _overflow(run)
        scale = 1.0
        if run.scaler is not None:
            scale = run.scaler.scale
        # If one gradient differs, clipping scales all of them. It also hides a common factor of all
        # gradients. So only the last step clips.
        of_run = run.config
        if run.state.step + 1 < of_run.training.steps:
            training = replace(of_run.training, max_norm=math.inf)
            run.config = replace(of_run, training=training)
        outcome = original_step(run)
        # Checkpoints contain the configuration, so restore it before the trainer saves.
        run.config = of_run
        outputs.end()
        if outcome is not None:
            averages_of_run = None
            if averages:
                averages_of_run = averages[0]
            _keep_step(run, outcome, numbers, averages_of_run)
            of_step = str(run.state.step)
            targets[of_step] = int(outcome.global_tokens)
            rates[of_step] = outcome.lr
            if trial.scales_loss:
                scales[of_step] = [scale]
                if trial.leaves_out:
                    scale = _expected_scale(run.state.step)
                numbers.scalars[SCALE, run.state.step, ""] = scale
        return outcome

    original_build = trainer.build

    def build(*arguments: Any) -> trainer.Run:
        run = original_build(*arguments)
        # The run computes in float32, in which a power of two changes no digit. So the loss scale of float16
        # is compared without the rounding of float16.
        if trial.scales_loss:
            interval = run.config.training.loss_scale_growth_interval
            run.scaler = LossScaler(INITIAL_SCALE, max(interval, run.config.training.steps + 1))
        return run

    mode_module = ""

    def validate(validator: Validator, at: int) -> Evaluation | None:
        nonlocal mode_module
        in_evaluation = OutputSizes()
        in_evaluation.watch_complete(started[0], trial)
        evaluation = original_validation(validator, at)
        in_evaluation.end()
        if evaluation is None:
            return None
        for name, value in evaluation.values.items():
            # The perplexity is a function of the loss, and amplifies its rounding.
            if name != "perplexity":
                numbers.scalars["validation", at, name] = value
        # All trials would have a fault of the evaluation mode, so compare with the training mode.
        numbers.scalars["validation", at, TRAINING_MODE] = evaluation.loss
        if not trial.is_reference:
            in_training = OutputSizes()
            in_training.watch_complete(started[0], trial)
            with replaced(nn.Module, "eval", _unchanged):
                again = original_validation(validator, at)
            in_training.end()
            assert again is not None
            numbers.scalars["validation", at, TRAINING_MODE] = again.loss
            mode_module = first_difference_of(in_training.sums, in_evaluation.sums) or ""
        return evaluation

    dump_folder = Path(config.job.dump_folder)
    log.setup(rank, num_ranks, dump_folder, config.metrics.save_log_file, console=False)
    # Patch the trainer instead of copying its loop, so the code under test is the code that users run.
    with ExitStack() as patches:
        patches.enter_context(replaced(trainer, "build", build))
        patches.enter_context(replaced(trainer, "step", step))
        patches.enter_context(replaced(Validator, "run", validate))
        batches = TrialBatches(trial)
        patches.enter_context(replaced(DataLoader, "__next__", batches.reader()))
        patches.enter_context(batches.of_documents())
        patches.enter_context(batches.of_short_epochs())
        open_short = _open_short(validation.open_dataloader)
        patches.enter_context(replaced(validation, "open_dataloader", open_short))
        try:
            trainer.train(trial.loaded, world)
        except _Stopped:
            pass
        finally:
            log.reset()
    facts = batches.facts()
    num_gradients = sum(kind == "gradient" and step == 1 for kind, step, _ in numbers.tensors)
    rows: Mapping[str, int] = {}
    # Ranks of other axes have the same rows.
    if started and started[0].mesh.rank("tp", "cp", "pp") == 0:
        rows = facts.rows
    facts = replace(
        facts,
        rows=rows,
        targets=targets,
        outputs=outputs.sums,
        num_gradients=num_gradients,
        core=models.find(config.model.name).LAYOUT.context or "",
        buffers=list(started[0].runner.buffers()) if started else [],
        mode_module=mode_module,
        rates=rates,
        scales=scales,
    )
    return numbers, facts


def _unchanged(module: nn.Module) -> nn.Module:
    """Replace ``nn.Module.eval``: keep the training mode."""
    return module


def _open_short(open_dataloader: Any) -> Any:
    """Return a function that opens ``VALIDATION_ROWS`` rows of validation data."""

    def open_short(*arguments: Any) -> DataLoader:
        loader: DataLoader = open_dataloader(*arguments)
        end_after(loader, VALIDATION_ROWS)
        return loader

    return open_short


def _begin(run: trainer.Run, numbers: TrialNumbers, trial: Trial) -> None:
    """Record and replace the initial weights, and record gradients from now on."""
    # The trainer stops if norms differ between ranks.
    # Here, the comparison of tensors finds the cause instead.
    run.resilience.compares_norms = False
    if trial.resumes and run.state.step != trial.steps[0] - 1:
        raise RuntimeError(
            f"the run continued at step {run.state.step} instead of {trial.steps[0] - 1}"
        )
    if run.state.step == 0:
        _keep(numbers, "initial", 0, run.runner.parameters())
        _draw_at_unit_gain(run.runner.parameters(), run.config.debug.seed)
        if trial.is_shaken:
            shake(run.runner.parameters(), run.config.debug.seed)
        # They are not compared, because a rule about updates needs the weight before the update.
        _keep(numbers, "weights", 0, run.runner.parameters())
    update = run.runner.update

    def recorded_update(optimizer: torch.optim.Optimizer, *applies: Tensor) -> None:
        # Record the gradients here, after reduction and clipping and before the update clears them.
        gradients = {}
        for name, parameter in run.runner.parameters().items():
            if parameter.grad is not None:
                gradients[name] = parameter.grad
        _keep(numbers, "gradient", run.state.step + 1, gradients)
        update(optimizer, *applies)

    run.runner.update = recorded_update  # type: ignore[assignment,method-assign]


def _leave_out_step(run: trainer.Run) -> None:
    """Read the rows of a step, and count it as a step without an update, without the code of the trainer."""
    for _ in range(run.dataloader.accumulation):
        next(run.dataloader)
    run.state.samples_consumed = run.dataloader.samples_consumed
    run.state.step += 1


def _overflow(run: trainer.Run) -> None:
    """Let the gradients of the last data rank overflow in the next forward and backward pass."""
    if run.mesh.rank(*BATCH_AXES) != run.mesh.size(*BATCH_AXES) - 1:
        return
    original = run.runner.forward_backward

    def forward_backward(batches: Any, weight: Tensor) -> Tensor:
        run.runner.forward_backward = original  # type: ignore[method-assign]
        return original(batches, weight * math.inf)

    run.runner.forward_backward = forward_backward  # type: ignore[method-assign]


def _expected_scale(step: int) -> float:
    """Return the loss scale of a step by the rule: an overflow halves the scale of the next step."""
    if step > SKIPPED_STEP:
        return INITIAL_SCALE / 2
    return INITIAL_SCALE


@torch.no_grad()
def _draw_at_unit_gain(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Draw trained matrices so that outputs are about as large as inputs.

    With its usual weights, a small model would hide the effect of some of its parts, and an adapter adds
    zero. Frozen weights keep their values, because a resumed run draws them again.
    """
    for name, parameter in parameters.items():
        if parameter.ndim < 2 or not parameter.requires_grad:
            continue
        std = parameter.size(-1) ** -0.5
        # An adapter is a small correction of its layer.
        if name.endswith(".lora_b"):
            std *= 0.1
        init_weights.draw_(parameter, name, Draw("normal", std=std), seed)


class Averages:
    """The moving averages of a trial.

    For the reference, they are computed again from the recorded weights, so a fault of all runs is detected, too.
    """

    def __init__(self, run: trainer.Run, is_reference: bool) -> None:
        """Start with the weights of the run before its first step."""
        self._decay = run.config.training.ema_decay or 0.0
        self._expected: dict[str, Tensor] = {}
        if is_reference:
            for name, parameter in run.runner.parameters().items():
                if parameter.requires_grad:
                    self._expected[name] = to_full(parameter.detach()).double()

    def keep(self, run: trainer.Run, numbers: TrialNumbers) -> None:
        """Record the averages after a step (a collective)."""
        assert run.moving_average is not None
        averages = run.moving_average.averages
        parameters = run.runner.parameters()
        for name, expected in self._expected.items():
            weight = to_full(parameters[name].detach()).double()
            expected.mul_(self._decay).add_(weight, alpha=1 - self._decay)
        if self._expected:
            averages = {name: expected.float() for name, expected in self._expected.items()}
        _keep(numbers, AVERAGE, run.state.step, averages)


def _keep_step(
    run: trainer.Run, outcome: trainer.Outcome, numbers: TrialNumbers, averages: Averages | None
) -> None:
    """Record loss, norm, metrics, weights, their averages and buffers after a step (a collective)."""
    step = run.state.step
    numbers.scalars[RATE, step, ""] = outcome.lr
    for name, value in run.runner.measures().items():
        numbers.scalars[METRIC, step, name] = value
    # Only the last pipeline stage has a loss, and the other stages add zero.
    axes = ("pp", *LOSS_AXES)
    total = run.mesh.sum(outcome.loss_sum.detach().double(), over=axes).item()
    numbers.scalars["loss", step, ""] = total / max(1, outcome.global_tokens)
    numbers.scalars["norm", step, ""] = outcome.grad_norm
    if outcome.source_sums is not None:
        sums, counts = run.mesh.sum(outcome.source_sums.clone(), over=axes)
        # A source without tokens in this step has a mean of 0.
        means = sums / counts.clamp_min(1)
        for source, mean in enumerate(means.tolist()):
            numbers.scalars["loss", step, f"data source {source}"] = mean
    tensors = {**run.runner.parameters(), **run.runner.buffers()}
    _keep(numbers, "weights", step, tensors)
    if averages is not None:
        averages.keep(run, numbers)
    if run.has_evaluation_weights:
        # These are weights that an optimizer file computes for validation, such as Schedule-Free AdamW.
        with run.evaluation_weights():
            _keep(numbers, AVERAGE, step, run.runner.parameters())


def _keep(numbers: TrialNumbers, kind: str, step: int, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype == torch.float32 or kind != "weights":
            numbers.tensors[kind, step, name] = to_full(tensor.detach()).clone()


def errors_of(numbers: TrialNumbers, reference: TrialNumbers) -> Iterator[tuple[Key, float]]:
    """Yield the error of each number of a run. It is infinite for NaN, and for a tensor that the reference lacks."""
    totals = {}
    for (kind, step, _), value in reference.scalars.items():
        if kind == "norm":
            totals[step] = value
    for key, value in numbers.scalars.items():
        if key in reference.scalars:
            yield key, _scalar_error(key[0], value, reference.scalars[key])
    for key, tensor in numbers.tensors.items():
        expected_tensor = reference.tensors.get(key)
        if expected_tensor is None or expected_tensor.shape != tensor.shape:
            yield key, math.inf
        else:
            yield key, _tensor_error(key, tensor, expected_tensor, totals)


def _scalar_error(kind: str, value: float, expected: float) -> float:
    # A metric of a step may be undefined, such as a mean over nothing.
    if kind == METRIC and math.isnan(value) and math.isnan(expected):
        return 0.0
    # The error of a norm is relative, and the error of a loss is absolute.
    scale = 1.0
    if kind == "norm":
        scale = expected
    elif kind == METRIC:
        scale = max(1.0, abs(expected))
    return _finite(abs(value - expected) / max(scale, 1e-30))


def _tensor_error(key: Key, tensor: Tensor, expected: Tensor, totals: Mapping[int, float]) -> float:
    kind, step, _ = key
    # Initial weights are drawn block by block on any mesh, so they must be bitwise equal.
    if kind == "initial":
        if same_bits(tensor, expected):
            return 0.0
        return math.inf
    difference = tensor.float() - expected.float()
    if kind == "gradient":
        # A gradient that is zero except for rounding is compared with the norm of all gradients.
        scale = max(float(expected.float().norm()), SMALL * totals[step])
        return _finite(float(difference.norm()) / max(scale, 1e-30))
    # ``max`` raises for an empty tensor.
    if not difference.numel():
        return 0.0
    return _finite(float(difference.abs().max()))


def _factor_of(key: Key, numbers: TrialNumbers, reference: TrialNumbers) -> float | None:
    """Return the factor of a gradient or an update, or None if no factor explains the difference.

    For a gradient, it is the factor between both gradients. For a weight, the difference of both weights is this
    factor times the weight before the update, as another weight decay would cause.
    """
    mine = numbers.tensors.get(key)
    theirs = reference.tensors.get(key)
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return None
    kind, step, name = key
    mine = mine.double()
    theirs = theirs.double()
    if kind == "weights":
        before = reference.tensors.get((kind, step - 1, name))
        # A buffer has no decay, and one number is always a multiple of another.
        if before is None or before.numel() < 2:
            return None
        return _multiple(mine - theirs, before.double(), ROUNDING_OF_UPDATE * float(theirs.norm()))
    if kind != "gradient":
        return None
    return _multiple(mine, theirs, MATCH * float(theirs.norm()))


def _multiple(tensor: Tensor, of: Tensor, tolerance: float) -> float | None:
    """Return the factor of least squares between two tensors, or None if the rest is above a tolerance."""
    square = float(of.square().sum())
    if not square:
        return None
    factor = float((tensor * of).sum()) / square
    # The remaining difference must be rounding.
    rest = float((tensor - factor * of).norm())
    return None if rest > tolerance else factor


class OutputSizes:
    """Sums of squares of the outputs of modules in the first step, which do not depend on how rows are divided.

    Attributes:
        sums: Sum over all calls of each module, by path, in the order in which their first calls ended.
    """

    def __init__(self) -> None:
        self.sums: dict[str, float] = {}
        self._handles: list[Any] = []

    def begin(self, run: trainer.Run, trial: Trial) -> None:
        """Start with the first step, if each rank has complete outputs for its rows and tokens."""
        # Tasks of rows pad each micro-batch, and separate documents have other padding.
        has_padding = (
            trial.loaded.config.task.name not in OF_NEXT_TOKENS or trial.separates_documents
        )
        if not run.state.step and not has_padding:
            self.watch_complete(run, trial)

    def watch_complete(self, run: trainer.Run, trial: Trial) -> None:
        """Record outputs from now on, if each rank has complete outputs for its rows and tokens."""
        config = trial.loaded.config
        # These axes divide the outputs of a module, or give a rank only some modules.
        has_parts = run.mesh.size("tp", "pp") > 1 or config.parallelism.expert_parallel_degree > 1
        # Hooks do not reliably see calls within compiled code.
        if has_parts or config.compile.enable:
            return
        for part in run.runner.parts:
            for path, module in part.named_modules():
                self._handles.append(module.register_forward_hook(partial(self._add, path)))

    def end(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _add(self, path: str, _: nn.Module, _inputs: Any, output: Any) -> None:
        # Recomputation calls a module again, within the backward pass.
        if torch._C._current_graph_task_id() != -1:
            return
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                square = float(leaf.detach().double().square().sum())
                self.sums[path] = self.sums.get(path, 0.0) + square
                return


def _finite(error: float) -> float:
    """Replace NaN by infinity, because comparing NaN with a tolerance would not report an error."""
    if math.isnan(error):
        return math.inf
    return error


def _write(numbers: TrialNumbers, folder: Path, name: str) -> None:
    """Write the numbers of a reference for the processes of other trials."""
    scalars = [(*key, value) for key, value in numbers.scalars.items()]
    # Names of tensors in the file are texts, so write each key as JSON.
    tensors = {}
    for key, tensor in numbers.tensors.items():
        tensors[json.dumps(key)] = tensor.contiguous()
    metadata = {"scalars": json.dumps(scalars)}
    save_file(tensors, folder / f"{name}.safetensors", metadata=metadata)


def _read(folder: Path, name: str) -> TrialNumbers:
    numbers = TrialNumbers()
    with safe_open(folder / f"{name}.safetensors", framework="pt") as file:
        for kind, step, name, value in json.loads(file.metadata()["scalars"]):
            numbers.scalars[kind, step, name] = value
        for text in file.keys():  # noqa: SIM118
            kind, step, name = json.loads(text)
            numbers.tensors[kind, step, name] = file.get_tensor(text)
    return numbers
