"""Every option of a run: one frozen dataclass per TOML section, a docstring under each field as its help text.

Sections, keys and defaults are torchtitan v0.2's, so its files run unmodified; a key that torchtitan has no word for
says so with "(shardtrain)". Nothing here is derived and nothing mutates a config: see ``derived.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardtrain.config.schema.data import Data, DataLoaderOptions
from shardtrain.config.schema.data import DataSource as DataSource
from shardtrain.config.schema.data import DataStage as DataStage
from shardtrain.config.schema.launch import Launch
from shardtrain.config.schema.lora import Lora
from shardtrain.config.schema.safety import Checkpoint, Comm, FaultTolerance, Numbers
from shardtrain.config.schema.task import Task
from shardtrain.config.schema.watch import MemoryEstimation, Metrics, Profiling


@dataclass(frozen=True)
class Job:
    """What this run is called and where its files go."""

    config_file: str | None = None
    """Path of the TOML file; the same as the first argument of ``shardtrain train``."""
    dump_folder: str = "./outputs"
    """Folder of everything that the run writes: resolved config, logs, metrics, traces, checkpoints."""
    description: str = "default job"
    """One line for people; written to the log and the resolved config."""
    print_config: bool = False
    """Log the resolved configuration at start."""
    save_config_file: str | None = None
    """Also write the resolved configuration to this path below dump_folder."""
    custom_config_module: str = ""
    """Not available: a Python module that adds sections (a torchtitan option)."""


@dataclass(frozen=True)
class Model:
    """Which network is trained."""

    name: str = "llama3"
    """A file of shardtrain/models without its ending, or the path of a model file of yours (``my_model.py``)."""
    flavor: str = "debugmodel"
    """A size of that model: a key of its FLAVORS, or "from_folder" for that of hf_assets_path, which is also taken
    where no flavor is named and config.json is there; model.name may be left out too."""
    hf_assets_path: str = "bytes"
    """Folder with tokenizer.json, and config.json if it is a model's, or "bytes" for the byte-level tokenizer of this
    package."""
    tokenizer_path: str | None = None
    """Older name of hf_assets_path: a tokenizer file or folder; used when set. It also takes a file of yours with a
    class Tokenizer, as "my_tokenizer.py": docs/extend.md (shardtrain)."""
    norm_type: Literal["rmsnorm", "fused_rmsnorm", "layernorm", "np_layernorm"] = "rmsnorm"
    """Normalisation; rmsnorm and fused_rmsnorm are one fused kernel, np_layernorm has no parameters (shardtrain)."""
    overrides: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Fields of the flavor to replace, e.g. ``num_layers = 4``; any field of the model's Config (shardtrain)."""
    check: bool = True
    """Before a model file of yours is trained on tensor-, context-, pipeline- or expert-parallel ranks, compare a small
    copy of it on such ranks with one process, in some ten seconds; a difference stops the run (shardtrain)."""
    converters: list[str] = field(default_factory=list)
    """Module replacements applied to the model, e.g. "quantize.linear.float8"."""
    print_after_conversion: bool = False
    """Log the model after the converters."""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its constants."""

    name: str = "AdamW"
    """AdamW decays weights apart from the gradient; Adam adds the decay to it; Muon orthogonalizes the update of each
    hidden matrix and leaves all else to AdamW (Muon: shardtrain). Or the path of a file of yours, which is given this
    section: docs/extend.md (shardtrain)."""
    lr: float = 8e-4
    """Peak learning rate, scaled by [lr_scheduler]."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.95
    """Decay of the mean of squared gradients."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.1
    """Weight decay, times the learning rate."""
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Kernels of the update; fused is the fastest on CPU and CUDA."""
    early_step_in_backward: bool = False
    """Not available: update each parameter during backward (it would update before clipping and the finite check)."""
    no_weight_decay: list[str] = field(default_factory=list)
    """Parameter name patterns without weight decay, e.g. ["*norm*", "*.bias"]; here ``*`` crosses dots (shardtrain)."""
    muon_adamw_patterns: list[str] = field(default_factory=lambda: ["embed*", "head*", "*norm*", "*.bias"])
    """Name patterns of parameters that Muon leaves to AdamW (lr, beta1, beta2, eps), beside all that are neither
    matrices nor stacks of matrices (shardtrain)."""
    muon_momentum: float = 0.95
    """Decay of Muon's mean of gradients (shardtrain)."""
    muon_nesterov: bool = True
    """Whether Muon looks ahead along its mean of gradients (shardtrain)."""
    muon_steps: int = 5
    """Newton-Schulz iterations that make Muon's update orthogonal (shardtrain)."""
    muon_update_rms: float = 0.2
    """Root mean square of Muon's update at a rate of 1; 0.2 is about AdamW's, so that one lr serves both
    (shardtrain)."""
    muon_dtype: Literal["default", "float32", "bfloat16"] = "default"
    """Type in which Muon iterates; default is float32 on CPU and bfloat16 elsewhere (shardtrain)."""


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate as a pure function of the step."""

    name: Literal[
        "warmup_stable_decay",
        "linear_linear",
        "linear_by_proportion",
        "deepspeed_warmup",
        "deepspeed_warmup_decay",
        "deepspeed_warmup_cosine",
        "transformers",
    ] = "warmup_stable_decay"
    """warmup_stable_decay is torchtitan's; linear_linear torchtrain's; linear_by_proportion warms up over
    warmup_proportion of the steps (Hugging Face's linear); deepspeed_warmup is WarmupLR, and the two after it
    WarmupDecayLR and WarmupCosineLR; transformers is that library's linear and cosine, whose first rate is 0
    (shardtrain)."""
    warmup_steps: int = 200
    """Steps from the first to the peak rate; with transformers 0 leaves them to warmup_proportion."""
    total_steps: int | None = None
    """Length of the schedule; training.steps unless set."""
    decay_ratio: float | None = None
    """Share of the steps that decay, 0..1; all steps after the warmup unless set."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """Rate at the end of the decay, as a share of the peak, 0..1; for deepspeed_warmup and
    deepspeed_warmup_decay the first rate, as a share."""
    warmup_proportion: float = 0.01
    """Share of the steps that warm up, for linear_by_proportion, and for transformers without warmup_steps, 0..1
    (shardtrain)."""
    warmup_type: Literal["log", "linear"] = "log"
    """Shape of the warmup of DeepSpeed's schedules (shardtrain)."""


@dataclass(frozen=True)
class Training(Numbers):
    """Data, batch sizes, length and precision of training."""

    dataset: str = "python_stdlib"
    """A file of shardtrain/data/sources without its ending; [data.sources] takes its place."""
    dataset_path: str | None = None
    """File or folder that the dataset reads; some datasets need none."""
    on_data_end: Literal["error", "stop", "repeat"] = "error"
    """When each sample has been seen once and steps remain: exit with code 3, before the first step where that is known
    then, else after a save (error), save and exit with 0 (stop), or begin again in another order, with a warning
    (repeat, as torchtitan does) (shardtrain)."""
    local_batch_size: int = 8
    """Sequences per data-parallel rank in one forward and backward pass."""
    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks; -1 is local_batch_size times the data-parallel ranks. A larger
    multiple accumulates gradients."""
    seq_len: int = 2048
    """Tokens per sequence."""
    max_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    steps: int = 10000
    """Optimizer steps of the run."""
    epochs: int | None = None
    """Passes over the dataset; when set it decides the number of steps in place of steps (shardtrain)."""
    last_batch: Literal["rollover", "keep", "discard"] = "rollover"
    """Where the rows of an epoch do not fill its last step: fill it from the next epoch (rollover), make a smaller step
    of them (keep, as a PyTorch DataLoader does), or leave them out (discard, its drop_last). With keep and discard each
    epoch begins a step, and has as many as every other; for tasks of rows (shardtrain)."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which parameters, gradients and optimizer state are stored."""
    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type in which forward and backward compute; float16 adds loss scaling."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are reduced over ranks."""
    initial_loss_scale: float = 65536.0
    """First loss scale with float16 (shardtrain)."""
    loss_scale_growth_interval: int = 2000
    """Finite steps in a row after which the loss scale doubles, with float16 (shardtrain)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to train; auto takes CUDA where a device is found (shardtrain)."""
    cpu_kernels: Literal["auto", "pytorch"] = "auto"
    """On a CPU, compute float32 linear layers and bfloat16 attention by the kernels that this machine has measured to
    be fastest (auto), or by PyTorch's own alone, as debug.deterministic does (pytorch) (shardtrain)."""
    gc_freq: int = 50
    """Steps between two runs of Python's garbage collector, which is off in between so that ranks do not wait for
    each other's."""
    gc_debug: bool = False
    """Collect every step and log what could not be freed."""
    dataloader: DataLoaderOptions = field(default_factory=DataLoaderOptions)


@dataclass(frozen=True)
class Parallelism:
    """The device mesh and how the model is split over it."""

    data_parallel_replicate_degree: int = 1
    """Copies of the model (DDP); with a shard degree above 1 it is HSDP."""
    data_parallel_shard_degree: int = -1
    """Ranks over which parameters are sharded (FSDP); -1 is all ranks that the other degrees leave."""
    fsdp_reshard_after_forward: Literal["default", "always", "never"] = "default"
    """Free gathered parameters after forward: always, never, or by default all but the last layer's."""
    shard_optimizer_states: bool = False
    """Split optimizer state over the data_parallel_replicate ranks (ZeRO-1) (shardtrain)."""
    tensor_parallel_degree: int = 1
    """Ranks over which each layer is split, with sequence parallelism between."""
    disable_loss_parallel: bool = False
    """Gather the logits over tensor-parallel ranks before the loss."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with matmuls (CUDA and compile only)."""
    pipeline_parallel_degree: int = 1
    """Ranks over which the layers are divided in sequence."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of each pipeline stage, where the automatic split does not fit."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """Layers that the embedding counts for in the automatic split."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """Layers that the norm and head count for in the automatic split."""
    pipeline_parallel_layers_per_stage: int | None = None
    """Layers per stage; decides the number of stages per rank."""
    pipeline_parallel_schedule: str = "1F1B"
    """Pipeline schedule."""
    pipeline_parallel_schedule_csv: str = ""
    """Path of a schedule written as CSV."""
    pipeline_parallel_microbatch_size: int = 1
    """Sequences per pipeline micro-batch."""
    pipeline_parallel_expert_parallel_overlap: bool = True
    """A torchtitan option for DualPipeV; without effect here: experts' exchanges are not overlapped."""
    context_parallel_degree: int = 1
    """Ranks over which each sequence is split."""
    context_parallel_load_balancer: Literal["headtail", "ptrr", "none"] = "headtail"
    """How the sequence is dealt so that causal attention costs every rank the same."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """How keys and values travel in the ring: gathered at once, or passed on part by part with less memory."""
    context_parallel_method: Literal["ring", "ulysses"] = "ring"
    """ring leaves heads whole and moves keys and values; ulysses exchanges heads for tokens, where the degree divides
    the key-value heads of a rank (shardtrain)."""
    expert_parallel_degree: int = 1
    """Ranks over which experts are divided."""
    expert_tensor_parallel_degree: int = 1
    """A torchtitan option, 1 or tensor_parallel_degree: without effect here, experts are spread whole."""
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    """How tokens reach their experts."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Recompute activations in backward to save memory."""

    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """none keeps all activations, full recomputes every layer, selective see below, memory_budget lets the compiler
    choose."""
    selective_ac_option: str = "2"
    """A number k recomputes every k-th layer; "op" keeps the expensive operations of every layer."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(default_factory=lambda: ["moe.router.gate"])
    """Linear layers whose matmul is recomputed in spite of "op"."""
    early_stop: bool = False
    """Stop recomputing a layer once all that backward needs is there."""
    memory_budget: float = 0.5
    """Share of activations to keep with memory_budget: 0 recomputes all, 1 none."""
    visualize_memory_budget_pareto: bool = False
    """Write the compiler's trade-off curve as SVG below job.dump_folder."""
    preserve_rng_state: bool = True
    """Give recomputation the same random numbers as forward."""
    determinism_check: str = "default"
    """How recomputed tensors are compared with the first ones: "default" or "none"."""
    debug: bool = False
    """Report the operations of forward and recomputation when they differ (slow)."""
    cpu_offload: bool = False
    """Hold the inputs that recomputation needs in host memory (shardtrain)."""


@dataclass(frozen=True)
class Compile:
    """torch.compile."""

    enable: bool = False
    """Compile each layer, and the loss."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])  # type: ignore[assignment]
    """What to compile."""
    backend: str = "inductor"
    """Compiler backend."""


@dataclass(frozen=True)
class Float8Linear:
    """Float8 linear layers (torchao)."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather parameters in float8."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute all scales in one reduction."""
    recipe_name: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    """Scaling recipe; tensorwise unless set."""
    filter_fqns: list[str] = field(default_factory=list)
    """Modules left in high precision."""
    emulate: bool = False
    """Emulate float8 on devices without it."""


@dataclass(frozen=True)
class MXLinear:
    """Microscaling linear layers (torchao)."""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """Kernel of the transposed cast."""
    recipe_name: str = "mxfp8_cublas"
    """Scaling recipe."""
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """Modules left in high precision."""


@dataclass(frozen=True)
class QuantizeLinear:
    """Quantized linear layers."""

    float8: Float8Linear = field(default_factory=Float8Linear)
    mx: MXLinear = field(default_factory=MXLinear)


@dataclass(frozen=True)
class Float8GroupedMM:
    """Float8 grouped matmuls of experts (torchao)."""

    fqns: list[str] = field(default_factory=list)
    """Modules to convert."""


@dataclass(frozen=True)
class MXGroupedMM:
    """Microscaling grouped matmuls of experts (torchao)."""

    recipe_name: str = "mxfp8"
    """Scaling recipe."""
    fqns: list[str] = field(default_factory=list)
    """Modules to convert."""


@dataclass(frozen=True)
class QuantizeGroupedMM:
    """Quantized grouped matmuls."""

    float8: Float8GroupedMM = field(default_factory=Float8GroupedMM)
    mx: MXGroupedMM = field(default_factory=MXGroupedMM)


@dataclass(frozen=True)
class Quantize:
    """Low-precision compute; named in model.converters to take effect."""

    linear: QuantizeLinear = field(default_factory=QuantizeLinear)
    grouped_mm: QuantizeGroupedMM = field(default_factory=QuantizeGroupedMM)


@dataclass(frozen=True)
class Validation:
    """Loss on held-out data during training."""

    enable: bool = False
    """Validate every freq steps, and at the last."""
    dataset: str = ""
    """A file of shardtrain/data/sources without its ending; to be named, because no set is held out by itself. Its rows
    are read as [data] says."""
    dataset_path: str | None = None
    """File or folder that the dataset reads."""
    split: str = "validation"
    """Split of a Hugging Face dataset (shardtrain)."""
    local_batch_size: int = 8
    """Sequences per data-parallel rank in one forward pass; a pipeline takes as many as in a training step instead."""
    seq_len: int = 2048
    """Tokens per sequence."""
    freq: int = 10
    """Steps between two validations."""
    per_epoch: int = 0
    """Validations in each pass over the training data, evenly spaced and one at its end; 0 takes freq (shardtrain)."""
    steps: int = -1
    """Batches of one validation; -1 is the whole set, once, at any number of ranks."""
    patience: int = 0
    """End the run, saved, after this many validations in a row without a better checkpoint.keep_best (or loss); 0 never
    does (shardtrain)."""
    dataloader: DataLoaderOptions = field(default_factory=DataLoaderOptions)


@dataclass(frozen=True)
class Debug:
    """Seeds, determinism and switches for finding faults."""

    seed: int = 42
    """Seed of initial weights, data order and dropout; torchtitan draws one when unset."""
    deterministic: bool = False
    """Bitwise equal runs: deterministic kernels only (slower on GPUs)."""
    deterministic_warn_only: bool = False
    """Warn at kernels without a deterministic form instead of stopping."""
    moe_force_load_balance: bool = False
    """Route tokens evenly to all experts, for benchmarks."""


@dataclass(frozen=True)
class Experimental:
    """torchtitan's hooks for code outside its tree; here ``model.name`` takes the path of a file."""

    custom_import: str = ""
    """Not available: a module imported at start."""
    custom_args_module: str = ""
    """Not available: a module that adds options."""


@dataclass(frozen=True)
class Config:
    """A run. Command line beats file, file beats default."""

    job: Job = field(default_factory=Job)
    profiling: Profiling = field(default_factory=Profiling)
    metrics: Metrics = field(default_factory=Metrics)
    model: Model = field(default_factory=Model)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    training: Training = field(default_factory=Training)
    data: Data = field(default_factory=Data)
    lora: Lora = field(default_factory=Lora)
    task: Task = field(default_factory=Task)
    parallelism: Parallelism = field(default_factory=Parallelism)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    compile: Compile = field(default_factory=Compile)
    quantize: Quantize = field(default_factory=Quantize)
    comm: Comm = field(default_factory=Comm)
    memory_estimation: MemoryEstimation = field(default_factory=MemoryEstimation)
    fault_tolerance: FaultTolerance = field(default_factory=FaultTolerance)
    validation: Validation = field(default_factory=Validation)
    debug: Debug = field(default_factory=Debug)
    experimental: Experimental = field(default_factory=Experimental)
    launch: Launch = field(default_factory=Launch)
