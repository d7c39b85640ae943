"""What a model must promise so that it can be cut, tried on a small copy of it: each broken promise is named with its
place. ``models.build`` proves the layout; here the forward pass is run in the pieces that parallelism makes of it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection
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
from shardtrain.tools.verify.verify_rank import model_of
from shardtrain.utils.errors import Problem

CLOSE = 1e-4
"""Relative error of float32 arithmetic in another order, with room; a broken promise is off by far more."""


def probe(
    _rank: int, _num: int, config: Config, folder: str = "", kinds: Collection[str] | None = None
) -> dict[str, Any]:
    """Broken promises and what probes found as one sentence each, and why an axis is not for this model.

    ``folder`` has what ``probes.run_with_peers`` left there, if it was run. ``kinds`` are those of parallelism that
    count, and RECOMPUTE; what is broken for others alone is among the notes. All count where none are given.

    Raises:
        ConfigError: the model cannot be built, or its layout does not cover it.
    """
    dropout.switch_off()
    module, shape, model = model_of(config)
    probes.fill(model)
    batch = whole_batch(config.debug.seed, 0, 2, config.training.seq_len, shape.vocab_size)
    prober = _Prober(kinds, config.model.name, model, module.LAYOUT, batch.tokens_BT, batch.positions_BT)
    with torch.no_grad():
        if broken := prober.runs():
            return {"broken": broken, "notes": [], "impossible": {}}
        # The probes come first: a model that lacks one of these properties would be accused of other things here.
        found = probes.ask(config, module, shape, model, Path(folder) if folder else None, kinds)
        broken = found.broken or prober.all()
        impossible = found.impossible
        if not broken and (kinds is None or "pp" in kinds):
            no_chain = prober.no_chain()
            if no_chain:
                impossible["pp"] = no_chain
    if not module.LAYOUT.context:
        problem = Problem("LAYOUT.context", None, "names no attention core, which cp replaces", "name the module")
        impossible["cp"] = str(problem)
    return {"broken": broken, "notes": found.notes + casts.notes(), "impossible": impossible}


class _Prober:
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

    def runs(self) -> list[str]:
        """What keeps the model from running at all, or on a part of a batch: nothing else can be asked then."""
        if len(inspect.signature(self._model.forward).parameters) < 2:
            return [self._problem("takes no positions", "write forward(self, tokens_BT, positions_BT)")]
        try:
            _, error, place = self._run(self._model, self._tokens_BT, self._positions_BT)
            if error:
                return [self._problem(f"fails in {place}: {error}", "correct its forward")]
            return self._shapes()
        except _NoTensor as wrong:
            return [self._problem(str(wrong), "return logits of shape (B, T, V)")]

    def all(self) -> list[str]:
        """Every broken promise of a model that runs."""
        if hasattr(self._model, "tensor_plan"):  # a network of transformers, which promises no chain
            return []
        checks = ((self._weightless, "cp"), (self._documents, ""), (self._words, "tp"), (self._halves, "tp"))
        asked = [check for check, kind in checks if not kind or self._kinds is None or kind in self._kinds]
        return [sentence for check in asked for sentence in check()]

    def _problem(self, rule: str, fix: str) -> str:
        return str(Problem("model.name", self._name, rule, fix))

    def _run(self, model: nn.Module, x: Tensor, positions_BT: Tensor) -> tuple[Tensor, str, str]:
        """Output, or the error and the innermost module that raised it."""
        # Modules that were entered and not left. A forward hook is not called where the forward raises, so that the
        # last one is the innermost that did. What a hook returns but None would replace the module's output.
        stack: list[str] = []
        handles = []
        for path, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(lambda *_, path=path: stack.append(path or "the model")))
            handles.append(module.register_forward_hook(lambda *_: stack.pop() and None))
        try:
            with trial(model):
                out = model(x, positions_BT)
        except Exception as error:
            text = str(error).splitlines() or [""]
            return x, f"{type(error).__name__}: {text[0]}", stack[-1] if stack else "the model"
        finally:
            for handle in handles:
                handle.remove()
        if not isinstance(out, Tensor):
            raise _NoTensor(f"returns {type(out).__name__}, not a tensor")
        return out, "", ""

    def _weightless(self) -> list[str]:
        """An attention core has no parameters: cp replaces it with a core of its own."""
        if not self._layout.context:
            return []
        sentences = []
        for path, module in self._model.named_modules():
            if matches(path, self._layout.context):
                for name, _ in module.named_parameters():
                    rule = f"breaks the promise of a weightless attention core: {path} holds the parameter {name}"
                    fix = "move it out: the core is softmax(q k) v and nothing else"
                    sentences.append(self._problem(rule, fix))
        return sentences

    def _shapes(self) -> list[str]:
        """A part of the batch and of the sequence goes through."""
        half = self._tokens_BT.size(1) // 2
        out, error, place = self._run(self._model, self._tokens_BT[:1, :half], self._positions_BT[:1, :half])
        if not error and out.shape[:2] != (1, half):
            error = f"it gives {tuple(out.shape)} for tokens (1, {half})"
            place = "the model"
        rule = f"runs on two rows of a whole sequence, and one row with half of a sequence fails in {place}: {error}"
        return [self._problem(rule, "take batch and sequence from x.shape")] if error else []

    def no_chain(self) -> str:
        """Why first modules, each layer and last modules, one model each, one after the other are not the whole.

        Stages of a pipeline need it, and no other kind of parallelism does.
        """
        if hasattr(self._model, "tensor_plan"):
            return ""
        whole, _, _ = self._run(self._model, self._tokens_BT, self._positions_BT)
        layers = list(getattr(self._model, self._layout.layers))
        promise = "breaks the promise that forward is a chain of first modules, layers and last modules"
        fix = "pass x alone from one to the next, with no other path around them, or leave pp at 1"
        # A stage each, as a pipeline of as many ranks would make them.
        stages = [[*self._layout.first], *([f"{self._layout.layers}.{name}"] for name in layers), [*self._layout.last]]
        x = self._tokens_BT
        for keep in stages:
            piece = pipeline_parallel.stage(copy.deepcopy(self._model), self._layout, set(keep))
            x, error, place = self._run(piece, x, self._positions_BT)
            if error:
                return self._problem(f"{promise}: with {', '.join(keep)} alone, {place} fails: {error}", fix)
        if x.shape != whole.shape or _error(x, whole) > CLOSE:
            return self._problem(f"{promise}: one after the other they give other numbers than the whole", fix)
        return ""

    def _documents(self) -> list[str]:
        """Other tokens in one document change no logit of the next, where the model receives documents at all."""
        if "documents_BT" not in inspect.signature(self._model.forward).parameters:
            return []
        # two documents in each row: every token of the first is changed, and the logits of the second are compared
        half = self._tokens_BT.size(1) // 2
        documents_BT = (torch.arange(self._tokens_BT.size(1)) >= half).long().expand_as(self._tokens_BT)
        with trial(self._model):
            before = self._model(self._tokens_BT, self._positions_BT, documents_BT=documents_BT)
        changed_BT = torch.where(documents_BT == 0, (self._tokens_BT + 1) % before.size(-1), self._tokens_BT)
        with trial(self._model):
            after = self._model(changed_BT, self._positions_BT, documents_BT=documents_BT)
        if _error(after[:, half:], before[:, half:]) > CLOSE:
            rule = "breaks the promise to keep documents apart: tokens of one document change the logits of the next"
            return [self._problem(rule, "pass documents_BT on to every attention core")]
        return []

    def _core_heads(self, model: nn.Module) -> tuple[int, ...]:
        """Heads of queries, keys and values of the first attention core; nothing where there is none."""
        seen: list[int] = []

        def note(core: nn.Module, inputs: tuple[Any, ...]) -> None:
            if not seen:
                dim = 1 if getattr(core, "heads_first", False) else 2
                seen.extend(value.size(dim) for value in inputs[:3] if isinstance(value, Tensor) and value.ndim == 4)

        handles = [
            module.register_forward_pre_hook(note)
            for path, module in model.named_modules()
            if self._layout.context and matches(path, self._layout.context)
        ]
        self._run(model, self._tokens_BT, self._positions_BT)
        for handle in handles:
            handle.remove()
        return tuple(seen)

    def _words(self) -> list[str]:
        """Words for linears name linears."""
        return [str(problem) for problem in tensor_parallel.misnamed(self._model, self._layout)[:1]]

    def _halves(self) -> list[str]:
        """Layers run with half of their columns and rows, as two tensor-parallel ranks have them."""
        whole = self._core_heads(self._model)
        if any(heads % 2 for heads in whole):
            return []  # such heads cannot be dealt to two ranks, and the configuration check says so

        # A copy with what the first of two ranks has of every layer. Where something cannot be halved nothing is
        # asked: the configuration check refuses that degree.
        halved = copy.deepcopy(self._model)
        changed = []
        for path, module in list(halved.named_modules()):
            if self._layout.context and matches(path, self._layout.context):
                slopes_N = getattr(module, "alibi_slopes", None)
                if slopes_N:  # a rank's core is given those of its heads
                    module.alibi_slopes = tuple(slopes_N[: len(slopes_N) // 2])  # type: ignore[assignment]
            word = style_of(self._layout, path)
            if word == "features":  # they are gathered for it, whatever their number
                halved.set_submodule(path, nn.Identity())
            if word == "rowwise" and isinstance(module, nn.Embedding):
                return []  # rows of a table are those of some tokens, and the others' are summed
            if path.startswith(f"{self._layout.layers}.") and word in ("colwise", "rowwise", "per_head"):
                features = 1 if isinstance(module, nn.Embedding) else 0
                if not _halve(module, {"colwise": features, "per_head": 0}.get(word, 1)):
                    return []
                changed.append(path)
        if not changed:
            return []

        # Run it. A rank deals the whole features that a rowwise linear is given, so where one fails for this it takes
        # its half, and the model is run again.
        while True:
            _, error, place = self._run(halved, self._tokens_BT, self._positions_BT)
            failing = dict(halved.named_modules()).get(place)
            word = style_of(self._layout, place)
            if not error or not isinstance(failing, nn.Linear) or word != "rowwise":
                break
            if failing._forward_pre_hooks or self._runs_if_halved(halved, place, 0):
                break
            failing.register_forward_pre_hook(_take_half)

        # A linear that fails reads no head count: it has the wrong word.
        if error and isinstance(failing, nn.Linear) and word == "rowwise":
            rule = f'declares {place} "rowwise" in LAYOUT.tensor, but its input is not sharded'
            fix = 'declare it "colwise"'
            if not self._runs_if_halved(halved, place, 0):
                fix = 'compute its input with a linear that is "colwise", which shards it'
            return [self._problem(f"{rule}: under tp=2 {error}", fix)]
        if error and isinstance(failing, nn.Linear) and (word == "colwise" or self._runs_if_halved(halved, place, 1)):
            rule = f'declares {place} "{word}" in LAYOUT.tensor, but its input is sharded along the feature dimension'
            return [self._problem(f"{rule}: under tp=2 {error}", 'declare it "rowwise"')]
        if error:
            replicated = self._whole_beside_halves(halved)
            if replicated:
                rule = (
                    f'declares {replicated} "replicate" in LAYOUT.tensor, but its output is combined with a tensor '
                    "that is sharded along the feature dimension"
                )
                return [self._problem(f"{rule}: under tp=2 {error}", 'declare it "colwise"')]

        fix = "write unflatten(-1, (-1, head_dim)) and flatten(2), with no head count of the config"
        if error:
            rule = f"fails with half of the columns of its linears, as under tp=2, in {place}: {error}"
            return [self._problem(rule, f"correct the words of LAYOUT.tensor; if they are right, {fix}")]
        heads = self._core_heads(halved)
        if tuple(2 * count for count in heads) != whole:
            rule = (
                "breaks the promise to take heads and sizes from weight shapes: with half of its columns, as under "
                f"tp=2, {self._layout.context} is given {heads} heads and not half of {whole}"
            )
            return [self._problem(rule, fix)]
        return []

    def _runs_if_halved(self, halved: nn.Module, path: str, dim: int) -> bool:
        """True if layers run where the linear of this name has half of its outputs (dim 0) or inputs (dim 1)."""
        # in every layer the linear of this name is taken from the whole model again, and halved the other way
        before = f"{self._layout.layers}."
        name = path.removeprefix(before).partition(".")[2]
        tried = copy.deepcopy(halved)
        for layer in getattr(self._model, self._layout.layers):
            whole = dict(self._model.named_modules()).get(f"{before}{layer}.{name}")
            if whole is not None:
                tried.set_submodule(f"{before}{layer}.{name}", copy.deepcopy(whole))
                _halve(tried.get_submodule(f"{before}{layer}.{name}"), dim)
        _, error, _ = self._run(tried, self._tokens_BT, self._positions_BT)
        return not error

    def _whole_beside_halves(self, halved: nn.Module) -> str:
        """The linear that every layer has whole, where layers run once half of its outputs are left; "" for none."""
        # linears called "replicate", by their name within a layer: each kind is halved alone, in all layers
        before = f"{self._layout.layers}."
        whole: dict[str, list[str]] = {}
        for path, module in halved.named_modules():
            if (
                path.startswith(before)
                and isinstance(module, nn.Linear)
                and style_of(self._layout, path) == "replicate"
            ):
                whole.setdefault(path.removeprefix(before).partition(".")[2], []).append(path)
        for paths in whole.values():
            tried = copy.deepcopy(halved)
            if all(_halve(tried.get_submodule(path), 0) for path in paths):
                _, error, _ = self._run(tried, self._tokens_BT, self._positions_BT)
                if not error:
                    return paths[0]
        return ""


class _NoTensor(Exception):
    """A forward pass gave something else than logits."""


def _take_half(linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Of twice the features that a linear has weights for, the first half; what is of another width stays."""
    half = linear.get_parameter("weight").size(-1)
    return (inputs[0][..., :half], *inputs[1:]) if inputs[0].size(-1) == 2 * half else inputs


def _halve(module: nn.Module, dim: int) -> bool:
    """Keep the first half of a linear module's outputs (dim 0) or inputs (dim 1); False where it is not even."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if dim == 1 and parameter.ndim == 1:
            continue  # a bias of the outputs stays whole
        if parameter.ndim <= dim or parameter.size(dim) % 2:
            return False
        setattr(module, name, nn.Parameter(parameter.narrow(dim, 0, parameter.size(dim) // 2).clone()))
    return True


def _error(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm().clamp_min(1e-30))
