"""Save a run, and continue it on any number of ranks, at exactly the sample where it stopped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
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
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.log import logger

if TYPE_CHECKING:
    from shardtrain.train.run import Run


def save(run: Run, checkpoints: Checkpoints, last: bool, wait: bool = False) -> None:
    """Write the run's state to its checkpoint folder (a collective); see ``Checkpoints.save``.

    Raises:
        NumericalError: before anything is written, where the update left a weight or the optimizer's state not finite.
    """
    model = weights(run)
    rest = run.optimizer_state_dict()

    # a weight that is not finite must not become the newest checkpoint, from which everything continues
    buffers = run.runner.buffers()  # not judged: a mask of -inf is one
    named = {name.removeprefix(WEIGHTS_PREFIX): tensor for name, tensor in model.items()}
    learned = {name: tensor for name, tensor in named.items() if name not in buffers}
    nonfinite_tensor.refuse_to_save(run, {**learned, **rest}, checkpoints)

    # where the readers of a stream are; other data need the count of samples alone
    cursors: list[list[int]] | None = []
    own = torch.from_numpy(run.dataloader.cursors(run.state.samples_consumed))
    if len(own):
        # a rank knows the cursors of its own readers and has -1 for others; one that nobody knows makes all useless
        known: Tensor = run.mesh.max(own.to(run.mesh.device), over=BATCH_AXES)
        cursors = None if bool((known < 0).any()) else known.tolist()

    # what is not a tensor, as JSON
    facts: dict[str, Any] = {
        "state": run.state.to_dict(),
        "guard": run.resilience.guard.to_dict(),
        "data_fingerprint": run.dataloader.fingerprint,
        "data_files": run.dataloader.sampled_files,
        "data_contents": sampled(run.contents.record()),
        "data_unproven": sampled(run.contents.unproven()),
        "data_cursors": cursors,
        "best": checkpoints.best.to_dict(),
        "owes_validation": run.owes_validation,
        **compatibility.record(run),
    }
    if run.lora:
        facts[FACT] = run.lora
    if run.scaler:
        facts["scaler"] = run.scaler.state()
    with heartbeat(f"saving step {run.state.step}", None if run.mesh.device_mesh.get_rank() == 0 else 0, logger.info):
        checkpoints.save(run.state.step, model, rest, facts, last, wait)


def resume(run: Run, checkpoints: Checkpoints) -> None:
    """Continue from the run's own checkpoint, or start from ``checkpoint.initial_load_path``, if there is one.

    A run of adapters takes the frozen weights from there in either case, and starts from ``lora.initial_load_path``.

    Raises:
        ConfigError: when the data or options are not those of the checkpoint; names each that differs.
        CheckpointError: when the checkpoint cannot be used.
    """
    options = run.config.checkpoint
    path = checkpoints.to_continue()
    start = derived.initial_weights(run.config)
    lora = run.config.lora
    if lora.enable:
        assert run.adapters is not None
        run.lora = base_weights.load(run.config, run.runner, run.adapters, run.mesh.device, checkpoints)
        start = lora.initial_load_path
    # its own checkpoint goes before the weights that a run may start from
    initial = path is None and options.enable and start is not None
    if initial:
        path = place(str(start))
    if path is None:
        return

    # weights of other formats, which hold no run that could be continued
    if initial and lora.enable and peft.is_folder(path):
        peft.load(run.config, run.lora, run.runner.parameters(), Path(str(path)))
        return
    if initial and not lora.enable and not options.initial_load_in_hf and saved_file.is_saved_file(path):
        tensors = weights(run)
        all_ranks(lambda: saved_file.load(run, Path(str(path)), tensors, options.initial_load_model_only))
        return
    if initial and options.initial_load_in_hf and not lora.enable:
        _load_hub(run, path)
        return

    # a checkpoint of this program: all of it, but for what the options exclude
    excluded = set(options.exclude_from_loading)
    if initial and options.initial_load_model_only:
        excluded |= {"optimizer", "train_state", "dataloader"}
    load(run, checkpoints, path, excluded, own=not initial)
    logger.info(f"continuing from {path} at step {run.state.step}")


def load(run: Run, checkpoints: Checkpoints, path: Place, excluded: Set[str], own: bool = True) -> None:
    """Fill the run in place from a checkpoint, and seek its data to the next sample; raises what ``resume`` raises.

    ``own``: whether the checkpoint is of this run, rather than of another one that it starts from.
    """
    facts = checkpoints.facts(path)
    if run.config.lora.enable:
        base_weights.check_same(run, path, facts)
    is_new_run = not own and run.config.checkpoint.initial_load_model_only
    changes = [] if is_new_run else compatibility.find_changes(run, facts, sorted(excluded))
    other_data = _find_other_data(run, facts) if not excluded & {"dataloader", "train_state"} else ""

    # a run with other options or data is refused before a tensor is touched; but of another model the load itself says
    # more, the name of a tensor that does not fit, so that it goes first
    is_other_model = any(change.option.startswith("model.") for change in changes)
    if is_new_run and not run.config.lora.enable:
        first_rank(lambda: check_noted(run.config.model, path))
    if not is_other_model:
        compatibility.refuse(run, path, changes, other_data)
    checkpoints.load(path, weights(run), {} if "optimizer" in excluded else run.optimizer_state_dict())
    if is_other_model:
        compatibility.refuse(run, path, changes, other_data)

    if "train_state" not in excluded:
        run.state.load(facts.get("state", {}))
        checkpoints.best.load(facts.get("best"), path.parent if own else None)
        run.owes_validation = own and run.config.validation.enable and facts.get("owes_validation") is True
        guard = facts.get("guard")
        if guard is None:
            logger.warning(
                f"checkpoint {path} remembers no earlier losses: spikes are found when the window is full again"
            )
        elif not isinstance(guard, dict):
            raise CheckpointError(f"checkpoint {path}: the guard's state is not a table; use another one")
        else:
            run.resilience.guard.load(guard)
        # a run that changes to float16 has no scale to continue from
        begins_to_scale = any(change.option == "training.mixed_precision_param" for change in changes)
        if run.scaler and ("scaler" in facts or not begins_to_scale):
            scaler = facts.get("scaler", {})
            if not isinstance(scaler, dict) or not all(isinstance(value, int | float) for value in scaler.values()):
                raise CheckpointError(
                    f"checkpoint {path}: the loss scaler's state is not a table of numbers; use another one"
                )
            run.scaler.load(scaler)
    if "lr_scheduler" in excluded:
        run.state.updates = 0  # the schedule starts from scratch: it is a function of this count alone

    # the position in the data follows from the count of samples; the readers of a stream have cursors beside it,
    # without which it would be read again up to there
    cursors: np.ndarray | None = None
    if "dataloader" in excluded:
        run.state.samples_consumed = run.state.order_hash = 0
        run.resilience.guard.rewinds = []  # the rows that they leave out are those of other data
    elif "train_state" not in excluded:
        saved = facts.get("data_cursors")
        try:
            cursors = None if saved is None else np.array(saved, np.int64).reshape(-1, 3)
        except (TypeError, ValueError, OverflowError) as error:
            raise CheckpointError(
                f"checkpoint {path}: data_cursors are not rows of three counts; use another one"
            ) from error
    run.dataloader.seek(run.state.samples_consumed, cursors)
    if not is_new_run:
        compatibility.keep_history(run, facts, changes)


def _load_hub(run: Run, folder: Place) -> None:
    """Start from the weights of a Hugging Face folder (a collective): all ranks do, or none."""
    tensors = base_weights.without_new_head(run.config, weights(run))
    all_ranks(partial(importing.fill_as_configured, tensors, Path(str(folder)), run.config))
    logger.info(f"starting from the weights of {folder}")


def weights(run: Run) -> dict[str, Tensor]:
    """Everything of a model that a checkpoint holds: parameters and buffers by name, or the adapters alone."""
    return held_by(run.adapters, run.model_state_dict())


def held_by(adapters: Spec | None, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of the tensors of a model, with the prefix of checkpoints, those that one of such adapters holds."""
    if adapters is None:
        return tensors
    return {name: tensor for name, tensor in tensors.items() if adapters.holds(name.removeprefix(WEIGHTS_PREFIX))}


def _find_other_data(run: Run, facts: Mapping[str, Any]) -> str:
    """How the data differ from those of the checkpoint; empty when they are the same."""
    # only the first rank knows what files hold; all ranks hear of it, and raise the same error
    contents = facts.get("data_contents")
    differing = broadcast_json(run.contents.expect(contents))
    if other := broadcast_json(run.contents.trained_on_other(contents, facts.get("data_unproven"))):
        option, path, step = other
        rule = f"held something else when steps after {step} of this run were trained, and has been replaced since"
        raise ConfigError(Problem(option, path, rule, f"continue with checkpoint.load_step={step}, or {RESTART}"))
    if facts.get("data_fingerprint") == run.dataloader.fingerprint:
        return f"{_some(differing)} differ at equal size" if differing else ""
    old = facts.get("data_files", {})
    new = run.dataloader.sampled_files
    old = old if isinstance(old, dict) else {}
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    if changed:
        return f"{_some(changed)} differ"
    return (
        "rows of a file of equal size, tokenizer, seq_len, seed, packing, mixture, data.mode, data.readers or "
        "training.last_batch differ"
    )


def _some(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
