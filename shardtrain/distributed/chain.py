"""Whether a model's forward is the chain that pipeline stages need: its modules in order, and x alone between them.

Nothing is computed with the model's weights: its modules run on the meta device, and what lies between them runs on a
few numbers. Both are tried on copies, since a forward may keep what it has made.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shardtrain.layout import Layout, matches
from shardtrain.ops.user_state import trial
from shardtrain.utils.errors import ConfigError, Problem

_TOKENS = 4


class Absent(nn.Identity):
    """Stands for an end of the model that another stage has: gives its first input back, whatever else it is given."""

    def forward(self, input: Tensor, *_: Any, **__: Any) -> Tensor:
        """The first input."""
        return input


def check(model: nn.Module, layout: Layout, parts: Sequence[Sequence[str]], degree: int) -> None:
    """Refuse a model of which a stage would do something that another has done, or lack what another has.

    ``parts`` are the names of each stage's modules. Raises ConfigError with the first break.
    """
    ends = (*layout.first, *layout.last)
    outside = [name for name, _ in model.named_parameters() if name.partition(".")[0] not in (*ends, layout.layers)]
    if outside:
        rule = f"needs each parameter in a module of LAYOUT.first, layers or last, and {outside[0]} is in none"
        raise _refusal(degree, rule, "move it into one of them")
    # two looks: at what flows between the modules, and at what stages with fewer layers are given
    features = _follow(model, layout, degree)
    _compare_stages(model, layout, parts, degree, features)


def _refusal(degree: int, rule: str, fix: str) -> ConfigError:
    option = "parallelism.pipeline_parallel_degree"
    return ConfigError(Problem(option, degree, f"needs a forward that is a chain: {rule}", f"{fix}, or set it to 1"))


def _names(model: nn.Module, layout: Layout) -> list[str]:
    return [*layout.first, *(f"{layout.layers}.{name}" for name in getattr(model, layout.layers)), *layout.last]


def _follow(whole: nn.Module, layout: Layout, degree: int) -> int:
    """Follow x through the modules, and give its features: each is given, as an object, what the one before gave.

    A module's output may come from its x and its own parameters alone. The graph of autograd tells, whichever way
    something went round x: by an argument, a list or a dictionary that layers write, or an attribute.
    """
    model = copy.deepcopy(whole)
    names = _names(model, layout)
    modules = dict(zip(names, map(model.get_submodule, names), strict=True))
    parameters = {id(parameter): name for name, parameter in model.named_parameters(remove_duplicate=False)}
    # one row of a few tokens: shapes alone count
    token = torch.zeros(1, _TOKENS, dtype=torch.int64, device="meta")
    given = token
    giver = "the tokens"
    reached = 0
    features = 0
    givers: dict[int, str] = {}
    kept: list[Tensor] = []  # ids are of living tensors

    def follow(name: str, x: Any, *others: Any, **keywords: Any) -> Tensor:
        nonlocal given, giver, reached, features
        if reached >= len(names) or name != names[reached]:
            expected = names[reached] if reached < len(names) else "the end"
            raise _refusal(
                degree, f"{name} is called where {expected} is next", "call each once, in the order of LAYOUT"
            )
        # the very object: whatever is computed in between makes another one
        if x is not given:
            fix = f"do what lies between in {name}" if reached else "give it the tokens as they are"
            if name in layout.first[1:]:
                fix = "let one module do both, as self.embed(tokens_BT, positions_BT)"
            rule = f"{name} is not given just what {giver} gives" if reached else f"{name} is not given them"
            raise _refusal(degree, rule, fix)
        if any(isinstance(value, Tensor) and value.requires_grad for value in tree_leaves([others, keywords])):
            rule = f"{name} is given more of what other modules compute than x"
            raise _refusal(degree, rule, "pass x alone along the chain")
        is_layer = name.startswith(f"{layout.layers}.")
        if is_layer:
            features = features or x.size(-1)
        try:
            out = own[name](x, *others, **keywords)
        except Exception:
            if not is_layer:
                raise
            out = torch.empty_like(x)  # layers need not run, and some cannot without numbers
        if not isinstance(out, Tensor):
            raise _refusal(degree, f"{name} gives {type(out).__name__}, not x alone", "give one tensor")
        # autograd knows where the output came from, by whichever way it went
        mine = {id(parameter) for parameter in modules[name].parameters()} | {id(x)}
        strange = next((leaf for leaf in _leaves(out) if id(leaf) not in mine), None)
        if strange is not None:
            source = givers.get(id(strange)) or parameters.get(id(strange)) or "another module"
            raise _refusal(degree, f"{name} uses what {source} has, and not x alone", "pass x alone along the chain")
        giver = name
        reached += 1
        given = out.detach().requires_grad_(out.is_floating_point())
        givers[id(given)] = f"the output of {name}"
        kept.append(given)
        return given

    own = {name: module.forward for name, module in modules.items()}
    for path, module in model.named_modules():
        if layout.expert and matches(path, layout.expert):  # their work depends on numbers
            module.forward = lambda x, *_, **__: x  # type: ignore[method-assign]
    for name, module in modules.items():
        module.forward = partial(follow, name)  # type: ignore[method-assign]
    try:
        with trial(model), torch.enable_grad(), torch.device("meta"):
            out = model(token, token)
    except RuntimeError as error:
        if "meta tensor" not in str(error):
            raise
        rule = f"it reads tensor values, but is traced on meta tensors: {str(error).splitlines()[0]}"
        raise _refusal(degree, rule, "read values (.item(), int(x), if x > 0) only inside the layers") from None
    if reached < len(names):
        raise _refusal(degree, f"{names[reached]} is never called", "call each module of LAYOUT once")
    if out is not given:
        raise _refusal(degree, f"it does not return just what {giver} gives", f"do what follows in {giver}")
    return features


def _leaves(out: Tensor) -> Iterator[Tensor]:
    """The tensors without history from which a tensor was computed, among those that are differentiated."""
    if out.requires_grad and out.grad_fn is None:
        yield out
    waiting = [out.grad_fn]
    seen = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if (variable := getattr(node, "variable", None)) is not None:
            yield variable
        waiting.extend(next_node for next_node, _ in node.next_functions)


def _compare_stages(
    model: nn.Module, layout: Layout, parts: Sequence[Sequence[str]], degree: int, features: int
) -> None:
    """Refuse a forward that gives a layer other arguments in its stage than in the whole model.

    Stages have fewer layers, so what depends on their number, or on a layer's place in a loop, is another there.
    """
    try:
        whole = _arguments(model, layout, _names(model, layout), features)
    except Exception:  # a forward that does not run on a CPU is tried in the first step
        return
    for part in parts:
        try:
            stage = _arguments(model, layout, part, features)
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            rule = f"with {part[0]} to {part[-1]} alone it fails: {type(error).__name__}: {text}"
            raise _refusal(degree, rule, "pass x alone along the chain, and name layers by their keys") from None
        for name, given in stage.items():
            if not _equal(given, whole[name]):
                rule = f"{name} is given other arguments in its stage than in the whole model, as by enumerate(layers)"
                fix = "let what differs between layers be attributes of theirs, set in __init__"
                raise _refusal(degree, rule, fix)


def _arguments(model: nn.Module, layout: Layout, keep: Sequence[str], features: int) -> dict[str, list[Any]]:
    """What a stage's forward gives to each of its modules beside x, computed on a CPU."""
    found: dict[str, list[Any]] = {}

    def note(name: str, x: Tensor, *others: Any, **keywords: Any) -> Tensor:
        found[name] = tree_leaves([others, keywords])
        return x if x.is_floating_point() else x.new_zeros(*x.shape, features, dtype=torch.float32)

    def noting(name: str) -> nn.Module:
        if name not in keep:
            return Absent()
        module = copy.copy(model.get_submodule(name))  # forwards read attributes of layers
        module.forward = partial(note, name)  # type: ignore[method-assign]
        return module

    stage = copy.copy(model)
    layers = {name: f"{layout.layers}.{name}" for name in getattr(model, layout.layers)}
    # modules that are not tried themselves are copied, since a forward may write to them
    stage._modules = {
        name: copy.deepcopy(module) for name, module in model._modules.items() if name != layout.layers
    } | {name: noting(name) for name in (*layout.first, *layout.last)}
    stage._modules[layout.layers] = nn.ModuleDict({key: noting(name) for key, name in layers.items() if name in keep})
    positions_BT = torch.arange(_TOKENS).unsqueeze(0)
    x = positions_BT if set(layout.first) & set(keep) else torch.zeros(1, _TOKENS, features)
    documents = {}
    if "documents_BT" in inspect.signature(model.forward).parameters:
        documents["documents_BT"] = torch.zeros_like(positions_BT)
    with trial(stage), torch.no_grad():
        stage(x, positions_BT, **documents)
    return found


def _equal(one: list[Any], other: list[Any]) -> bool:
    if len(one) != len(other):
        return False
    for a, b in zip(one, other, strict=True):
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            if not (isinstance(a, Tensor) and isinstance(b, Tensor) and torch.equal(a, b)):
                return False
        elif isinstance(a, bool | int | float | str | None) and a != b:
            return False
    return True
