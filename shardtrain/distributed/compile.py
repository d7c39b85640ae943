"""torch.compile, layer by layer and in place, so that names never change. Must run after recompute, before shard."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from shardtrain.config import derived
from shardtrain.config.machine import has_cpp_compiler
from shardtrain.config.schema import Config
from shardtrain.config.schema.task import Task
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout, matches, word_of
from shardtrain.ops.cross_entropy import ChunkFunction, chunk_loss_without_scatter
from shardtrain.ops.machine_key import machine_key
from shardtrain.utils import user_cache
from shardtrain.utils.log import logger

RECOMPILE_LIMIT = 64
LONG_SECONDS = 1800.0
"""A run on CPUs that takes longer, were they as fast as any, is compiled by default: it gains 3 % to 12 % on an idle
machine and up to 30 % on a busy one, and loses 20 to 50 s of its first start and some 2 s of every other."""
SHORT_STEP_SECONDS = 0.05
"""Steps that would be shorter are not compiled by default: nothing of theirs was measured."""


def decided(config: Config, mesh: Mesh, flops_per_token: float) -> Config:
    """The configuration with ``compile.enable`` as a run on CPUs gains by it, where that is left open (a collective).

    Only for what was measured: a model of this package that learns the next token on one process or with FSDP. It
    depends on the configuration and the kind of processor, not on the time that anything took: a run that is continued
    decides as before, and has the same bits.
    """
    is_open = config.compile.enable is None and mesh.device.type == "cpu"
    if not (is_open and _is_known_to_gain(config, mesh) and _is_long(config, mesh, flops_per_token)):
        return config
    if mesh.sum_of_all(torch.tensor(float(not has_cpp_compiler()))):  # one rank that cannot is enough
        return config
    # what cannot be compiled at its first forward stays eager, with a warning: nobody has asked for it by name
    torch._dynamo.config.suppress_errors = True
    return replace(config, compile=replace(config.compile, enable=True))


def _is_known_to_gain(config: Config, mesh: Mesh) -> bool:
    own = config.model.name != "transformers" and not config.model.name.endswith(".py")
    kernels = config.training.cpu_kernels == "auto" and not config.debug.deterministic
    plain = not (config.lora.enable or config.model.converters or config.activation_checkpoint.debug)
    recompute = config.activation_checkpoint.mode != "memory_budget"
    together = mesh.size("tp", "cp", "pp") == 1 and config.parallelism.expert_parallel_degree == 1
    return own and kernels and plain and recompute and together and config.task.name == Task().name


def _is_long(config: Config, mesh: Mesh, flops_per_token: float) -> bool:
    """Whether the steps take long even where a thread reaches what the fastest processors do."""
    training = config.training
    if training.epochs is not None:  # how many steps there are is known when the data have been opened
        return False
    per_second = 2e11  # of a core of AMD's Zen 5 in float32, and of Zen 4 in bfloat16
    if derived.compute_dtype(config) != "float32" and getattr(torch.cpu, "_is_amx_tile_supported", lambda: True)():
        per_second = 2e12
    size = mesh.device_mesh.size()
    tokens = derived.global_batch_size(config, size) * training.seq_len / size
    step_seconds = tokens * flops_per_token / (per_second * torch.get_num_threads())
    return step_seconds >= SHORT_STEP_SECONDS and step_seconds * training.steps >= LONG_SECONDS


def apply(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Compile each layer; with tensor parallelism or experts, each layer's attention and feed-forward apart.

    Experts themselves stay eager: how many rows each gets is not known before it runs. Where sequences are split,
    layers that recompute have been compiled already, see ``is_compiled_within``.
    """
    if not _compiles_layers(config):
        return
    if mesh.size("tp") > 1:
        # Backward is traced again in each process instead of being read from the compiler's cache on disk. That cache
        # does not tell all placements of DTensors apart: with sequence parallelism an entry of another run has given
        # norm weights the gradient of one rank's tokens alone, without an error (torch 2.13). Kernels stay cached.
        import torch._functorch.config as autograd

        autograd.enable_autograd_cache = False
    if mesh.device.type == "cpu" and config.compile.backend == "inductor":
        _remember_vector_instructions()
        _remove_cut_libraries()
    # Layers share the compiler's cache of one function, whatever their kind; each kind takes a graph for fixed and one
    # for any lengths, with gradients and, in validation, without. Beyond the limit (8) layers would run eagerly.
    torch._dynamo.config.recompile_limit = max(RECOMPILE_LIMIT, torch._dynamo.config.recompile_limit)
    for name, layer in getattr(model, layout.layers).items():
        path = f"{layout.layers}.{name}"
        if "forward" in vars(layer) and is_compiled_within(layer, path, layout, mesh, config):
            continue
        for part in _parts(layer, path, layout, mesh):
            part.compile(backend=config.compile.backend)


