"""Select the modules that compute in float8 or MX, and let FSDP gather weights in 8 bits.

The arithmetic is in ``ops/``.

With float8 gathering, the owner of a shard rounds it to float8 and sends one byte per number. The receiver
converts it back to the compute dtype. The module that uses the weight rounds it again and gets the same
float8 numbers, because scales are powers of two. So float8 gathering halves the traffic without changing
any result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from shardtrain.config import derived
from shardtrain.config.schema import Config, Float8Linear, MXLinear
from shardtrain.distributed.mesh import Mesh
from shardtrain.facts.quantization import FLOAT8_MULTIPLE, GROUPED, LINEAR, MX, MX_BLOCK, OPTION
from shardtrain.layout import Layout
from shardtrain.ops import float8, microscaling
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

SMALL = "auto_filter_small_kn"
"""An entry of filter_fqns that excludes layers whose matmuls are too small to gain from float8."""
_TITAN_NAMES = (("head", "output"), ("embed", "tok_embeddings"), (".attn.", ".attention."), (".ffn.", ".feed_forward."),
                (".shared.", ".shared_experts."))  # fmt: skip
"""Pairs of (module name in this package, module name in torchtitan).

A name with dots may be anywhere inside a path. A name without dots must be a complete part of the path.
"""


def convert(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Make the modules selected by ``model.converters`` compute in 8 bits, in place.

    Parameter names do not change.

    Must run before all other steps of ``parallelize``.

    Raises:
        ConfigError: the device does not support the matmuls, a filter names no module, or no module is
            left to convert.
    """
    converters = config.model.converters
    _check_device(mesh, config)
    if LINEAR in converters or MX in converters:
        _convert_linear(model, mesh, config)
    if GROUPED in converters:
        options = config.quantize.grouped_mm.float8
        selected = _experts_of(model, config)
        for _, experts in selected:
            experts.product = partial(
                float8.grouped_product, multiply=experts.product, emulate=options.emulate
            )
        suffix = ", emulated" if options.emulate else ""
        logger.info(
            f"{GROUPED}: the experts of {len(selected)} layers compute in float8, rowwise{suffix}"
        )
    if config.model.print_after_conversion:
        logger.info(str(model))


def check(model: nn.Module, config: Config) -> None:
    """Raise the ConfigErrors of ``convert`` that do not depend on the device. Changes nothing."""
    converters = config.model.converters
    if LINEAR in converters or MX in converters:
        selected = _select_linears(model, config)
        if MX in converters:
            _check_parts(
                selected.converted, config.parallelism.tensor_parallel_degree, MX, MX_BLOCK
            )
    if GROUPED in converters:
        _experts_of(model, config)


def _check_device(mesh: Mesh, config: Config) -> None:
    """Raise ConfigError if a CUDA device does not support the matmuls that the converters need."""
    options = config.quantize
    converters = config.model.converters
    # config/machine_rules.py refuses a CPU before ranks start
    if config.comm.mode == "fake_backend" or mesh.device.type != "cuda":
        return
    if MX in converters and not microscaling.RECIPES[options.linear.mx.recipe_name][1]:
        _check_mx_of_device(config)
    needs_linear = LINEAR in converters and not options.linear.float8.emulate
    needs_grouped = GROUPED in converters and not options.grouped_mm.float8.emulate
    if not needs_linear and not needs_grouped:
        return
    if torch.version.hip:
        name = torch.cuda.get_device_properties(0).gcnArchName
        is_capable = "gfx94" in name or "gfx95" in name
    else:
        major, minor = torch.cuda.get_device_capability()
        name = f"{torch.cuda.get_device_name()} (capability {major}.{minor})"
        is_capable = (major, minor) >= (8, 9)
        # PyTorch's grouped float8 matmul has a kernel only for Hopper
        if needs_grouped and major != 9:
            is_capable = False
    if not is_capable:
        rule = (
            f"needs float8 matmuls, which {name} does not support; this device computes in bfloat16, "
            "float16 and float32"
        )
        fix = "set emulate = true in the converter's section, or remove the converter"
        raise ConfigError(Problem(OPTION, list(converters), rule, fix))


