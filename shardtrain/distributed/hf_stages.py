"""Pipeline stages of a ``transformers`` network. Every stage runs the network's own forward.

In a stage, ``_OtherLayer`` is a placeholder for each layer of another stage. So the list of layers keeps its
full length, and everything that depends on a layer's index is the same as in the full model. The last
placeholder before the stage's own layers returns the received activations. The first placeholder after them
ends the forward pass. The code between the tokens and the first layer therefore runs in every stage, and
computes masks and position embeddings there. Only the first stage uses the activations that this code
computes.

``trace`` finds which modules run before and after the layers, and rejects networks that are not a chain.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from shardtrain.config.rules.pipeline_rules import DEGREE
from shardtrain.distributed import chain
from shardtrain.distributed.chain import HIDDEN_STATES, ChainNames
from shardtrain.ops.no_token_chosen import NoTokenChosen
from shardtrain.ops.trial_failure import failure_of
from shardtrain.utils.errors import ConfigError, Problem

_TOKENS = 16
USE_FSDP = "set it to 1 and use data_parallel_shard_degree"


def is_hf(model: nn.Module) -> bool:
    """True if the model is a ``transformers`` network (``model.name = "transformers"``)."""
    return hasattr(model, "hf")


@dataclass(frozen=True)
class HFChain:
    """What a trace found out about a network's forward.

    Attributes:
        names: the modules with parameters or buffers, in the order of the forward pass.
        features: number of features of the residual stream.
        outputs: length of the tuple that a layer returns. 0 if a layer returns a tensor.
    """

    names: ChainNames
    features: int
    outputs: int


def trace(model: nn.Module) -> HFChain:
    """Find the order of a network's modules by a forward pass whose layers run on the meta device.

    Raises:
        ConfigError: the forward is not a chain, so stages would repeat or miss a computation.
    """
    known = _chains.get(model)
    if known is None:
        known = _Trace(model).run()
        _chains[model] = known
    return known


_chains: WeakKeyDictionary[nn.Module, HFChain] = WeakKeyDictionary()
"""Cached results of ``trace``, because it is called several times when a run starts."""


class _EndOfStage(Exception):
    """Raised to end the forward pass of a stage. Carries the stage's output."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class _Reading(nn.Module):
    """A placeholder for a module. It has no parameters, but all other attributes of the original.

    The network's forward reads attributes of layers and embeddings, such as ``attention_type``.
    """

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        # Not as a submodule, because the original's parameters must not belong to this stage.
        # ``Module.__setattr__`` would register it as one.
        self.__dict__["original"] = original

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # deepcopy creates the object without calling __init__.
            if "original" not in self.__dict__:
                raise
            return getattr(self.__dict__["original"], name)


class _OtherLayer(_Reading):
    """Placeholder for a layer of another stage.

    Attributes:
        outputs: see ``HFChain``.
        received: the activations from the previous stage, if this is the last layer before the stage's own
            layers. Else None.
        ends: True if this is the first layer after the stage's own layers.
    """

    def __init__(self, original: nn.Module, outputs: int) -> None:
        super().__init__(original)
        self.outputs = outputs
        self.received: Tensor | None = None
        self.ends = False

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the residual stream, or instead the received activations, or end the stage."""
        hidden, _ = _split_arguments(arguments, keywords)
        if self.ends:
            raise _EndOfStage(hidden)
        if self.received is not None:
            hidden = self.received
        return _layer_output(hidden, self.outputs)


class _OtherEnd(_Reading, chain.Absent):
    """Placeholder for a module before or after the layers that is in another stage.

    Returns zeros in the shape of the original's output. They do not affect the stage's output.
    """

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Run the original on the meta device to find the shape, and return zeros of this shape."""
        # Use the device of the arguments. Use their floating-point dtype, too, because the stage may compute in
        # another dtype than the original, which returns the dtype of its weights.
        device = torch.device("cpu")
        float_dtype = None
        tensors = _tensors([arguments, keywords])
        if tensors:
            device = tensors[0].device
        for tensor in tensors:
            if tensor.is_floating_point():
                float_dtype = tensor.dtype
                break

        original = self.__dict__["original"]
        meta_arguments, meta_keywords = tree_map_only(
            Tensor, lambda tensor: tensor.to("meta"), (arguments, keywords)
        )
        with torch.no_grad():
            out = original(*meta_arguments, **meta_keywords)

        def zeros(tensor: Tensor) -> Tensor:
            dtype = tensor.dtype
            if float_dtype is not None and tensor.is_floating_point():
                dtype = float_dtype
            return torch.zeros(tensor.shape, dtype=dtype, device=device)

        return tree_map_only(Tensor, zeros, out)


