"""Check that a model's forward is a chain, which pipeline stages require.

A chain calls the modules in order, and passes only x from one to the next. The check never computes
with the model's weights. It runs the modules on the meta device, and the code between them on small CPU
tensors. Both passes use copies of the model, because a forward may store values on its modules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardtrain.config import stages
from shardtrain.config.schema import Parallelism
from shardtrain.layout import Layout, matches, mtp_modules
from shardtrain.ops.user_state import trial
from shardtrain.utils.errors import ConfigError, Problem

HIDDEN_STATES = "hidden_states"
"""Argument name of the residual stream in the layers of ``transformers``."""
_TOKENS = 4


@dataclass(frozen=True)
class ChainNames:
    """Paths of the modules of a chain, in the order of the forward pass.

    Attributes:
        first: modules of the first stage only.
        layers: path of the container of the layers.
        layer_names: keys of the layers in the container.
        last: modules of the last stage only.
    """

    first: tuple[str, ...]
    layers: str
    layer_names: tuple[str, ...]
    last: tuple[str, ...]

    @property
    def paths(self) -> list[str]:
        """Paths of all modules."""
        layers = [f"{self.layers}.{name}" for name in self.layer_names]
        return [*self.first, *layers, *self.last]

    def per_stage(self, parallelism: Parallelism) -> list[list[str]]:
        """Return the paths of the modules of each stage.

        ``module_fqns_per_model_part`` may omit the prefix ``hf.`` of a network of ``transformers``.
        """
        parts = stages.modules_per_stage(
            parallelism, self.first, self.layers, self.layer_names, self.last
        )
        known = set(self.paths)
        per_stage = []
        for part in parts:
            paths = []
            for name in part:
                with_prefix = f"hf.{name}"
                paths.append(with_prefix if with_prefix in known else name)
            per_stage.append(paths)
        return per_stage


def names_of(model: nn.Module, layout: Layout) -> ChainNames:
    """Return the paths of the modules that form the chain of a model, according to its layout."""
    return ChainNames(
        layout.first, layout.layers, tuple(getattr(model, layout.layers)), layout.last
    )


class Absent(nn.Identity):
    """Placeholder for a module that is on another stage. Returns its first input, ignores the others."""

    def forward(self, input: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return ``input`` unchanged."""
        return input


def check(model: nn.Module, layout: Layout, parts: Sequence[Sequence[str]], degree: int) -> None:
    """Refuse a model whose stages would repeat or miss a computation of the full model.

    Args:
        model: the full model, on the meta device.
        parts: the names of each stage's modules.
        degree: ``parallelism.pipeline_parallel_degree``, for messages.

    Raises:
        ConfigError: the forward is not a chain. The message names the first violation.
    """
    units = {*layout.first, *layout.last, layout.layers, *mtp_modules(model, layout)}
    for name, _ in model.named_parameters():
        if name.partition(".")[0] not in units:
            rule = f"every parameter must be in a module of LAYOUT.first, layers or last, and {name} is not"
            raise _refusal(degree, rule, "move it into one of them")
    # First check x, the tensor between the modules. Then check the other arguments: in a stage they must
    # be the same as in the full model.
    features = _ChainTrace(model, layout, degree).run()
    _compare_stages(model, layout, parts, degree, features)


def _refusal(degree: int, rule: str, fix: str) -> ConfigError:
    option = "parallelism.pipeline_parallel_degree"
    fix = f"{fix}, or set it to 1"
    return ConfigError(Problem(option, degree, f"needs a forward that is a chain: {rule}", fix))