def _check_mx_of_device(config: Config) -> None:
    name = torch.cuda.get_device_name()
    is_capable = False
    if not torch.version.hip:
        major, minor = torch.cuda.get_device_capability()
        name = f"{name} (capability {major}.{minor})"
        is_capable = major >= 10
    if not is_capable:
        rule = (
            f"needs MXFP8 matmuls (CUDA capability 10.0 or higher), which {name} does not support"
        )
        fix = (
            'set recipe_name = "mxfp8_emulated" in its section, which is slow but has the results of '
            'mxfp8_cublas, or use "quantize.linear.float8"'
        )
        raise ConfigError(Problem(OPTION, list(config.model.converters), rule, fix))


@dataclass(frozen=True)
class _Selection:
    """The linear layers of a model: layers to convert, and layers that are excluded for each reason.

    Attributes:
        converted: (path, layer) of each layer to convert.
        odd: paths of layers whose sizes are not multiples of 16.
        small: paths of layers that ``auto_filter_small_kn`` excludes.
        filtered: paths of layers that another entry of filter_fqns excludes.
    """

    converted: list[tuple[str, nn.Linear]]
    odd: list[str]
    small: list[str]
    filtered: list[str]


def _select_linears(model: nn.Module, config: Config) -> _Selection:
    """Decide which linear layers of a model to convert.

    Raises:
        ConfigError: a filter names no module, or no layer is left to convert.
    """
    # Find the options of the converter. The filter of float8 may contain SMALL, which is no module's name.
    is_mx = MX in config.model.converters
    converter = MX if is_mx else LINEAR
    options: Float8Linear | MXLinear = (
        config.quantize.linear.mx if is_mx else config.quantize.linear.float8
    )
    option = f"{converter}.filter_fqns"
    filters = list(options.filter_fqns)
    excludes_small = SMALL in filters and not is_mx
    if not is_mx:
        filters = [name for name in filters if name != SMALL]

    # The default filter of MX names the head. Not every model has one, so do not check the default.
    is_default = is_mx and options.filter_fqns == MXLinear().filter_fqns
    if not is_default:
        paths = [path for path, _ in model.named_modules() if path]
        for name in filters:
            if not any(_is_named(path, name) for path in paths):
                rule = f"contains {name!r}, which matches no module of this model"
                fix = f"name a part of a module's path, such as {paths[-1]!r}"
                raise ConfigError(Problem(option, options.filter_fqns, rule, fix))

    selection = _Selection([], [], [], [])
    for path, module in model.named_modules():
        # Skip subclasses. They may compute something else, which the conversion would lose.
        if type(module) is not nn.Linear:
            continue
        rows, columns = module.weight.shape
        if any(_is_named(path, name) for name in filters):
            selection.filtered.append(path)
        elif rows % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE:
            selection.odd.append(path)
        elif excludes_small and _is_small(rows, columns, options.recipe_name or "tensorwise"):
            selection.small.append(path)
        else:
            selection.converted.append((path, module))
    if not selection.converted:
        kind = "MX" if is_mx else "float8"
        rule = f"leaves no linear layer to compute in {kind}"
        fix = f"filter less, or remove {converter!r} from model.converters"
        raise ConfigError(Problem(option, options.filter_fqns, rule, fix))
    return selection