def _tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested containers."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _layer_output(hidden: Tensor, outputs: int) -> Any:
    """Return activations in the form of a layer's output: a tensor, or the first item of a tuple."""
    if outputs == 0:
        return hidden
    others = [None] * (outputs - 1)
    return (hidden, *others)


def cut(model: Any, hf_chain: HFChain, keep: set[str]) -> nn.Module:
    """Turn a network into one of its stages, in place. Only the modules named in ``keep`` stay."""
    # Replace the modules before and after the layers.
    names = hf_chain.names
    for path in (*names.first, *names.last):
        if path not in keep:
            copied = _meta_copy(model.get_submodule(path))
            model.set_submodule(path, _OtherEnd(copied))

    # Replace the layers of other stages.
    own_indices = []
    for index, path in enumerate(_layer_paths(names)):
        if path in keep:
            own_indices.append(index)
            continue
        copied = _meta_copy(model.get_submodule(path))
        model.set_submodule(path, _OtherLayer(copied, hf_chain.outputs))

    # The model's own lists of modules must not name what was replaced.
    model.blocks = {path: layer for path, layer in model.blocks.items() if path in keep}
    model.stage_paths = [path for path in names.paths if path in keep]
    _keep_own_constants(model)
    layers = [model.get_submodule(path) for path in _layer_paths(names)]
    _connect(model, layers, own_indices)
    return model  # type: ignore[no-any-return]


def _layer_paths(names: ChainNames) -> list[str]:
    """Return the paths of all layers of a network, in their order."""
    return [f"{names.layers}.{name}" for name in names.layer_names]


def _meta_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module on the meta device. It shares no parameter with the network."""
    copied = copy.deepcopy(module).to("meta")
    # ``models.transformers`` has turned constant buffers into attributes, which ``to`` does not move.
    for owner in copied.modules():
        for key, value in vars(owner).items():
            if isinstance(value, Tensor):
                owner.__dict__[key] = value.to("meta")
    return copied


def _keep_own_constants(model: Any) -> None:
    """Drop modules that were replaced from the model's list of constants."""
    modules = set(model.modules())
    kept = []
    for owner, name in model._constants:
        if owner in modules and name in vars(owner):
            kept.append((owner, name))
    model._constants = kept


def _connect(model: Any, layers: Sequence[nn.Module], own_indices: Sequence[int]) -> None:
    """Let the placeholder before the stage's own layers receive, and the one after them end the pass.

    Also replaces the model's forward. ``own_indices`` are the indices of the stage's own layers.
    """
    before = None
    if own_indices[0] > 0:
        before = layers[own_indices[0] - 1]
    place_after = own_indices[-1] + 1
    if place_after < len(layers):
        layers[place_after].ends = True  # type: ignore[assignment]
    model.forward = partial(_run_stage, model.forward, before)


def _run_stage(
    forward: Callable[..., Tensor], before: Any, x: Tensor, *arguments: Any, **keywords: Any
) -> Tensor:
    """Run a stage, and return its output: activations, or logits in the last stage."""
    if before is not None:
        before.received = x
    try:
        return forward(x, *arguments, **keywords)
    except _EndOfStage as end:
        # the schedules detach outputs in place, which autograd rejects for views (torch 2.13)
        if end.hidden._is_view():
            return end.hidden.clone()
        return end.hidden
    finally:
        # Activations of one micro-batch must not stay in memory until the next.
        if before is not None:
            before.received = None


def _refusal(model: Any, rule: str) -> ConfigError:
    """Return the error that a network cannot be cut into stages."""
    return ConfigError(
        Problem(DEGREE, None, f"cannot cut {model.config_name} into stages: {rule}", USE_FSDP)
    )


