"""Every option of a run: one frozen dataclass per TOML section, a docstring under each field as its help text.

Sections, keys and defaults are torchtitan v0.2's, so its files run unmodified. The help text of
a key that torchtitan does not have ends with "(shardtrain)". Derived values are in
``derived.py``; nothing mutates a config.
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

# How FSDP treats the gathered parameters of a layer after its forward pass.
ReshardPolicy = Literal["default", "always", "never"]


@dataclass(frozen=True)
class Job:
    """Description of the run and locations of its files."""

    config_file: str | None = None
    """Path of the TOML file; the same as the first argument of ``shardtrain train``."""
    dump_folder: str = "./outputs"
    """Output folder of the run: resolved config, logs, metrics, traces, checkpoints."""
    description: str = "default job"
    """Free text for the log and the resolved config."""
    print_config: bool = False
    """Log the resolved configuration at start."""
    save_config_file: str | None = None
    """Also write the resolved configuration to this path below dump_folder."""
    certificate: str | None = None
    """Certificate of ``shardtrain verify`` for this configuration. The log's header states whether it still
    applies, and checkpoints record its hash (shardtrain).
    """
    custom_config_module: str = ""
    """Python file with a dataclass JobConfig, whose fields are sections of your own for your model, task, optimizer
    or sink. It is parsed and not run; docs/extend.md.
    """


@dataclass(frozen=True)
class Model:
    """The model to train."""

    # Model and files.
    name: str = "llama3"
    """A file of shardtrain/models without ".py", or the path of a model file of yours (``my_model.py``)."""
    flavor: str = "debugmodel"
    """Size of the model: a key of its FLAVORS, or "from_folder" for the size in hf_assets_path. from_folder
    is the default if no flavor is set and the folder has a config.json; model.name may then be omitted too.
    """
    hf_assets_path: str = "bytes"
    """Folder with a tokenizer.json and optionally a model's config.json; or a tokenizer of this
    package: "bytes", or "python_bpe" (2,048 ids, for Python source).
    """
    tokenizer_path: str | None = None
    """Older name of hf_assets_path: a tokenizer file or folder. It can also be your own file with a
    class Tokenizer, such as "my_tokenizer.py": docs/extend.md (shardtrain).
    """
    # Variations of the model.
    norm_type: Literal["rmsnorm", "fused_rmsnorm", "layernorm", "np_layernorm"] = "rmsnorm"
    """Normalization; rmsnorm and fused_rmsnorm are the same fused kernel, np_layernorm has no parameters
    (shardtrain)."""
    overrides: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Fields of the flavor to replace, such as ``num_layers = 4``; any field of the model's Config (shardtrain)."""
    check: bool = True
    """Before training your own model file with tensor, context, pipeline or expert parallelism,
    compare a small copy on such ranks with one process. It takes about ten seconds, and a
    difference stops the run (shardtrain).
    """
    converters: list[str] = field(default_factory=list)
    """Modules that compute in 8 bits: "quantize.linear.float8" or "quantize.linear.mx" for linear layers,
    "quantize.grouped_mm.float8" for experts. Each has a section of the same name."""
    print_after_conversion: bool = False
    """Log the model after the converters."""


