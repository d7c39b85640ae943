"""torch.compile, layer by layer and in place. Parameter names never change.

Must run after activation checkpointing and before FSDP.
"""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from shardtrain.config import derived
from shardtrain.config.machine_rules import has_cpp_compiler
from shardtrain.config.schema import Config
from shardtrain.config.schema.task_options import Task
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, all_layers, matches, style_of
from shardtrain.ops.cross_entropy import ChunkFunction, chunk_loss_without_scatter
from shardtrain.ops.loss_terms import CROSS_ENTROPY, LossTerms
from shardtrain.ops.machine_key import machine_key
from shardtrain.utils import user_cache
from shardtrain.utils.log import logger

RECOMPILE_LIMIT = 64
LONG_SECONDS = 1800.0
"""Minimum duration of a CPU run that is compiled by default, estimated for the fastest processors.

Compilation saves 3 % to 12 % on an idle machine and up to 30 % on a busy one. It costs 20 to 50 s at the
first start and about 2 s at every other start.
"""
SHORT_STEP_SECONDS = 0.05
"""Shorter steps are not compiled by default, because no such step was measured."""
_PEAK_FLOPS_PER_CORE = 2e11
"""Peak FLOP/s of one AMD core: Zen 5 in float32, and Zen 4 in bfloat16."""
_PEAK_FLOPS_PER_CORE_AMX = 2e12
"""Peak FLOP/s in bfloat16 of one core with AMX."""
_EAGER_RECURRENCE = "a recurrence stays eager"
"""Reason for a graph break that this file causes on purpose, see ``graph_break_warning``."""
EAGER_ATTENTION = "attention stays eager to measure its logits"
"""Reason for a graph break that ``qk_clip.py`` causes on purpose."""


def decided(config: Config, mesh: Mesh, flops_per_token: float) -> Config:
    """If ``compile.enable`` is unset, set it for a CPU run that benefits (a collective).

    Only measured cases are compiled by default: a model of this package that is trained to predict the
    next token, in one process or with FSDP. The decision depends on the configuration and the type of
    processor, not on measured times. So a resumed run makes the same decision again, and its results
    stay bitwise equal.
    """
    is_open = config.compile.enable is None and mesh.device.type == "cpu"
    if (
        not is_open
        or not _is_known_to_gain(config, mesh)
        or not _is_long(config, mesh, flops_per_token)
    ):
        return config
    # All ranks must make the same decision, so compile only if every rank has a compiler.
    lacks_compiler = torch.tensor(float(not has_cpp_compiler()))
    if mesh.sum_of_all(lacks_compiler):
        return config
    # The user did not request compilation, so a layer that fails to compile stays eager, with a warning.
    torch._dynamo.config.suppress_errors = True
    return replace(config, compile=replace(config.compile, enable=True))


def _is_known_to_gain(config: Config, mesh: Mesh) -> bool:
    """True for combinations of options that were measured to be faster when compiled."""
    is_native_model = config.model.name != "transformers" and not config.model.name.endswith(".py")
    has_chosen_kernels = config.training.cpu_kernels == "auto" and not config.debug.deterministic
    has_adapters = config.lora.enable or bool(config.model.converters)
    recompute = config.activation_checkpoint
    if has_adapters or recompute.debug or recompute.mode == "memory_budget":
        return False
    if mesh.size("tp", "cp", "pp") > 1 or config.parallelism.expert_parallel_degree > 1:
        return False
    return is_native_model and has_chosen_kernels and config.task.name == Task().name


