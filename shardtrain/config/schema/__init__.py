"""Every option of a run: one frozen dataclass per TOML section, a docstring under each field as its help text.

Sections, keys and defaults are torchtitan v0.2's, so its files run unmodified; a key that torchtitan has no word for
says so with "(shardtrain)". Nothing here is derived and nothing mutates a config: see ``derived.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from shardtrain.config.schema.data_options import Data, DataLoaderOptions
from shardtrain.config.schema.data_options import DataSource as DataSource
from shardtrain.config.schema.data_options import DataStage as DataStage
from shardtrain.config.schema.launch_options import Launch
from shardtrain.config.schema.lora_options import Lora
from shardtrain.config.schema.safety_options import Checkpoint, Comm, FaultTolerance, Numbers
from shardtrain.config.schema.task_options import Task
from shardtrain.config.schema.watch_options import MemoryEstimation, Metrics, Profiling
from shardtrain.facts.devices import DeviceType
from shardtrain.facts.dtypes import ComputeDtype
from shardtrain.facts.lr_schedules import DecayType, WarmupType
from shardtrain.facts.quantization import Float8Recipe, MXRecipe

ReshardPolicy = Literal["default", "always", "never"]


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
    """A file of shardtrain/models without ".py", or the path of a model file of yours (``my_model.py``)."""
    flavor: str = "debugmodel"
    """A size of that model: a key of its FLAVORS, or "from_folder" for that of hf_assets_path. from_folder is the
    default if no flavor is set and the folder has a config.json; then model.name may be left out too."""
    hf_assets_path: str = "bytes"
    """Folder with tokenizer.json, and config.json if it is a model's; or a tokenizer of this package: "bytes", or
    "python_bpe" (2,048 ids, for Python source)."""
    tokenizer_path: str | None = None
    """Older name of hf_assets_path: a tokenizer file or folder. It also takes a file of yours with a class Tokenizer,
    such as "my_tokenizer.py": docs/extend.md (shardtrain)."""
    norm_type: Literal["rmsnorm", "fused_rmsnorm", "layernorm", "np_layernorm"] = "rmsnorm"
    """Normalisation; rmsnorm and fused_rmsnorm are the same fused kernel, np_layernorm has no parameters
    (shardtrain)."""
    overrides: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Fields of the flavor to replace, such as ``num_layers = 4``; any field of the model's Config (shardtrain)."""
    check: bool = True
    """Before a model file of yours is trained on tensor-, context-, pipeline- or expert-parallel ranks, compare a small
    copy of it on such ranks with one process, in about ten seconds; a difference stops the run (shardtrain)."""
    converters: list[str] = field(default_factory=list)
    """Modules that compute in 8 bits: "quantize.linear.float8" or "quantize.linear.mx" for linear layers,
    "quantize.grouped_mm.float8" for experts; each has a section of its name."""
    print_after_conversion: bool = False
    """Log the model after the converters."""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its constants."""

    name: str = "AdamW"
    """AdamW decays weights apart from the gradient; Adam adds the decay to it; AdamW8bit is AdamW with one byte per
    number of state; Muon orthogonalizes the update of hidden matrices and uses AdamW for the rest (AdamW8bit, Muon:
    shardtrain). Or the path of a file of yours, which gets this section: docs/extend.md (shardtrain)."""
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
    """Kernels of the update; fused is the fastest on CPU and CUDA. Other types of state have their own."""
    state_dtype: Literal["default", "bfloat16"] = "default"
    """Type of the state of Adam and AdamW; default is training.dtype (shardtrain)."""
    bf16_stochastic_round: bool = False
    """Round bfloat16 parameters and state of Adam and AdamW stochastically, so that small updates are not lost
    (torchao's option of this name); the same on any mesh (shardtrain)."""
    early_step_in_backward: bool = False
    """Update each parameter in backward as soon as its gradient is ready, so that not all gradients are held at once;
    needs training.max_norm = inf, because clipping would come later."""
    no_weight_decay: list[str] = field(default_factory=list)
    """Parameter name patterns without weight decay, e.g. ["*norm*", "*.bias"]; here ``*`` crosses dots. A pattern that
    matches nothing is a notice (shardtrain)."""
    muon_adamw_patterns: list[str] = field(default_factory=lambda: ["embed*", "head*", "*norm*", "*.bias"])
    """Name patterns of parameters that Muon leaves to AdamW (lr, beta1, beta2, eps), besides all that are neither
    matrices nor stacks of matrices (shardtrain)."""
    muon_momentum: float = 0.95
    """Decay of Muon's mean of gradients (shardtrain)."""
    muon_nesterov: bool = True
    """Nesterov momentum for Muon (shardtrain)."""
    muon_steps: int = 5
    """Newton-Schulz iterations of Muon (shardtrain)."""
    muon_update_rms: float = 0.2
    """Root mean square of Muon's update at a rate of 1; 0.2 is about AdamW's, so that one lr fits both (shardtrain)."""
    muon_dtype: Literal["default", "float32", "bfloat16"] = "default"
    """Type of Muon's iterations; default is float32 on CPU and bfloat16 elsewhere (shardtrain)."""


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate as a pure function of the step."""

    name: str = "warmup_stable_decay"
    """A schedule of the list in docs/options.md; the default is torchtitan's. Or the path of a file of yours, whose
    function factor returns the share of the peak rate: docs/extend.md (shardtrain)."""
    warmup_steps: int = 200
    """Steps from the first to the peak rate; with transformers, 0 means warmup_proportion."""
    total_steps: int | None = None
    """Length of the schedule; training.steps by default."""
    decay_ratio: float | None = None
    """Share of the steps that decay, 0..1; by default all steps after the warmup."""
    decay_type: DecayType = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """Rate at the end of the decay, as a share of the peak, 0..1; for deepspeed_warmup and deepspeed_warmup_decay the
    first rate."""
    warmup_proportion: float = 0.01
    """Share of the steps that warm up, for linear_by_proportion, and for transformers without warmup_steps, 0..1
    (shardtrain)."""
    warmup_type: WarmupType = "log"
    """Shape of the warmup of DeepSpeed's schedules (shardtrain)."""


@dataclass(frozen=True)
class Training(Numbers):
    """Data, batch sizes, length and precision of training."""

    dataset: str = "python_stdlib"
    """A file of shardtrain/data/sources without ".py"; not with [data.sources]."""
    dataset_path: str | None = None
    """File or folder that the dataset reads; some datasets need none."""
    on_data_end: Literal["error", "stop", "repeat"] = "error"
    """When all samples have been read once and steps remain: exit with 3 (error), before the first step if this is
    known, otherwise after a save; save and exit with 0 (stop); or repeat the data in another order, with a warning
    (repeat, as torchtitan does) (shardtrain)."""
    local_batch_size: int = 8
    """Sequences per data-parallel rank in one forward and backward pass."""
    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks; -1 is local_batch_size times the data-parallel ranks, or what the
    checkpoint has from which the run resumes. A larger multiple accumulates gradients."""
    seq_len: int = 2048
    """Tokens per sequence."""
    max_norm: float = 1.0
    """Gradients are scaled down to this global norm."""
    steps: int = 10000
    """Optimizer steps of the run."""
    epochs: int | None = None
    """Passes over the dataset; sets the number of steps instead of steps (shardtrain)."""
    last_batch: Literal["rollover", "keep", "discard"] = "rollover"
    """If the rows of an epoch do not fill its last step: complete it from the next epoch (rollover), make a smaller
    step (keep, as a PyTorch DataLoader does), or leave the rows out (discard, its drop_last). With keep and discard all
    epochs have the same number of steps. For tasks of rows (shardtrain)."""
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which parameters, gradients and optimizer state are stored."""
    mixed_precision_param: ComputeDtype = "bfloat16"
    """Type in which forward and backward compute; float16 adds loss scaling."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are reduced over ranks."""
    initial_loss_scale: float = 65536.0
    """First loss scale with float16 (shardtrain)."""
    loss_scale_growth_interval: int = 2000
    """Finite steps in a row after which the loss scale doubles, with float16 (shardtrain)."""
    device: DeviceType = "auto"
    """Where to train; auto is the accelerator that PyTorch finds: cuda (also ROCm) or xpu, otherwise cpu
    (shardtrain)."""
    flash_attention: Literal["FA2", "FA3", "FA4"] = "FA2"
    """On CUDA: PyTorch's flash attention (FA2), or that of a package: FlashAttention 3 for Hopper
    (flash_attn_interface), 4 for Blackwell (flash_attn.cute) (shardtrain)."""
    cpu_kernels: Literal["auto", "pytorch"] = "auto"
    """On a CPU. auto: compute float32 linear layers, bfloat16 attention and RMSNorm with the kernels that were measured
    as the fastest on this machine, and keep freed memory. pytorch: PyTorch's own kernels, as with debug.deterministic
    (shardtrain)."""
    gc_freq: int = 50
    """Steps between two runs of Python's garbage collector. It is off in between, so that ranks do not wait for each
    other's."""
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
    fsdp_reshard_after_forward: ReshardPolicy = "default"
    """Free gathered parameters after forward: always, never, or (default) all but the last layer's."""
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
    """Module names of each pipeline stage, instead of the automatic split."""
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
    """A torchtitan option for DualPipeV; no effect here: the all-to-all of experts is not overlapped."""
    context_parallel_degree: int = 1
    """Ranks over which each sequence is split."""
    context_parallel_load_balancer: Literal["headtail", "ptrr", "none"] = "headtail"
    """How a sequence is split so that causal attention costs every rank the same."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """Keys and values of the ring are gathered at once (allgather), or passed from rank to rank with less memory
    (alltoall)."""
    context_parallel_method: Literal["ring", "ulysses"] = "ring"
    """ring moves keys and values and leaves heads whole; ulysses exchanges heads for tokens, if the degree divides the
    key-value heads of a rank (shardtrain)."""
    expert_parallel_degree: int = 1
    """Ranks over which experts are divided."""
    expert_tensor_parallel_degree: int = 1
    """A torchtitan option, 1 or tensor_parallel_degree; no effect here: experts are not split."""
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

    enable: bool | None = None
    """Compile each layer, and the loss. Unless set, only runs on CPUs that are long enough to gain by it do."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])  # type: ignore[assignment]
    """What to compile."""
    backend: str = "inductor"
    """Compiler backend."""


@dataclass(frozen=True)
class Float8Linear:
    """Linear layers in float8; docs/float8.md."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather weights as one byte per number, with recipe_name = "tensorwise"; it changes no number."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Find the scales of all gathered weights in one reduction per step, rather than one for each weight."""
    recipe_name: Float8Recipe | None = None
    """tensorwise (unless set) has one scale for a tensor and is the fastest; rowwise one for each row or column;
    rowwise_with_gw_hp leaves the gradients of weights in the compute type."""
    filter_fqns: list[str] = field(default_factory=list)
    """Parts of the paths of linear layers that are left as they are, by names of here or of torchtitan ("output");
    auto_filter_small_kn leaves those that are too small to gain."""
    emulate: bool = False
    """Round to float8 and multiply in the compute type: the same numbers on any device, and slower."""


@dataclass(frozen=True)
class MXLinear:
    """Linear layers in MXFP8, with one scale for 32 numbers; docs/float8.md."""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """torchtitan's kernel of the transposed cast; no effect here, where casts are PyTorch's operations."""
    recipe_name: MXRecipe = "mxfp8_cublas"
    """mxfp8_cublas has scales of the largest number's exponent, rounded down; mxfp8_cublas_rceil the smallest under
    which no number is cut off; mxfp8_emulated is mxfp8_cublas multiplied in the compute type, on any device."""
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """Parts of the paths of linear layers that are left as they are, by names of here or of torchtitan ("output")."""


@dataclass(frozen=True)
class QuantizeLinear:
    """Quantized linear layers."""

    float8: Float8Linear = field(default_factory=Float8Linear)
    mx: MXLinear = field(default_factory=MXLinear)


@dataclass(frozen=True)
class Float8GroupedMM:
    """Products of experts in float8, rowwise; docs/float8.md."""

    fqns: list[str] = field(default_factory=list)
    """Parts of the paths of experts that compute in float8: ["experts"] is all."""
    emulate: bool = False
    """As in [quantize.linear.float8] (shardtrain)."""


@dataclass(frozen=True)
class MXGroupedMM:
    """Not available: microscaling products of experts."""

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
    seq_len: int = -1
    """Tokens per sequence; -1 is training.seq_len."""
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

    def __post_init__(self) -> None:
        """Resolve validation.seq_len = -1, so that every user of the section reads a length."""
        if self.validation.seq_len == -1:
            object.__setattr__(self, "validation", replace(self.validation, seq_len=self.training.seq_len))