class _ChainTrace:
    """A forward pass on the meta device that checks the chain.

    Each module must receive as x the same object that the previous module returned. Its output may depend
    only on x and its parameters. The autograd graph reveals every other dependency, even one through an
    attribute or a list that layers write.
    """

    def __init__(self, model: nn.Module, layout: Layout, degree: int) -> None:
        self._model = copy.deepcopy(model)
        self._layout = layout
        self._degree = degree
        self._names = names_of(self._model, layout).paths
        self._modules = {name: self._model.get_submodule(name) for name in self._names}
        self._forwards = {name: module.forward for name, module in self._modules.items()}
        named_parameters = self._model.named_parameters(remove_duplicate=False)
        self._parameter_names = {id(parameter): name for name, parameter in named_parameters}
        self._features = 0
        self._num_called = 0
        # One row with a few tokens is enough, because only shapes matter.
        self._tokens = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
        # the output of the last module that ran, and the name of its origin for messages
        self._x = self._tokens
        self._x_origin = "the tokens"
        self._output_names: dict[int, str] = {}
        # Outputs are looked up by id, so they must stay alive: Python reuses the ids of freed objects.
        self._outputs: list[Tensor] = []

    def run(self) -> int:
        """Trace the forward pass. Return the number of features of the residual stream.

        Raises:
            ConfigError: see ``check``.
        """
        self._replace_forwards()
        try:
            with trial(self._model), torch.enable_grad(), torch.device("meta"):
                out = self._model(self._tokens, self._tokens)
        except RuntimeError as error:
            # Other errors are faults of the model, with PyTorch's own message.
            if "meta tensor" not in str(error):
                raise
            rule = f"it reads tensor values, but is traced on meta tensors: {str(error).splitlines()[0]}"
            raise self._refusal(
                rule, "read values (.item(), int(x), if x > 0) only inside the layers"
            ) from None
        if self._num_called < len(self._names):
            name = self._names[self._num_called]
            raise self._refusal(f"{name} is never called", "call each module of LAYOUT once")
        if out is not self._x:
            last = self._x_origin
            rule = f"it does not return the output of {last} unchanged"
            raise self._refusal(rule, f"move the code after {last} into {last}")
        return self._features

    def _refusal(self, rule: str, fix: str) -> ConfigError:
        return _refusal(self._degree, rule, fix)

    def _replace_forwards(self) -> None:
        # Skip experts: shapes inside them depend on the router's values, which meta tensors do not have.
        for path, module in self._model.named_modules():
            if self._layout.expert and matches(path, self._layout.expert):
                module.forward = _return_input  # type: ignore[method-assign]
        for name, module in self._modules.items():
            module.forward = partial(self._call, name)  # type: ignore[method-assign]

    def _call(self, name: str, x: Any, *others: Any, **keywords: Any) -> Tensor:
        """Check and run one module of the chain."""
        self._check_order(name)
        self._check_inputs(name, x, [others, keywords])
        is_layer = name.startswith(f"{self._layout.layers}.")
        if is_layer and not self._features:
            self._features = x.size(-1)
        try:
            out = self._forwards[name](x, *others, **keywords)
        except Exception:
            if not is_layer:
                raise
            # Some layers cannot run on meta tensors. That is no violation: assume that the output has
            # the shape of x.
            out = torch.empty_like(x)
        self._check_output(name, x, out)

        # Detach the output. The autograd graph of the next output then ends here.
        self._x = out.detach().requires_grad_(out.is_floating_point())
        self._x_origin = name
        self._num_called += 1
        self._output_names[id(self._x)] = f"the output of {name}"
        self._outputs.append(self._x)
        return self._x

    def _check_order(self, name: str) -> None:
        expected = "the end"
        if self._num_called < len(self._names):
            expected = self._names[self._num_called]
        if name != expected:
            rule = f"{name} is called, but {expected} must be called next"
            raise self._refusal(rule, "call each module once, in the order of LAYOUT")

    def _check_inputs(self, name: str, x: Any, others: Any) -> None:
        # Compare by identity: any computation in between would create another object.
        if x is not self._x:
            origin = self._x_origin
            if self._num_called > 0:
                origin = f"the output of {origin}"
            rule = f"the input of {name} is not {origin} unchanged"
            if name in self._layout.first[1:]:
                fix = "let one module do both, as self.embed(tokens_BT, positions_BT)"
            elif self._num_called == 0:
                fix = f"pass the tokens to {name} as they are"
            else:
                fix = f"move the code before {name} into {name}"
            raise self._refusal(rule, fix)
        if any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves(others)):
            rule = f"{name} receives outputs of other modules in addition to x"
            raise self._refusal(rule, "pass only x along the chain")

    def _check_output(self, name: str, x: Any, out: Any) -> None:
        if not isinstance(out, Tensor):
            raise self._refusal(
                f"{name} returns a {type(out).__name__}, not only x", "return one tensor"
            )
        # The output may depend on x and on this module's parameters.
        own_ids = {id(parameter) for parameter in self._modules[name].parameters()}
        own_ids.add(id(x))
        for leaf in autograd_leaves(out):
            if id(leaf) in own_ids:
                continue
            source = self._output_names.get(id(leaf)) or self._parameter_names.get(id(leaf))
            if source is None:
                source = "a tensor of another module"
            rule = f"{name} uses {source} in addition to x"
            raise self._refusal(rule, "pass only x along the chain")


