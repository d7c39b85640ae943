"""Options of checkpoints, numerical failures and process groups. The package's docstring explains the conventions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardtrain.facts.dtypes import ComputeDtype


@dataclass(frozen=True)
class Checkpoint:
    """Saving and continuing."""

    # Folder and interval.
    enable: bool = False
    """Save checkpoints, and continue from the newest one found."""
    enable_ft_dataloader_checkpoints: bool = True
    """A torchtitan option for replica groups; no effect here."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, below job.dump_folder, or an address of an object store such as
    "s3://bucket/run" (the object-store extra).
    """
    interval: int = 500
    """Steps, or seconds, between two saves; the last step is always saved."""
    interval_type: Literal["steps", "seconds", "automatic"] = "steps"
    """Unit of interval; "automatic" chooses the interval that loses the least time, from the
    measured wait for a save and mean_time_to_failure_hours (shardtrain).
    """
    mean_time_to_failure_hours: float = 24.0
    """Mean time between two failures of the job, for an automatic interval (shardtrain)."""
    storage: Literal["shared", "first_node"] = "shared"
    """shared: all nodes must see folder; this is checked before the first step. first_node: rank 0
    saves into the folder on its own node, and the other ranks send it their data. At startup the
    newest checkpoint on any node is used (shardtrain).
    """
    snapshot_interval: int = 0
    """Steps between two snapshots of the training state in host memory, from which --max_restarts continues;
    each node also holds a copy for another node; 0: none (shardtrain).
    """
    # Initial checkpoint.
    initial_load_path: str | None = None
    """Checkpoint to start from if folder has none: a folder, or a file of torch.save with a model_state_dict,
    such as pytorch_universal_trainer's checkpoint-396. Opening it runs no code.
    """
    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path."""
    initial_load_in_hf: bool = False
    """initial_load_path is in Hugging Face format; if it is not set, load the weights of model.hf_assets_path."""
    initial_load_resize_embeddings: bool = False
    """With initial_load_in_hf, allow model.overrides.vocab_size above the rows of the folder's
    embedding and head; a new row starts as the mean of the others (shardtrain).
    """
    initial_load_in_hf_quantized: bool = False
    """The weights are fp8 with a scale per block, as DeepSeek-V3 is published."""
    initial_load_legacy_bin: bool = False
    """With initial_load_in_hf, load pytorch_model.bin, a pickle, from a folder without safetensors.
    No code in the file runs (shardtrain).
    """
    # Contents of a save.
    last_save_model_only: bool = False
    """Save only the weights at the last step. Such a run cannot be continued, so the
    default is false (torchtitan's is true).
    """
    last_save_in_hf: bool = False
    """Also write the last save in Hugging Face format, as folder step-N-hf next to step-N."""
    hf_interval: int = 0
    """Steps between two saves that are also written in Hugging Face format, as folder step-N-hf,
    which is deleted with step-N; 0: none (shardtrain).
    """
    export_dtype: Literal["auto", ComputeDtype] = "auto"
    """dtype of the weights in a weights-only save and in Hugging Face format. auto: float32 in a
    save; in Hugging Face format the dtype of the folder that the run started from.
    """
    # Writes, and their failures.
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints in the background: training waits only for the copy into host memory.
    Pinned memory makes the copy from CUDA faster.
    """
    max_stall_seconds: float = 60.0
    """With async_mode, maximum time that a save waits for the previous one.
    After that it is skipped (shardtrain).
    """
    on_save_error: Literal["stop", "continue"] = "stop"
    """After a failed save: exit with 8 (stop), or warn and continue. Three failures in a row, or a
    failed last save, always stop (shardtrain).
    """
    compare_replicas: bool = True
    """Before a save, compare replicated tensors bitwise between ranks; if they differ, stop without saving
    (shardtrain)."""
    # Retention.
    keep_latest_k: int = 10
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_every_n_steps: int = 0
    """Never delete checkpoints whose step is a multiple of this; 0: none (shardtrain)."""
    keep_best: str = ""
    """Metric of the validation, such as "validation.loss", "validation.perplexity" or another
    metric of the task. Save at every new best value, and keep that checkpoint (shardtrain).
    """
    best_mode: Literal["auto", "min", "max"] = "auto"
    """Best value of keep_best: the lowest (min) or the highest (max); auto: as the task defines the metric
    (shardtrain)."""
    # Resuming.
    load_step: int = -1
    """Step to continue from; -1 is the newest."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts not to load: "optimizer", "lr_scheduler", "dataloader", "train_state"."""
    accept_changes: list[str] = field(default_factory=list)
    """Options that may differ from those of the checkpoint, such as "optimizer.lr", or "all". Any
    other change of an option that affects results stops the run (shardtrain).
    """
    enable_first_step_checkpoint: bool = False
    """Also save after step 1."""
    create_seed_checkpoint: bool = False
    """Save the initial state as step-0 and stop. It is not required for equal starts, because
    initial weights do not depend on the mesh.
    """
    load_only: bool = False
    """Load, never save."""
    allow_shared_writable: bool = False
    """Allow a checkpoint folder that every user of the machine can write to, and whose
    checkpoints anybody may have written (shardtrain).
    """
    # Stopping.
    grace_seconds: int = 30
    """Time limit from a request to stop (SIGTERM and others) until the last process ends. A
    save that would take longer is skipped. Set at most the grace period of your platform
    (Kubernetes: 30 s) (shardtrain).
    """
    stop_exit_code: int = 75
    """Exit code after a request to stop, if everything is saved: the code that your scheduler
    requeues, or 0 for success. exit.json always has 75 (shardtrain).
    """