class _Trace:
    """A forward pass that checks that each layer receives exactly the output of the previous one.

    The layers run on the meta device. The code around them runs on a CPU, because masks depend on values.
    The modules before and after the layers are replaced by placeholders that return zeros.
    """

    def __init__(self, model: Any) -> None:
        self._original = model
        self._path, self._layer_names = self._find_layers()
        self._layers = [self._copied_layer(name) for name in self._layer_names]
        self._parameter_names = self._names_of_parameters()
        self._num_layers_called = 0
        self._calls: dict[str, list[int]] = {}
        """For each module outside the layers: how many layers had run before each of its calls."""
        self._x: Tensor | None = None
        self._features = 0
        self._outputs: int | None = None

    def run(self) -> HFChain:
        """Trace the forward pass.

        Raises:
            ConfigError: the forward is not a chain.
        """
        # Run the forward. The placeholders check the calls of layers, and record those of other modules.
        outside = self._modules_outside_layers()
        model = self._model_without_parameters(outside)
        tokens = torch.full((1, _TOKENS), _token(model))
        try:
            with torch.enable_grad():
                model(tokens)
        except ConfigError:
            raise
        except Exception as error:  # a network may raise any exception
            copies = {self._layer_path(index): layer for index, layer in enumerate(self._layers)}
            raise self._refusal(f"it {failure_of(error, model, copies)}") from None
        if self._num_layers_called < len(self._layers):
            missing = self._layer_path(self._num_layers_called)
            raise self._refusal(f"it does not call {missing}")

        # The recorded calls show which modules belong to the first stage and which to the last.
        first, last = self._ends(outside)
        names = ChainNames(first, self._path, tuple(self._layer_names), last)
        return HFChain(names, self._features, self._outputs or 0)

    def _refusal(self, rule: str) -> ConfigError:
        return _refusal(self._original, rule)

    def _find_layers(self) -> tuple[str, list[str]]:
        """Return the path of the container of the layers, and the layers' keys in it."""
        model = self._original
        if model.kind == "sequence_to_sequence":
            raise self._refusal("the layers of its decoder read the output of the encoder")
        keys_by_list: dict[str, list[str]] = {}
        for path in model.blocks:
            list_path, _, key = path.rpartition(".")
            keys_by_list.setdefault(list_path, []).append(key)
        if len(keys_by_list) > 1:
            raise self._refusal(f"it has several lists of layers: {', '.join(keys_by_list)}")
        # A later stage receives activations instead of tokens.
        if "inputs_embeds" not in inspect.signature(model.hf.forward).parameters:
            raise self._refusal("its forward takes no inputs_embeds")
        return next(iter(keys_by_list.items()))

    def _layer_path(self, index: int) -> str:
        return f"{self._path}.{self._layer_names[index]}"

    def _copied_layer(self, name: str) -> nn.Module:
        """Return a copy of a layer that runs on the meta device, with all parameters in the autograd graph."""
        layer = _meta_copy(self._original.get_submodule(f"{self._path}.{name}"))
        # With adapters, parameters are frozen. The trace must see every parameter in the autograd graph.
        for parameter in layer.parameters():
            parameter.requires_grad_(parameter.is_floating_point())
        # Experts need the router's values, which meta tensors do not have.
        for module in layer.modules():
            if _is_experts(module):
                module.forward = _first_input  # type: ignore[method-assign]
        return layer

    def _names_of_parameters(self) -> dict[int, str]:
        """Map the id of each parameter of the copied layers to its name, for messages."""
        names = {}
        for key, layer in zip(self._layer_names, self._layers, strict=True):
            for name, parameter in layer.named_parameters():
                names[id(parameter)] = f"{self._path}.{key}.{name}"
        return names

    def _modules_outside_layers(self) -> list[str]:
        """Return the paths of the modules that own the parameters and buffers outside the layers."""
        model = self._original
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        names += [name for name, _ in model.named_buffers()]
        owners: list[str] = []
        for name in names:
            is_in_layers = name.startswith(f"{self._path}.")
            if is_in_layers:
                continue
            owner = name.rpartition(".")[0]
            contains_layers = f"{self._path}.".startswith(f"{owner}.")
            if contains_layers:
                raise self._refusal(f"{name} belongs to no module before or after the layers")
            if owner not in owners:
                owners.append(owner)

        # Skip modules inside another listed module: that module calls them.
        outermost = []
        for path in owners:
            if not any(path.startswith(f"{other}.") for other in owners):
                outermost.append(path)
        return outermost

    def _model_without_parameters(self, outside: Sequence[str]) -> Any:
        """Return a copy of the model in which every module with parameters is replaced by a placeholder."""
        # deepcopy uses an object from its memo instead of copying the original. So the memo puts in the
        # placeholders, and only the modules around them are copied.
        memo: dict[int, Any] = {}
        for path in outside:
            module = self._original.get_submodule(path)
            memo[id(module)] = _TracedEnd(_meta_copy(module), partial(self._record_call, path))
        for index, name in enumerate(self._layer_names):
            layer = self._original.get_submodule(f"{self._path}.{name}")
            memo[id(layer)] = _TracedLayer(layer, partial(self._call_layer, index))
        copied = copy.deepcopy(self._original, memo)
        _keep_own_constants(copied)
        return copied

    def _record_call(self, path: str) -> None:
        """Record a call of a module outside the layers."""
        self._calls.setdefault(path, []).append(self._num_layers_called)

    def _ends(self, outside: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Split the modules outside the layers: first those called before the layers, then those after."""
        first = []
        last = []
        for path in outside:
            calls = self._calls.get(path)
            if calls is None:
                raise self._refusal(f"the parameters of {path} are used without calling the module")
            num_layers_before = set(calls)
            if num_layers_before == {0}:
                first.append(path)
            elif num_layers_before == {len(self._layers)}:
                last.append(path)
            else:
                raise self._refusal(f"{path} is called between the layers")

        # Stages list modules in the order of their first call.
        order = list(self._calls)
        first.sort(key=order.index)
        last.sort(key=order.index)
        return tuple(first), tuple(last)

    def _call_layer(self, index: int, *arguments: Any, **keywords: Any) -> Any:
        """Check a call of a layer, run the layer on the meta device, and return zeros as its output."""
        # The layers are called once, in order.
        path = self._layer_path(index)
        if index != self._num_layers_called:
            raise self._refusal(f"{path} is called out of order or more than once")

        # The first argument is the output of the previous layer. No other argument depends on other modules.
        hidden, others = _split_arguments(arguments, keywords)
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise self._refusal(f"the first argument of {path} is not one tensor of activations")
        if self._x is not None and hidden is not self._x:
            raise self._refusal(
                f"the input of {path} is not the output of the previous layer unchanged"
            )
        if any(tensor.requires_grad for tensor in _tensors(others)):
            raise self._refusal(
                f"{path} receives outputs of other modules in addition to {HIDDEN_STATES}"
            )
        self._features = hidden.size(-1)

        # Run the layer on the meta device. A tensor that is passed twice is moved only once, so that the
        # copies of one tensor stay the same object.
        x = torch.empty_like(hidden, device="meta").requires_grad_()
        moved: dict[int, Tensor] = {id(hidden): x}

        def move(tensor: Tensor) -> Tensor:
            return moved.setdefault(id(tensor), tensor.to("meta"))

        meta_arguments, meta_keywords = tree_map_only(Tensor, move, (arguments, keywords))
        with torch.device("meta"), NoTokenChosen():
            out = self._layers[index](*meta_arguments, **meta_keywords)

        # The containers among the arguments were copied, so a new item shows that the layer wrote into one.
        num_leaves_before = len(tree_leaves([arguments, keywords]))
        num_leaves_after = len(tree_leaves([meta_arguments, meta_keywords]))
        if num_leaves_after != num_leaves_before:
            raise self._refusal(f"{path} writes into a container that other layers receive")
        self._check_output(index, x, out)

        # A leaf, because the graph of the next layer's output must end at this tensor.
        self._x = torch.zeros_like(hidden).requires_grad_()
        self._num_layers_called += 1
        return _layer_output(self._x, self._outputs or 0)

    def _check_output(self, index: int, x: Tensor, out: Any) -> None:
        """Check the form of a layer's output, and that it depends only on the layer and its input ``x``."""
        path = self._layer_path(index)
        outputs = 0
        out_hidden = out
        if isinstance(out, tuple):
            outputs = len(out)
            out_hidden = out[0]
        if not isinstance(out_hidden, Tensor) or out_hidden.shape != x.shape:
            raise self._refusal(f"{path} does not return activations in the shape of its input")
        if self._outputs not in (None, outputs):
            raise self._refusal(f"{path} returns a different number of values than earlier layers")
        self._outputs = outputs

        # Some networks read a state of another layer, or share its weights. A stage would not have them.
        own_ids = {id(parameter) for parameter in self._layers[index].parameters()}
        own_ids.add(id(x))
        for leaf in chain.autograd_leaves(out_hidden):
            if id(leaf) not in own_ids:
                source = self._parameter_names.get(id(leaf), "a state of another layer")
                raise self._refusal(f"{path} reads {source} in addition to {HIDDEN_STATES}")


class _TracedEnd(_OtherEnd):
    """Placeholder for a module before or after the layers during the trace. It reports each call.

    Its output requires a gradient, as if it depended on the module's parameters.
    """

    def __init__(self, original: nn.Module, report: Callable[[], None]) -> None:
        super().__init__(original)
        self._report = report

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Return zeros that require a gradient."""
        self._report()
        out = super().forward(*arguments, **keywords)

        def requiring_gradient(tensor: Tensor) -> Tensor:
            tensor.requires_grad_(tensor.is_floating_point())
            # a copy, because autograd rejects in-place operations on leaves
            return tensor.clone()

        return tree_map_only(Tensor, requiring_gradient, out)


class _TracedLayer(_Reading):
    """Placeholder for a layer during the trace. It passes its calls to a function."""

    def __init__(self, original: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__(original)
        self._call = call

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the function."""
        return self._call(*arguments, **keywords)


def _token(model: Any) -> int:
    """Return a token that is not padding: 1 if the padding token is 0, else 0."""
    padding = model.hf.config.get_text_config().pad_token_id
    return int(padding == 0)


def _split_arguments(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[Any, Any]:
    """Split the arguments of a layer into the residual stream and all others."""
    if arguments:
        return arguments[0], [arguments[1:], keywords]
    others = {name: value for name, value in keywords.items() if name != HIDDEN_STATES}
    return keywords.get(HIDDEN_STATES), others


def _is_experts(module: nn.Module) -> bool:
    """True for stacked experts. Their shapes depend on the router's values, which meta tensors do not have."""
    stacks = [parameter for parameter in module.parameters(recurse=False) if parameter.ndim == 3]
    return len(stacks) > 1


def _first_input(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return x


def check(model: Any, hf_chain: HFChain, parts: Sequence[Sequence[str]]) -> None:
    """Check that layers receive the same arguments in their stage as in the full model.

    Raises:
        ConfigError: a layer receives different arguments, or a stage has no layer.
    """
    layer_paths = set(_layer_paths(hf_chain.names))
    for index, part in enumerate(parts):
        if not layer_paths.intersection(part):
            rule = f"leaves stage {index} without a layer, but each stage of {model.config_name} needs one"
            fix = "give each stage at least one layer"
            raise ConfigError(Problem("parallelism.module_fqns_per_model_part", None, rule, fix))

    expected = _recorded(model, hf_chain, layer_paths)
    for part in parts:
        own_paths = layer_paths.intersection(part)
        recorded = _recorded(model, hf_chain, own_paths)
        for path, arguments in recorded.items():
            if not chain.are_equal(arguments, expected[path]):
                rule = f"{path} receives different arguments in its stage than in the full model"
                raise _refusal(model, rule)


class _Recorder(_OtherLayer):
    """Placeholder for a layer that records its arguments and computes nothing."""

    def __init__(self, original: nn.Module, outputs: int) -> None:
        super().__init__(original, outputs)
        self.arguments: list[Any] | None = None

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Record the arguments, and return the residual stream unchanged."""
        hidden, others = _split_arguments(arguments, keywords)
        self.arguments = tree_leaves(others)
        return _layer_output(hidden, self.outputs)


def _recorded(model: Any, hf_chain: HFChain, own_paths: set[str]) -> dict[str, list[Any]]:
    """Run a stage's forward on a CPU, on a row of two documents, without computing its layers.

    Map the path of each of the stage's layers to its arguments other than the residual stream.
    """
    # Build the stage out of placeholders.
    names = hf_chain.names
    skeleton = _skeleton(model, names, hf_chain.outputs, own_paths)
    layer_paths = _layer_paths(names)
    layers: list[Any] = [skeleton.get_submodule(path) for path in layer_paths]
    recorded = [index for index, layer in enumerate(layers) if isinstance(layer, _Recorder)]
    _connect(skeleton, layers, recorded)

    # Two documents, whose positions each begin at 0, also show masks and angles that depend on them.
    columns = torch.arange(_TOKENS).unsqueeze(0)
    is_second = columns >= _TOKENS // 2
    positions = columns - is_second * (_TOKENS // 2)

    # The first stage receives tokens, all others receive activations.
    x = torch.zeros(1, _TOKENS, hf_chain.features)
    if recorded[0] == 0:
        x = torch.full_like(columns, _token(model))
    with torch.no_grad():
        skeleton(x, positions, documents_BT=is_second.long())
    return {layer_paths[index]: layers[index].arguments for index in recorded}


def _skeleton(model: Any, names: ChainNames, outputs: int, own_paths: set[str]) -> Any:
    """Return a copy of a network in which placeholders replace all modules with parameters."""
    # The memo of deepcopy puts in the placeholders, as in ``_model_without_parameters``.
    memo: dict[int, Any] = {}
    for path in (*names.first, *names.last):
        module = model.get_submodule(path)
        memo[id(module)] = _OtherEnd(_meta_copy(module))
    for path in _layer_paths(names):
        layer = model.get_submodule(path)
        if path in own_paths:
            memo[id(layer)] = _Recorder(layer, outputs)
        else:
            memo[id(layer)] = _OtherLayer(layer, outputs)
    copied = copy.deepcopy(model, memo)
    _keep_own_constants(copied)
    return copied