def _is_long(config: Config, mesh: Mesh, flops_per_token: float) -> bool:
    """True if the run would be long even if every thread reached the peak of the fastest processors."""
    training = config.training
    if training.epochs is not None:  # the number of steps is not known until the data are open
        return False
    flops_per_second = _PEAK_FLOPS_PER_CORE
    has_amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    if derived.compute_dtype(config) != "float32" and has_amx():
        flops_per_second = _PEAK_FLOPS_PER_CORE_AMX
    num_ranks = mesh.device_mesh.size()
    tokens_per_rank = derived.global_batch_size(config, num_ranks) * training.seq_len / num_ranks
    step_seconds = tokens_per_rank * flops_per_token / (flops_per_second * torch.get_num_threads())
    return step_seconds >= SHORT_STEP_SECONDS and step_seconds * training.steps >= LONG_SECONDS


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Compile each layer in place.

    With tensor parallelism or experts, attention and feed-forward are compiled separately. Experts stay
    eager, because the number of rows per expert is not known in advance. Recurrences stay eager,
    because the compiler would unroll their loop over blocks of tokens. With context parallelism or a
    recurrence, ``activation_checkpoint.apply`` has already compiled the layers that recompute, see
    ``is_compiled_within``.
    """
    if not _compiles_layers(config):
        return
    if mesh.size("tp") > 1:
        # Disable the on-disk cache of backward graphs, so each process traces backward again. The cache
        # key does not distinguish all DTensor placements: with sequence parallelism, an entry of another
        # run gave norm weights the gradient of only one rank's tokens, without an error (torch 2.13).
        # Kernels stay cached.
        import torch._functorch.config as autograd

        autograd.enable_autograd_cache = False
    if mesh.device.type == "cpu" and config.compile.backend == "inductor":
        _remember_vector_instructions()
        _remove_cut_libraries()
    # All layers share one function, so all their graphs count against one limit. Each type of layer
    # needs up to four graphs: for fixed and dynamic lengths, with gradients and without (validation).
    # Beyond the limit (default 8) layers would silently run eagerly.
    torch._dynamo.config.recompile_limit = max(
        RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit
    )
    for path, layer in all_layers(model, layout).items():
        for core in _recurrences(layer, path, layout):
            if "forward" not in vars(core):  # context parallelism has disabled it already
                core.forward = torch.compiler.disable(core.forward, reason=_EAGER_RECURRENCE)  # type: ignore[method-assign]
        is_recomputed = "forward" in vars(layer)
        if is_recomputed and is_compiled_within(layer, path, layout, mesh, config):
            continue
        for part in _compiled_parts(layer, path, layout, mesh):
            part.compile(backend=config.compile.backend)


def _remember_vector_instructions() -> None:
    """Skip inductor's test of the vector instructions if this processor has passed it before.

    The test takes a second at each start: for each instruction set that the processor reports, inductor
    builds a small library (cached) and starts a process that loads it. If any set fails, nothing is
    remembered, and inductor repeats the test at each start.
    """
    # These are private parts of inductor, which another version may not have.
    try:
        from torch._inductor import config as inductor
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        compiler_path = shutil.which(os.environ.get("CXX", "g++"))
        if inductor.cpp.vec_isa_ok is not None or compiler_path is None:
            return
        # Another compiler may not support all sets, so test again when the compiler changes. The size
        # and modification time of its file identify it.
        compiler = Path(compiler_path).resolve()
        status = compiler.stat()
        key = machine_key(str(compiler), str(status.st_size), str(status.st_mtime_ns))
        marker = user_cache.folder() / f"vector_instructions-{key}"
        if not marker.exists():
            working_sets = [str(isa) for isa in valid_vec_isa_list()]
            with inductor.patch({"cpp.vec_isa_ok": True}):
                reported_sets = [str(isa) for isa in valid_vec_isa_list.__wrapped__()]
            if working_sets != reported_sets:
                return
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()
        # Set it at the first start too: the setting is part of the compiler's cache key.
        inductor.cpp.vec_isa_ok = True
    except (ImportError, AttributeError, OSError):
        return


def _remove_cut_libraries() -> None:
    """Remove truncated libraries from inductor's cache, and log each. A killed run may leave such files.

    The linker writes a library directly under its final name, and inductor loads whatever file has that
    name. So after a killed run, every later run would fail at its first step. A library that another
    process is still writing is locked, and is kept.
    """
    # These are private parts of inductor, which another version may not have.
    try:
        from torch._inductor.codecache import cache_dir, get_lock_dir
        from torch.utils._filelock import FileLock
    except ImportError:
        return
    for path in Path(cache_dir()).glob("*/*.so"):
        # OSError: another rank has removed the file, or another process holds the lock (TimeoutError).
        with suppress(OSError):
            if _is_complete(path):
                continue
            lock_name = f"{path.name.split('.')[0]}.lock"
            with FileLock(Path(get_lock_dir()) / lock_name, timeout=0):
                if not _is_complete(path):
                    path.unlink()
                    logger.warning(f"removed {path}, which a killed run left half written")


def _is_complete(path: Path) -> bool:
    """True if a 64-bit ELF library contains its section header table, which is at the end of the file.

    Files of other formats count as complete unless they begin with zeros.
    """
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) < 64:
        return False
    is_elf64 = header[:6] == b"\x7fELF\x02\x01"
    if not is_elf64:
        return bool(header.strip(b"\0"))
    table_start = int.from_bytes(header[40:48], "little")
    entry_bytes = int.from_bytes(header[58:60], "little")
    num_entries = int.from_bytes(header[60:62], "little")
    return table_start > 0 and table_start + entry_bytes * num_entries <= size


def _compiles_layers(config: Config) -> bool:
    return bool(config.compile.enable) and "model" in config.compile.components


def graph_break_warning(config: Config) -> str | None:
    """Return a warning that names the first graph break so far. None if all layers were compiled.

    If a layer recomputes, a graph break inside it makes the entire layer run eagerly.
    """
    if not _compiles_layers(config):
        return None
    from torch._dynamo.utils import counters

    # These modules disable the compiler on purpose, so do not report their graph breaks.
    on_purpose = (
        "SplitAttentionCore",
        "SplitRecurrenceCore",
        "RoutedCore",
        _EAGER_RECURRENCE,
        EAGER_ATTENTION,
    )
    reasons = []
    for graph_break in counters["graph_break"]:
        if not any(name in str(graph_break) for name in on_purpose):
            reasons.append(str(graph_break))
    if not reasons:
        return None
    extent = "some layers are not compiled, or only in part"
    if config.activation_checkpoint.mode in ("none", "memory_budget"):
        extent = "some layers are compiled only in part"
    reason = " ".join(reasons[0].split())[:200]
    return f"compile.enable: {extent}: {reason} (set TORCH_LOGS=graph_breaks to see where)"


def is_compiled_within(
    layer: nn.Module, path: str, layout: Layout, mesh: Mesh, config: Config
) -> bool:
    """True if a layer is compiled inside its recomputed region instead of around it.

    This is necessary for a layer with an eager core: a recurrence, or attention with context
    parallelism or QK-clip. If the compiler wraps a recomputed region that contains an eager part, it silently
    compiles nothing. If the region wraps the compiled layer, only the core breaks the graph.
    """
    has_eager_attention = mesh.size("cp") > 1 or config.optimizer.qk_clip_threshold > 0
    has_eager_core = has_eager_attention or bool(_recurrences(layer, path, layout))
    if not _compiles_layers(config) or not has_eager_core:
        return False
    parts = _compiled_parts(layer, path, layout, mesh)
    return parts == [layer]


def _recurrences(layer: nn.Module, path: str, layout: Layout) -> list[nn.Module]:
    """Return the cores of recurrences in a layer."""
    if not layout.recurrence:
        return []
    return [
        module
        for name, module in layer.named_modules()
        if matches(f"{path}.{name}", layout.recurrence)
    ]


def _compiled_parts(layer: nn.Module, path: str, layout: Layout, mesh: Mesh) -> list[nn.Module]:
    """Return the modules of a layer to compile: the layer, or its attention and feed-forward."""
    paths = [f"{path}.{name}" for name, _ in layer.named_modules()]
    has_experts = layout.expert and any(matches(name, layout.expert) for name in paths)
    if mesh.size("tp") == 1 and not has_experts:
        return [layer]
    # With sequence parallelism, an entire compiled layer fails in backward: 'Tensor' object has no attribute
    # '_local_tensor' (torch 2.13). The modules whose input is gathered compile well separately.
    parts = []
    for name, child in layer.named_children():
        if style_of(layout, f"{path}.{name}") == "gather":
            parts.append(child)
    return parts


def chunk_loss(config: Config, terms: LossTerms = CROSS_ENTROPY) -> ChunkFunction | None:
    """Return the function that computes the loss of one chunk of tokens, compiled if configured.

    None if the loss should use its default function.
    """
    is_compiled = config.compile.enable and "loss" in config.compile.components
    if terms.is_cross_entropy and not is_compiled:
        return None
    function = chunk_loss_without_scatter if terms.is_cross_entropy else terms.chunk_loss
    if not is_compiled:
        return function
    return torch.compile(function, backend=config.compile.backend)  # type: ignore[no-any-return]
