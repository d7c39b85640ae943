"""The options that keep a run safe. The package's docstring has the rules for options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardtrain.facts.dtypes import ComputeDtype


@dataclass(frozen=True)
class Checkpoint:
    """Saving and continuing."""

    enable: bool = False
    """Save checkpoints, and continue from the newest one found."""
    enable_ft_dataloader_checkpoints: bool = True
    """A torchtitan option for replica groups; no effect here."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, below job.dump_folder, or an address of an object store such as "s3://bucket/run"
    (the object-store extra)."""
    interval: int = 500
    """Steps, or seconds, between two saves; the last step is always saved."""
    interval_type: Literal["steps", "seconds", "automatic"] = "steps"
    """Unit of interval; "automatic" chooses the interval that loses the least time, from the measured wait for a save
    and mean_time_to_failure_hours (shardtrain)."""
    mean_time_to_failure_hours: float = 24.0
    """Mean time between two failures of the whole job, for an automatic interval (shardtrain)."""
    storage: Literal["shared", "first_node"] = "shared"
    """shared: all nodes must see folder; this is checked before the first step. first_node: rank 0 saves into the
    folder on its own node, and the other ranks send it their data. At startup the newest checkpoint on any node is used
    (shardtrain)."""
    initial_load_path: str | None = None
    """Checkpoint to start from if folder has none: a folder, or a file of torch.save with a model_state_dict, such as
    pytorch_universal_trainer's checkpoint-396. Opening it runs no code."""
    initial_load_model_only: bool = True
    """Load only the weights from initial_load_path."""
    initial_load_in_hf: bool = False
    """initial_load_path is in Hugging Face format; if it is not set, load the weights of model.hf_assets_path."""
    initial_load_resize_embeddings: bool = False
    """With initial_load_in_hf, allow model.overrides.vocab_size above the rows of the folder's embedding and head; a
    new row starts as the mean of the others (shardtrain)."""
    initial_load_in_hf_quantized: bool = False
    """The weights are fp8 with a scale per block, as DeepSeek-V3 is published."""
    initial_load_legacy_bin: bool = False
    """With initial_load_in_hf, load pytorch_model.bin, a pickle, from a folder without safetensors; it is read as data,
    and no code in it runs (shardtrain)."""
    last_save_model_only: bool = False
    """Save only the weights at the last step. Such a run cannot be continued, so the default is false (torchtitan's is
    true)."""
    last_save_in_hf: bool = False
    """Also write the last save in Hugging Face format, as step-N-hf beside it."""
    hf_interval: int = 0
    """Steps between two saves that are also written in Hugging Face format, as step-N-hf, which is deleted with step-N;
    0: none (shardtrain)."""
    export_dtype: Literal["auto", ComputeDtype] = "auto"
    """Type of the weights in a weights-only save and in Hugging Face format. "auto": float32 in a save; in Hugging Face
    format the type of the folder that the run started from."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints in the background: training waits only for the copy into host memory. Pinned memory makes the
    copy from CUDA faster."""
    max_stall_seconds: float = 60.0
    """With async_mode, how long a save waits for the one before it; then it is skipped (shardtrain)."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """After a failed save: exit with 8 (stop), or warn and continue, with at most two in a row; a failed last save
    always stops (shardtrain)."""
    compare_replicas: bool = True
    """Before a save, compare the bits of tensors that several ranks hold; if they differ, stop without saving
    (shardtrain)."""
    keep_latest_k: int = 10
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_every_n_steps: int = 0
    """Also keep, for ever, checkpoints whose step is a multiple of this; 0: none (shardtrain)."""
    keep_best: str = ""
    """"validation.loss", "validation.perplexity" or another metric of the task, such as "validation.accuracy": save at
    every new best of it, and keep that one (shardtrain)."""
    best_mode: Literal["auto", "min", "max"] = "auto"
    """Whether less (min) or more (max) of it is better; auto: as the task defines the metric (shardtrain)."""
    load_step: int = -1
    """Step to continue from; -1 is the newest."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts not to load: "optimizer", "lr_scheduler", "dataloader", "train_state"."""
    accept_changes: list[str] = field(default_factory=list)
    """Options that may differ from those of the checkpoint, such as "optimizer.lr", or "all". Without it, a change of
    an option that affects what the run learns stops the run (shardtrain)."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too."""
    create_seed_checkpoint: bool = False
    """Save the initial state as step-0 and stop. Equal starts do not need it: initial weights do not depend on the
    mesh."""
    load_only: bool = False
    """Load, never save."""
    allow_shared_writable: bool = False
    """Use a checkpoint folder that every user of the machine can write; anybody may have made its checkpoints
    (shardtrain)."""
    grace_seconds: int = 30
    """Time from a request to stop (SIGTERM and others) to the end of the last process; a save that would take longer is
    skipped. Set what your platform allows (Kubernetes: 30 s), or less (shardtrain)."""
    stop_exit_code: int = 75
    """Exit status of the command if it was asked to stop and has saved everything: what your scheduler queues again, or
    0 for success. exit.json has 75 in any case (shardtrain)."""


