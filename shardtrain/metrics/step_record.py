"""The record of one logged step, and constant facts about a run."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from shardtrain.metrics.peak_memory import MemoryPeak

if TYPE_CHECKING:
    from torch import Tensor

TOTAL_SPEED = "tokens/s, all devices"
"""Label of ``tokens_per_second`` in all output for users. ``tps`` is the speed per device."""


class Reduce(Protocol):
    """Collectives over the ranks that share a batch. Every rank calls them in the same steps.

    They include all pipeline ranks. Ranks without a loss pass a zero sum and zero local tokens, so every rank
    gets the loss.
    """

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks, with the shape of the input."""
        ...

    def max(self, tensor: Tensor) -> Tensor:
        """Return the maximum over ranks, with the shape of the input."""
        ...


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that do not change."""

    # The process.
    rank: int
    world_size: int
    is_writer: bool
    """True on the rank that writes metrics.jsonl, TensorBoard and W&B."""
    # The run.
    start_step: int
    """Number of steps before this process started: 0, or the step of the checkpoint."""
    total_steps: int
    # The model, the device and the data.
    num_params: int
    flops_per_token: float
    device_type: str
    device_name: str
    compute_dtype: str
    """Dtype of matmuls, which determines the peak FLOP/s: "bfloat16", "float16", "float32" or "float8"."""
    description: str = ""
    model: str = ""
    """Name and size, such as "llama3/8B"."""
    sources: tuple[str, ...] = ()
    """Names of [data.sources], in the order of their numbers."""


@dataclass(frozen=True)
class Record:
    """One logged step.

    Means are over the window since the last logged step, ratios are 0..1, times in seconds.
    """

    # The step and its loss.
    step: int
    loss: float
    """Loss per target token over the window and all ranks."""
    max_loss: float
    """Maximum over ranks of a rank's loss per token over the window."""
    grad_norm: float
    """Gradient norm of this step, before clipping."""
    lr: float
    # Tokens and speed.
    tokens_seen: int
    """Target tokens over all ranks since the first step of the run."""
    tokens_per_second: float
    """Tokens per second that the model processed on all devices together, without padding."""
    tps: float
    """``tokens_per_second`` per device."""
    tflops: float
    """Model TFLOP/s per device."""
    mfu: float | None
    """Fraction of the device's dense peak, 0..1. None if the peak is unknown."""
    # Time and memory.
    step_seconds: float
    data_seconds: float
    memory: MemoryPeak
    eta_seconds: float
    """Remaining time at the speed of this window."""
    # Targets, further metrics and the identity of the data.
    targets_per_second: float = 0.0
    """Target tokens per second over all devices."""
    has_targets: bool = True
    """False if no step of the window had a target, in which case there is no loss."""
    extra: Mapping[str, float] = field(default_factory=dict)
    order_hash: int = 0
    """Hash of all data since the first step, see ``data/checksum.py``."""

    def json_fields(self) -> dict[str, Any]:
        """Return the fields for ``metrics.jsonl``. Non-finite numbers become None, which JSON writes as null.

        Raises:
            ValueError: an extra metric has the name of a standard field.
        """
        # The share is undefined if no token was processed.
        target_share = None
        if self.tokens_per_second:
            target_share = self.targets_per_second / self.tokens_per_second
        fields: dict[str, float | int | None] = {
            "step": self.step,
            "loss": self.loss,
            "max_loss": self.max_loss,
            "grad_norm": self.grad_norm,
            "lr": self.lr,
            "tokens_seen": self.tokens_seen,
            "tps": self.tps,
            "tokens_per_second": self.tokens_per_second,
            "targets_per_second": self.targets_per_second,
            "target_share": target_share,
            "tflops": self.tflops,
            "mfu": self.mfu,
            "memory_gib": self.memory.peak_gib,
            "step_seconds": self.step_seconds,
            "data_seconds": self.data_seconds,
        }
        # A metric of a task must not hide a standard one.
        clash = fields.keys() & self.extra.keys()
        if clash:
            raise ValueError(
                f"extra metrics must not have names of standard metrics: {sorted(clash)}"
            )
        fields.update(self.extra)
        # JSON has no NaN.
        record: dict[str, Any] = {}
        for key, value in fields.items():
            record[key] = finite_or_none(value)
        record["order_hash"] = f"{self.order_hash:016x}"
        return record

    def tags(self, device_type: str, legacy: bool = False) -> dict[str, float]:
        """Return the values by TensorBoard tag."""
        return {**tags_of(self.json_fields(), device_type, legacy), **self.memory.tags()}


# Names in metrics.jsonl -> tags of torchtitan.
_TAGS = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tps": "throughput(tps)",
    "tflops": "tflops",
    "step_seconds": "time_metrics/end_to_end(s)",
    "data_seconds": "time_metrics/data_loading(s)",
    "tokens_seen": "n_tokens_seen",
}
_NO_TAG = {"step", "tokens_per_second", "order_hash"}


def tags_of(fields: Mapping[str, Any], device_type: str, legacy: bool = False) -> dict[str, float]:
    """Return a record of ``metrics.jsonl`` by TensorBoard tag. Extra metrics keep their names.

    A null loss or norm was not finite. It becomes NaN, which TensorBoard marks.
    """
    tags: dict[str, float] = {}
    for key, value in fields.items():
        if key in _NO_TAG:
            continue
        if key == "mfu":
            # torchtitan's tag is a percentage.
            if value is not None:
                tags["mfu(%)"] = 100 * value
        # Without a device allocator, memory is that of the process.
        elif key == "memory_gib":
            tags["memory/max_reserved(GiB)" if device_type != "cpu" else "memory/max_rss(GiB)"] = (
                value
            )
        else:
            tags[_TAGS.get(key, key)] = math.nan if value is None else value
    step_seconds = fields.get("step_seconds")
    data_seconds = fields.get("data_seconds")
    # torchtitan also shows the share of the step.
    if step_seconds and data_seconds is not None:
        tags["time_metrics/data_loading(%)"] = 100 * data_seconds / step_seconds
    # The tag of torchtitan in early 2024.
    if legacy and fields.get("tps") is not None:
        tags["wps"] = fields["tps"]
    return tags


def finite_or_none(value: float | int | None) -> float | int | None:
    """Return a finite number unchanged, otherwise None."""
    return value if value is not None and math.isfinite(value) else None
