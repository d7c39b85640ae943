"""Find modules that round more than their dtype requires, by comparing each module with itself in float64.

1. One process runs one micro-batch in the precision of the run, and records the inputs and outputs of every
   module.
2. The unsharded model runs in float64, without casts. Before each module, recorded inputs replace the
   computed inputs. After it, recorded outputs replace the computed outputs.

So each comparison contains the errors of a single module, or of a parent module's code between two of its
submodules.

An error is allowed if random rounding of the float64 result explains it (``rounding_limits``):

- a module without submodules may round twice, or twice per matrix if it has several
- the code between two submodules may round a few times

The allowed rounding is that of the promised dtype (``promised_precision``), even if the result has a shorter one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardtrain import distributed
from shardtrain.config import Config, derived
from shardtrain.data.batch import Batch
from shardtrain.distributed import Runner
from shardtrain.distributed.process_group import World
from shardtrain.layout import Layout, matches
from shardtrain.models.moe import Balance
from shardtrain.ops.dtensor import local_tensor
from shardtrain.ops.float8 import Float8Linear
from shardtrain.ops.loss_terms import LossTerms
from shardtrain.ops.microscaling import MXLinear
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.verify import backward_rounding, casts, dropout, promised_precision
from shardtrain.tools.verify.batches import whole_batch
from shardtrain.tools.verify.rounding_limits import (
    DRAWS,
    MARGIN,
    Deviation,
    Excess,
    deviation,
    distance,
)
from shardtrain.tools.verify.rounding_noise import ROUNDOFF, perturbed, unit_roundoff
from shardtrain.tools.verify.verify_rank import (
    device_of,
    draws_of,
    make_rows_uneven,
    model_of,
    plain_model,
)

LOSS_MARGIN = 1e-5
"""Allowed relative error of the loss for given logits, which is computed in float32 and added in float64."""

ONE_ROUNDING = 1.02
"""Allowed error of a gradient of the logits in unit roundoffs, with a margin for float32."""


@dataclass
class Recorded:
    """Inputs and outputs of all calls of modules, by path, in order of the calls."""

    inputs: dict[str, list[list[Tensor]]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, list[list[Tensor]]] = field(default_factory=lambda: defaultdict(list))
    gradients: dict[tuple[str, str, int], dict[int, Tensor]] = field(default_factory=dict)
    """Gradients by path, "in" or "out", number of the call and index of the tensor."""
    weight_gradients: dict[str, Tensor] = field(default_factory=dict)
    balance_losses: dict[str, float] = field(default_factory=dict)
    """Sum of the balance losses of the micro-batch, by path of the module."""


def check_modules(
    _rank: int, _num: int, config: Config, seed: int, unit_gain: bool
) -> dict[str, Any]:
    """Check one micro-batch of one process in the precision of ``config``.

    Returns:
        A dictionary with these keys:

        - "excess": the results with too large an error, in the order of the forward pass
        - "outputs": name of the dtype of the first floating-point output of each module, by path
        - "products": paths of linear layers in 8 bits
        - "skipped": the reason if the model does not run in float64, or ""
    """
    dropout.switch_off()
    runner, layout, vocabulary = _build(config, unit_gain)
    rows = config.training.local_batch_size
    batch = whole_batch(seed, 0, rows, config.training.seq_len, vocabulary)
    of_loss, recorded = _record(runner, batch, config)

    # Layers in 8 bits have a larger tolerance, because they also round their operands.
    products = []
    for path, layer in runner.parts[0].named_modules():
        if isinstance(layer, Float8Linear | MXLinear):
            products.append(path)
    weights = {}
    for name, parameter in runner.parameters().items():
        weights[name] = local_tensor(parameter).detach().cpu()
    model = _in_float64(config, weights)
    compute = getattr(torch, derived.compute_dtype(config))
    replay = Replay(model, layout, recorded, products, compute)
    # A cast to float32 inside the model would round the reference, so casts keep float64.
    skipped = ""
    with casts.off(torch.float64):
        try:
            replay.run(batch)
            replay.compare_balance_losses()
        except Exception as error:  # a user's file may raise anything, for example if it reads the bits of a number
            skipped = f"modules were not compared with float64: {type(error).__name__}: {error}"

    # The loss is computed after the modules, so its errors come last.
    in_forward_order = [*replay.excess, *of_loss]
    return {
        # Dictionaries, because the result is sent to the parent process.
        "excess": [vars(result) for result in in_forward_order],
        "outputs": _output_dtypes(recorded),
        "products": products,
        "skipped": skipped,
    }


def _output_dtypes(recorded: Recorded) -> dict[str, str]:
    """Return the name of the dtype of the first floating-point output of each module, by path."""
    dtypes = {}
    for path, calls in recorded.outputs.items():
        first_call = calls[0]
        for tensor in first_call:
            if tensor.is_floating_point():
                dtypes[path] = _name(tensor)
                break
    return dtypes


def _build(config: Config, unit_gain: bool) -> tuple[Runner, Layout, int]:
    """Build and initialize the model on one process like ``verify_rank.run_steps``. Also return its vocabulary size."""
    mesh = distributed.build(config, World(0, 1, 0, device_of(config, 0)))
    module, shape, model = model_of(config)
    draws = draws_of(module, shape, model, unit_gain)
    runner = distributed.parallelize(model, module.LAYOUT, mesh, config, shape.vocab_size)
    runner.materialize(draws, config.debug.seed)
    if config.model.converters:
        make_rows_uneven(runner.parameters())
    return runner, module.LAYOUT, shape.vocab_size


def _in_float64(config: Config, weights: Mapping[str, Tensor]) -> nn.Module:
    """Return the unsharded model in float64, with the weights as the run uses them: rounded to the compute dtype."""
    compute = getattr(torch, derived.compute_dtype(config))
    used = {}
    for name, weight in weights.items():
        used[name] = weight.to(compute).float()
    return plain_model(config, used).double()


def _record(runner: Runner, batch: Batch, config: Config) -> tuple[list[Excess], Recorded]:
    """Run forward and backward of one micro-batch. Return the check of the loss, and all calls of modules."""
    recorded = Recorded()
    logits: list[Tensor] = []
    gradients: list[Tensor] = []

    def before(path: str) -> Callable[..., Any]:
        def keep_inputs(module: nn.Module, positional: Any, named: Any) -> Any:
            recorded.inputs[path].append(_copies((positional, named)))
            inputs = backward_rounding.with_separate_inputs(module, positional, named)
            call = len(recorded.inputs[path]) - 1
            _keep_gradients(recorded, (path, "in", call), inputs)
            return inputs

        return keep_inputs

    def after(path: str) -> Callable[..., None]:
        def keep_outputs(_: nn.Module, _positional: Any, _named: Any, output: Any) -> None:
            recorded.outputs[path].append(_copies(output))
            call = len(recorded.outputs[path]) - 1
            _keep_gradients(recorded, (path, "out", call), output)
            # ``check_loss`` computes the exact loss from the logits, which the root module returns.
            if path == "" and isinstance(output, Tensor) and output.ndim == 3:
                logits.append(output.detach().clone())
                output.register_hook(keep_gradient_of_logits)

        return keep_outputs

    def keep_gradient_of_logits(gradient: Tensor) -> None:
        gradients.append(gradient.detach().clone())

    handles = []
    for path, module in runner.parts[0].named_modules():
        handles.append(module.register_forward_pre_hook(before(path), with_kwargs=True))
        handles.append(module.register_forward_hook(after(path), with_kwargs=True))
    weight = torch.full((), 1.0 / max(1, batch.num_targets))
    loss = runner.forward_backward([batch], weight)
    for path, module in runner.parts[0].named_modules():
        if isinstance(module, Balance) and module.loss_sum is not None:
            recorded.balance_losses[path] = float(module.loss_sum)
    for name, parameter in runner.parameters().items():
        if parameter.grad is not None:
            gradient = local_tensor(parameter.grad)
            recorded.weight_gradients[name] = gradient.detach().clone()
    runner.zero_grad()
    for handle in handles:
        handle.remove()
    if not logits:
        return [], recorded
    # The loss is not a module, so it is compared here instead of in the replay.
    terms = LossTerms(config.training.label_smoothing, config.training.z_loss_weight)
    of_loss = check_loss(logits[0], gradients, batch.targets_BT, float(weight), float(loss), terms)
    return list(of_loss), recorded


def _copies(value: Any) -> list[Tensor]:
    copies = []
    for leaf in _tensors(value):
        local = local_tensor(leaf.detach())
        copies.append(local.detach().clone())
    return copies


def _keep_gradients(recorded: Recorded, key: tuple[str, str, int], value: Any) -> None:
    """Record the gradients of the tensors in a nested structure during the backward pass."""
    gradients: dict[int, Tensor] = {}
    recorded.gradients[key] = gradients

    def keep(index: int, gradient: Tensor) -> None:
        gradients[index] = local_tensor(gradient.detach()).detach().clone()

    for index, leaf in enumerate(_tensors(value)):
        if leaf.requires_grad:
            leaf.register_hook(partial(keep, index))


def check_loss(
    logits_BTV: Tensor,
    gradients: Sequence[Tensor],
    targets_BT: Tensor,
    weight: float,
    loss: float,
    terms: LossTerms,
) -> Iterator[Excess]:
    """Compare ``weight`` times the sum of losses, and its gradients, with float64 for the logits of the run."""
    exact_BTV = logits_BTV.double().requires_grad_()
    kept_BT = targets_BT != IGNORE
    # IGNORE is negative and not an index. The mask removes these tokens after the lookup.
    targets_BT1 = targets_BT.clamp_min(0).unsqueeze(-1)
    logits_of_targets_BT = exact_BTV.gather(-1, targets_BT1).squeeze(-1)
    losses_BT = terms.losses(exact_BTV.logsumexp(-1), logits_of_targets_BT, exact_BTV.mean(-1))
    weighted_sum = (losses_BT * kept_BT).sum() * weight
    weighted_sum.backward()  # type: ignore[no-untyped-call]
    exact = float(weighted_sum)
    error = abs(loss - exact) / abs(exact)
    # The negation also catches NaN, which compares as False with every number.
    if not error <= LOSS_MARGIN:
        cause = "the loss of these logits is not computed in float32, or rounded before it is added"
        yield Excess("", "loss", error, LOSS_MARGIN, cause)
    assert exact_BTV.grad is not None
    for gradient_BTV in gradients:
        error, allowed = _largest_rounding(gradient_BTV, exact_BTV.grad)
        if not error <= allowed:
            cause = "softmax minus target is rounded more than once, or computed in a shorter dtype"
            yield Excess("", "gradient of the logits", error, allowed, cause)


def _largest_rounding(actual: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the largest relative error of an element, and the error of one rounding to nearest.

    Most elements are small, and the elements of targets are almost equal, so their rounding is not random.
    """
    info = torch.finfo(actual.dtype)
    # Subnormal numbers have an absolute error.
    size = exact.abs().clamp_min(info.tiny)
    absolute = (actual.double() - exact).abs()
    largest = (absolute / size).max()
    allowed = max(ONE_ROUNDING * unit_roundoff(actual.dtype), LOSS_MARGIN)
    return float(largest), allowed


