"""Which modules compute in float8 or MX, and gathering weights in 8 bits; numbers are made in ``ops/``.

A weight that FSDP gathers is rounded by its owner, sent as one byte per number, and restored in the compute type: the
module that uses it rounds it once more, to the same numbers, because scales are powers of two. So gathering in float8
changes no bit of a step, and halves what is sent.
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
from shardtrain.facts.quantization import FLOAT8_MULTIPLE, GROUPED, LINEAR, MX, MX_BLOCK
from shardtrain.layout import Layout
from shardtrain.ops import float8, microscaling
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

OPTION = "model.converters"
SMALL = "auto_filter_small_kn"
"""A word of filter_fqns: layers whose products are too small to gain by float8 are left as they are."""
_TITAN = (("head", "output"), ("embed", "tok_embeddings"), (".attn.", ".attention."), (".ffn.", ".feed_forward."),
          (".shared.", ".shared_experts."))  # fmt: skip


def convert(model: nn.Module, layout: Layout, mesh: Mesh, config: Config) -> None:
    """Let the modules that ``model.converters`` asks for compute in 8 bits, in place; names stay. Must run first.

    Raises:
        ConfigError: when the device has no such products, or a filter names nothing, or no module is left.
    """
    wanted = config.model.converters
    _check_device(mesh, config)
    if LINEAR in wanted or MX in wanted:
        _convert_linear(model, mesh, config)
    if GROUPED in wanted:
        options = config.quantize.grouped_mm.float8
        found = _experts_of(model, config)
        for _, experts in found:
            experts.product = partial(float8.grouped_product, multiply=experts.product, emulate=options.emulate)
        how = ", emulated" if options.emulate else ""
        logger.info(f"{GROUPED}: the experts of {len(found)} layers compute in float8, rowwise{how}")
    if config.model.print_after_conversion:
        logger.info(str(model))


def check(model: nn.Module, config: Config) -> None:
    """Refuse what ``convert`` would refuse of a model on any device; nothing is changed."""
    wanted = config.model.converters
    if LINEAR in wanted or MX in wanted:
        found = _linears_of(model, config)
        if MX in wanted:
            _check_parts(found.converted, config.parallelism.tensor_parallel_degree, MX, MX_BLOCK)
    if GROUPED in wanted:
        _experts_of(model, config)


def _check_device(mesh: Mesh, config: Config) -> None:
    options = config.quantize
    wanted = config.model.converters
    on_device = (LINEAR in wanted and not options.linear.float8.emulate) or (
        GROUPED in wanted and not options.grouped_mm.float8.emulate
    )
    if config.comm.mode == "fake_backend" or mesh.device.type != "cuda":
        return  # a CPU is refused before ranks start, see config/machine_rules.py
    if MX in wanted and not microscaling.RECIPES[options.linear.mx.recipe_name][1]:
        _check_mx_of_device(config)
    if not on_device:
        return
    if torch.version.hip:
        name = torch.cuda.get_device_properties(0).gcnArchName
        capable = "gfx94" in name or "gfx95" in name
    else:
        major, minor = torch.cuda.get_device_capability()
        # grouped products have a kernel for Hopper alone
        name = f"{torch.cuda.get_device_name()} (capability {major}.{minor})"
        capable = (major, minor) >= (8, 9)
        capable = capable and (GROUPED not in wanted or options.grouped_mm.float8.emulate or major == 9)
    if not capable:
        rule = f"needs float8 products that {name} lacks; it computes in bfloat16, float16 and float32"
        raise ConfigError(Problem(OPTION, list(wanted), rule, "set emulate = true in its section, or remove it"))


def _check_mx_of_device(config: Config) -> None:
    name = torch.cuda.get_device_name()
    capable = False
    if not torch.version.hip:
        major, minor = torch.cuda.get_device_capability()
        name = f"{name} (capability {major}.{minor})"
        capable = major >= 10
    if not capable:
        rule = f"needs MXFP8 products, of CUDA capability 10.0 and above, that {name} lacks"
        fix = (
            'set its recipe_name = "mxfp8_emulated" for those of mxfp8_cublas, slowly, or use "quantize.linear.float8"'
        )
        raise ConfigError(Problem(OPTION, list(config.model.converters), rule, fix))


@dataclass(frozen=True)
class _Linears:
    """Linear layers that compute in 8 bits, with their paths, and the paths of those that do not, by the reason."""

    converted: list[tuple[str, nn.Linear]]
    odd: list[str]
    small: list[str]
    left: list[str]


def _linears_of(model: nn.Module, config: Config) -> _Linears:
    in_mx = MX in config.model.converters
    converter = MX if in_mx else LINEAR
    options: Float8Linear | MXLinear = config.quantize.linear.mx if in_mx else config.quantize.linear.float8
    option = f"{converter}.filter_fqns"
    is_default = in_mx and options.filter_fqns == MXLinear().filter_fqns  # a model may have no head
    too_small = SMALL in options.filter_fqns and not in_mx
    filters = [word for word in options.filter_fqns if word != SMALL or in_mx]
    paths = [path for path, _ in model.named_modules() if path]
    for word in filters if not is_default else ():
        if not any(_names(path, word) for path in paths):
            fix = f"name a part of a module's path, such as {paths[-1]!r}"
            raise ConfigError(Problem(option, options.filter_fqns, f"names no module of this model by {word!r}", fix))
    found = _Linears([], [], [], [])
    for path, module in model.named_modules():
        # a class of its own computes something else, which this would replace
        if type(module) is not nn.Linear:
            continue
        rows, columns = module.weight.shape
        if any(_names(path, word) for word in filters):
            found.left.append(path)
        elif rows % FLOAT8_MULTIPLE or columns % FLOAT8_MULTIPLE:
            found.odd.append(path)
        elif too_small and _is_small(rows, columns, options.recipe_name or "tensorwise"):
            found.small.append(path)
        else:
            found.converted.append((path, module))
    if not found.converted:
        rule = f"leaves no linear layer to compute in {'MX' if in_mx else 'float8'}"
        fix = f"filter less, or remove {converter!r} from model.converters"
        raise ConfigError(Problem(option, options.filter_fqns, rule, fix))
    return found


def _convert_linear(model: nn.Module, mesh: Mesh, config: Config) -> None:
    options = config.quantize.linear
    found = _linears_of(model, config)
    if MX in config.model.converters:
        # Also where products are emulated: a part that is not whole blocks would be rounded by other scales
        _check_parts(found.converted, mesh.size("tp"), MX, MX_BLOCK)
        for _, module in found.converted:
            microscaling.convert(module, options.mx.recipe_name)
        how = f"{MX}: {len(found.converted)} linear layers compute in MX, {options.mx.recipe_name}"
    else:
        recipe = options.float8.recipe_name or "tensorwise"
        if not options.float8.emulate:
            _check_parts(found.converted, mesh.size("tp"), LINEAR, FLOAT8_MULTIPLE)
        for _, module in found.converted:
            float8.convert(module, recipe, options.float8.emulate)
        how = f"{LINEAR}: {len(found.converted)} linear layers compute in float8, {recipe}"
        how += ", emulated" if options.float8.emulate else ""
    aside = [
        f"{len(names)} {why}"
        for names, why in (
            (found.left, "by filter_fqns"),
            (found.small, "too small to gain"),
            (found.odd, f"of sizes that {FLOAT8_MULTIPLE} does not divide"),
        )
        if names
    ]
    logger.info(f"{how}{'; left out: ' if aside else ''}{', '.join(aside)}")


def _names(path: str, word: str) -> bool:
    """Whether a word of filter_fqns is part of a module's path, as it is here or as torchtitan has it."""
    theirs = f".{path}."
    for ours, other in _TITAN:
        theirs = theirs.replace(ours if ours[0] == "." else f".{ours}.", other if ours[0] == "." else f".{other}.")
    return word in path or word in theirs.strip(".")