def _convert_linear(model: nn.Module, mesh: Mesh, config: Config) -> None:
    options = config.quantize.linear
    selection = _select_linears(model, config)
    converted = selection.converted
    if MX in config.model.converters:
        # This also applies to emulated matmuls. If the size of a shard is not a multiple of the block
        # size, its blocks, and therefore their scales, differ from those of the unsharded weight.
        _check_parts(converted, mesh.size("tp"), MX, MX_BLOCK)
        for _, module in converted:
            microscaling.convert(module, options.mx.recipe_name)
        message = f"{MX}: {len(converted)} linear layers compute in MX, {options.mx.recipe_name}"
    else:
        recipe = options.float8.recipe_name or "tensorwise"
        if not options.float8.emulate:
            _check_parts(converted, mesh.size("tp"), LINEAR, FLOAT8_MULTIPLE)
        for _, module in converted:
            float8.convert(module, recipe, options.float8.emulate)
        message = f"{LINEAR}: {len(converted)} linear layers compute in float8, {recipe}"
        if options.float8.emulate:
            message += ", emulated"
    exclusions = []
    if selection.filtered:
        exclusions.append(f"{len(selection.filtered)} by filter_fqns")
    if selection.small:
        exclusions.append(f"{len(selection.small)} too small to gain")
    if selection.odd:
        exclusions.append(
            f"{len(selection.odd)} with sizes that are not multiples of {FLOAT8_MULTIPLE}"
        )
    if exclusions:
        message += f"; not converted: {', '.join(exclusions)}"
    logger.info(message)


def _is_named(path: str, name: str) -> bool:
    """True if a module's path contains ``name``, with our module names or with torchtitan's."""
    titan_path = f".{path}."
    for ours, theirs in _TITAN_NAMES:
        if ours[0] == ".":
            titan_path = titan_path.replace(ours, theirs)
        else:
            titan_path = titan_path.replace(f".{ours}.", f".{theirs}.")
    return name in path or name in titan_path.strip(".")


def _is_small(rows: int, columns: int, recipe: str) -> bool:
    """True if the scaling of a weight (rows, columns) costs more than float8 saves.

    The thresholds are torchao's, measured on an H100.
    """
    if recipe == "tensorwise":
        return columns <= 4096 and rows <= 1024
    is_narrow = rows <= 2048 or columns <= 1024
    return is_narrow or (rows <= 4096 and columns <= 2048)


def _check_parts(
    converted: Sequence[tuple[str, nn.Linear]], tp: int, converter: str, multiple: int
) -> None:
    """Raise ConfigError if a rank's part of a weight has a size that is not a multiple of ``multiple``.

    Kernels require it, and an MX block must not be split over ranks.
    """
    if tp == 1:
        return
    for path, module in converted:
        for size in module.weight.shape:
            if size % (multiple * tp):
                part = f"leaves each rank {size / tp:g} of the {size} features of {path}"
                rule = f"{part}, which is not a multiple of {multiple}"
                fix = f"use a smaller degree, or add {path.rpartition('.')[2]!r} to {converter}.filter_fqns"
                raise ConfigError(Problem("parallelism.tensor_parallel_degree", tp, rule, fix))


def _experts_of(model: nn.Module, config: Config) -> list[tuple[str, Any]]:
    """Return the expert modules that ``fqns`` names, with their paths.

    Raises:
        ConfigError: ``fqns`` names no experts, or their sizes are not multiples of 16.
    """
    option = f"{GROUPED}.fqns"
    fqns = config.quantize.grouped_mm.float8.fqns
    selected: list[tuple[str, Any]] = []
    for path, module in model.named_modules():
        is_experts = hasattr(module, "product") and hasattr(module, "w1")
        if is_experts and any(_is_named(path, name) for name in fqns):
            selected.append((path, module))
    if not selected:
        rule = "names no experts of this model" if fqns else "names no experts"
        fix = f'use ["experts"], or remove {GROUPED!r} from model.converters'
        raise ConfigError(Problem(option, fqns, rule, fix))
    for path, experts in selected:
        sizes = tuple(experts.w1.shape[1:])
        if any(size % FLOAT8_MULTIPLE for size in sizes):
            rule = f"names {path}, whose sizes {sizes} are not multiples of {FLOAT8_MULTIPLE}"
            raise ConfigError(Problem(option, fqns, rule, "remove it"))
    return selected


