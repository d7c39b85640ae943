"""Save a run, and resume it at exactly the sample where it stopped, on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from shardtrain.checkpoint.collectives import all_ranks, broadcast_json, first_rank
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.checkpoint.manifest import WEIGHTS_PREFIX
from shardtrain.checkpoint.storage import Place, place
from shardtrain.config import derived
from shardtrain.data.file_hashes import RESTART
from shardtrain.data.sources._data_files import sampled
from shardtrain.distributed import BATCH_AXES
from shardtrain.hf import importing
from shardtrain.hf.hub_model import check_noted
from shardtrain.lora import FACT, peft
from shardtrain.lora.spec import Spec
from shardtrain.resilience.guards import nonfinite_tensor
from shardtrain.train import base_weights, compatibility, saved_file
from shardtrain.train.run import named_training_weights
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.config.changes import OptionChange
    from shardtrain.train.run import Run


def save(run: Run, checkpoints: Checkpoints, last: bool, wait: bool = False) -> None:
    """Write the run's state to its checkpoint folder (a collective); see ``Checkpoints.save``.

    Raises:
        NumericalError: a weight or the optimizer's state is not finite. Nothing is written.
    """
    with _stored_tensors(run) as (model, optimizer_state):
        _save(run, checkpoints, model, optimizer_state, last, wait)


def take_snapshot(run: Run, checkpoints: Checkpoints) -> None:
    """Copy the run's state to host memory (a collective). It is what a checkpoint of this step would contain."""
    with _stored_tensors(run) as (model, optimizer_state):
        facts = _facts(run, checkpoints)
        checkpoints.take_snapshot(run.state.step, model, optimizer_state, facts)