class Replay:
    """A float64 run of the model on recorded inputs, which compares every module with its recorded outputs.

    Attributes:
        excess: Results with too large an error.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: Layout,
        recorded: Recorded,
        products: Sequence[str],
        compute: torch.dtype,
    ) -> None:
        self.excess: list[Excess] = []
        self._model = model
        self._layout = layout
        self._recorded = recorded
        self._products = frozenset(products)
        self._compute = compute
        self._num_calls: dict[str, int] = defaultdict(int)
        self._open: list[tuple[str, int]] = []
        # Outputs of the submodules of a module that rotates queries and keys, by path.
        self._before_rotation: dict[str, Tensor] = {}

    @torch.no_grad()
    def run(self, batch: Batch) -> None:
        """Run the forward pass, and compare every module that the run has called."""
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
            parent = self._innermost()
            self._open.append((path, call))
            # The run may call other modules, for example fused ones.
            if call >= len(self._recorded.inputs[path]):
                return None
            recorded = self._recorded.inputs[path][call]
            if path:
                computed = _tensors((positional, named))
                what = f"own code before {path}"
                self._compare_own_code(parent, what, computed, recorded, child=path)
                if self._is_rotation(parent) and self._is_core(path):
                    self._compare_gradients_of_rotation(parent, path, call, computed)
            if self._is_rotation(path):
                self._before_rotation.clear()
                # The code between the submodules of this module is also run backward.
                torch.set_grad_enabled(True)
            return _replaced((positional, named), recorded)

        return replace_inputs

    def _after(self, path: str) -> Callable[..., Any]:
        def replace_outputs(module: nn.Module, positional: Any, named: Any, output: Any) -> Any:
            opened, call = self._open.pop()
            assert opened == path
            if call >= len(self._recorded.outputs[path]):
                return None
            recorded = self._recorded.outputs[path][call]
            computed = _tensors(output)
            if any(True for _ in module.children()):
                self._compare_own_code(path, "output", computed, recorded)
            else:
                self._compare_leaf(path, module, (positional, named), computed, recorded)
                self._compare_gradients_of_leaf(path, call, module)
            replaced = _replaced(output, recorded)
            if self._is_rotation(path):
                torch.set_grad_enabled(False)
            # These outputs are the leaves of the graph through the rotation, see ``replace_inputs``.
            is_single = isinstance(replaced, Tensor) and replaced.is_floating_point()
            if call == 0 and is_single and self._is_rotation(self._innermost()):
                self._before_rotation[path] = replaced.requires_grad_()
            return replaced

        return replace_outputs

    def _innermost(self) -> str:
        """Return the path of the innermost module whose forward is running, "" for the root module."""
        if not self._open:
            return ""
        return self._open[-1][0]

    @torch.no_grad()
    def _compare_own_code(
        self, path: str, what: str, computed: list[Tensor], recorded: list[Tensor], child: str = ""
    ) -> None:
        """Compare results of the code of a module: its outputs, or the inputs of its submodule ``child``."""
        # Without a one-to-one correspondence, there are no pairs to compare.
        if len(computed) != len(recorded):
            return
        module = self._model.get_submodule(path)
        judged = module
        promised = promised_precision.dtype_of_outputs(module, self._compute)
        if child:
            judged = self._model.get_submodule(child)
            promised = promised_precision.dtype_of_inputs(judged, self._compute)
        roundings = promised_precision.own_code_roundings(module)
        is_rotated = promised_precision.is_rotated_once(module) and self._is_core(child)
        for exact, actual in zip(computed, recorded, strict=True):
            if exact.shape != actual.shape:
                continue
            if not exact.is_floating_point():
                # Positions and counts must be equal. Indices of outputs are choices, which may flip.
                is_equal = bool((actual.double() == exact.double()).all())
                if what != "output" and not is_equal:
                    cause = f"integers differ from the float64 result, because they are cast to {_name(actual)}"
                    self.excess.append(Excess(path, what, 1.0, 0.0, cause))
                continue
            compared = deviation(actual, exact, roundings, is_by_row=False, promised=promised)
            # A stricter test for rotations: each number must be rounded only once.
            if is_rotated and compared.is_rounding and actual.element_size() < 4:
                self._compare_rotated(path, what, actual, exact)
            self._note(path, what, compared, actual, exact, judged)

    def _compare_rotated(self, path: str, what: str, actual: Tensor, exact: Tensor) -> None:
        """Compare queries, keys or values, which are exact or rounded once."""
        fraction = promised_precision.fraction_not_rounded_once(actual, exact)
        if fraction <= promised_precision.ROUNDED_ONCE:
            return
        error = distance(actual.double(), exact)
        # The smallest possible error in this dtype: the exact result, rounded to nearest.
        nearest = torch.empty_like(actual).copy_(exact).double()
        allowed = distance(nearest, exact)
        cause = (
            f"rotation in {_name(actual)} instead of float32, or another rounding before the core: "
            f"{fraction:.0%} of the numbers are not the exact result, rounded once"
        )
        self.excess.append(Excess(path, what, error, allowed, cause))

    def _is_rotation(self, path: str) -> bool:
        return bool(path) and promised_precision.is_rotated_once(self._model.get_submodule(path))

    def _compare_gradients_of_rotation(
        self, parent: str, core: str, call: int, computed: Sequence[Tensor]
    ) -> None:
        """Compare the gradients of projections with those of the rotated queries, keys and values."""
        gradients = self._recorded.gradients[core, "in", call]
        rotated = []
        gradients_of_rotated = []
        for index, gradient_of_run in gradients.items():
            if computed[index].requires_grad:
                rotated.append(computed[index])
                gradients_of_rotated.append(gradient_of_run.double())
        if call or not rotated:
            return
        projections = list(self._before_rotation.values())
        exact = torch.autograd.grad(rotated, projections, gradients_of_rotated, allow_unused=True)
        for child, gradient in zip(self._before_rotation, exact, strict=True):
            actual = self._recorded.gradients[child, "out", 0].get(0)
            # A parameter with one number per head, such as a sink, is not rotated.
            if gradient is not None and actual is not None and actual.ndim >= 3:
                what = f"gradient of the output of {child}"
                self.excess += backward_rounding.excess_of(parent, what, actual, gradient)

    def _compare_gradients_of_leaf(self, path: str, call: int, module: nn.Module) -> None:
        """Compare the gradients of a module that computes each token separately."""
        of_output = self._recorded.gradients[path, "out", call].get(0)
        is_compared = isinstance(module, promised_precision.ON_EACH_TOKEN)
        if not is_compared or of_output is None or path in self._products:
            return
        weights = dict(module.named_parameters())
        inputs_of_calls = self._recorded.inputs[path]
        x = inputs_of_calls[call][0]
        of_input, of_weights = backward_rounding.exact_gradients(module, weights, x, of_output)
        actual = self._recorded.gradients[path, "in", call].get(0)
        if actual is not None:
            what = "gradient of the input"
            self.excess += backward_rounding.excess_of(path, what, actual, of_input)
        # The gradient of a weight is a sum over all calls, so it is compared only if there is a single call.
        if self._num_calls[path] != 1 or len(inputs_of_calls) != 1:
            return
        for name, exact in of_weights.items():
            summed = self._recorded.weight_gradients.get(f"{path}.{name}")
            if summed is not None:
                # The run may store the gradient in float32, but it computes it in the compute dtype.
                rounded = summed.to(self._compute)
                what = f"gradient of {name}"
                self.excess += backward_rounding.excess_of(path, what, rounded, exact)

    def compare_balance_losses(self) -> None:
        """Compare the sums of balance losses with float64, for the recorded logits and scores."""
        for path, loss in self._recorded.balance_losses.items():
            balance: Any = self._model.get_submodule(path)
            inputs = []
            for tensor in self._recorded.inputs[path][0]:
                # Indices of experts keep their integer dtype.
                if tensor.is_floating_point():
                    tensor = tensor.double()
                inputs.append(tensor)
            balance.loss_weight = torch.ones((), dtype=torch.float64)
            balance.reset()
            with torch.enable_grad():
                weights = inputs[0].requires_grad_()
                balance.forward(weights, *inputs[1:]).sum().backward()
            if balance.loss_sum is None:
                continue
            exact = float(balance.loss_sum)
            error = abs(loss - exact) / max(abs(exact), 1e-30)
            if not error <= LOSS_MARGIN:
                cause = "the balance loss of these scores is not computed in float32"
                self.excess.append(Excess(path, "balance loss", error, LOSS_MARGIN, cause))

    def _is_core(self, path: str) -> bool:
        return bool(path and self._layout.context) and matches(path, self._layout.context)

    @torch.no_grad()
    def _compare_leaf(
        self, path: str, module: nn.Module, inputs: Any, computed: Any, recorded: list[Tensor]
    ) -> None:
        if len(computed) != len(recorded):
            return
        is_core = self._is_core(path)
        promised = promised_precision.dtype_of_outputs(module, self._compute)
        matrices = sum(parameter.ndim > 1 for parameter in module.parameters())
        roundings = 2 * max(1, matrices)
        if is_core:
            roundings = promised_precision.core_roundings(module)
        for index, (exact, actual) in enumerate(zip(computed, recorded, strict=True)):
            if exact.shape != actual.shape or not exact.is_floating_point():
                continue
            in_8_bits = path in self._products
            # In a layer with at most one matrix, also judge the error that all elements of a row share.
            is_by_row = not is_core and not in_8_bits and matrices <= 1
            compared = deviation(actual, exact, roundings, is_by_row, promised)
            if in_8_bits:
                of_operands = _error_of_8_bits(module, inputs, index, exact)
                compared = Deviation(compared.error, compared.allowed + of_operands)
            self._note(path, "output", compared, actual, exact, module)

    def _note(
        self,
        path: str,
        what: str,
        compared: Deviation,
        actual: Tensor,
        exact: Tensor,
        module: nn.Module,
    ) -> None:
        if compared.is_rounding:
            return
        cause = promised_precision.cause_of(module, actual)
        if not cause:
            cause = _cause_of(distance(actual.double(), exact.double()), actual)
        self.excess.append(Excess(path, what, compared.error, compared.allowed, cause))


def _tensors(structure: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]


def _replaced(structure: Any, recorded: Sequence[Tensor]) -> Any:
    """Return a nested structure with recorded tensors in float64, or ``structure`` itself if shapes differ."""
    shapes = [leaf.shape for leaf in _tensors(structure)]
    recorded_shapes = [tensor.shape for tensor in recorded]
    if shapes != recorded_shapes:
        return structure
    values = iter(recorded)

    def replace(leaf: Tensor) -> Tensor:
        value = next(values)
        if not leaf.is_floating_point():
            return value.to(leaf.dtype)
        return torch.empty_like(leaf).copy_(value)

    return tree_map_only(Tensor, replace, structure)


def _error_of_8_bits(module: nn.Module, inputs: Any, index: int, exact: Tensor) -> float:
    """Return the relative error of a linear layer whose operands are rounded to 8 bits."""
    generator = torch.Generator().manual_seed(0)
    roundoff = ROUNDOFF["e4m3"]

    def rounded_operand(tensor: Tensor) -> Tensor:
        return perturbed(tensor, roundoff, generator)

    weight = dict(module.named_parameters())["weight"]
    unrounded = weight.data
    # Rounding to nearest has one result. Random perturbations of the same size show how large its error can
    # be.
    errors = []
    for _ in range(DRAWS):
        positional, named = tree_map_only(Tensor, rounded_operand, inputs)
        weight.data = rounded_operand(unrounded)
        # Not ``module(...)``, whose hooks compare and replace.
        output = tree_leaves(module.forward(*positional, **named))[index]
        errors.append(distance(output, exact))
    weight.data = unrounded
    return MARGIN * max(errors)


def _cause_of(error: float, actual: Tensor) -> str:
    """Describe the dtype whose rounding has an error of this size."""
    if not math.isfinite(error):
        return "the result is not finite: it overflows, or divides by a number that underflows"
    roundoff_of_result = unit_roundoff(actual.dtype)
    # The root mean square of one rounding is 0.4 unit roundoffs.
    for name in ("bfloat16", "float16"):
        roundoff = ROUNDOFF[name]
        is_shorter = roundoff > 4 * roundoff_of_result
        if is_shorter and roundoff / 6 < error < 4 * roundoff:
            return f"computed in {name}, or rounded to it, although the result is {_name(actual)}"
    if error < 4 * roundoff_of_result:
        return f"rounded to {_name(actual)} before the result: compute inside in float32"
    return (
        "no rounding to 16 bits has an error of this size: check what it computes, and its casts of positions, "
        "angles and 8-bit operands"
    )


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def sentence(excess: Mapping[str, Any]) -> str:
    """Describe an ``Excess``."""
    where = " in the model's own forward"
    if excess["path"]:
        where = f" in module {excess['path']}"
    if excess["what"] in ("loss", "gradient of the logits"):
        where = ""
    return (
        f"step 1: {excess['what']}{where} differs from float64 on the same inputs by {excess['error']:.2g}, "
        f"and rounding explains {excess['allowed']:.2g}"
    )
