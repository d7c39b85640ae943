"""Test whether a small copy of a model keeps the promises of its model file, by running it in the pieces of a mesh.

``models.build`` checks the layout itself. Here the forward pass runs on parts of a batch, as a chain of
pipeline stages, and with half of the weights as in tensor parallelism. Each message names the promise and the
module that breaks it.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardtrain.config import Config
from shardtrain.distributed import pipeline_parallel
from shardtrain.distributed.tensor_parallel import plan as tensor_parallel
from shardtrain.layout import Layout, matches, style_of
from shardtrain.ops.user_state import trial
from shardtrain.tools.verify import casts, dropout, probes
from shardtrain.tools.verify.batches import whole_batch
from shardtrain.tools.verify.probe_inputs import fill
from shardtrain.tools.verify.verify_rank import model_of
from shardtrain.utils.errors import Problem

CLOSE = 1e-4
"""Relative tolerance for float32 sums in another order, with a margin.

A broken promise causes much larger errors.
"""


def probe(
    _rank: int, _num: int, config: Config, folder: str = "", kinds: Collection[str] | None = None
) -> dict[str, Any]:
    """Run the probes and check the promises of the configured model, in this process.

    Args:
        config: Configuration of a small model.
        folder: Folder with the files of ``probes.run_with_peers``, or "" to skip the comparison with them.
        kinds: Mesh axes to check, and ``probes.RECOMPUTE``. Promises that affect only other kinds become
            notes or are not checked. None for all.

    Returns:
        ``broken`` and ``notes``, lists of messages, and ``impossible``, a message for each
        unsupported mesh axis.

    Raises:
        ConfigError: the model cannot be built, or its layout does not cover it.
    """
    dropout.switch_off()
    module, shape, model = model_of(config)
    fill(model)
    batch = whole_batch(config.debug.seed, 0, 2, config.training.seq_len, shape.vocab_size)
    checker = _PromiseChecker(
        kinds,
        config.model.name,
        model,
        module.LAYOUT,
        batch.tokens_BT,
        batch.positions_BT,
    )
    peer_folder = None
    if folder:
        peer_folder = Path(folder)
    with torch.no_grad():
        broken = checker.check_runs()
        if broken:
            return {"broken": broken, "notes": [], "impossible": {}}
        # Run the probes first, because a model that fails one of them also fails the checks below, for a
        # misleading reason.
        result = probes.run_probes(config, module, shape, model, peer_folder, kinds)
        broken = result.broken or checker.check_all()
        impossible = result.impossible
        # A model that is not a chain can train without pipeline stages, so this is no broken promise.
        if not broken and (kinds is None or "pp" in kinds):
            broken_chain = checker.check_chain()
            if broken_chain:
                impossible["pp"] = broken_chain
    if not (module.LAYOUT.context or module.LAYOUT.recurrence):
        problem = Problem(
            "LAYOUT.context",
            None,
            rule="names no attention core, which cp replaces",
            fix="name the module",
        )
        impossible["cp"] = str(problem)
    return {"broken": broken, "notes": result.notes + casts.notes(), "impossible": impossible}


class _PromiseChecker:
    """The checks of one model. Each check returns the messages of broken promises."""

    def __init__(
        self,
        kinds: Collection[str] | None,
        name: str,
        model: nn.Module,
        layout: Layout,
        tokens_BT: Tensor,
        positions_BT: Tensor,
    ) -> None:
        self._kinds = kinds
        self._name = name
        self._model = model
        self._layout = layout
        self._tokens_BT = tokens_BT
        self._positions_BT = positions_BT

    def check_runs(self) -> list[str]:
        """Require that the model runs on the batch and on a part of it. All other checks depend on this."""
        if len(inspect.signature(self._model.forward).parameters) < 2:
            return [
                self._problem("takes no positions", "write forward(self, tokens_BT, positions_BT)")
            ]
        try:
            _, error, place = self._run(self._model, self._tokens_BT, self._positions_BT)
            if error:
                return [self._problem(f"fails in {place}: {error}", "correct its forward")]
            return self._check_shapes()
        except _NoTensor as wrong:
            return [self._problem(str(wrong), "return logits of shape (B, T, V)")]

    def check_all(self) -> list[str]:
        """Run all checks of promises that affect the kinds of parallelism to check."""
        if hasattr(self._model, "tensor_plan"):
            return []  # a network of the transformers library, which makes no promises
        checks = (
            (self._check_weightless_core, "cp"),
            (self._check_documents, ""),
            (self._check_styles, "tp"),
            (self._check_halved_weights, "tp"),
        )
        problems = []
        for check, kind in checks:
            if not kind or self._kinds is None or kind in self._kinds:
                problems += check()
        return problems

    def _problem(self, rule: str, fix: str) -> str:
        return str(Problem("model.name", self._name, rule, fix))

    def _run(self, model: nn.Module, x: Tensor, positions_BT: Tensor) -> tuple[Tensor, str, str]:
        """Run a model, and catch its error.

        Returns:
            (output, "", "") after success, or (x, error, path of the innermost module that raised the error).

        Raises:
            _NoTensor: the output is not a tensor.
        """
        # A module whose forward raises does not call its forward hook and stays on the stack. The last
        # module on the stack is the innermost.
        stack: list[str] = []
        handles = []

        def enter(path: str, *_: Any) -> None:
            stack.append(path or "the model")

        def leave(*_: Any) -> None:
            stack.pop()

        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(partial(enter, path)))
            handles.append(module.register_forward_hook(leave))
        try:
            with trial(model):
                out = model(x, positions_BT)
        except Exception as error:  # a user's model may raise anything
            lines = str(error).splitlines() or [""]
            place = "the model"
            if stack:
                place = stack[-1]
            return x, f"{type(error).__name__}: {lines[0]}", place
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(out, Tensor):
            raise _NoTensor(f"returns {type(out).__name__}, not a tensor")
        return out, "", ""

    def _check_weightless_core(self) -> list[str]:
        """Require that cores have no parameters, because cp replaces them with its own."""
        kinds = {
            self._layout.context: (
                "attention core",
                "move it out of the core, which may only compute softmax(q k) v",
            ),
            self._layout.recurrence: (
                "recurrence core",
                "pass it to the core as one of its weights",
            ),
        }
        problems = []
        for pattern, (kind, fix) in kinds.items():
            # A layout without such a core has an empty pattern.
            if not pattern:
                continue
            for path, module in self._model.named_modules():
                if not matches(path, pattern):
                    continue
                for name, _ in module.named_parameters():
                    rule = f"breaks the promise of a weightless {kind}: {path} contains the parameter {name}"
                    problems.append(self._problem(rule, fix))
        return problems

    def _check_shapes(self) -> list[str]:
        """Require that the model runs on one row with half of a sequence."""
        half = self._tokens_BT.size(1) // 2
        tokens_BT = self._tokens_BT[:1, :half]
        positions_BT = self._positions_BT[:1, :half]
        out, error, place = self._run(self._model, tokens_BT, positions_BT)
        # A model with fixed sizes may run without an error and return the wrong shape.
        if not error and out.shape[:2] != (1, half):
            error = f"it returns {tuple(out.shape)} for tokens (1, {half})"
            place = "the model"
        if not error:
            return []
        rule = f"runs on two rows of a full sequence, but one row with half of a sequence fails in {place}: {error}"
        return [self._problem(rule, "take batch and sequence from x.shape")]

    def check_chain(self) -> str:
        """Require that the model is a chain of first modules, layers and last modules, like pipeline stages.

        Return the message of the broken promise, or "".
        """
        if hasattr(self._model, "tensor_plan"):
            return ""  # a network of the transformers library
        expected, _, _ = self._run(self._model, self._tokens_BT, self._positions_BT)
        promise = (
            "breaks the promise that forward is a chain of first modules, layers and last modules"
        )
        fix = "pass only x from one module to the next, with no other path around them, or leave pp at 1"
        # Build one stage for each link of the chain, like the pipeline builds its stages.
        stages = [[*self._layout.first]]
        for name in getattr(self._model, self._layout.layers):
            stages.append([f"{self._layout.layers}.{name}"])
        stages.append([*self._layout.last])
        x = self._tokens_BT
        for keep in stages:
            # Building a stage removes the other modules, so it needs a copy of the model.
            full_model = copy.deepcopy(self._model)
            stage = pipeline_parallel.stage(full_model, self._layout, set(keep))
            x, error, place = self._run(stage, x, self._positions_BT)
            if error:
                names = ", ".join(keep)
                rule = f"{promise}: a stage with only {names} fails in {place}: {error}"
                return self._problem(rule, fix)
        # A model with a path around a module runs as a chain, but computes something else.
        if x.shape != expected.shape or _error(x, expected) > CLOSE:
            rule = f"{promise}: run one after the other, they return other outputs than the model"
            return self._problem(rule, fix)
        return ""

    def _check_documents(self) -> list[str]:
        """Require that tokens of one document do not affect logits of the next, if the model takes
        ``documents_BT``.
        """
        if "documents_BT" not in inspect.signature(self._model.forward).parameters:
            return []
        # Put two documents in each row. Change every token of the first document, and compare the logits
        # of the second document.
        num_tokens = self._tokens_BT.size(1)
        half = num_tokens // 2
        documents_T = (torch.arange(num_tokens) >= half).long()
        documents_BT = documents_T.expand_as(self._tokens_BT)
        with trial(self._model):
            before = self._model(self._tokens_BT, self._positions_BT, documents_BT=documents_BT)
        other_tokens_BT = (self._tokens_BT + 1) % before.size(-1)
        changed_BT = torch.where(documents_BT == 0, other_tokens_BT, self._tokens_BT)
        with trial(self._model):
            after = self._model(changed_BT, self._positions_BT, documents_BT=documents_BT)
        if _error(after[:, half:], before[:, half:]) > CLOSE:
            rule = "breaks the promise to keep documents apart: tokens of one document change the logits of the next"
            return [self._problem(rule, "pass documents_BT on to every attention core")]
        return []

    def _core_heads(self, model: nn.Module) -> tuple[int, ...]:
        """Return the numbers of heads of q, k and v of the first attention core, or () without a core."""
        heads: list[int] = []

        def note(core: nn.Module, inputs: tuple[Any, ...]) -> None:
            # The layers are alike, so the first core is enough.
            if heads:
                return
            dim = 2
            if getattr(core, "heads_first", False):
                dim = 1
            for value in inputs[:3]:
                if isinstance(value, Tensor) and value.ndim == 4:
                    heads.append(value.size(dim))

        # Hooks see the heads only in a run, because a core may reshape or repeat them in the model's own code.
        handles = []
        for path, module in model.named_modules():
            if self._layout.context and matches(path, self._layout.context):
                handles.append(module.register_forward_pre_hook(note))
        self._run(model, self._tokens_BT, self._positions_BT)
        for handle in handles:
            handle.remove()
        return tuple(heads)

    def _check_styles(self) -> list[str]:
        """Require that the styles for linears in LAYOUT.tensor name linears."""
        # One wrong pattern matches a module in every layer, so the first problem is enough.
        problems = tensor_parallel.misnamed(self._model, self._layout)
        return [str(problem) for problem in problems[:1]]

    def _check_halved_weights(self) -> list[str]:
        """Require that layers run with half of their columns and rows, as on one of two
        tensor-parallel ranks.
        """
        heads = self._core_heads(self._model)
        if any(count % 2 for count in heads):
            return []  # not divisible between two ranks; the configuration check reports this
        halved = self._halved_copy()
        if halved is None:
            return []
        error, place = self._run_halved(halved)
        if error:
            return [self._explain_failure(halved, error, place)]

        halved_heads = self._core_heads(halved)
        if tuple(2 * count for count in halved_heads) != heads:
            rule = (
                "breaks the promise to take heads and sizes from weight shapes: "
                f"with half of its columns, as under tp=2, {self._layout.context} gets "
                f"{halved_heads} heads instead of half of {heads}"
            )
            return [self._problem(rule, _SHAPE_FIX)]
        return []

    def _halved_copy(self) -> nn.Module | None:
        """Copy the model with the weights that the first of two tensor-parallel ranks has in its layers.

        Return None if nothing is halved, or if something cannot be halved. The configuration check rejects
        such a degree.
        """
        halved = copy.deepcopy(self._model)
        has_halved = False
        for path, module in list(halved.named_modules()):
            if self._layout.context and matches(path, self._layout.context):
                slopes_N = getattr(module, "alibi_slopes", None)
                if slopes_N:  # the attention core of a rank has the slopes of its heads
                    module.alibi_slopes = tuple(slopes_N[: len(slopes_N) // 2])  # type: ignore[assignment]
            style = style_of(self._layout, path)
            is_embedding = isinstance(module, nn.Embedding)
            # A module with this style gathers all features, so halving must not affect it.
            if style == "features":
                halved.set_submodule(path, nn.Identity())
            if style == "rowwise" and is_embedding:
                return None  # a rank has the rows of some tokens, and outputs are summed
            is_in_layer = path.startswith(f"{self._layout.layers}.")
            if is_in_layer and style in ("colwise", "rowwise", "per_head"):
                # A weight is (outputs, inputs), but the table of an embedding is (tokens, features).
                dim = 0
                if style == "rowwise" or (style == "colwise" and is_embedding):
                    dim = 1
                if not _halve(module, dim):
                    return None
                has_halved = True
        if not has_halved:
            return None
        return halved

    def _run_halved(self, halved: nn.Module) -> tuple[str, str]:
        """Run the halved model. Return the error and the module that raised it, or ("", "").

        On a mesh, a rowwise linear with a full input takes its half of the features. If such a linear fails
        here, add a hook that does the same, and run the model again.
        """
        while True:
            _, error, place = self._run(halved, self._tokens_BT, self._positions_BT)
            failing = dict(halved.named_modules()).get(place)
            is_rowwise = style_of(self._layout, place) == "rowwise"
            if not error or not isinstance(failing, nn.Linear) or not is_rowwise:
                return error, place
            # If the hook did not help, or the layer should be colwise, the error is the user's.
            if failing._forward_pre_hooks or self._runs_if_halved(halved, place, 0):
                return error, place
            failing.register_forward_pre_hook(_take_half)

    def _explain_failure(self, halved: nn.Module, error: str, place: str) -> str:
        """Name the wrong style in LAYOUT.tensor that makes the halved model fail in the module ``place``."""
        style = style_of(self._layout, place)
        # A linear does not depend on the number of heads. If it fails, its own style is wrong.
        if isinstance(dict(halved.named_modules()).get(place), nn.Linear):
            if style == "rowwise":
                rule = f'declares {place} "rowwise" in LAYOUT.tensor, but its input is not sharded'
                fix = 'declare it "colwise"'
                if not self._runs_if_halved(halved, place, 0):
                    fix = 'compute its input with a linear that is "colwise", which shards it'
                return self._problem(f"{rule}: under tp=2 {error}", fix)
            if style == "colwise" or self._runs_if_halved(halved, place, 1):
                rule = (
                    f'declares {place} "{style}" in LAYOUT.tensor, '
                    "but its input is sharded along the feature dimension"
                )
                return self._problem(f"{rule}: under tp=2 {error}", 'declare it "rowwise"')
        replicated = self._replicated_next_to_sharded(halved)
        if replicated:
            rule = (
                f'declares {replicated} "replicate" in LAYOUT.tensor, '
                "but its output is combined with a tensor "
                "that is sharded along the feature dimension"
            )
            return self._problem(f"{rule}: under tp=2 {error}", 'declare it "colwise"')
        # No single style explains the error. The model may contain a fixed size.
        rule = f"fails with half of the columns of its linears, as under tp=2, in {place}: {error}"
        fix = f"correct the styles in LAYOUT.tensor; if they are right, {_SHAPE_FIX}"
        return self._problem(rule, fix)

    def _runs_if_halved(self, halved: nn.Module, path: str, dim: int) -> bool:
        """True if layers run with half of the outputs (dim 0) or inputs (dim 1) of the linear at ``path``.

        The same linear is halved in every layer. ``halved`` is not changed.
        """
        prefix = f"{self._layout.layers}."
        name_in_layer = path.removeprefix(prefix).partition(".")[2]
        full_modules = dict(self._model.named_modules())
        tried = copy.deepcopy(halved)
        for layer in getattr(self._model, self._layout.layers):
            path_in_layer = f"{prefix}{layer}.{name_in_layer}"
            full = full_modules.get(path_in_layer)
            if full is not None:
                tried.set_submodule(path_in_layer, copy.deepcopy(full))
                _halve(tried.get_submodule(path_in_layer), dim)
        _, error, _ = self._run(tried, self._tokens_BT, self._positions_BT)
        return not error

    def _replicated_next_to_sharded(self, halved: nn.Module) -> str:
        """Return a linear with the style "replicate" with which the layers run if half of its outputs are
        removed, or "".

        Such a linear must be sharded. ``halved`` is not changed.
        """
        # Collect replicated linears by their name within a layer. Try one name at a time, in all layers.
        prefix = f"{self._layout.layers}."
        replicated: dict[str, list[str]] = {}
        for path, module in halved.named_modules():
            is_linear_of_layer = path.startswith(prefix) and isinstance(module, nn.Linear)
            if is_linear_of_layer and style_of(self._layout, path) == "replicate":
                name_in_layer = path.removeprefix(prefix).partition(".")[2]
                replicated.setdefault(name_in_layer, []).append(path)
        for paths in replicated.values():
            tried = copy.deepcopy(halved)
            if not all(_halve(tried.get_submodule(path), 0) for path in paths):
                continue
            _, error, _ = self._run(tried, self._tokens_BT, self._positions_BT)
            if not error:
                return paths[0]
        return ""


_SHAPE_FIX = (
    "write unflatten(-1, (-1, head_dim)) and flatten(2), without the head count of the config"
)


class _NoTensor(Exception):
    """The output of a forward pass is not a tensor."""


def _take_half(linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Keep the first half of the features if the input has twice as many features as the linear has columns."""
    half = linear.get_parameter("weight").size(-1)
    x = inputs[0]
    if x.size(-1) != 2 * half:
        return inputs
    return (x[..., :half], *inputs[1:])


def _halve(module: nn.Module, dim: int) -> bool:
    """Keep the first half of a linear module's outputs (dim 0) or inputs (dim 1), in place.

    Return False if the number is odd.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        if dim == 1 and parameter.ndim == 1:
            continue  # a bias has no inputs
        if parameter.ndim <= dim or parameter.size(dim) % 2:
            return False
        half = parameter.narrow(dim, 0, parameter.size(dim) // 2).clone()
        setattr(module, name, nn.Parameter(half))
    return True


def _error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30))