@contextmanager
def _stored_tensors(run: Run) -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Yield the tensors of a checkpoint: those of the model, and those of the optimizer (a collective)."""
    # A checkpoint stores the weights for evaluation and export as the model. If the optimizer trains separate
    # weights, the checkpoint stores the trained weights as part of the optimizer state.
    with run.evaluation_weights() as training_weights:
        model = {**weights(run), **run.averages_state_dict()}
        training_state = named_training_weights(training_weights)
        yield model, {**run.optimizer_state_dict(), **training_state}


def _save(
    run: Run,
    checkpoints: Checkpoints,
    model: dict[str, Tensor],
    optimizer_state: dict[str, Tensor],
    last: bool,
    wait: bool,
) -> None:
    # A resumed run starts from the newest checkpoint, so weights that are not finite must never be saved.
    # Buffers are not checked, because a buffer may be a mask of -inf.
    buffers = run.runner.buffers()
    checked = {}
    for key, tensor in model.items():
        name = key.removeprefix(WEIGHTS_PREFIX)
        if name not in buffers:
            checked[name] = tensor
    checked |= optimizer_state
    nonfinite_tensor.refuse_to_save(run, checked, checkpoints)

    facts = _facts(run, checkpoints)
    is_rank_0 = run.mesh.device_mesh.get_rank() == 0
    with heartbeat(f"saving step {run.state.step}", None if is_rank_0 else 0, logger.info):
        checkpoints.save(run.state.step, model, optimizer_state, facts, last, wait)


def _facts(run: Run, checkpoints: Checkpoints) -> dict[str, Any]:
    """Return the counters and positions of a checkpoint (a collective)."""
    facts: dict[str, Any] = {
        "state": run.state.to_dict(),
        "guard": run.resilience.guard.to_dict(),
        "data_fingerprint": run.dataloader.fingerprint,
        "data_files": run.dataloader.sampled_files,
        "data_contents": sampled(run.contents.record()),
        "data_unproven": sampled(run.contents.unproven()),
        "data_cursors": _gather_cursors(run),
        "best": checkpoints.best.to_dict(),
        "owes_validation": run.owes_validation,
        **compatibility.record(run),
    }
    if run.certificate is not None:
        facts["certificate"] = run.certificate
    if run.lora:
        facts[FACT] = run.lora
    if run.scaler:
        facts["scaler"] = run.scaler.state()
    return facts


def _gather_cursors(run: Run) -> list[list[int]] | None:
    """Return the cursors of all readers of streamed data (a collective). None if a cursor is not known.

    The list is empty for data that are not streamed: their position follows from the number of samples.
    """
    local = torch.from_numpy(run.dataloader.cursors(run.state.samples_consumed))
    if not len(local):
        return []
    # Each rank knows only its own readers, and has -1 for the others. So the maximum is complete.
    cursors: Tensor = run.mesh.max(local.to(run.mesh.device), over=BATCH_AXES)
    if bool((cursors < 0).any()):
        return None
    return cursors.tolist()


def resume(run: Run, checkpoints: Checkpoints) -> None:
    """Load the state from which the run starts or resumes, see ``_load_start``.

    If the checkpoint contains no averages of weights, they start as the loaded weights.
    """
    has_averages = _load_start(run, checkpoints)
    if run.moving_average is not None and not has_averages:
        run.moving_average.restart()


def _load_start(run: Run, checkpoints: Checkpoints) -> bool:
    """Resume from the run's own checkpoint, or else start from ``checkpoint.initial_load_path`` if it is set.

    A LoRA run always loads its frozen weights from ``checkpoint.initial_load_path``. Without a checkpoint of
    its own, it starts from ``lora.initial_load_path``.

    Returns:
        True if averages of weights were loaded.

    Raises:
        ConfigError: data or options differ from the checkpoint's. The message names each difference.
        CheckpointError: the checkpoint cannot be used.
    """
    options = run.config.checkpoint
    path = checkpoints.to_continue()
    start = derived.initial_weights(run.config)
    lora = run.config.lora
    if lora.enable:
        assert run.adapters is not None
        run.lora = base_weights.load(
            run.config, run.runner, run.adapters, run.mesh.device, checkpoints
        )
        start = lora.initial_load_path
    # A checkpoint in the run's folder takes precedence over initial weights.
    is_start = path is None and options.enable and start is not None
    if is_start:
        path = place(str(start))
    if path is None:
        return False

    # Initial weights in formats of other libraries.
    if is_start and lora.enable and peft.is_folder(path):
        peft.load(run.config, run.lora, run.runner.parameters(), Path(str(path)))
        return False
    if (
        is_start
        and not lora.enable
        and not options.initial_load_in_hf
        and saved_file.is_saved_file(path)
    ):
        tensors = weights(run)
        all_ranks(
            lambda: saved_file.load(run, Path(str(path)), tensors, options.initial_load_model_only)
        )
        return False
    if is_start and options.initial_load_in_hf and not lora.enable:
        _load_hub(run, path)
        return False

    # The path is a shardtrain checkpoint: load all parts that the options do not exclude.
    excluded = set(options.exclude_from_loading)
    if is_start and options.initial_load_model_only:
        excluded |= {"optimizer", "train_state", "dataloader"}
    has_averages = load(run, checkpoints, path, excluded, own=not is_start)
    logger.info(f"continuing from {path} at step {run.state.step}")
    return has_averages


def load(
    run: Run, checkpoints: Checkpoints, path: Place, excluded: Set[str], own: bool = True
) -> bool:
    """Load a checkpoint in place, and seek the data to the next sample (a collective).

    Args:
        run: the run.
        checkpoints: the run's checkpoints.
        path: the checkpoint to load.
        excluded: parts that are not loaded, as in ``checkpoint.exclude_from_loading``.
        own: True for a checkpoint of this run. False for a checkpoint of another run that this run starts
            from.

    Returns:
        True if averages of weights were loaded.

    Raises:
        ConfigError: data or options differ from the checkpoint's.
        CheckpointError: the checkpoint cannot be used.
    """
    facts = checkpoints.facts(path)
    if run.config.lora.enable:
        base_weights.check_same(run, path, facts)
    is_new_run = not own and run.config.checkpoint.initial_load_model_only
    changes = [] if is_new_run else compatibility.find_changes(run, facts, sorted(excluded))
    other_data = "" if excluded & {"dataloader", "train_state"} else _find_other_data(run, facts)

    # Reject changed options or data before any tensor is changed. The exception is a changed model: load
    # first, because a tensor of the wrong shape then raises a more specific error.
    is_other_model = any(change.option.startswith("model.") for change in changes)
    if is_new_run and not run.config.lora.enable:
        first_rank(lambda: check_noted(run.config.model, path))
    if not is_other_model:
        compatibility.refuse(run, path, changes, other_data)
    tensors = weights(run)
    skips_optimizer = "optimizer" in excluded
    optimizer_state = {} if skips_optimizer else run.optimizer_state_dict()
    # Averages are handled like the optimizer's state: both are loaded or neither.
    has_averages = False
    if run.moving_average is not None and not skips_optimizer:
        has_averages = checkpoints.has_averages(path)
    if has_averages:
        tensors |= run.averages_state_dict()
    training_weights = {} if skips_optimizer else run.empty_training_weights()
    checkpoints.load(path, tensors, {**optimizer_state, **named_training_weights(training_weights)})
    run.load_training_weights(training_weights)
    if is_other_model:
        compatibility.refuse(run, path, changes, other_data)

    if "train_state" not in excluded:
        run.state.load(facts.get("state", {}))
        folder_of_best = checkpoints.folder if own else None
        checkpoints.best.load(facts.get("best"), folder_of_best)
        run.owes_validation = (
            own and run.config.validation.enable and facts.get("owes_validation") is True
        )
        _load_guard(run, facts, path)
        _load_scaler(run, facts, path, changes)
    if "lr_scheduler" in excluded:
        # The schedule depends only on the number of updates, so 0 restarts it.
        run.state.updates = 0
    # The position in the data follows from the number of samples. Readers of a stream also need their
    # cursors. Without them, they would have to read the stream again from its start.
    cursors: np.ndarray | None = None
    if "dataloader" in excluded:
        run.state.samples_consumed = run.state.order_hash = 0
        # Forget earlier rollbacks, because the rows that they skip belong to the old data.
        run.resilience.guard.rewinds = []
    elif "train_state" not in excluded:
        cursors = _read_cursors(facts, path)
    run.dataloader.seek(run.state.samples_consumed, cursors)
    if not is_new_run:
        compatibility.keep_history(run, facts, changes)
    return has_averages


def _load_guard(run: Run, facts: Mapping[str, Any], path: Place) -> None:
    """Load the losses and norms of earlier steps, which the guard needs to detect spikes."""
    guard = facts.get("guard")
    if guard is None:
        logger.warning(
            f"checkpoint {path} contains no earlier losses: loss spikes are detected only after the guard has "
            "seen enough new losses"
        )
        return
    if not isinstance(guard, dict):
        raise CheckpointError(
            f"checkpoint {path}: the guard's state is not a table; use another checkpoint"
        )
    run.resilience.guard.load(guard)


def _load_scaler(
    run: Run, facts: Mapping[str, Any], path: Place, changes: Sequence[OptionChange]
) -> None:
    """Load the state of the loss scaler.

    If the run has changed to float16, the checkpoint contains no state, and the scaler keeps its initial one.
    """
    changes_dtype = any(change.option == "training.mixed_precision_param" for change in changes)
    if not run.scaler or ("scaler" not in facts and changes_dtype):
        return
    scaler = facts.get("scaler", {})
    if not isinstance(scaler, dict) or not all(
        isinstance(value, int | float) for value in scaler.values()
    ):
        rule = "the loss scaler's state is not a table of numbers"
        raise CheckpointError(f"checkpoint {path}: {rule}; use another checkpoint")
    run.scaler.load(scaler)


def _read_cursors(facts: Mapping[str, Any], path: Place) -> np.ndarray | None:
    """Read the cursors that ``_gather_cursors`` saved, as int64 of shape (readers, 3)."""
    saved = facts.get("data_cursors")
    if saved is None:
        return None
    try:
        return np.array(saved, np.int64).reshape(-1, 3)
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            f"checkpoint {path}: data_cursors must be rows of three numbers; use another checkpoint"
        ) from error


def _load_hub(run: Run, folder: Place) -> None:
    """Load the weights of a Hugging Face folder (a collective). If one rank fails, all ranks raise."""
    tensors = base_weights.without_new_head(run.config, weights(run))
    all_ranks(partial(importing.fill_as_configured, tensors, Path(str(folder)), run.config))
    logger.info(f"starting from the weights of {folder}")


def weights(run: Run) -> dict[str, Tensor]:
    """Return the model's tensors that checkpoints contain: all tensors, or only trained tensors in a LoRA run."""
    return held_by(run.adapters, run.model_state_dict())