def _remember_vector_instructions() -> None:
    """Let inductor trust this processor's vector instructions if they have worked once: a second less at each start.

    It compiles and loads a small library for each set of instructions that the processor says to have; the libraries
    are cached, but a process is started to load each. Where one fails, inductor tries them at each start.
    """
    # inductor's own, of which another version may have none
    try:
        from torch._inductor import config as inductor
        from torch._inductor.cpu_vec_isa import valid_vec_isa_list

        found = shutil.which(os.environ.get("CXX", "g++"))
        if inductor.cpp.vec_isa_ok is not None or found is None:
            return
        # another compiler may not know all of them: its file is told from others by size and time
        compiler = Path(found).resolve()
        facts = compiler.stat()
        key = machine_key(str(compiler), str(facts.st_size), str(facts.st_mtime_ns))
        remembered = user_cache.folder() / f"vector_instructions-{key}"
        if not remembered.exists():
            working = [str(one) for one in valid_vec_isa_list()]
            with inductor.patch({"cpp.vec_isa_ok": True}):
                claimed = [str(one) for one in valid_vec_isa_list.__wrapped__()]
            if working != claimed:
                return
            remembered.parent.mkdir(parents=True, exist_ok=True)
            remembered.touch()
        # at the first start too: the compiler's cache asks for the same settings
        inductor.cpp.vec_isa_ok = True
    except (ImportError, AttributeError, OSError):
        return


def _remove_cut_libraries() -> None:
    """Remove libraries of inductor's cache that a run which was killed has left half written, and say so.

    The linker writes a library under its own name, and inductor loads whatever has that name: every later start would
    fail at its first step. A library that another process is writing has a lock, and stays.
    """
    try:  # inductor's own places, of which another version may have others
        from torch._inductor.codecache import cache_dir, get_lock_dir
        from torch.utils._filelock import FileLock
    except ImportError:
        return
    for path in Path(cache_dir()).glob("*/*.so"):
        # another rank may have removed it meanwhile, or another process has the lock, which is a TimeoutError
        with suppress(OSError):
            if _is_whole(path):
                continue
            with FileLock(Path(get_lock_dir()) / f"{path.name.split('.')[0]}.lock", timeout=0):
                if not _is_whole(path):
                    path.unlink()
                    logger.warning(f"removed {path}, which a run that was killed had left half written")


def _is_whole(path: Path) -> bool:
    """Whether a library has all that its header tells of: the table of its sections comes last. 64-bit ELF alone."""
    with path.open("rb") as file:
        header = file.read(64)
        size = os.fstat(file.fileno()).st_size
    if len(header) < 64:
        return False
    if header[:6] != b"\x7fELF\x02\x01":
        return bool(header.strip(b"\0"))  # another system's
    sections = int.from_bytes(header[40:48], "little")
    end = sections + int.from_bytes(header[58:60], "little") * int.from_bytes(header[60:62], "little")
    return sections > 0 and end <= size


def _compiles_layers(config: Config) -> bool:
    return bool(config.compile.enable) and "model" in config.compile.components


def left_out(config: Config) -> str | None:
    """Why PyTorch has left out something of what has run so far, in a line; None where all layers were compiled.

    Where a graph breaks within a region that recomputes, all of the layer runs eagerly.
    """
    if not _compiles_layers(config):
        return None
    from torch._dynamo.utils import counters

    reasons = [str(why) for why in counters["graph_break"] if "SplitAttentionCore" not in str(why)]
    if not reasons:
        return None
    what = "the rest of" if config.activation_checkpoint.mode in ("none", "memory_budget") else "all or the rest of"
    why = " ".join(reasons[0].split())[:200]
    return f"compile.enable: {what} some layers is not compiled: {why} (TORCH_LOGS=graph_breaks says where)"


def is_compiled_within(layer: nn.Module, path: str, layout: Layout, mesh: Mesh, config: Config) -> bool:
    """Whether a layer that recomputes is compiled inside of what is recomputed, not around it.

    The attention core of a split sequence stays eager, and around a recomputed region that it cannot see whole the
    compiler leaves out everything, without a word. Inside it breaks the graph at the core alone.
    """
    return _compiles_layers(config) and mesh.size("cp") > 1 and _parts(layer, path, layout, mesh) == [layer]


def _parts(layer: nn.Module, path: str, layout: Layout, mesh: Mesh) -> list[nn.Module]:
    # A whole layer with sequence parallelism fails in backward when compiled: 'Tensor' object has no attribute
    # '_local_tensor' (torch 2.13). The modules whose input is gathered compile well by themselves.
    inner = [f"{path}.{name}" for name, _ in layer.named_modules()]
    has_experts = layout.expert and any(matches(name, layout.expert) for name in inner)
    if mesh.size("tp") == 1 and not has_experts:
        return [layer]
    return [child for name, child in layer.named_children() if word_of(layout, f"{path}.{name}") == "gather"]


def compiled_chunk_loss(config: Config) -> ChunkFunction | None:
    """The loss of one chunk of tokens as one compiled kernel, or None when it is not to be compiled."""
    if not (config.compile.enable and "loss" in config.compile.components):
        return None
    return torch.compile(chunk_loss_without_scatter, backend=config.compile.backend)  # type: ignore[no-any-return]
