"""Properties without which no mesh can give one process's numbers, each asked of a small copy of the model by itself.

They come before the promises, in this order, because a model that lacks one is accused of others: it answers twice
alike; a row does not depend on its batch; a token does not see a later one; nothing depends on the number of ranks; and
outside of attention a token depends on itself alone. Each answer names the module.
"""

from __future__ import annotations

import inspect
import itertools
import json
import random
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardtrain import models
from shardtrain.config import Config
from shardtrain.layout import Layout, matches, style_of
from shardtrain.ops.tied import tied_names, to_empty
from shardtrain.ops.user_state import trial
from shardtrain.tools.verify import dropout
from shardtrain.tools.verify.meshes import OPTIONS
from shardtrain.tools.verify.traces import Call, Pick, Trace, blame, off, outputs_of, trace
from shardtrain.tools.verify.verify_rank import model_of
from shardtrain.utils.errors import Problem

CLOSE = 1e-4
"""Relative error of float32 arithmetic in another order, with room; what a probe finds is off by far more."""
REPEATED = 1e-6
"""The same for two passes of the same arithmetic."""
ROWS = 3
RECOMPUTE = "recompute"
"""Beside the axes of the mesh, what some promises matter to."""


@dataclass
class ProbeResult:
    """What the probes of a model say: ``broken`` refuses it, ``impossible`` says why an axis is not for it."""

    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)


def fill(model: nn.Module) -> None:
    """Memory and random weights at unit gain, so that every part shows; buffers start at zero, as the trainer's do."""
    to_empty(model)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for buffer in model.buffers():
            buffer.zero_()
        for parameter in model.parameters():
            std = parameter.size(-1) ** -0.5 if parameter.ndim > 1 else 0.1
            parameter.normal_(0.0, std, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)