@dataclass(frozen=True)
class Numbers:
    """What happens when numbers go wrong: the last options of [training]."""

    nonfinite_policy: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: stop before the update, or skip the update (shardtrain)."""
    nonfinite_max_skips: int = 10
    """Skipped updates in a row after which the run stops (shardtrain)."""
    nonfinite_max_skip_fraction: float = 0.01
    """Share of the last 1000 steps whose update may be skipped, 0..1; one more stops the run (shardtrain)."""
    spike_policy: Literal["log", "off", "skip", "rewind"] = "log"
    """On a loss or gradient norm far above those before: warn (log), do nothing (off), skip the update (skip), or go
    back to an older checkpoint and leave out the data of the last steps (rewind) (shardtrain)."""
    spike_window: int = 128
    """Steps that a loss is compared with; half of them, and at least 20, must be there (shardtrain)."""
    spike_sigmas: float = 6.0
    """Standard deviations above the mean of the window that make a spike (shardtrain)."""
    spike_rewind_steps: int = 100
    """Steps to go back on a spike; the run takes the newest good checkpoint that is at least so old (shardtrain)."""
    spike_skip_steps: int = 100
    """Steps up to the spike whose data are left out after going back (shardtrain)."""
    max_rewinds: int = 2
    """Rewinds from spikes within spike_rewind_steps of each other; the next one stops the run (shardtrain)."""
    replica_check_interval: int = 0
    """Steps between two comparisons of tensors that several ranks hold; a difference stops the run; 0: only before
    saves, see checkpoint.compare_replicas (shardtrain)."""


@dataclass(frozen=True)
class Comm:
    """Process groups."""

    init_timeout_seconds: int = 300
    """Time limit of a collective until the first step is done."""
    train_timeout_seconds: int = 100
    """Time limit of a collective after the first step."""
    hang_timeout_seconds: int = 30
    """The run is considered hung if no rank progresses for this time, or for five times the longest steps (99th
    percentile) if that is more; 0: no hang detection (shardtrain)."""
    straggler_window_steps: int = 100
    """Steps between two comparisons of the ranks' working time and counters; 0: none (shardtrain)."""
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
    """Synchronise every few steps instead of each."""
    sync_steps: int = 5
    """Steps between synchronisations."""
    should_quantize: bool = False
    """Quantize what is exchanged."""
    fragment_sync_delay: int = 0
    """Steps by which a fragment's synchronisation is delayed."""
    fragment_update_alpha: float = 0.0
    """Share of the local weights kept."""
    module_fqns_per_model_fragment: list[list[str]] = field(default_factory=list)
    """Modules of each fragment."""
    num_fragments: int = 1
    """Fragments of the model."""