@dataclass(frozen=True)
class Optimizer:
    """The optimizer and its constants."""

    # The optimizer, and the constants of Adam.
    name: str = "AdamW"
    """AdamW: decoupled weight decay; Adam: weight decay is added to the gradient; AdamW8bit: AdamW
    with states in 8 bits; Muon: orthogonalized updates of hidden matrices, and AdamW for the other
    parameters (AdamW8bit, Muon: shardtrain). Or the path of your own file, which receives this
    section: docs/extend.md (shardtrain).
    """
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
    # Implementation of the update.
    implementation: Literal["fused", "foreach", "for-loop"] = "fused"
    """Kernels of the update; fused is the fastest on CPU and CUDA. States in 8 bits or bfloat16 have their own."""
    state_dtype: Literal["default", "bfloat16"] = "default"
    """dtype of the states of Adam and AdamW; default is training.dtype (shardtrain)."""
    bf16_stochastic_round: bool = False
    """Round bfloat16 parameters and states of Adam and AdamW stochastically, which preserves small updates on
    average (torchao's option of this name). Results do not depend on the mesh (shardtrain).
    """
    early_step_in_backward: bool = False
    """Update each parameter during backward and free its gradient, which saves the memory of
    gradients. Requires training.max_norm = inf, because clipping needs all gradients.
    """
    # Weight decay.
    no_weight_decay: list[str] = field(default_factory=list)
    """Parameter name patterns without weight decay, e.g. ["*norm*", "*.bias"]; here ``*`` crosses
    dots. A pattern that matches nothing is a notice (shardtrain).
    """
    # Muon.
    muon_adamw_patterns: list[str] = field(
        default_factory=lambda: ["embed*", "head*", "*norm*", "*.bias"]
    )
    """Name patterns of parameters for which Muon uses AdamW (lr, beta1, beta2, eps). It also does
    so for all parameters that are neither matrices nor stacks of matrices (shardtrain).
    """
    muon_momentum: float = 0.95
    """Decay of Muon's mean of gradients (shardtrain)."""
    muon_nesterov: bool = True
    """Nesterov momentum for Muon (shardtrain)."""
    muon_steps: int = 5
    """Newton-Schulz iterations of Muon (shardtrain)."""
    muon_update_rms: float = 0.2
    """Root mean square of Muon's update at a rate of 1; 0.2 is about AdamW's, so
    both can use one lr (shardtrain).
    """
    muon_dtype: Literal["default", "float32", "bfloat16"] = "default"
    """dtype of Muon's iterations; default is float32 on CPU and bfloat16 elsewhere (shardtrain)."""
    qk_clip_threshold: float = 0.0
    """With Muon, scale the query and key weights of each head whose largest attention logit exceeds
    this number (QK-clip of MuonClip; Kimi K2: 100); 0: off (shardtrain).
    """


@dataclass(frozen=True)
class LRScheduler:
    """The learning rate as a pure function of the step."""

    name: str = "warmup_stable_decay"
    """Name of a schedule listed in docs/options.md; the default is torchtitan's. Or the path
    of your own file, whose function factor returns the fraction of the peak rate:
    docs/extend.md (shardtrain).
    """
    warmup_steps: int = 200
    """Steps from the first to the peak rate; with transformers, 0 means warmup_proportion."""
    total_steps: int | None = None
    """Length of the schedule; training.steps by default."""
    decay_ratio: float | None = None
    """Fraction of the steps that decay, 0..1; by default all steps after the warmup."""
    decay_type: DecayType = "linear"
    """Shape of the decay."""
    min_lr_factor: float = 0.0
    """Rate at the end of the decay, as a fraction of the peak, 0..1; for deepspeed_warmup and
    deepspeed_warmup_decay the first rate.
    """
    warmup_proportion: float = 0.01
    """Fraction of the steps that warm up, for linear_by_proportion, and for transformers
    without warmup_steps, 0..1 (shardtrain).
    """
    warmup_type: WarmupType = "log"
    """Shape of the warmup of DeepSpeed's schedules (shardtrain)."""