def _is_small(rows: int, columns: int, recipe: str) -> bool:
    """torchao's thresholds, which it measured on H100: below them scaling costs more than float8 gains."""
    if recipe == "tensorwise":
        return columns <= 4096 and rows <= 1024
    return rows <= 2048 or columns <= 1024 or (rows <= 4096 and columns <= 2048)


def _check_parts(converted: Sequence[tuple[str, nn.Linear]], tp: int, converter: str, multiple: int) -> None:
    """Each rank's part of a weight has sizes that kernels of devices take, and is whole blocks of MX."""
    for path, module in converted:
        for size in module.weight.shape:
            if tp > 1 and size % (multiple * tp):
                part = f"leaves a rank {size / tp:g} of the {size} features of {path}"
                rule = f"{part}, which are not a multiple of {multiple}"
                fix = f"use a smaller degree, or add {path.rpartition('.')[2]!r} to {converter}.filter_fqns"
                raise ConfigError(Problem("parallelism.tensor_parallel_degree", tp, rule, fix))


def _experts_of(model: nn.Module, config: Config) -> list[tuple[str, Any]]:
    options = config.quantize.grouped_mm.float8
    found: list[tuple[str, Any]] = [
        (path, module)
        for path, module in model.named_modules()
        if hasattr(module, "product") and hasattr(module, "w1") and any(_names(path, word) for word in options.fqns)
    ]
    if not found:
        rule = "names no experts of this model" if options.fqns else "names no experts"
        fix = f'use ["experts"], or remove {GROUPED!r} from model.converters'
        raise ConfigError(Problem(f"{GROUPED}.fqns", options.fqns, rule, fix))
    for path, experts in found:
        if any(size % FLOAT8_MULTIPLE for size in experts.w1.shape[1:]):
            rule = f"names {path}, whose sizes {tuple(experts.w1.shape[1:])} are not multiples of {FLOAT8_MULTIPLE}"
            raise ConfigError(Problem(f"{GROUPED}.fqns", options.fqns, rule, "remove it"))
    return found