@dataclass(frozen=True)
class Numbers:
    """Handling of non-finite values and loss spikes: the last options of [training]."""

    # Values that are not finite.
    nonfinite_policy: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: stop before the update, or skip the update (shardtrain)."""
    nonfinite_max_skips: int = 10
    """Number of consecutive skipped updates after which the run stops (shardtrain)."""
    nonfinite_max_skip_fraction: float = 0.01
    """Fraction of the last 1000 steps whose update may be skipped, 0..1; one more stops the run (shardtrain)."""
    # Loss spikes.
    spike_policy: Literal["log", "off", "skip", "rewind"] = "log"
    """If the loss or gradient norm is far above previous values: warn (log), do nothing
    (off), skip the update (skip), or load an older checkpoint and skip the data of the last
    steps (rewind) (shardtrain).
    """
    spike_window: int = 128
    """Number of previous steps that a value is compared with. Detection starts after half of them,
    and at least 20 (shardtrain).
    """
    spike_sigmas: float = 6.0
    """A spike is this many standard deviations above the mean of the window (shardtrain)."""
    spike_rewind_steps: int = 100
    """Minimum number of steps to rewind on a spike. The newest valid checkpoint that is old enough is loaded
    (shardtrain)."""
    spike_skip_steps: int = 100
    """Number of steps before and including the spike whose data are skipped after a rewind (shardtrain)."""
    max_rewinds: int = 2
    """Maximum number of rewinds from spikes within spike_rewind_steps of each other; one more stops the run
    (shardtrain)."""
    # Replicas.
    replica_check_interval: int = 0
    """Steps between two comparisons of replicated tensors between ranks; a difference stops the
    run; 0: only before saves, see checkpoint.compare_replicas (shardtrain).
    """


@dataclass(frozen=True)
class Comm:
    """Process groups."""

    # Timeouts.
    init_timeout_seconds: int = 300
    """Time limit of a collective until the first step is done."""
    train_timeout_seconds: int = 100
    """Time limit of a collective after the first step."""
    hang_timeout_seconds: int = 30
    """The run is considered hung if no rank progresses for this time, or for five times the longest
    steps (99th percentile) if that is more; 0: no hang detection (shardtrain).
    """
    straggler_window_steps: int = 100
    """Steps between two comparisons of the ranks' working time and counters; 0: none (shardtrain)."""
    # Records of collectives.
    trace_buf_size: int = 20000
    """Entries of the flight recorder of collectives; 0 turns it off."""
    save_traces_folder: str = "comm_traces"
    """Folder of the flight recorder's dumps, below job.dump_folder."""
    save_traces_file_prefix: str = "rank_"
    """Start of the dumps' file names."""
    mode: Literal["default", "fake_backend", "local_tensor"] = "default"
    """default trains; fake_backend builds any world size in one process."""


@dataclass(frozen=True)
class FaultTolerance:
    """Replica groups with per-step membership (torchft)."""

    # Accepted so that files of torchtitan can be read. ``enable`` is an error.
    enable: bool = False
    """Not available: replica groups of torchft."""
    process_group: Literal["gloo", "nccl"] = "gloo"
    """Backend between replica groups."""
    process_group_timeout_ms: int = 10000
    """Limit of a collective between replica groups."""
    replica_id: int = 0
    """This replica group."""
    group_size: int = 0
    """Number of replica groups."""
    min_replica_size: int = 1
    """Replica groups that a step needs."""
    semi_sync_method: Literal["local_sgd", "diloco"] | None = None
    """Synchronize every few steps instead of each."""
    sync_steps: int = 5
    """Steps between synchronizations."""
    should_quantize: bool = False
    """Quantize the exchanged tensors."""
    fragment_sync_delay: int = 0
    """Steps by which a fragment's synchronization is delayed."""
    fragment_update_alpha: float = 0.0
    """Share of the local weights kept."""
    module_fqns_per_model_fragment: list[list[str]] = field(default_factory=list)
    """Modules of each fragment."""
    num_fragments: int = 1
    """Fragments of the model."""