@dataclass(frozen=True)
class Training(Numbers):
    """Data, batch sizes, length and precision of training."""

    # Data.
    dataset: str = "python_stdlib"
    """A file of shardtrain/data/sources without ".py"; not with [data.sources]."""
    dataset_path: str | None = None
    """File or folder that the dataset reads; some datasets need none."""
    on_data_end: Literal["error", "stop", "repeat"] = "error"
    """If the data end before the last step. error: exit with 3, before the first step if the number
    of rows is known, otherwise after a save; stop: save and exit with 0; repeat: warn, and repeat
    the data in another order, as torchtitan does (shardtrain).
    """
    # Batches.
    local_batch_size: int = 8
    """Sequences per data-parallel rank in one forward and backward pass."""
    global_batch_size: int = -1
    """Sequences per optimizer step over all ranks; -1 is local_batch_size times the data-parallel ranks, or
    the value of the checkpoint when a run resumes. A larger multiple accumulates gradients.
    """
    batch_ramp: list[list[int]] = field(default_factory=list)
    """Grow the global batch: pairs of a step and the sequences per step from there on, such as
    [[0, 32], [1000, 64]]. Steps count from 0. The last size is that of global_batch_size (shardtrain).
    """
    # Sequences.
    seq_len: int = 2048
    """Tokens per sequence."""
    sequence_ramp: list[list[int]] = field(default_factory=list)
    """Grow the sequences: pairs of a step and the tokens per sequence from there on, such as
    [[0, 512], [1000, 2048]]. Shorter sequences are equal parts of those of seq_len tokens, which is the last
    length. So tokens per step and the order of the data stay the same (shardtrain).
    """
    # Gradients and loss.
    max_norm: float = 1.0
    """Maximum global norm of the gradients, which are scaled down to it."""
    label_smoothing: float = 0.0
    """Share of each target that is distributed over the vocabulary, with task.name = "language_model". Only the
    loss of training has it, not that of validation (shardtrain).
    """
    mtp_loss_scaling_factor: float = 0.1
    """Weight of the losses of multi-token prediction, which ``model.overrides.num_nextn_predict_layers`` enables:
    their mean over depths times this factor is added to the loss of the next token (shardtrain).
    """
    z_loss_weight: float = 0.0
    """Weight of the squared log-sum-exp of the logits in the training loss of language_model, which keeps logits
    small (PaLM uses 1e-4) (shardtrain).
    """
    neftune_noise_alpha: float | None = None
    """Add uniform noise of at most this number / sqrt(tokens of the document x features) to the output of the
    embedding in training (NEFTune), with task.name = "language_model"; unset: no noise (shardtrain).
    """
    # Averages of the weights.
    ema_decay: float | None = None
    """Keep an exponential moving average of the trained weights in float32, and multiply it by this number, above
    0 and below 1, in each update; unset: no average. See validation.use_ema (shardtrain).
    """
    # Length of the run.
    steps: int = 10000
    """Optimizer steps of the run."""
    epochs: int | None = None
    """Passes over the dataset, instead of training.steps (shardtrain)."""
    last_batch: Literal["rollover", "keep", "discard"] = "rollover"
    """If the rows of an epoch do not fill its last step: add rows of the next epoch (rollover), run a smaller
    step (keep, as a PyTorch DataLoader does), or skip the rows (discard, its drop_last). With keep and
    discard all epochs have the same number of steps. Only for tasks of rows (shardtrain).
    """
    # Memory and precision.
    enable_cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """dtype of stored parameters, gradients and optimizer states."""
    mixed_precision_param: ComputeDtype = "bfloat16"
    """dtype of forward and backward; float16 adds loss scaling."""
    mixed_precision_reduce: Literal["float32", "bfloat16"] = "float32"
    """dtype of the reduction of gradients over ranks."""
    initial_loss_scale: float = 65536.0
    """First loss scale with float16 (shardtrain)."""
    loss_scale_growth_interval: int = 2000
    """Number of consecutive finite steps after which the loss scale doubles, with float16 (shardtrain)."""
    # Device and kernels.
    device: DeviceType = "auto"
    """Where to train; auto is the accelerator that PyTorch finds: cuda (also ROCm) or xpu, otherwise cpu.
    mps is Apple's GPU, in one process; it has not been run on a Mac (shardtrain)."""
    flash_attention: Literal["FA2", "FA3", "FA4"] = "FA2"
    """On CUDA: PyTorch's flash attention (FA2), FlashAttention 3 for Hopper (package flash_attn_interface),
    or FlashAttention 4 for Blackwell (package flash_attn.cute) (shardtrain).
    """
    cpu_kernels: Literal["auto", "pytorch"] = "auto"
    """On a CPU. auto: for float32 linear layers, bfloat16 attention and RMSNorm, use the kernels
    that measurements on this machine found to be the fastest, and keep freed memory. pytorch: use
    PyTorch's kernels, as debug.deterministic does (shardtrain).
    """
    # Garbage collection.
    gc_freq: int = 50
    """Steps between two runs of Python's garbage collector. It is disabled in between,
    so all ranks collect at the same time.
    """
    gc_debug: bool = False
    """Run the garbage collector every step, and log objects that could not be freed."""
    dataloader: DataLoaderOptions = field(default_factory=DataLoaderOptions)


