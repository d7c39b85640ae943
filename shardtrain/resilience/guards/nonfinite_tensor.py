"""Which tensor was the first that is not finite: a second look at a step that failed, which changes nothing.

Parameters are looked at first, then the outputs of modules in another forward pass of the same rows, then gradients. A
save looks at what it would hold.
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
_ADVICE = "lower optimizer.lr, or look at the samples named in the rank's log"


def find(run: WatchedRun, local: list[data.Batch], in_loss: bool) -> tuple[str, str]:
    """The first tensors that are not finite with the ranks that hold them, and what to do; equal on all ranks."""
    tensors = {**run.runner.parameters(), **run.runner.buffers()}
    if found := _agree(run, _not_finite(tensors)):
        return f"{found} itself is not finite", "continue from the last checkpoint"
    # in the order in which numbers are made: weights, activations, gradients
    if in_loss:
        if found := _agree(run, _outputs(run, local), shown=1):
            return f"the first that is not finite is the output of {found}", _ADVICE
        return "a second forward pass of the same rows was finite", "suspect the device"
    gradients = {name: p.grad for name, p in run.runner.parameters().items() if p.grad is not None}
    if found := _agree(run, _not_finite(gradients)):
        return f"the first gradient that is not finite is that of {found}", _ADVICE
    return "each gradient is finite, and the sum of their squares is not", _ADVICE


def refuse_to_save(run: WatchedRun, tensors: Mapping[str, Tensor], checkpoints: Saver) -> None:
    """Stop before a save that would hold NaN or infinity, from which no run could continue (a collective).

    A step is judged by its loss and gradient, before the update. What the update made of the weights shows in the loss
    of the next step; a save comes before that, and after the last step there is none.

    Raises:
        NumericalError: on all ranks; names the tensors, the ranks that hold them, and the step to continue from.
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
            f"step {run.state.step}: not finite after the update: {culprits}",
            f"{fix}, with a lower optimizer.lr",
            "this step was not saved",
        )
    )


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Names of tensors of which this rank's part holds NaN or infinity, a few."""
    names = (name for name, tensor in tensors.items() if not _is_finite(tensor))
    return [name for name, _ in zip(names, range(_SHOWN), strict=False)]


def _is_finite(tensor: Tensor) -> bool:
    local = local_tensor(tensor).detach()
    if not local.is_floating_point() or not local.numel():
        return True
    low, high = torch.aminmax(local)  # NaN is both; a tenth of what isfinite takes, which makes a tensor of answers
    return bool(torch.isfinite(low) & torch.isfinite(high))


def _agree(run: WatchedRun, own: list[str], shown: int = _SHOWN) -> str:
    """The first few names over all ranks, in the order of the model, with the ranks that told them."""
    ranks: dict[str, list[int]] = {}
    for rank, names in enumerate(all_gather_json(own)):
        for name in names:
            ranks.setdefault(name, []).append(rank)
    # a rank knows its own modules alone; run.names have the order of the whole model
    order = {name: place for place, name in enumerate(run.names)}

    def place(name: str) -> int:
        within = [place for parameter, place in order.items() if f"{parameter}.".startswith(f"{name}.")]
        return min(within, default=len(order))

    first = sorted(ranks, key=place)[:shown]
    return ", ".join(f"{name} (rank {', '.join(map(str, ranks[name][:8]))})" for name in first)


def _outputs(run: WatchedRun, local: list[data.Batch]) -> list[str]:
    """The first module with an output that is not finite, in another forward pass of the same micro-batches.

    All ranks make it, for its collectives, with the random numbers of the step; nothing is kept of it. A rank whose
    loss is not finite again names the rows of that micro-batch in its log.
    """
    mesh = run.mesh
    found: list[str] = []
    seed_step(run.config.debug.seed, run.state.step, mesh.rank("pp"), mesh.rank(*BATCH_AXES), mesh.rank("cp", "tp"))
    # a pipeline takes the micro-batches of a step as one batch
    batches = [_joined(local)] if mesh.size("pp") > 1 and local else local
    # a compiled layer does not call hooks that are registered after it was compiled
    with torch.compiler.set_stance("force_eager"), _Watch(run.runner.parts) as watch:
        for number, batch in enumerate(batches):
            loss = run.runner.evaluate(batch.to(mesh.device))
            if watch.first is None and not _is_finite(loss):
                watch.first = "the loss function"
            if watch.first is not None and not found:
                found = [watch.first]
                ids = batch.sample_ids_B.tolist()
                logger.error(f"step {run.state.step + 1}: micro-batch {number}, {watch.first}: sample ids {ids}")
    for part in run.runner.parts:
        free_gathered(part)  # no backward follows that would
    return found


class _Watch:
    """Remembers the first module whose output is not finite."""

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.first: str | None = None
        self._parts = parts
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> _Watch:
        for part in self._parts:
            for name, module in part.named_modules():
                if name and not isinstance(module, nn.Identity):  # which stands for what another stage has
                    self._handles.append(module.register_forward_hook(self._hook(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _hook(self, name: str) -> Any:
        def look(_module: nn.Module, _inputs: object, output: object) -> None:
            if self.first is None and not all(map(_is_finite, _tensors(output))):
                self.first = name

        return look


def _tensors(output: object) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        yield output
    elif isinstance(output, tuple | list):
        for each in output:
            yield from _tensors(each)


def _joined(batches: list[data.Batch]) -> data.Batch:
    """The micro-batches of a step as one, as a pipeline takes them."""
    columns = ((b.tokens_BT, b.targets_BT, b.positions_BT, b.sample_ids_B) for b in batches)
    tokens_BT, targets_BT, positions_BT, sample_ids_B = (torch.cat(column) for column in zip(*columns, strict=True))
    documents = [b.documents_BT for b in batches if b.documents_BT is not None]
    return data.Batch(tokens_BT, targets_BT, positions_BT, sample_ids_B, torch.cat(documents) if documents else None)