def held_by(adapters: Spec | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that checkpoints contain. Without adapters, these are all of ``tensors``.

    Names in ``tensors`` have the prefix that checkpoints use.
    """
    if adapters is None:
        return tensors
    holders = {}
    for name, tensor in tensors.items():
        if adapters.holds(name.removeprefix(WEIGHTS_PREFIX)):
            holders[name] = tensor
    return holders


def _find_other_data(run: Run, facts: Mapping[str, Any]) -> str:
    """Describe how the data differ from the checkpoint's data (a collective). Empty if they are the same.

    Raises:
        ConfigError: a file was replaced during training, so part of the run was trained on other data.
    """
    # Only rank 0 knows the hashes of the files, so it broadcasts the result of its comparison.
    contents = facts.get("data_contents")
    differing = broadcast_json(run.contents.expect(contents))
    replaced = broadcast_json(run.contents.find_replaced_file(contents, facts.get("data_unproven")))
    if replaced:
        option, path, step = replaced
        raise ConfigError(
            Problem(
                option,
                path,
                rule=f"has been replaced: steps after {step} of this run were trained on other contents",
                fix=f"continue with checkpoint.load_step={step}, or {RESTART}",
            )
        )
    if facts.get("data_fingerprint") == run.dataloader.fingerprint:
        # Names, sizes and options agree, so only the hashes can show a difference.
        return f"{_first_names(differing)} differ at equal size" if differing else ""
    old_files = facts.get("data_files", {})
    new_files = run.dataloader.sampled_files
    if not isinstance(old_files, dict):
        old_files = {}
    changed = sorted(
        name for name in {*old_files, *new_files} if old_files.get(name) != new_files.get(name)
    )
    if changed:
        return f"{_first_names(changed)} differ"
    # The files look the same, so the difference is in an option or within a file.
    return (
        "tokenizer, seq_len, seed, packing, mixture, data.mode, data.readers, training.last_batch, or rows of a "
        "file of equal size differ"
    )


def _first_names(names: Sequence[str]) -> str:
    """Format at most three names, and how many more there are."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
