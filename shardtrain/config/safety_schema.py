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
    """Steps between two saves; the last step is always saved."""
    interval_type: Literal["steps", "seconds"] = "steps"
    """Unit of interval (shardtrain)."""
    storage: Literal["shared", "first_node"] = "shared"
    """shared: all nodes see folder, which is tried before the first step. first_node: only the first rank's node does;
    the bytes of the others travel through it (shardtrain)."""
    initial_load_path: str | None = None
    """Checkpoint to start from when folder holds none."""
    initial_load_model_only: bool = True
    """Take the weights alone from initial_load_path."""
    initial_load_in_hf: bool = False
    """initial_load_path is in Hugging Face format."""
    initial_load_in_hf_quantized: bool = False
    """initial_load_path holds quantized Hugging Face weights."""
    last_save_model_only: bool = False
    """Save the weights alone at the last step. torchtitan's default is true, which makes a finished run impossible to
    extend; here it is asked for."""
    last_save_in_hf: bool = False
    """Write the last save in Hugging Face format."""
    export_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """Type of the weights in a weights-only save."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """Write checkpoints while training goes on."""
    keep_latest_k: int = 10
    """Newest checkpoints kept; 0 keeps all."""
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
    """Save the initial weights and stop. Not needed for equal starts: initial weights do not depend on the mesh."""
    load_only: bool = False
    """Load, never save."""
    grace_seconds: int = 30
    """Time from a request to stop (SIGTERM and others) to the end of the last process; a save that would take longer is
    skipped. What your platform grants (Kubernetes 30 s), or less (shardtrain)."""


@dataclass(frozen=True)
class Comm:
    """Process groups."""

    init_timeout_seconds: int = 300
    """Limit of a collective until the first step is done."""
    train_timeout_seconds: int = 100
    """Limit of a collective after the first step."""
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