def num_tokens(model: nn.Module, most: int) -> int:
    """A length of sequences that no dimension of a weight has, so that a tensor's shape tells where its tokens lie."""
    sizes = {size for parameter in model.parameters() for size in parameter.shape} | {ROWS}
    fitting = [length for length in range(most - most % 4, 7, -4) if length not in sizes and length // 2 not in sizes]
    return fitting[0] if fitting else most


def tokens_of(count: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Rows (ROWS, count) and positions: the first row is one token over and over, which overflows a capacity."""
    generator = torch.Generator().manual_seed(1)
    tokens_BT = torch.randint(0, vocabulary, (ROWS, count), generator=generator)
    tokens_BT[0] = tokens_BT[0, 0]
    return tokens_BT, torch.arange(count).expand(ROWS, count).contiguous()


def run_with_peers(rank: int, _num: int, config: Config, folder: str) -> None:
    """As one of several ranks, run the model on the row of this rank and leave what every module gave."""
    dropout.switch_off()
    # All ranks meet here: one that has nothing to exchange must not leave before the other has come.
    dist.barrier()
    module, shape, model = model_of(config)
    fill(model)
    count = num_tokens(model, config.training.seq_len)
    tokens_BT, positions_BT = tokens_of(count, shape.vocab_size)
    row = slice(rank, rank + 1)
    facts: dict[str, Any] = {"draws": _draws(module, shape), "parameters": _sizes(model), "calls": []}
    tensors: dict[str, Tensor] = {}
    try:
        found = trace(model, tokens_BT[row], positions_BT[row])
        for number, call in enumerate(found.calls):
            facts["calls"].append([call.path, len(call.inputs), len(call.outputs)])
            for place, tensor in enumerate([*call.inputs, *call.outputs]):
                tensors[f"{number}/{place}"] = tensor.contiguous()
    except Exception as error:
        facts["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    save_file(tensors, Path(folder) / f"peer-{rank}.safetensors", metadata={"facts": json.dumps(facts)})


def _draws(module: Any, shape: Any) -> dict[str, str]:
    return {pattern: repr(draw) for pattern, draw in module.initial(shape).items()}


def _sizes(model: nn.Module) -> dict[str, str]:
    return {name: str(tuple(parameter.shape)) for name, parameter in model.named_parameters()}


class Prober:
    """A model with weights, and the questions."""

    def __init__(
        self,
        config: Config,
        module: Any,
        shape: Any,
        model: nn.Module,
        folder: Path | None,
        kinds: Collection[str] | None = None,
    ) -> None:
        self._kinds = kinds
        self._config = config
        self._module = module
        self._shape = shape
        self._model = model
        self._layout: Layout = module.LAYOUT
        self._folder = folder
        self._count = num_tokens(model, config.training.seq_len)
        self._tokens_BT, self._positions_BT = tokens_of(self._count, shape.vocab_size)
        self._foreign = hasattr(model, "tensor_plan")  # a network of transformers, whose layout names no core
        self._drawing: set[str] = set()
        self.found = ProbeResult()

    def all(self) -> ProbeResult:
        """Ask until something is broken: what is asked later would accuse the wrong module."""
        for question in (
            self._seeds,
            self._repeats,
            self._lengths,
            self._rows,
            self._causal,
            self._ranks,
            self._precision,
            self._writes,
            self._mixing,
            self._places,
            self._shared,
        ):
            question()
            if self.found.broken:
                break
        if dropout.used:
            self.found.notes.insert(0, f"dropout: off ({', '.join(dropout.used)}): which numbers drop is the mesh's")
        return self.found

    # ---- helpers

    def _run(self, tokens_BT: Tensor, positions_BT: Tensor, keep_state: bool = False, **options: Any) -> Trace:
        """Trace a forward pass; what it leaves in the model's code is undone unless ``keep_state``."""
        with nullcontext() if keep_state else trial(self._model):
            return trace(self._model, tokens_BT, positions_BT, **options)

    def _break(self, rule: str, fix: str, *kinds: str) -> None:
        """Note what is broken; of what matters to some kinds of parallelism alone, with any of these."""
        matters = not kinds or self._kinds is None or bool(set(self._kinds) & set(kinds))
        lines = self.found.broken if matters else self.found.notes
        lines.append(str(Problem("model.name", self._config.model.name, rule, fix)))

    def _say(self, path: str | None) -> str:
        """A module as a reader finds it: its path and class."""
        if not path:
            return f"the model's own forward ({type(self._model).__name__})"
        return f"module {path} ({type(self._model.get_submodule(path)).__name__})"

    def _is_core(self, path: str | None) -> bool:
        """Whether a module is an attention core, or lies in one."""
        return bool(path and self._layout.context) and any(
            matches(start, self._layout.context) for start in _starts(path or "")
        )

    def _in_word(self, path: str | None, word: str) -> bool:
        """Whether a module has a word of the layout, or lies in one that has."""
        return any(style_of(self._layout, start) == word for start in _starts(path or ""))

    # ---- questions

    def _repeats(self) -> None:
        """Twice the same answer, from the same model and from one built again."""
        tokens = self._tokens_BT
        positions = self._positions_BT
        fill(self._model)  # earlier passes may have changed weights
        weights = {name: parameter.detach().clone() for name, parameter in self._model.named_parameters()}
        tokens_before = tokens.clone()
        positions_before = positions.clone()
        with trial(self._model) as state:
            one = self._run(tokens, positions, keep_state=True)

            # What the pass has written over: its inputs, its weights.
            if not torch.equal(tokens_before, tokens) or not torch.equal(positions_before, positions):
                rule = "writes into the tokens or positions that it is given: micro-batches and recomputation read them"
                return self._break(rule, "write positions = positions + 2 instead of positions += 2")
            written = [
                name for name, weight in self._model.named_parameters() if not torch.equal(weight, weights[name])
            ]
            if written:
                rule = (
                    f"changes the weight {written[0]} in forward, of which a rank has a part, and forward runs more "
                    "often on a mesh"
                )
                fix = "compute with a changed copy, as F.linear(x, F.normalize(self.weight, dim=-1)) does (no max_norm)"
                return self._break(rule, fix)
            buffers = [name for name in state.changed() if name in dict(self._model.named_buffers())]

            # Twice more: a model that keeps state may answer the second pass as the first.
            again = [self._run(tokens, positions, keep_state=True) for _ in range(2)]
            changed = state.changed()
        for other in again:
            if off(other.out, one.out, REPEATED):
                return self._not_repeated(blame(one, other, _whole, REPEATED), changed)

        # Buffers that change and are not read, as running statistics in training.
        if buffers:
            rule = f"changes the buffer {buffers[0]} in forward: each rank sees other tokens, and its copies part"
            return self._break(rule, "keep no running statistics; compute from the inputs alone")

        # The same model built again, which shows what is counted on a class or a module of Python.
        another = models.build(self._module, self._shape)
        fill(another)
        with trial(another):
            built = trace(another, tokens, positions)
        if off(built.out, one.out, REPEATED):
            where = self._say(blame(one, built, _whole, REPEATED))
            rule = f"gives other numbers when it is built a second time in one process, first in {where}"
            self._break(rule, "count nothing on a class or a module of Python; pass the layer's number as an argument")
        return None

    def _not_repeated(self, path: str | None, changed: Sequence[str]) -> None:
        """Find out why the module at ``path`` gives different outputs, by resetting random generators and state.

        ``changed`` names the state of the model's code that the passes have changed.
        """
        where = self._say(path)
        repeats = []
        for seeds in ((0, 1), (0, 0)):
            answers = []
            for seed in seeds:
                _seed(seed)
                before = _generator_states()
                answers.append(self._run(self._tokens_BT, self._positions_BT).out)
                drawn = _generator_states() != before
            repeats.append(not off(answers[0], answers[1], REPEATED))
        repeats_from_one_state, repeats_from_one_seed = repeats
        if drawn and repeats_from_one_seed and not repeats_from_one_state:
            rule = f"draws random numbers in {where}: a mesh draws others than one process"
            fix = "drop with nn.Dropout or F.dropout, which verify switches off, and draw nothing else in forward"
            return self._break(rule, fix)
        rule = "gives different outputs when called twice with the same tokens"
        if repeats_from_one_state and changed:
            own = [name for name in changed if name.rpartition(".")[0] == (path or "")] or changed
            rule += f": {where} keeps state between forward passes ({own[0]} changes)"
        else:
            rule += f", first in {where}"
        return self._break(
            rule, "compute from the inputs alone: pipelines and accumulation call it another number of times"
        )

    def _seeds(self) -> None:
        """The model sets no seed: under one, dropout drops the same numbers in every step and layer."""
        runs = []
        for seed in (1, 2):
            _seed(seed)
            watch = _Draws(self._model)
            with watch:
                self._run(self._tokens_BT, self._positions_BT)
            watch.remove()
            runs.append([*(("", state) for state in _generator_states()), *watch.found])
        self._drawing = {path for path, _ in runs[0][len(_generator_states()) :]}
        # from two seeds, a generator is in the same state only if something has set it in between
        same = [path for (path, one), (_, other) in zip(*runs, strict=False) if one == other]
        if same:
            drawing = next((f" before a draw in {self._say(path)}" for path in same if path), "")
            rule = f"sets the seed of a global random generator in forward{drawing}: each step draws and drops the same"
            self._break(rule, "set no seed in forward (torch.manual_seed, random.seed); debug.seed is set once")

    def _lengths(self) -> None:
        """A row has the answer that it has in a new model, after a batch of another shape too."""
        half = self._count // 2
        shapes = {
            f"{ROWS} rows of {self._count} tokens": (self._tokens_BT, self._positions_BT),
            f"1 row of {half} tokens": (self._tokens_BT[:1, :half], self._positions_BT[:1, :half]),
        }
        for first, second in (list(shapes), list(shapes)[::-1]):
            alone = self._run(*shapes[second])
            error = ""
            with trial(self._model) as state:
                self._run(*shapes[first], keep_state=True)
                kept = ", ".join(state.changed()[:1])
                try:
                    after = self._run(*shapes[second], keep_state=True)
                except Exception as raised:
                    error = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
            if not error and not off(after.out, alone.out, REPEATED):
                continue
            what = f"fails with {error}" if error else f"differs in {self._say(blame(alone, after, _whole, REPEATED))}"
            rule = f"gives different outputs for {second} after {first}: it keeps {kept or 'state'}, and {what}"
            return self._break(rule, "keep separate masks and tables for each length, or make them in forward")
        return None

    def _rows(self) -> None:
        """A row alone has the answer that it has in its batch."""
        whole = self._run(self._tokens_BT, self._positions_BT)
        for row in range(ROWS):
            only = slice(row, row + 1)
            alone = self._run(self._tokens_BT[only], self._positions_BT[only])
            if not off(alone.out, whole.out[only], CLOSE):
                continue
            path = blame(whole, alone, _row(row), CLOSE)
            rule = f"gives different outputs for a row by itself and in its batch: {self._say(path)}"
            if self._sees_other_rows(whole):
                fix = "normalise each token by itself (nn.LayerNorm, nn.RMSNorm), and give experts no capacity"
                return self._break(f"{rule} mixes rows", fix)
            if path in self._drawing:
                fix = "draw no random numbers in forward: their number is that of the tokens, of which a rank has some"
                return self._break(f"{rule} draws random numbers, others for another number of rows", fix)
            return self._break(f"{rule} depends on the number of rows", "let no number depend on the size of the batch")
        return None

    def _sees_other_rows(self, whole: Trace) -> bool:
        """True if other tokens in the other rows change the answer of a row."""
        # A repeated token exceeds the capacity of its expert. Which token selects which expert is unknown: try six
        vocabulary = self._shape.vocab_size
        for row, token in itertools.product(range(ROWS), range(0, vocabulary, -(-vocabulary // 6))):
            tokens_BT = torch.full_like(self._tokens_BT, token)
            tokens_BT[row] = self._tokens_BT[row]
            if off(self._run(tokens_BT, self._positions_BT).out[row], whole.out[row], CLOSE):
                return True
        return False

    def _causal(self) -> None:
        """No token sees a later one; in an encoder all do, through its attention."""
        half = self._count // 2
        later = self._tokens_BT.clone()
        later[:, half:] = (later[:, half:] + 1) % self._shape.vocab_size
        one = self._run(self._tokens_BT, self._positions_BT)
        other = self._run(later, self._positions_BT)
        if not off(other.out[:, :half], one.out[:, :half], CLOSE):
            return
        path = blame(one, other, _kept(self._count, slice(0, half)), CLOSE)
        where = self._say(path)

        # In attention it may be meant. Where the layout names no core, a gathered module is taken for one; of a network
        # of transformers nobody knows where its attention is.
        names_no_core = not self._layout.context
        if self._is_core(path) or (names_no_core and self._in_word(path, "gather")) or self._foreign:
            self.found.notes.append(
                f"each token sees later ones, in {where}: right for an encoder, and for a language model a leak of its "
                "targets"
            )
            rule = f"is not causal, as attention over a split sequence is: {where} sees later tokens"
            self.found.impossible["cp"] = self._axis("cp", rule, "leave sequences whole")
            return
        rule = f"lets a token see later ones in {where}, outside of an attention core: its targets leak"
        fix = "read earlier positions alone; of an encoder, name the attention core in LAYOUT.context"
        if bool(getattr(self._module, "CAUSAL", True)):
            self._break(rule, fix, "cp")  # elsewhere it leaks alike on every mesh

    def _ranks(self) -> None:
        """Nothing depends on the number of ranks, or on which one it is."""
        if self._folder is None:
            return
        fix = "read no rank and no number of ranks (RANK, WORLD_SIZE, torch.distributed), and no clock or host"
        error = self._folder / "error"
        if error.exists():
            return self._break(f"fails as one of two ranks, and not alone: {error.read_text(encoding='utf-8')}", fix)
        draws = _draws(self._module, self._shape)
        sizes = _sizes(self._model)
        for rank in range(2):
            path = self._folder / f"peer-{rank}.safetensors"
            if not path.exists():
                continue
            # what run_with_peers has left
            with safe_open(path, framework="pt") as file:
                facts = json.loads(file.metadata()["facts"])
                calls = []
                for number, (module, inputs, outputs) in enumerate(facts["calls"]):
                    tensors = [file.get_tensor(f"{number}/{place}") for place in range(inputs + outputs)]
                    calls.append(Call(module, tensors[:inputs], tensors[inputs:]))
            peer = Trace(calls)

            on_two = f"on rank {rank} of 2"
            for pattern, alone in draws.items():
                there = facts["draws"].get(pattern)
                if there != alone:
                    rule = f"starts from other weights {on_two}: initial() gives {pattern} {there}, alone {alone}"
                    return self._break(rule, fix)
            for name in sorted({*sizes, *facts["parameters"]}):
                there = facts["parameters"].get(name, "absent")
                alone = sizes.get(name, "absent")
                if there != alone:
                    return self._break(f"has other weights {on_two}: {name} is {there}, alone {alone}", fix)
            if "error" in facts:
                return self._break(f"fails {on_two}, and not alone: {facts['error']}", fix)
            row = slice(rank, rank + 1)
            single = self._run(self._tokens_BT[row], self._positions_BT[row])
            peer.out = peer.calls[-1].outputs[0]
            if off(peer.out, single.out, CLOSE):
                where = self._say(blame(single, peer, _whole, CLOSE))
                return self._break(f"gives other numbers {on_two} than alone, first in {where}", fix)
        return None

    def _precision(self) -> None:
        """Nothing is computed in a type that is shorter than that of the weights."""
        watch = _ShortTypes(self._model)
        with watch:
            self._run(self._tokens_BT[:1], self._positions_BT[:1])
        watch.remove()
        if watch.found:
            path, dtype = watch.found
            rule = (
                f"computes in {dtype} in {self._say(path)}, whatever the type of its weights: meshes round differently"
            )
            self._break(rule, "cast nothing: training.mixed_precision_param is the type in which a model computes")

    def _writes(self) -> None:
        """No layer writes into what it was given: recomputation and pipelines keep that for the backward pass."""
        whole = self._run(self._tokens_BT, self._positions_BT)
        layer = f"{self._layout.layers}."
        for call in whole.calls:
            if call.changed and call.path.startswith(layer) and call.path.count(".") == layer.count("."):
                # calls are in the order in which they ended, so the first that changed something is the innermost
                inner = next(c.path for c in whole.calls if c.changed)
                rule = (
                    f"writes into its input in {self._say(inner)}: recomputation would start from what it has written"
                )
                return self._break(rule, "write x = x + y instead of x += y", "pp", RECOMPUTE)
        return None

    def _mixing(self) -> None:
        """Outside of attention a token depends on itself and its position, so that sequences can be cut there."""
        if self._foreign:
            return
        # Modules inside of which tokens may mix: the attention cores under cp, gathered modules under sequence
        # parallelism. Of one inside another the outer is meant.
        cores = []
        gathered = []
        for path, _ in self._model.named_modules():
            around = path.rpartition(".")[0]
            if self._is_core(path) and not self._is_core(around):
                cores.append(path)
            if style_of(self._layout, path) == "gather" and not self._in_word(around, "gather"):
                gathered.append(path)

        mixing = self._mixes(cores) if cores else None
        if mixing is not None:
            rule = f"mixes the tokens of a sequence outside of the attention core, in {self._say(mixing)}"
            fix = "move it into the core's place or leave sequences whole"
            self.found.impossible.setdefault("cp", self._axis("cp", rule, fix))
        mixing = self._mixes(gathered) if gathered else None
        if mixing is not None:
            rule = (
                f"mixes the tokens of a sequence in {self._say(mixing)}, where activations are split along the sequence"
            )
            fix = 'do it in a module whose word in LAYOUT.tensor is "gather"'
            self.found.impossible.setdefault("tp", self._axis("tp", rule, fix))

    def _places(self) -> None:
        """Half of a sequence, given its positions and what attention gave it, is as within the whole."""
        if self._foreign or "cp" in self.found.impossible or "tp" in self.found.impossible:
            return None
        paths = [path for path, _ in self._model.named_modules()]
        fixed = [path for path in paths if self._is_core(path) and not self._is_core(path.rpartition(".")[0])]
        if not fixed:
            fixed = [path for path in paths if style_of(self._layout, path) == "gather"]
        if not fixed and self._mixes([]) is not None:
            return None  # nothing says where the attention is, whose result half of a sequence would need

        # Counting positions from 0 is right for the first half and wrong for the second.
        first = self._differs_in_half(fixed, 0)
        second = self._differs_in_half(fixed, self._count // 2)
        if second is not None and first is None and self._ignores_positions(fixed):
            rule = (
                "breaks the promise to take positions from its argument: the second half of a sequence, given its "
                f"positions, has other numbers than within the whole, {second}, and no position changes any number"
            )
            return self._break(rule, "use positions_BT wherever a token's place counts, never arange", "cp")
        if first is None and second is None:
            return None
        half = "half" if first else "the second half"
        rule = (
            f"answers {half} of a sequence, given its positions, differently from within the whole, {first or second}"
        )
        fix = "let no token's numbers depend on how many tokens or which positions a row has, or on counting its tokens"
        return self._break(f"{rule}: a cp rank has a part of the row", fix, "cp")

    def _run_half(self, whole: Trace, fixed: Sequence[str], start: int, positions_from: int) -> Trace:
        """Run half of the sequence from ``start`` with the positions from another start and what ``fixed`` gave."""
        length = self._count // 2
        return self._run(
            self._tokens_BT[:, start : start + length],
            self._positions_BT[:, positions_from : positions_from + length],
            replay=outputs_of(whole, fixed),
            fit=partial(_of_half, start),
        )

    def _ignores_positions(self, fixed: Sequence[str]) -> bool:
        """True if half of a sequence has the same numbers with the positions of the other half."""
        whole = self._run(self._tokens_BT, self._positions_BT)
        start = self._count // 2
        own, others = (self._run_half(whole, fixed, start, positions) for positions in (start, 0))
        return not off(own.out, others.out, CLOSE) and _given_otherwise(own, others, fixed, _whole) is None

    def _differs_in_half(self, fixed: Sequence[str], start: int) -> str | None:
        """Return where half of a sequence differs from the same half of the whole, with what ``fixed`` gave there."""
        whole = self._run(self._tokens_BT, self._positions_BT)
        part = self._run_half(whole, fixed, start, start)
        pick = _half(self._count, start)
        # Positions that are added to activations show in the output.
        if off(part.out, whole.out[:, start : start + self._count // 2], CLOSE):
            path = blame(whole, part, pick, CLOSE, skip=lambda path: _within(path, fixed))
            return f"first in {self._say(path)}"
        # Those that rotate queries and keys show in what attention is given alone: what it gave was replaced.
        given = _given_otherwise(whole, part, fixed, pick)
        return None if given is None else f"where {given} is given other queries, keys or values"

    def _shared(self) -> None:
        """Weights that two layers share cannot be sharded with each."""
        for names in tied_names(self._model):
            # what FSDP wraps and a pipeline stage holds as a whole: an end of the model, or one layer
            tops = {}
            for name in names:
                pieces = name.split(".")
                tops[".".join(pieces[:2] if pieces[0] == self._layout.layers else pieces[:1])] = name
            if len(tops) > 1 and any(top.startswith(f"{self._layout.layers}.") for top in tops):
                first, second, *_ = tops.values()
                rule = f"shares one weight between {first} and {second}, and each layer is sharded by itself"
                return self._break(rule, "give each layer weights of its own")

    def _axis(self, axis: str, rule: str, fix: str) -> str:
        return str(Problem(f"parallelism.{OPTIONS[axis]}", None, f"must be 1: the model {rule}", fix))

    def _mixes(self, fixed: Sequence[str]) -> str | None:
        """The module in which one half of the tokens changes the other, with what ``fixed`` gave replayed."""
        whole = self._run(self._tokens_BT, self._positions_BT)
        replay = outputs_of(whole, fixed)
        half = self._count // 2
        for kept, other in ((slice(half, None), slice(0, half)), (slice(0, half), slice(half, None))):
            changed = self._tokens_BT.clone()
            changed[:, other] = (changed[:, other] + 1) % self._shape.vocab_size
            run = self._run(changed, self._positions_BT, replay=replay, fit=_as_it_was)
            pick = _kept(self._count, kept)
            if off(run.out[:, kept], whole.out[:, kept], CLOSE):
                return blame(whole, run, pick, CLOSE, skip=lambda path: _within(path, fixed)) or ""
            given = _given_otherwise(whole, run, fixed, pick)
            if given is not None:
                return blame(whole, run, pick, CLOSE) or given.rpartition(".")[0]
        return None


def _starts(path: str) -> list[str]:
    """A path and those of the modules around it: a.b.c, a.b, a."""
    pieces = path.split(".")
    return [".".join(pieces[:count]) for count in range(len(pieces), 0, -1)]


def _within(path: str, modules: Sequence[str]) -> bool:
    return any(start in modules for start in _starts(path))


def _given_otherwise(whole: Trace, other: Trace, paths: Sequence[str], pick: Pick) -> str | None:
    """Return the first module of ``paths`` that two passes give different inputs, as far as ``pick`` compares them."""
    ones = [call for call in whole.calls if call.path in paths]
    others = [call for call in other.calls if call.path in paths]
    for one, other_call in zip(ones, others, strict=True):
        pairs = [pick(a, b) for a, b in zip(one.inputs, other_call.inputs, strict=True)]
        if any(pair is not None and off(pair[1], pair[0], CLOSE) for pair in pairs):
            return one.path
    return None


def _whole(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    return one, other


def _row(row: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """A row of a batch of ROWS, against that row alone; a batch may have been flattened with what follows it."""

    def pick(batch: Tensor, alone: Tensor) -> tuple[Tensor, Tensor] | None:
        if batch.shape == alone.shape:
            return batch, alone
        if batch.ndim != alone.ndim or batch.ndim == 0 or batch.size(0) != ROWS * alone.size(0):
            return None
        if batch.shape[1:] != alone.shape[1:]:
            return None
        size = alone.size(0)
        return batch[row * size : (row + 1) * size], alone

    return pick


def _kept(count: int, kept: slice) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """Of tensors with ``count`` tokens along some dimension, those that were not changed."""

    def pick(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
        if one.shape != other.shape:
            return None
        dims = [dim for dim, size in enumerate(one.shape) if size == count]
        for dim in dims:
            index = tuple(kept if d == dim else slice(None) for d in range(one.ndim))
            one = one[index]
            other = other[index]
        if not dims and one.numel() > 1 and ROWS * count in one.shape:
            return None  # rows and tokens in one dimension
        return one, other

    return pick


def _as_it_was(kept: list[Tensor], output: Any) -> Any:
    """What a module gave in another pass, in the form of what it gives now."""
    remaining = iter(kept)
    if isinstance(output, Tensor):
        return next(remaining).clone()
    if isinstance(output, tuple | list):
        return type(output)(next(remaining).clone() if isinstance(x, Tensor) else x for x in output)
    return output


def _half(count: int, start: int) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor] | None]:
    """A half of tensors with ``count`` tokens, from token ``start``, against what has half as many."""

    def pick(whole: Tensor, part: Tensor) -> tuple[Tensor, Tensor] | None:
        if whole.ndim != part.ndim:
            return None
        for dim, (size, own) in enumerate(zip(whole.shape, part.shape, strict=True)):
            if size != own:
                if size != count or own != count // 2:
                    return None
                whole = whole.narrow(dim, start, own)
        return whole, part

    return pick


def _of_half(start: int, kept: list[Tensor], output: Any) -> Any:
    """What a module gave for the half of the tokens from ``start`` on, in the form of what it gives now."""
    remaining = iter(kept)

    def cut(now: Any) -> Any:
        if not isinstance(now, Tensor):
            return now
        then = next(remaining)
        for dim, (size, own) in enumerate(zip(then.shape, now.shape, strict=True)):
            if size != own:
                then = then.narrow(dim, start and size - own, own)
        return then.clone()

    return type(output)(cut(x) for x in output) if isinstance(output, tuple | list) else cut(output)


def _seed(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _torch_state() -> bytes:
    return torch.get_rng_state().numpy().tobytes()


def _generator_states() -> tuple[Any, ...]:
    """Return the states of the global generators of PyTorch, Python and NumPy, in a form that can be compared."""
    numpy_state: Any = np.random.get_state()
    return _torch_state(), random.getstate(), (numpy_state[1].tobytes(), numpy_state[2])


class _Located(TorchDispatchMode):
    """Base of modes that ask in which module an operation is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._stack: list[str] = []
        self._handles = []
        for path, module in model.named_modules():
            self._handles.append(module.register_forward_pre_hook(lambda *_, path=path: self._stack.append(path)))
            self._handles.append(module.register_forward_hook(lambda *_: self._stack.pop() and None))

    @property
    def path(self) -> str:
        """Path of the innermost module that runs; empty for the model itself."""
        return self._stack[-1] if self._stack else ""

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()


class _Draws(_Located):
    """Notes the module of each draw, and of each dropout although it is switched off, with the generator's state."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.found: list[tuple[str, bytes]] = []
        dropout.listeners.append(self._note)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _torch_state()
        result = function(*args, **(kwargs or {}))
        # kernels of attention may draw, too, and draw nothing without dropout
        if before != _torch_state() or (kwargs or {}).get("generator") is not None:
            self.found.append((self.path, before))
        return result

    def remove(self) -> None:
        """Stop noting."""
        super().remove()
        dropout.listeners.remove(self._note)

    def _note(self, _name: str, _dropped: Tensor) -> None:
        self.found.append((self.path, _torch_state()))


class _ShortTypes(_Located):
    """Finds the first operation that gives float16, bfloat16 or shorter, and the module in which it is."""

    found: tuple[str, str] | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            short = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.element_size() < 4
            if short and self.found is None and leaf.numel():
                self.found = (self.path, str(leaf.dtype).removeprefix("torch."))
        return result


def ask(
    config: Config,
    module: Any,
    shape: Any,
    model: nn.Module,
    folder: Path | None,
    kinds: Collection[str] | None = None,
) -> ProbeResult:
    """Ask a model with weights everything; without a forward pass that works there is nothing to ask."""
    if len(inspect.signature(model.forward).parameters) < 2:
        return ProbeResult()
    prober = Prober(config, module, shape, model, folder, kinds)
    return prober.all()