class GatheredInFloat8:
    """How FSDP gathers one weight: rounded, as bytes, and restored."""

    def __init__(self, param: Any, dtype: torch.dtype) -> None:
        self._param = param
        self._dtype = dtype
        self._restored: Tensor | None = None
        self.amax: Tensor | None = None
        """Largest magnitude over the ranks that hold a part, where it is known already."""

    @property
    def shard(self) -> Tensor:
        """This rank's part, with the zeros that make all ranks' equal in size."""
        return self._param._sharded_param_data.view(self._param.padded_sharded_param_size)  # type: ignore[no-any-return]

    @property
    def group(self) -> dist.ProcessGroup:
        """The ranks that hold a part."""
        return self._param.mesh_info.shard_process_group  # type: ignore[no-any-return]

    def before(self, mesh: DeviceMesh) -> tuple[tuple[Tensor], Tensor]:
        """What is sent, and the exponent that all ranks share."""
        shard = self.shard.to(self._dtype)
        amax = self.amax
        if amax is None:
            amax = shard.abs().amax().float()
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=mesh.get_group())
        bits, inverse = float8.to_float8(shard, None, float8.E4M3, amax)
        return (bits.view(torch.uint8),), inverse  # gloo has no float8

    def after(
        self, gathered: tuple[Tensor, ...], inverse: Tensor, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor]] | None:
        """The weight, in the type that the layer computes in."""
        bits = gathered[0].view(float8.dtype_of(float8.E4M3))
        # FSDP asks first for new memory, and later for the same numbers in that memory
        if out is None:
            self._restored = bits.to(dtype) * inverse.to(dtype)
            return self._restored, (self._restored,)
        assert self._restored is not None
        with torch.autograd._unsafe_preserve_version_counter(self._restored):  # the same numbers as forward had
            self._restored.copy_(bits).mul_(inverse.to(dtype))
        return None


def gather_in_float8(parts: Sequence[nn.Module], mesh: Mesh, config: Config) -> list[GatheredInFloat8]:
    """Let FSDP gather weights of float8 layers as bytes, once their memory is there; gives those that it changed."""
    if LINEAR not in config.model.converters or not config.quantize.linear.float8.enable_fsdp_float8_all_gather:
        return []
    if mesh.size("dp_shard", "cp") == 1:
        return []
    dtype = getattr(torch, derived.compute_dtype(config))
    gathered = []
    for param in _fsdp_params(parts):
        if isinstance(param._module_info.module, float8.Float8Linear) and param._module_info.param_name == "weight":
            one = GatheredInFloat8(param, dtype)
            # FSDP2's extension for tensors that gather otherwise; it asks the tensor at hand, of whatever class
            local = param._sharded_local_tensor
            local.fsdp_pre_all_gather = one.before
            local.fsdp_post_all_gather = one.after
            param._init_extensions()
            gathered.append(one)
    return gathered


def _fsdp_params(parts: Sequence[nn.Module]) -> Iterator[Any]:
    for part in parts:
        for module in part.modules():
            if isinstance(module, FSDPModule):
                group = fully_shard.state(module)._fsdp_param_group  # type: ignore[attr-defined]
                yield from group.fsdp_params if group is not None else ()


@torch.no_grad()
def precompute_scales(gathered: Sequence[GatheredInFloat8]) -> None:
    """Find the largest magnitudes of all weights that are gathered in float8, in one reduction (a collective)."""
    if not gathered:
        return
    amax = torch.stack([norm.float() for norm in torch._foreach_norm([one.shard for one in gathered], float("inf"))])
    dist.all_reduce(amax, dist.ReduceOp.MAX, group=gathered[0].group)
    for one, largest in zip(gathered, amax, strict=True):
        one.amax = largest.to(one._dtype).float()


BeforePass = Callable[[], None]


def before_pass(parts: Sequence[nn.Module], mesh: Mesh, config: Config) -> BeforePass | None:
    """Gather in float8 where it is asked for; gives what is to be called before each forward pass of a step, if any."""
    gathered = gather_in_float8(parts, mesh, config)
    if not config.quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp:
        return None
    return partial(precompute_scales, gathered)
