"""Find the first non-finite tensor of a failed step, without changing the run.

Check parameters first, then the outputs of modules in another forward pass of the same rows, then gradients.
Before a save, check the tensors to save.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from shardtrain import data
from shardtrain.checkpoint.collectives import all_gather_json, any_rank
from shardtrain.checkpoint.save import Saver
from shardtrain.distributed import BATCH_AXES
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.seeding import seed_step
from shardtrain.resilience.watched_run import WatchedRun
from shardtrain.utils.errors import NumericalError, StorageError, fix_first
from shardtrain.utils.log import logger

_SHOWN = 3
_ADVICE = "lower optimizer.lr, or check the samples in the rank's log"


def find(run: WatchedRun, local: list[data.Batch], in_loss: bool) -> tuple[str, str]:
    """Describe the first non-finite tensors and the ranks that have them, and return advice. Collective.

    Args:
        run: the run.
        local: this rank's batches of the step.
        in_loss: True if the loss of any rank is not finite.

    Returns:
        The description and the advice, equal on all ranks.
    """
    # Check in the order of computation: weights, activations, gradients.
    parameters = run.runner.parameters()
    names = _agree(run, _not_finite({**parameters, **run.runner.buffers()}))
    if names:
        return f"{names} itself is not finite", "continue from the last checkpoint"
    if in_loss:
        names = _agree(run, _outputs(run, local), shown=1)
        if names:
            return f"the first non-finite output is that of {names}", _ADVICE
        return "a second forward pass of the same rows was finite", "check the device"
    gradients = {}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            gradients[name] = parameter.grad
    names = _agree(run, _not_finite(gradients))
    if names:
        return f"the first non-finite gradient is that of {names}", _ADVICE
    return "each gradient is finite, but the sum of their squares is not", _ADVICE


def refuse_to_save(run: WatchedRun, tensors: Mapping[str, Tensor], checkpoints: Saver) -> None:
    """Stop before a save that would contain NaN or infinity, because no run could continue from it. Collective.

    The guard judges a step by its loss and gradient, before the update. Weights that become non-finite in the update
    show only in the loss of the next step. A save comes before that, and there is no step after the last one.

    Raises:
        NumericalError: a tensor is not finite. All ranks raise it, with the tensors, their ranks, and the
            step from which to continue.
    """
    names = _not_finite(tensors)
    if not any_rank(bool(names)):
        return
    culprits = _agree(run, names)
    with contextlib.suppress(StorageError):
        checkpoints.finish()
    saved = checkpoints.saved_step
    fix = f"continue from step {saved}" if saved else "start again"
    raise NumericalError(
        fix_first(
            f"step {run.state.step}: non-finite values after the update in {culprits}",
            f"{fix}, with a lower optimizer.lr",
            "this step was not saved",
        )
    )


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the first few tensors whose local part contains NaN or infinity."""
    names: list[str] = []
    for name, tensor in tensors.items():
        if len(names) == _SHOWN:
            break
        if not _is_finite(tensor):
            names.append(name)
    return names


def _is_finite(tensor: Tensor) -> bool:
    local = local_tensor(tensor).detach()
    if not local.is_floating_point() or not local.numel():
        return True
    # Both results are NaN if any element is. This takes a tenth of the time of isfinite, which allocates a mask.
    low, high = torch.aminmax(local)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _agree(run: WatchedRun, local_names: list[str], shown: int = _SHOWN) -> str:
    """Return the first few names of all ranks in the order of the model, with their ranks. Collective."""
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(all_gather_json(local_names)):
        for name in names:
            ranks.setdefault(name, []).append(rank)

    # A rank knows only its own modules, but run.names contains the order of the full model.
    def position(name: str) -> int:
        for index, parameter in enumerate(run.names):
            if f"{parameter}.".startswith(f"{name}."):
                return index
        return len(run.names)

    descriptions = []
    for name in sorted(ranks, key=position)[:shown]:
        rank_list = ", ".join(map(str, ranks[name][:8]))
        descriptions.append(f"{name} (rank {rank_list})")
    return ", ".join(descriptions)


def _outputs(run: WatchedRun, local: list[data.Batch]) -> list[str]:
    """Repeat the forward pass of the micro-batches, and return the name of the first module with a
    non-finite output, as a list of at most one name (a collective).

    The pass uses the random numbers of the step. A rank whose loss is non-finite again logs the sample ids of
    the micro-batch.
    """
    mesh = run.mesh
    step = run.state.step
    batch_rank = mesh.rank(*BATCH_AXES)
    seed_step(run.config.debug.seed, step, mesh.rank("pp"), batch_rank, mesh.rank("cp", "tp"))
    # A pipeline processes all micro-batches of a step as one batch.
    batches = local
    if mesh.size("pp") > 1 and local:
        batches = [_joined(local)]
    first_module: list[str] = []
    # A compiled layer does not call hooks that were registered after it was compiled.
    with torch.compiler.set_stance("force_eager"), _Watch(run.runner.parts) as watch:
        for number, batch in enumerate(batches):
            loss = run.runner.evaluate(batch.to(mesh.device))
            if watch.first is None and not _is_finite(loss):
                watch.first = "the loss function"
            # The other micro-batches are computed as well, because all ranks take part in their collectives.
            if watch.first is None or first_module:
                continue
            first_module = [watch.first]
            ids = batch.sample_ids_B.tolist()
            logger.error(
                f"step {step + 1}, micro-batch {number}: the first output that is not finite is that of "
                f"{watch.first}; sample ids {ids}"
            )
    for part in run.runner.parts:
        free_gathered(part)  # normally backward frees them
    return first_module


class _Watch:
    """Hooks that record the first module whose output is not finite."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.first: str | None = None
        self._parts = parts
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> _Watch:
        for part in self._parts:
            for name, module in part.named_modules():
                # An nn.Identity is a placeholder for a module of another stage.
                if not name or isinstance(module, nn.Identity):
                    continue
                handle = module.register_forward_hook(self._hook(name))
                self._handles.append(handle)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def check(_module: nn.Module, _inputs: object, output: object) -> None:
            if self.first is not None:
                return
            if not all(_is_finite(tensor) for tensor in _tensors(output)):
                self.first = name

        return check


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for each in output:
            yield from _tensors(each)


def _joined(batches: list[data.Batch]) -> data.Batch:
    """Concatenate the micro-batches of a step."""
    # Either all micro-batches of a step have document numbers, or none.
    documents_BT = None
    documents = [batch.documents_BT for batch in batches if batch.documents_BT is not None]
    if documents:
        documents_BT = torch.cat(documents)
    return data.Batch(
        torch.cat([batch.tokens_BT for batch in batches]),
        torch.cat([batch.targets_BT for batch in batches]),
        torch.cat([batch.positions_BT for batch in batches]),
        torch.cat([batch.sample_ids_B for batch in batches]),
        documents_BT,
    )
