"""Find modules that round more than their dtype requires: compare each with itself in float64, on the same inputs.

One process runs one micro-batch in the run's own precision and records the inputs and outputs of every module. The
unsharded model then runs in float64 without casts. Before each of its modules the recorded inputs replace the computed
ones, and after it the recorded outputs. So each comparison contains the errors of one module, or of one stretch of a
module's own code between two of its submodules.

An error is allowed up to ``MARGIN`` times that of random rounding of the float64 result. A module without submodules
may round its result twice, and once per additional matrix on the way. Own code between submodules may round more often.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

from shardtrain import distributed
from shardtrain.config import Config, derived
from shardtrain.data.batch import Batch
from shardtrain.distributed import Runner
from shardtrain.distributed.process_group import World
from shardtrain.layout import Layout, matches
from shardtrain.ops import init_weights
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.float8 import Float8Linear
from shardtrain.ops.microscaling import MXLinear
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify import casts, dropout
from shardtrain.tools.verify.batches import whole_batch
from shardtrain.tools.verify.rounding_noise import ROUNDOFF, perturbed, rounded, unit_roundoff
from shardtrain.tools.verify.verify_rank import device_of, draws_of, make_rows_uneven, model_of, plain_model

MARGIN = 1.25
"""Allowed error divided by the largest of ``DRAWS`` simulated ones."""
DRAWS = 4
OWN_CODE_ROUNDINGS = 4
"""Number of roundings of the code between two submodules: residual sums, rotary angles, activations."""
LEAST = ROUNDOFF["float16"] / 8
"""Allowed relative error of a float32 result, far above its rounding and below that of any shorter dtype."""
LOSS_MARGIN = 1e-5
"""Allowed relative error of the loss for given logits, which is computed in float32 and added in float64."""


@dataclass
class Recorded:
    """Inputs and outputs of all calls of modules, by path, in order of the calls."""

    inputs: dict[str, list[list[Tensor]]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, list[list[Tensor]]] = field(default_factory=lambda: defaultdict(list))


@dataclass(frozen=True)
class Excess:
    """A result with more error than rounding explains.

    Attributes:
        path: Module of the result.
        what: "output", "own code before NAME", "loss" or "gradient of the logits".
        error: Relative error.
        allowed: Relative error that rounding explains.
        cause: Likely cause, as a sentence.
    """

    path: str
    what: str
    error: float
    allowed: float
    cause: str


def check_modules(_rank: int, _num: int, config: Config, seed: int, unit_gain: bool) -> dict[str, Any]:
    """Check one micro-batch of one process in the precision of ``config``.

    Returns:
        "excess": the results with too large an error, in the order of the forward pass. "outputs": name of the
            dtype of the first floating-point output of each module, by path. "products": paths of linear layers
            in 8 bits.
    """
    dropout.switch_off()
    device = device_of(config, 0)
    mesh = distributed.build(config, World(0, 1, 0, device))
    module, shape, model = model_of(config)
    draws = draws_of(module, shape, model, unit_gain)
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, shape.vocab_size)
    runner.materialize(draws, config.debug.seed)
    for name, parameter in runner.parameters().items():
        init_weights.draw_(parameter, name, draws[name], config.debug.seed)
    if config.model.converters:
        make_rows_uneven(runner.parameters())
    part = runner.parts[0]
    products = [path for path, layer in part.named_modules() if isinstance(layer, Float8Linear | MXLinear)]
    weights = {name: local_tensor(value).detach().cpu() for name, value in runner.parameters().items()}

    rows = config.training.local_batch_size
    batch = whole_batch(seed, 0, rows, config.training.seq_len, shape.vocab_size)
    loss_excess, recorded = _record(runner, batch, config)
    compute = getattr(torch, derived.compute_dtype(config))
    plain = plain_model(config, {name: value.float() for name, value in weights.items()}).double()
    with casts.off(torch.float64):
        for name, parameter in plain.named_parameters():
            # The weights as the run uses them. ``copy_`` rounds, and is not a cast that is disabled here.
            used = torch.empty_like(weights[name], dtype=compute).copy_(weights[name])
            parameter.data = torch.empty_like(parameter).copy_(used)
        replay = Replay(plain, module.LAYOUT, recorded, products)
        replay.run(batch)
    excess = [*replay.excess, *loss_excess]
    outputs = {}
    for path, calls in recorded.outputs.items():
        floats = [tensor for tensor in calls[0] if tensor.is_floating_point()]
        if floats:
            outputs[path] = str(floats[0].dtype).removeprefix("torch.")
    return {"excess": [vars(one) for one in excess], "outputs": outputs, "products": products}


def _record(runner: Runner, batch: Batch, config: Config) -> tuple[list[Excess], Recorded]:
    """Run forward and backward of one micro-batch. Return the check of the loss, and all calls of modules."""
    recorded = Recorded()
    logits: list[Tensor] = []
    gradients: list[Tensor] = []

    def before(path: str) -> Callable[..., None]:
        def keep_inputs(_: nn.Module, positional: Any, named: Any) -> None:
            recorded.inputs[path].append(_copies((positional, named)))

        return keep_inputs

    def after(path: str) -> Callable[..., None]:
        def keep_outputs(_: nn.Module, _positional: Any, _named: Any, output: Any) -> None:
            recorded.outputs[path].append(_copies(output))
            if path == "" and isinstance(output, Tensor) and output.ndim == 3:
                logits.append(output.detach().clone())
                output.register_hook(lambda gradient: gradients.append(gradient.detach().clone()))

        return keep_outputs

    handles = []
    for path, module in runner.parts[0].named_modules():
        handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        handles.append(module.register_forward_hook(after(path), with_kwargs=True))
    weight = torch.full((), 1.0 / max(1, batch.num_targets))
    loss = runner.forward_backward([batch], weight)
    runner.zero_grad()
    for handle in handles:
        handle.remove()
    # The check below computes the plain cross-entropy only.
    has_terms = config.training.label_smoothing or config.training.z_loss_weight
    if not logits or has_terms:
        return [], recorded
    return list(_check_loss(logits[0], gradients, batch, float(weight), float(loss))), recorded


def _copies(value: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return [local_tensor(leaf.detach()).detach().clone() for leaf in leaves]


def _check_loss(
    logits_BTV: Tensor, gradients: Sequence[Tensor], batch: Batch, weight: float, loss: float
) -> Iterator[Excess]:
    """Compare the loss and its gradient with float64, for the logits of the run."""
    exact_BTV = logits_BTV.double().requires_grad_()
    targets_N = batch.targets_BT.flatten()
    exact = F.cross_entropy(exact_BTV.flatten(0, 1), targets_N, ignore_index=IGNORE, reduction="sum") * weight
    exact.backward()  # type: ignore[no-untyped-call]
    error = abs(loss - float(exact)) / abs(float(exact))
    if not error <= LOSS_MARGIN:
        cause = "the loss of these logits is not computed in float32, or rounded before it is added"
        yield Excess("", "loss", error, LOSS_MARGIN, cause)
    assert exact_BTV.grad is not None
    for gradient_BTV in gradients:
        error, allowed = _errors(gradient_BTV, exact_BTV.grad, roundings=1, coherent=False)
        if not error <= allowed:
            cause = "softmax minus target is rounded more than once, or computed in a shorter dtype"
            yield Excess("", "gradient of the logits", error, allowed, cause)


class Replay:
    """A float64 run of the model on recorded inputs, which compares every module with its recorded outputs.

    Attributes:
        excess: Results with too large an error.
    """

    def __init__(self, model: nn.Module, layout: Layout, recorded: Recorded, products: Sequence[str]) -> None:
        self.excess: list[Excess] = []
        self._model = model
        self._layout = layout
        self._recorded = recorded
        self._products = frozenset(products)
        self._num_calls: dict[str, int] = defaultdict(int)
        self._open: list[tuple[str, int]] = []

    @torch.no_grad()
    def run(self, batch: Batch) -> None:
        handles = []
        for path, module in self._model.named_modules():
            handles.append(module.register_forward_pre_hook(self._before(path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._after(path), with_kwargs=True))
        try:
            self._model(batch.tokens_BT, batch.positions_BT)
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, path: str) -> Callable[..., Any]:
        def replace_inputs(_: nn.Module, positional: Any, named: Any) -> Any:
            call = self._num_calls[path]
            self._num_calls[path] += 1
            self._open.append((path, call))
            recorded = self._recorded.inputs[path][call]
            if path:
                parent = self._open[-2][0] if len(self._open) > 1 else ""
                computed = [leaf for leaf in tree_leaves((positional, named)) if isinstance(leaf, Tensor)]
                self._compare_own_code(parent, f"own code before {path}", computed, recorded)
            return _replaced((positional, named), recorded)

        return replace_inputs

    def _after(self, path: str) -> Callable[..., Any]:
        def replace_outputs(module: nn.Module, positional: Any, named: Any, output: Any) -> Any:
            opened, call = self._open.pop()
            assert opened == path
            recorded = self._recorded.outputs[path][call]
            computed = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
            if any(True for _ in module.children()):
                self._compare_own_code(path, "output", computed, recorded)
            else:
                self._compare_leaf(path, module, (positional, named), computed, recorded)
            return _replaced(output, recorded)

        return replace_outputs

    def _compare_own_code(self, path: str, what: str, computed: list[Tensor], recorded: list[Tensor]) -> None:
        if len(computed) != len(recorded):
            return
        for exact, actual in zip(computed, recorded, strict=True):
            if exact.shape != actual.shape:
                continue
            if not exact.is_floating_point():
                # Positions and counts must be equal. Indices of outputs are choices, which may flip.
                is_equal = bool((actual.double() == exact.double()).all())
                if what != "output" and not is_equal:
                    cause = f"integers differ from those of float64: they are cast to {_name(actual)} on the way"
                    self.excess.append(Excess(path, what, 1.0, 0.0, cause))
                continue
            self._compare(path, what, actual, exact, OWN_CODE_ROUNDINGS, coherent=False)

    def _compare_leaf(self, path: str, module: nn.Module, inputs: Any, computed: Any, recorded: list[Tensor]) -> None:
        if len(computed) != len(recorded):
            return
        is_core = bool(self._layout.context) and matches(path, self._layout.context)
        matrices = sum(parameter.ndim > 1 for parameter in module.parameters())
        roundings = OWN_CODE_ROUNDINGS if is_core else 2 * max(1, matrices)
        for index, (exact, actual) in enumerate(zip(computed, recorded, strict=True)):
            if exact.shape != actual.shape or not exact.is_floating_point():
                continue
            extra = 0.0
            if path in self._products:
                extra = _error_of_8_bits(module, inputs, index, exact)
            coherent = not is_core and matrices <= 1 and not extra
            self._compare(path, "output", actual, exact, roundings, coherent, extra)

    def _compare(
        self, path: str, what: str, actual: Tensor, exact: Tensor, roundings: int, coherent: bool, extra: float = 0.0
    ) -> None:
        error, allowed = _errors(actual, exact, roundings, coherent)
        allowed += extra
        if not error <= allowed:
            cause = _cause_of(_distance(actual.double(), exact.double()), actual)
            self.excess.append(Excess(path, what, error, allowed, cause))


def _replaced(structure: Any, recorded: Sequence[Tensor]) -> Any:
    """Replace the tensors of a nested structure by recorded ones, in float64. Keep it if they do not fit."""
    leaves = [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]
    shapes = [leaf.shape for leaf in leaves]
    if shapes != [tensor.shape for tensor in recorded]:
        return structure
    values = iter(recorded)

    def replace(leaf: Tensor) -> Tensor:
        value = next(values)
        if not leaf.is_floating_point():
            return value.to(leaf.dtype)
        return torch.empty_like(leaf).copy_(value)

    return tree_map_only(Tensor, replace, structure)


def _errors(actual: Tensor, exact: Tensor, roundings: int, coherent: bool) -> tuple[float, float]:
    """Return the relative error of a result, and the error that ``roundings`` random roundings explain.

    With ``coherent``, also compare the error that all elements of a row have in common, and return the pair that
    exceeds its limit by more. A sum or scale in a short dtype changes a row as a whole, and rounding its result does
    not.
    """
    roundoff = unit_roundoff(actual.dtype)
    exact = exact.double()
    simulated = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(DRAWS):
        values = exact
        for _ in range(roundings):
            values = rounded(values, actual.dtype, generator)
        simulated.append(values)
    # float32 results have no limit below LEAST: angles and sums lose a few digits of float32.
    floor = LEAST if roundoff < LEAST else 0.0
    pairs = []
    for statistic in (_distance, _common_error) if coherent else (_distance,):
        allowed = MARGIN * max(statistic(values, exact) for values in simulated)
        # The rounding of subnormal numbers is absolute.
        tiny = float(torch.finfo(actual.dtype).tiny) * math.sqrt(exact.numel()) / max(float(exact.norm()), 1e-300)
        pairs.append((statistic(actual.double(), exact), max(allowed, floor) + tiny))
    return max(pairs, key=lambda pair: pair[0] / max(pair[1], 1e-300))


def _distance(actual: Tensor, exact: Tensor) -> float:
    """Return the relative L2 error. Elements that are infinite in both do not count."""
    difference = torch.where(actual == exact, 0.0, actual - exact)
    size = torch.where(exact.isfinite(), exact, 0.0).norm()
    error = float(difference.norm() / size.clamp_min(1e-300))
    return math.inf if math.isnan(error) else error


def _common_error(actual: Tensor, exact: Tensor) -> float:
    """Return the root mean square over rows of the relative error that is a multiple of the row."""
    if exact.ndim < 2:
        return 0.0
    energy = exact.square().sum(-1)
    along = ((actual - exact) * exact).sum(-1)
    shares = torch.where(energy > 0, along / energy.clamp_min(1e-300), 0.0)
    return float(shares.square().mean().sqrt())


def _error_of_8_bits(module: nn.Module, inputs: Any, index: int, exact: Tensor) -> float:
    """Return the relative error of a linear layer whose operands are rounded to 8 bits."""
    generator = torch.Generator().manual_seed(0)
    weight = module.weight.data
    errors = []
    for _ in range(DRAWS):
        positional, named = tree_map_only(Tensor, lambda tensor: perturbed(tensor, ROUNDOFF["e4m3"], generator), inputs)
        module.weight.data = perturbed(weight, ROUNDOFF["e4m3"], generator)
        output = tree_leaves(module.forward(*positional, **named))[index]
        errors.append(_distance(output, exact))
    module.weight.data = weight
    return MARGIN * max(errors)


def _cause_of(error: float, actual: Tensor) -> str:
    """Describe the dtype whose rounding has an error of this size."""
    if not math.isfinite(error):
        return "the result is not finite: it overflows, or divides by a number that underflows"
    own = unit_roundoff(actual.dtype)
    # The root mean square of one rounding is 0.4 unit roundoffs.
    for name in ("bfloat16", "float16"):
        roundoff = ROUNDOFF[name]
        if roundoff > 4 * own and roundoff / 6 < error < 4 * roundoff:
            return f"computed in {name}, or rounded to it, although the result is {_name(actual)}"
    if error < 8 * own:
        return f"rounded to {_name(actual)} before the result: compute inside in float32"
    return (
        "no rounding to 16 bits has an error of this size: check what it computes, and its casts of positions, "
        "angles and 8-bit operands"
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def sentence(excess: Mapping[str, Any]) -> str:
    """Describe an ``Excess``."""
    where = f" in module {excess['path']}" if excess["path"] else " in the model's own forward"
    if excess["what"] in ("loss", "gradient of the logits"):
        where = ""
    return (
        f"step 1: {excess['what']}{where} differs from float64 on the same inputs by {excess['error']:.2g}, "
        f"and rounding explains {excess['allowed']:.2g}"
    )
