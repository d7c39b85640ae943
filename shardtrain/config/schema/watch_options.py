"""Options of profiling, metrics and logs. The docstring of the package explains the conventions."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Profiling:
    """Traces of the PyTorch profiler and snapshots of device memory."""

    enable_profiling: bool = False
    """Write a profiler trace per rank every profile_freq steps."""
    save_traces_folder: str = "profile_traces"
    """Folder of the traces, below job.dump_folder."""
    profile_freq: int = 10
    """Steps from one trace to the next."""
    profiler_active: int = 1
    """Steps recorded in each trace."""
    profiler_warmup: int = 3
    """Steps before each trace in which the profiler runs but does not record."""
    profile_memory: bool = True
    """Record allocations in each trace, for `shardtrain profile` and Perfetto (shardtrain)."""
    enable_memory_snapshot: bool = False
    """Write a snapshot of the CUDA allocator every profile_freq steps, and when memory runs out."""
    save_memory_snapshot_folder: str = "memory_snapshot"
    """Folder of the snapshots, below job.dump_folder."""


@dataclass(frozen=True)
class Metrics:
    """Metrics, their interval and their destinations. ``metrics.jsonl`` is always written."""

    log_freq: int = 10
    """Steps between two lines of metrics; step 1 is always logged."""
    enable_tensorboard: bool = False
    """Write TensorBoard event files."""
    disable_color_printing: bool = False
    """No colors on the console. They are always off if the output is not a terminal or SLURM_JOB_ID is set."""
    save_tb_folder: str = "tb"
    """Folder of TensorBoard files, below job.dump_folder."""
    save_for_all_ranks: bool = False
    """Write TensorBoard, W&B, MLflow, trackio and your own sinks from every rank, not only from the first."""
    enable_wandb: bool = False
    """Log to Weights & Biases (the wandb extra); WANDB_MODE=offline works without an account."""
    enable_mlflow: bool = False
    """Log to MLflow (the mlflow extra): to MLFLOW_TRACKING_URI, or to files below job.dump_folder (shardtrain)."""
    enable_trackio: bool = False
    """Log to trackio (the trackio extra): to files below job.dump_folder, or to TRACKIO_SPACE_ID (shardtrain)."""
    prometheus_port: int = 0
    """Port of a Prometheus endpoint with the last logged step, on the first rank (the
    prometheus extra); 0: none (shardtrain).
    """
    prometheus_address: str = "127.0.0.1"
    """Address of the Prometheus endpoint; anyone who reaches it can read the metrics (shardtrain)."""
    sample_prompt: str = ""
    """Text to continue after the last step, with the weights that were saved; empty:
    no sample (shardtrain).
    """
    sample_freq: int | None = None
    """Steps between two samples, into the log and samples.jsonl; unset: only after the last step;
    0: no sample (shardtrain).
    """
    sinks: list[str] = field(default_factory=list)
    """Your own sinks: files with a class Sink, such as ["my_sink.py"]; see docs/extend.md (shardtrain)."""
    token_metrics: list[str] = field(default_factory=list)
    """Your own training metrics: files with a function measure(logits, targets), such as ["my_metric.py"],
    averaged over the target tokens of a logged step; see docs/extend.md (shardtrain).
    """
    per_source_loss: bool = False
    """Log the mean training loss and the target tokens of each of [data.sources], with task.name =
    "language_model" (shardtrain).
    """
    peak_flops: float | None = None
    """Dense peak of one device in FLOP/s for the MFU, if the device is not in the table (shardtrain)."""
    legacy_tags: bool = False
    """Also write ``throughput(tps)`` with its tag of 2024, ``wps`` (shardtrain)."""
    save_log_file: str = "logs/rank-{rank}.log"
    """Log file of each rank below job.dump_folder; ``{rank}`` is the global rank (shardtrain)."""


@dataclass(frozen=True)
class MemoryEstimation:
    """torchtitan's estimator; see ``shardtrain plan``."""

    enable: bool = False
    """Not available."""
    disable_fake_mode: bool = False
    """Not available."""