class GatheredInFloat8:
    """FSDP2's all-gather extension of one weight: round it to float8, send it as bytes, and convert it back."""

    def __init__(self, param: Any, dtype: torch.dtype) -> None:
        self._param = param
        self._dtype = dtype
        self._restored: Tensor | None = None
        self.amax: Tensor | None = None
        """Largest magnitude of the full weight. None if it was not computed in advance."""

    @property
    def shard(self) -> Tensor:
        """This rank's shard, padded with zeros to the size of the largest shard."""
        return self._param._sharded_param_data.view(self._param.padded_sharded_param_size)  # type: ignore[no-any-return]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold a shard."""
        return self._param.mesh_info.shard_process_group  # type: ignore[no-any-return]

    def before(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], Tensor]:
        """Return the bytes to send, and the inverse scale, which is equal on all ranks (a collective)."""
        shard = self.shard.to(self._dtype)
        amax = self.amax
        if amax is None:
            amax = shard.abs().amax().float()
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        bits, inverse = float8.to_float8(shard, None, float8.E4M3, amax)
        return (bits.view(torch.uint8),), inverse  # gloo does not support float8

    def after(
        self,
        gathered: tuple[Tensor, ...],
        inverse: Tensor,
        dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """Convert the gathered weight back to the compute dtype.

        Allocates a tensor, or if ``out`` is given, writes to the tensor of the first call.
        """
        bits = gathered[0].view(float8.dtype_of(float8.E4M3))
        if out is None:
            self._restored = bits.to(dtype) * inverse.to(dtype)
            return self._restored, (self._restored,)
        assert self._restored is not None
        # Backward writes the same numbers again. Hide this from autograd, which would otherwise report
        # that the saved weight was modified in place.
        with torch.autograd._unsafe_preserve_version_counter(self._restored):
            self._restored.copy_(bits).mul_(inverse.to(dtype))
        return None


def gather_in_float8(
    parts: Sequence[nn.Module], mesh: Mesh, config: Config
) -> list[GatheredInFloat8]:
    """Let FSDP gather the weights of float8 layers as bytes. Return the extension of each such weight.

    Must run after the memory of the weights is allocated.
    """
    is_enabled = config.quantize.linear.float8.enable_fsdp_float8_all_gather
    if LINEAR not in config.model.converters or not is_enabled:
        return []
    if mesh.size("dp_shard", "cp") == 1:
        return []
    dtype = getattr(torch, derived.compute_dtype(config))
    extensions = []
    for param in _fsdp_params(parts):
        info = param._module_info
        if isinstance(info.module, float8.Float8Linear) and info.param_name == "weight":
            extension = GatheredInFloat8(param, dtype)
            # FSDP2 looks up these two methods on the local tensor. Usually a tensor subclass defines them,
            # but attributes of a plain tensor work too.
            local = param._sharded_local_tensor
            local.fsdp_pre_all_gather = extension.before
            local.fsdp_post_all_gather = extension.after
            param._init_extensions()
            extensions.append(extension)
    return extensions


def _fsdp_params(parts: Sequence[nn.Module]) -> Iterator[Any]:
    for part in parts:
        modules = [module for module in part.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
            if group is not None:
                yield from group.fsdp_params


@torch.no_grad()
def precompute_scales(gathered: Sequence[GatheredInFloat8]) -> None:
    """Compute the largest magnitude of each weight gathered in float8, in one reduction (a collective)."""
    if not gathered:
        return
    norms = torch._foreach_norm([weight.shard for weight in gathered], float("inf"))
    amax = torch.stack([norm.float() for norm in norms])
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=gathered[0].group)
    for weight, largest in zip(gathered, amax, strict=True):
        weight.amax = largest.to(weight._dtype).float()


BeforePass = Callable[[], None]


def before_pass(parts: Sequence[nn.Module], mesh: Mesh, config: Config) -> BeforePass | None:
    """Set up float8 gathering if it is enabled.

    Return a function that must be called before the first forward pass of each step and each evaluation,
    or None. The function is a collective.
    """
    gathered = gather_in_float8(parts, mesh, config)
    if not config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp:
        return None
    return partial(precompute_scales, gathered)