def _return_input(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def autograd_leaves(out: Tensor) -> Iterator[Tensor]:
    """Yield the leaf tensors of a tensor's autograd graph: tensors without history that require a
    gradient.
    """
    if out.requires_grad and out.grad_fn is None:
        yield out
    pending = [out.grad_fn]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
        pending.extend(next_node for next_node, _ in node.next_functions)


def _compare_stages(
    model: nn.Module, layout: Layout, parts: Sequence[Sequence[str]], degree: int, features: int
) -> None:
    """Refuse a forward that passes different arguments to a layer in its stage than in the full model.

    A stage has fewer layers, so an argument is wrong there if it depends on the number of layers, or on
    the index of a layer in the loop over them.
    """
    try:
        expected = _extra_arguments(model, layout, names_of(model, layout).paths, features)
    except Exception:
        # Some kernels fail only on the CPU, where this check runs. A real error will stop the first step.
        return
    for part in parts:
        try:
            actual = _extra_arguments(model, layout, part, features)
        except Exception as error:
            first_line = (str(error).splitlines() or [""])[0]
            rule = (
                f"it fails with only {part[0]} to {part[-1]}: {type(error).__name__}: {first_line}"
            )
            raise _refusal(
                degree, rule, "pass only x along the chain, and name layers by their keys"
            ) from None
        for name, arguments in actual.items():
            if not are_equal(arguments, expected[name]):
                rule = (
                    f"{name} receives different arguments in its stage than in the full model, for example from "
                    "enumerate(layers)"
                )
                fix = "store values that differ between layers as attributes of the layers, set in __init__"
                raise _refusal(degree, rule, fix)


def _extra_arguments(
    model: nn.Module, layout: Layout, stage_names: Sequence[str], features: int
) -> dict[str, list[Any]]:
    """Run a stage's forward on a CPU. Map each of its modules to the arguments that follow x."""
    recorded: dict[str, list[Any]] = {}

    def record(name: str, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        recorded[name] = tree_leaves([others, keywords])
        if x.is_floating_point():
            return x
        # the first module turns tokens into activations
        return x.new_zeros(*x.shape, features, dtype=torch.float32)

    def recorder(name: str) -> nn.Module:
        if name not in stage_names:
            return Absent()
        # a copy of the module, because forwards read attributes of layers
        module = copy.copy(model.get_submodule(name))
        module.forward = partial(record, name)  # type: ignore[method-assign]
        return module

    stage = copy.copy(model)
    stage._modules = {}
    for name, module in model._modules.items():
        if name in (*layout.first, *layout.last):
            stage._modules[name] = recorder(name)
        elif name != layout.layers:
            # Other modules run for real. They are copied, because a forward may write to them.
            stage._modules[name] = copy.deepcopy(module)
        else:
            layers = {}
            for key in getattr(model, layout.layers):
                path = f"{layout.layers}.{key}"
                if path in stage_names:
                    layers[key] = recorder(path)
            stage._modules[name] = nn.ModuleDict(layers)

    positions_BT = torch.arange(_TOKENS).unsqueeze(0)
    is_first_stage = bool(set(layout.first) & set(stage_names))
    x = positions_BT if is_first_stage else torch.zeros(1, _TOKENS, features)
    documents = {}
    if "documents_BT" in inspect.signature(model.forward).parameters:
        documents["documents_BT"] = torch.zeros_like(positions_BT)
    with trial(stage), torch.no_grad():
        stage(x, positions_BT, **documents)
    return recorded


def are_equal(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """True if all tensors and plain values are equal. Values of other classes are not compared."""
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor) != isinstance(b, Tensor):
            return False
        if isinstance(a, Tensor):
            if not torch.equal(a, b):
                return False
        elif isinstance(a, bool | int | float | str | None) and a != b:
            return False
    return True