@dataclass(frozen=True)
class Parallelism:
    """The device mesh and how the model is split over it."""

    # Data parallelism.
    data_parallel_replicate_degree: int = 1
    """Replicas of the model (DDP); with a shard degree above 1 it is HSDP."""
    data_parallel_shard_degree: int = -1
    """Ranks over which parameters are sharded (FSDP); -1 is the number of ranks divided by the other degrees."""
    fsdp_reshard_after_forward: ReshardPolicy = "default"
    """Free gathered parameters after forward: always, never, or (default) all but the last layer's."""
    shard_optimizer_states: bool = False
    """Shard optimizer states over the data_parallel_replicate ranks (ZeRO-1) (shardtrain)."""
    # Tensor parallelism.
    tensor_parallel_degree: int = 1
    """Ranks over which each layer is split, with sequence parallelism between the split layers."""
    disable_loss_parallel: bool = False
    """Gather the logits over tensor-parallel ranks before the loss."""
    enable_async_tensor_parallel: bool = False
    """Overlap tensor-parallel communication with matmuls (CUDA and compile only)."""
    # Pipeline parallelism.
    pipeline_parallel_degree: int = 1
    """Ranks over which the layers are divided in sequence."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of each pipeline stage, instead of the automatic split."""
    pipeline_parallel_first_stage_less_layers: int = 1
    """Number of layers that the embedding counts as in the automatic split."""
    pipeline_parallel_last_stage_less_layers: int = 1
    """Number of layers that the norm and head count as in the automatic split."""
    pipeline_parallel_layers_per_stage: int | None = None
    """Layers per stage, which determines the number of stages per rank."""
    pipeline_parallel_schedule: str = "1F1B"
    """Pipeline schedule."""
    pipeline_parallel_schedule_csv: str = ""
    """Path of a schedule written as CSV."""
    pipeline_parallel_microbatch_size: int = 1
    """Sequences per pipeline micro-batch."""
    pipeline_parallel_expert_parallel_overlap: bool = True
    """A torchtitan option for DualPipeV; no effect here: the all-to-all of experts is not overlapped."""
    # Context parallelism.
    context_parallel_degree: int = 1
    """Ranks over which each sequence is split."""
    context_parallel_load_balancer: Literal["headtail", "ptrr", "none"] = "headtail"
    """Assignment of the sequence's chunks to ranks. headtail balances the cost of causal attention."""
    context_parallel_rotate_method: Literal["allgather", "alltoall"] = "allgather"
    """For ring: gather all keys and values in one collective (allgather), or pass them from
    rank to rank with less memory (alltoall).
    """
    context_parallel_method: Literal["ring", "ulysses"] = "ring"
    """ring exchanges keys and values; ulysses exchanges heads for tokens, and requires that the
    degree divides the key-value heads of a rank (shardtrain).
    """
    # Expert parallelism.
    expert_parallel_degree: int = 1
    """Ranks over which experts are divided."""
    expert_tensor_parallel_degree: int = 1
    """Accepted for torchtitan: must be 1 or tensor_parallel_degree. No effect here,
    because experts are not split.
    """
    expert_parallel_comm_backend: Literal["standard", "deepep"] = "standard"
    """Backend of the exchange of tokens between experts."""


@dataclass(frozen=True)
class ActivationCheckpoint:
    """Recompute activations in backward to save memory."""

    # Choice of activations.
    mode: Literal["selective", "full", "memory_budget", "none"] = "selective"
    """none keeps all activations; full recomputes every layer; selective: see selective_ac_option;
    memory_budget: the compiler chooses.
    """
    selective_ac_option: str = "2"
    """A number k recomputes every k-th layer; "op" keeps the expensive operations of every layer."""
    per_op_sac_force_recompute_mm_shapes_by_fqns: list[str] = field(
        default_factory=lambda: ["moe.router.gate"]
    )
    """Linear layers whose matmul is recomputed even with "op"."""
    # Details of recomputation.
    early_stop: bool = False
    """Stop recomputing a layer as soon as all tensors that backward needs are available."""
    memory_budget: float = 0.5
    """With mode memory_budget, fraction of activations to keep: 0 recomputes all, 1 none."""
    visualize_memory_budget_pareto: bool = False
    """Write the compiler's trade-off curve as SVG below job.dump_folder."""
    preserve_rng_state: bool = True
    """Use the random numbers of forward again in recomputation."""
    determinism_check: str = "default"
    """Comparison of recomputed tensors with the original ones: "default" compares metadata,
    "none" does not compare.
    """
    debug: bool = False
    """Report the operations of forward and recomputation when they differ (slow)."""
    cpu_offload: bool = False
    """Keep the saved inputs of recomputed layers in host memory (shardtrain)."""


@dataclass(frozen=True)
class Compile:
    """torch.compile."""

    enable: bool | None = None
    """Compile each layer, and the loss. Unset: only on a CPU, for runs long enough to benefit."""
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])  # type: ignore[assignment]
    """Parts to compile."""
    backend: str = "inductor"
    """Compiler backend."""


@dataclass(frozen=True)
class Float8Linear:
    """Linear layers in float8; docs/float8.md."""

    enable_fsdp_float8_all_gather: bool = False
    """Gather weights in float8, with recipe_name = "tensorwise". It does not change results."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all gathered weights in one reduction per step, instead of one per weight."""
    recipe_name: Float8Recipe | None = None
    """tensorwise (the default): one scale per tensor, the fastest; rowwise: one scale per row or column;
    rowwise_with_gw_hp: rowwise, with weight gradients in the compute dtype."""
    filter_fqns: list[str] = field(default_factory=list)
    """Linear layers to skip, by parts of their paths, with names of this package or of torchtitan ("output");
    auto_filter_small_kn skips layers that are too small to benefit."""
    emulate: bool = False
    """Round to float8 and multiply in the compute dtype: the same results on any device, but slower."""


