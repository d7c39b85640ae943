"""The options that keep a run safe: part of ``schema.py``, whose rules hold here too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Checkpoint:
    """Saving and continuing."""

    enable: bool = False
    """Save checkpoints, and continue from the newest one found."""
    enable_ft_dataloader_checkpoints: bool = True
    """A torchtitan option for replica groups; without effect here."""
    folder: str = "checkpoint"
    """Folder of the checkpoints, below job.dump_folder, or an address of an object store such as "s3://bucket/run"
    (the object-store extra)."""
    interval: int = 500
    """Steps, or seconds, between two saves; the last step is always saved."""
    interval_type: Literal["steps", "seconds", "automatic"] = "steps"
    """Unit of interval; "automatic" saves as often as loses least time, from the measured wait for a save and
    mean_time_to_failure_hours (shardtrain)."""
    mean_time_to_failure_hours: float = 24.0
    """How long the whole job runs between two failures, for an automatic interval (shardtrain)."""
    storage: Literal["shared", "first_node"] = "shared"
    """shared: all nodes see folder, which is tried before the first step. first_node: only the first rank's node does;
    the bytes of the others travel through it (shardtrain)."""
    initial_load_path: str | None = None
    """Checkpoint to start from when folder holds none: a folder, or a file of torch.save with a model_state_dict, as
    pytorch_universal_trainer's checkpoint-396, of which nothing is run."""
    initial_load_model_only: bool = True
    """Take the weights alone from initial_load_path."""
    initial_load_in_hf: bool = False
    """initial_load_path is in Hugging Face format; without one the weights are those of model.hf_assets_path."""
    initial_load_resize_embeddings: bool = False
    """With initial_load_in_hf, let model.overrides.vocab_size be above the rows of the folder's embedding and head; a
    new row starts as the mean of those that are there (shardtrain)."""
    initial_load_in_hf_quantized: bool = False
    """They are fp8 with a scale per block of a weight, as DeepSeek-V3 is published."""
    initial_load_legacy_bin: bool = False
    """With initial_load_in_hf, take the weights of pytorch_model.bin, a pickle, of a folder without safetensors; it is
    read as data, and nothing in it is run (shardtrain)."""
    last_save_model_only: bool = False
    """Save the weights alone at the last step. torchtitan's default is true, which makes a finished run impossible to
    extend; here it is asked for."""
    last_save_in_hf: bool = False
    """Write the last save in Hugging Face format too, as step-N-hf beside it."""
    hf_interval: int = 0
    """Steps between two saves that are written in Hugging Face format too, as step-N-hf, which retention deletes with
    step-N; 0 writes none (shardtrain)."""
    export_dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    """Type of the weights in a weights-only save, and in Hugging Face format. "auto" is float32 in a save, and in
    Hugging Face format what the folder has with which the run began."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints while training goes on, which waits for a copy in host memory alone; pinned copies faster from
    CUDA."""
    max_stall_seconds: float = 60.0
    """How long a save waits for the one before it, with async_mode; then it is skipped (shardtrain)."""
    on_save_error: Literal["stop", "continue"] = "stop"
    """What a failed save does to the run: exit 8, or go on with at most two in a row; the last one always stops
    (shardtrain)."""
    compare_replicas: bool = True
    """Compare, before a save, the bits of what several ranks hold alike, and stop without saving where they differ
    (shardtrain)."""
    keep_latest_k: int = 10
    """Newest checkpoints kept; 0 keeps all."""
    keep_every_n_steps: int = 0
    """Checkpoints whose step is a multiple are kept for ever, besides the newest; 0 keeps none (shardtrain)."""
    keep_best: str = ""
    """"validation.loss", "validation.perplexity" or another metric of the task, such as "validation.accuracy": save at
    every new best of it, and keep that one (shardtrain)."""
    best_mode: Literal["auto", "min", "max"] = "auto"
    """Whether less or more of it is better; auto is what the task says of the metric (shardtrain)."""
    load_step: int = -1
    """Step to continue from; -1 is the newest."""
    exclude_from_loading: list[str] = field(default_factory=list)
    """Parts not to load: "optimizer", "lr_scheduler", "dataloader", "train_state"."""
    accept_changes: list[str] = field(default_factory=list)
    """Options that may differ from those of the checkpoint, such as "optimizer.lr", or "all"; each of the others that
    would change what the run learns stops it (shardtrain)."""
    enable_first_step_checkpoint: bool = False
    """Save after step 1 too."""
    create_seed_checkpoint: bool = False
    """Save the initial state as step-0 and stop. Not needed for equal starts: weights do not depend on the mesh."""
    load_only: bool = False
    """Load, never save."""
    allow_shared_writable: bool = False
    """Use a folder of checkpoints that every user of the machine can write, whose checkpoints anybody may have made
    (shardtrain)."""
    grace_seconds: int = 30
    """Time from a request to stop (SIGTERM and others) to the end of the last process; a save that would take longer is
    skipped. What your platform grants (Kubernetes 30 s), or less (shardtrain)."""


@dataclass(frozen=True)
class Numbers:
    """What happens when numbers go wrong: the last options of [training]."""

    nonfinite_policy: Literal["stop", "skip"] = "stop"
    """On a loss or gradient that is not finite: stop before the update, or skip the update (shardtrain)."""
    nonfinite_max_skips: int = 10
    """Updates skipped in a row after which the run stops all the same (shardtrain)."""
    nonfinite_max_skip_fraction: float = 0.01
    """Share of the last 1000 steps whose update may be skipped, 0..1; one more stops the run (shardtrain)."""
    spike_policy: Literal["log", "off", "skip", "rewind"] = "log"
    """On a loss or gradient norm far above those before: say so, nothing, skip the update, or go back to an older
    checkpoint and leave out the data of the last steps (shardtrain)."""
    spike_window: int = 128
    """Steps that a loss is compared with; half of them, and at least 20, must have been made (shardtrain)."""
    spike_sigmas: float = 6.0
    """Standard deviations above the mean of the window that make a spike (shardtrain)."""
    spike_rewind_steps: int = 100
    """Steps to go back on a spike, or more, to the newest good checkpoint (shardtrain)."""
    spike_skip_steps: int = 100
    """Steps before and with the spike whose data are left out after going back (shardtrain)."""
    max_rewinds: int = 2
    """Times to go back from spikes within spike_rewind_steps of each other; the next one stops (shardtrain)."""
    replica_check_interval: int = 0
    """Steps between two comparisons of what several ranks hold alike; a difference stops the run; 0 leaves it to
    the saves, see checkpoint.compare_replicas (shardtrain)."""


@dataclass(frozen=True)
class Comm:
    """Process groups."""

    init_timeout_seconds: int = 300
    """Limit of a collective until the first step is done."""
    train_timeout_seconds: int = 100
    """Limit of a collective after the first step."""
    hang_timeout_seconds: int = 30
    """The run hangs when no rank has moved for so long, or for five times the longest steps (99 of 100 are shorter); 0
    looks for no hangs (shardtrain)."""
    straggler_window_steps: int = 100
    """Compare every so many steps how long ranks work, and what they have counted; 0 does not (shardtrain)."""
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