@dataclass(frozen=True)
class MXLinear:
    """Linear layers in MXFP8, with one scale per 32 elements; docs/float8.md."""

    mxfp8_dim1_cast_kernel_choice: Literal["triton", "cuda", "torch"] = "triton"
    """torchtitan's kernel of the transposed cast; no effect here, where casts are PyTorch's operations."""
    recipe_name: MXRecipe = "mxfp8_cublas"
    """mxfp8_cublas: the scale is the exponent of the largest element, rounded down;
    mxfp8_cublas_rceil: the smallest scale that saturates no element; mxfp8_emulated: mxfp8_cublas
    with products in the compute dtype, on any device.
    """
    filter_fqns: list[str] = field(default_factory=lambda: ["output"])
    """Linear layers to skip, by parts of their paths, with names of this package or of torchtitan ("output")."""


@dataclass(frozen=True)
class QuantizeLinear:
    """Quantized linear layers."""

    float8: Float8Linear = field(default_factory=Float8Linear)
    mx: MXLinear = field(default_factory=MXLinear)


@dataclass(frozen=True)
class Float8GroupedMM:
    """Products of experts in float8, rowwise; docs/float8.md."""

    fqns: list[str] = field(default_factory=list)
    """Experts that compute in float8, by parts of their paths: ["experts"] selects all."""
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
    """Low-precision compute. A section takes effect if model.converters names it."""

    linear: QuantizeLinear = field(default_factory=QuantizeLinear)
    grouped_mm: QuantizeGroupedMM = field(default_factory=QuantizeGroupedMM)


@dataclass(frozen=True)
class Validation:
    """Loss on held-out data during training."""

    # Dataset.
    enable: bool = False
    """Validate every freq steps, and after the last step."""
    dataset: str = ""
    """A file of shardtrain/data/sources without ".py". Required, because no data are held out
    automatically. [data] applies to its rows too.
    """
    dataset_path: str | None = None
    """File or folder that the dataset reads."""
    split: str = "validation"
    """Split of a Hugging Face dataset (shardtrain)."""
    # Batches and frequency.
    local_batch_size: int = 8
    """Sequences per data-parallel rank in one forward pass. A pipeline uses the
    number of a training step instead.
    """
    seq_len: int = -1
    """Tokens per sequence; -1 is training.seq_len."""
    freq: int = 10
    """Steps between two validations."""
    per_epoch: int = 0
    """Validations per pass over the training data, evenly spaced, the last one at its end; 0:
    use freq (shardtrain).
    """
    steps: int = -1
    """Batches per validation; -1 is the entire dataset once, for any number of ranks."""
    patience: int = 0
    """Save and end the run after this many consecutive validations without improvement of
    checkpoint.keep_best (or of the loss); 0: never (shardtrain).
    """
    use_ema: bool = False
    """Evaluate the averages of training.ema_decay instead of the weights, also in "shardtrain test" (shardtrain)."""
    dataloader: DataLoaderOptions = field(default_factory=DataLoaderOptions)


@dataclass(frozen=True)
class Debug:
    """Seed, determinism and debugging options."""

    seed: int = 42
    """Seed of initial weights, data order and dropout. torchtitan draws a random one if it is unset."""
    deterministic: bool = False
    """Use only deterministic kernels, for bitwise equal runs (slower on GPUs)."""
    deterministic_warn_only: bool = False
    """Warn instead of stopping if a kernel has no deterministic version."""
    moe_force_load_balance: bool = False
    """Route tokens evenly to all experts, for benchmarks."""


@dataclass(frozen=True)
class Experimental:
    """torchtitan's hooks for code outside its tree; here ``model.name`` takes the path of a file."""

    # torchtitan imports these modules at start. Here model.name and job.custom_config_module replace them.
    custom_import: str = ""
    """Not available: a module imported at start."""
    custom_args_module: str = ""
    """Not available: a module that adds options; job.custom_config_module names a file."""


@dataclass(frozen=True)
class Config:
    """A run. Command line beats file, file beats default."""

    # The order of the sections in help texts and in resolved files.
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
        """Replace validation.seq_len = -1 by training.seq_len."""
        # The dataclass is frozen, and a default cannot refer to another section.
        if self.validation.seq_len == -1:
            object.__setattr__(
                self, "validation", replace(self.validation, seq_len=self.training.seq_len)
            )
