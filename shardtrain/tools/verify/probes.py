"""Test one copy of the model, without a mesh, for properties that every mesh requires.

The probes run before the checks in ``promises.py``, in the order of ``Prober.run``: a model that fails a
probe also fails later checks, which then name the wrong module. The probes require that repeated passes
return the same output, a row does not depend on its batch, a token does not see later tokens, nothing depends
on the number of ranks, and tokens interact only inside attention. Each message names the responsible module.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from shardtrain import models
from shardtrain.config import Config
from shardtrain.layout import Layout, matches, style_of
from shardtrain.ops.tied import tied_names
from shardtrain.ops.user_state import trial
from shardtrain.tools.verify import dropout
from shardtrain.tools.verify.meshes import OPTIONS
from shardtrain.tools.verify.operation_modes import (
    DrawRecorder,
    ShortDtypeFinder,
    generator_states,
    seed_generators,
)
from shardtrain.tools.verify.probe_inputs import ROWS, fill, num_tokens, tokens_of
from shardtrain.tools.verify.probe_tensors import (
    entire,
    first_with_other_inputs,
    half_of_tokens,
    replay_half,
    replay_unchanged,
    row_of_batch,
    unchanged_tokens,
)
from shardtrain.tools.verify.traces import Call, Trace, blame, differs, outputs_of, trace
from shardtrain.tools.verify.verify_rank import model_of
from shardtrain.utils.errors import Problem

CLOSE = 1e-4
"""Relative tolerance for float32 sums in another order, with a margin.

Real faults cause much larger differences.
"""
REPEATED = 1e-6
"""Relative tolerance for two passes with the same arithmetic."""
RECOMPUTE = "recompute"
"""Element of ``kinds`` that means activation checkpointing. The other elements are mesh axes."""


@dataclass
class ProbeResult:
    """Findings of the probes.

    Attributes:
        broken: Messages of failed probes. If there are any, the model is rejected.
        notes: Messages for the user that do not reject the model.
        impossible: Message per mesh axis that the model does not support.
    """

    broken: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    impossible: dict[str, str] = field(default_factory=dict)


def run_probes(
    config: Config,
    module: Any,
    shape: Any,
    model: nn.Module,
    folder: Path | None,
    kinds: Collection[str] | None = None,
) -> ProbeResult:
    """Run all probes on a model that has weights.

    Args:
        config: Configuration of the model.
        module: The model file.
        shape: Sizes of the model.
        model: The model, on the CPU.
        folder: Folder with the files of ``run_with_peers``, or None to skip the comparison with two ranks.
        kinds: Mesh axes to check, and RECOMPUTE. A finding that affects only other kinds becomes a
            note. None for all.
    """
    if len(inspect.signature(model.forward).parameters) < 2:
        return ProbeResult()  # reported by promises.py; the model cannot be called with positions
    return Prober(config, module, shape, model, folder, kinds).run()


def run_with_peers(rank: int, _num: int, config: Config, folder: str) -> None:
    """Run the model as one of several ranks, on row ``rank`` of the batch. Collective.

    Write the inputs and outputs of every module to ``peer-RANK.safetensors`` in ``folder``. If the forward
    pass raises, record the error in that file instead.
    """
    dropout.switch_off()
    # Without this barrier, a rank without collectives could exit before the other rank has connected to it.
    dist.barrier()
    module, shape, model = model_of(config)
    fill(model)
    count = num_tokens(model, config.training.seq_len)
    tokens_BT, positions_BT = tokens_of(count, shape.vocab_size)
    row = slice(rank, rank + 1)
    facts: dict[str, Any] = {
        "draws": _initial_draws(module, shape),
        "parameters": _sizes(model),
        "calls": [],
    }
    tensors: dict[str, Tensor] = {}
    try:
        recording = trace(model, tokens_BT[row], positions_BT[row])
        for number, call in enumerate(recording.calls):
            facts["calls"].append([call.path, len(call.inputs), len(call.outputs)])
            for index, tensor in enumerate([*call.inputs, *call.outputs]):
                tensors[f"{number}/{index}"] = tensor.contiguous()
    except Exception as error:
        facts["error"] = _first_line(error)
    path = Path(folder) / f"peer-{rank}.safetensors"
    save_file(tensors, path, metadata={"facts": json.dumps(facts)})


def _read_peer(path: Path) -> tuple[dict[str, Any], Trace]:
    """Read a file of ``run_with_peers``. Return its facts and the recorded pass."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["facts"])
        calls = []
        for number, (module, num_inputs, num_outputs) in enumerate(facts["calls"]):
            num_tensors = num_inputs + num_outputs
            tensors = [file.get_tensor(f"{number}/{index}") for index in range(num_tensors)]
            inputs = tensors[:num_inputs]
            outputs = tensors[num_inputs:]
            calls.append(Call(module, inputs, outputs))
    return facts, Trace(calls)


def _initial_draws(module: Any, shape: Any) -> dict[str, str]:
    """Return the initializer of each pattern of parameter names, as text."""
    return {pattern: repr(draw) for pattern, draw in module.initial(shape).items()}


def _sizes(model: nn.Module) -> dict[str, str]:
    return {name: str(tuple(parameter.shape)) for name, parameter in model.named_parameters()}


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


class Prober:
    """The probes of one model. Each method that starts with ``_check`` is one probe."""

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
        # True for a model of the transformers library. Its layout does not name the attention core.
        self._is_foreign = hasattr(model, "tensor_plan")
        # Paths of modules that draw random numbers, and of modules that contain a dropout.
        self._drawing: set[str] = set()
        self.result = ProbeResult()

    def run(self) -> ProbeResult:
        """Run the probes until one rejects the model. Later probes would name the wrong module."""
        probes = (
            self._check_seeds,
            self._check_repeats,
            self._check_lengths,
            self._check_rows,
            self._check_causal,
            self._check_ranks,
            self._check_precision,
            self._check_in_place_writes,
            self._check_token_mixing,
            self._check_positions,
            self._check_shared_weights,
        )
        for probe in probes:
            probe()
            if self.result.broken:
                break
        if dropout.used:
            self.result.notes.insert(
                0,
                f"dropout: switched off ({', '.join(dropout.used)}), because each mesh drops different elements",
            )
        return self.result

    # ---- helpers

    def _run(
        self,
        tokens_BT: Tensor,
        positions_BT: Tensor,
        keep_state: bool = False,
        **options: Any,
    ) -> Trace:
        """Trace a forward pass.

        Restore the Python state that the model's code changes, unless ``keep_state`` is set.
        """
        if keep_state:
            return trace(self._model, tokens_BT, positions_BT, **options)
        with trial(self._model):
            return trace(self._model, tokens_BT, positions_BT, **options)

    def _run_all(self, keep_state: bool = False) -> Trace:
        """Trace a forward pass of the unmodified batch."""
        return self._run(self._tokens_BT, self._positions_BT, keep_state)

    def _with_other_tokens(self, tokens: slice) -> Tensor:
        """Return the batch with each token in the slice ``tokens`` replaced by the next ID of the
        vocabulary.
        """
        changed_BT = self._tokens_BT.clone()
        changed_BT[:, tokens] = (changed_BT[:, tokens] + 1) % self._shape.vocab_size
        return changed_BT

    def _break(self, rule: str, fix: str, *kinds: str) -> None:
        """Reject the model. If ``kinds`` are given and the caller checks none of them, only add a note."""
        is_relevant = not kinds or self._kinds is None or bool(set(self._kinds) & set(kinds))
        lines = self.result.broken if is_relevant else self.result.notes
        lines.append(str(Problem("model.name", self._config.model.name, rule, fix)))

    def _exclude(self, axis: str, rule: str, fix: str) -> None:
        """Mark a mesh axis as unsupported, unless an earlier probe has marked it."""
        problem = Problem(f"parallelism.{OPTIONS[axis]}", None, f"must be 1: the model {rule}", fix)
        self.result.impossible.setdefault(axis, str(problem))

    def _describe(self, path: str | None) -> str:
        """Return the path and class of a module for a message."""
        if not path:
            return f"the model's own forward ({type(self._model).__name__})"
        return f"module {path} ({type(self._model.get_submodule(path)).__name__})"

    def _is_core(self, path: str | None) -> bool:
        """True if the module is the core of an attention or a recurrence, or a submodule of one."""
        for pattern in (self._layout.context, self._layout.recurrence):
            if not pattern:
                continue
            if any(matches(start, pattern) for start in _with_parents(path or "")):
                return True
        return False

    def _has_style(self, path: str | None, style: str) -> bool:
        """True if the module or one of its parents has this style in ``LAYOUT.tensor``."""
        return any(style_of(self._layout, start) == style for start in _with_parents(path or ""))

    # ---- probes

    def _check_repeats(self) -> None:
        """Require the same output from repeated passes, and from a second model built by the same file."""
        fill(self._model)  # earlier passes may have changed weights
        weights = {}
        for name, parameter in self._model.named_parameters():
            weights[name] = parameter.detach().clone()
        tokens_before = self._tokens_BT.clone()
        positions_before = self._positions_BT.clone()
        with trial(self._model) as state:
            first = self._run_all(keep_state=True)

            # The pass must not have modified its inputs or the weights.
            has_same_tokens = torch.equal(tokens_before, self._tokens_BT)
            if not has_same_tokens or not torch.equal(positions_before, self._positions_BT):
                rule = "modifies the tokens or positions in place, but micro-batches and recomputation read them again"
                return self._break(
                    rule, "write positions = positions + 2 instead of positions += 2"
                )
            for name, weight in self._model.named_parameters():
                if torch.equal(weight, weights[name]):
                    continue
                rule = (
                    f"changes the weight {name} in forward, but on a mesh a rank has only a part of "
                    "it, and forward runs more than once per step"
                )
                fix = "compute with a modified copy, like F.linear(x, F.normalize(self.weight, dim=-1)); avoid max_norm"
                return self._break(rule, fix)
            buffer_names = dict(self._model.named_buffers())
            changed_buffers = [name for name in state.changed() if name in buffer_names]

            # Run two more passes, because a model with state may return a different output only from the
            # third pass on.
            repetitions = [self._run_all(keep_state=True) for _ in range(2)]
            changed = state.changed()
        for repetition in repetitions:
            if differs(repetition.out, first.out, REPEATED):
                return self._explain_repeats(blame(first, repetition, entire, REPEATED), changed)

        # Some buffers change without affecting the output, such as running statistics during training.
        if changed_buffers:
            rule = (
                f"changes the buffer {changed_buffers[0]} in forward, "
                "so copies diverge on ranks with different tokens"
            )
            return self._break(rule, "keep no running statistics; compute only from the inputs")

        # Building a second model reveals counters that are kept on a class or a Python module.
        rebuilt_model = models.build(self._module, self._shape)
        fill(rebuilt_model)
        with trial(rebuilt_model):
            rebuilt = trace(rebuilt_model, self._tokens_BT, self._positions_BT)
        if differs(rebuilt.out, first.out, REPEATED):
            culprit = self._describe(blame(first, rebuilt, entire, REPEATED))
            rule = f"returns different outputs when it is built a second time in one process, first in {culprit}"
            self._break(
                rule,
                "keep no counters on a class or a Python module; pass the layer's number as an argument",
            )
        return None

    def _explain_repeats(self, path: str | None, changed: Sequence[str]) -> None:
        """Report that repeated outputs differ, first in the module at ``path``, because of random
        numbers or Python state.

        ``changed`` names the Python state that the passes have changed.
        """
        where = self._describe(path)
        # Run the model twice with different seeds, then twice with the same seed.
        repeats_by_seeds = {}
        is_drawing = False
        for seeds in ((0, 1), (0, 0)):
            outputs = []
            for seed in seeds:
                seed_generators(seed)
                before = generator_states()
                outputs.append(self._run_all().out)
                is_drawing = generator_states() != before
            repeats_by_seeds[seeds] = not differs(outputs[0], outputs[1], REPEATED)

        # Each of these passes started from the same Python state, so only the seeds differed.
        repeats_from_same_state = repeats_by_seeds[0, 1]
        if is_drawing and repeats_by_seeds[0, 0] and not repeats_from_same_state:
            rule = f"draws random numbers in {where}, and a mesh draws different numbers than one process"
            fix = "use nn.Dropout or F.dropout, which verify switches off, and draw no other numbers in forward"
            return self._break(rule, fix)
        rule = "returns different outputs when called twice with the same tokens"
        if repeats_from_same_state and changed:
            changed_here = [name for name in changed if name.rpartition(".")[0] == (path or "")]
            name = (changed_here or changed)[0]
            rule += f": {where} keeps state between forward passes ({name} changes)"
        else:
            rule += f", first in {where}"
        fix = (
            "compute only from the inputs, "
            "because the number of calls differs with pipelines and gradient accumulation"
        )
        return self._break(rule, fix)

    def _check_seeds(self) -> None:
        """Require that forward sets no seed. Otherwise dropout drops the same elements in every
        step and layer.
        """
        runs = []
        for seed in (1, 2):
            seed_generators(seed)
            recorder = DrawRecorder(self._model)
            with recorder:
                self._run_all()
            recorder.remove()
            self._drawing |= {path for path, _ in recorder.draws}
            final_states = [("", state) for state in generator_states()]
            runs.append([*final_states, *recorder.draws])

        # The two runs start from different seeds. A generator with the same state in both was
        # seeded by the model.
        reseeded = []
        for (path, state), (_, other_state) in zip(*runs, strict=False):
            if state == other_state:
                reseeded.append(path)
        if not reseeded:
            return
        # The first entries are the final states of the generators, which have no path.
        paths_of_draws = [path for path in reseeded if path]
        where = ""
        if paths_of_draws:
            where = f" before a draw in {self._describe(paths_of_draws[0])}"
        rule = f"sets the seed of a global random generator in forward{where}, so every step draws the same numbers"
        self._break(
            rule,
            "remove torch.manual_seed and random.seed from forward; training sets debug.seed once",
        )

    def _check_lengths(self) -> None:
        """Require that a batch returns the same output in a new model and after a batch of another shape."""
        # Test both orders, because a state of one length may fit another length only in one direction.
        half = self._count // 2
        shapes = {
            f"{ROWS} rows of {self._count} tokens": (self._tokens_BT, self._positions_BT),
            f"1 row of {half} tokens": (self._tokens_BT[:1, :half], self._positions_BT[:1, :half]),
        }
        for first, second in (list(shapes), list(shapes)[::-1]):
            # A model without state returns the same output whether or not another shape came before.
            expected = self._run(*shapes[second])
            error = ""
            with trial(self._model) as state:
                self._run(*shapes[first], keep_state=True)
                changed = state.changed()
                try:
                    after = self._run(*shapes[second], keep_state=True)
                except Exception as raised:
                    error = _first_line(raised)
            if error:
                symptom = f"fails with {error}"
            elif differs(after.out, expected.out, REPEATED):
                symptom = f"differs in {self._describe(blame(expected, after, entire, REPEATED))}"
            else:
                continue
            state_name = changed[0] if changed else "state"
            rule = f"returns different outputs for {second} after {first}: it keeps {state_name}, and {symptom}"
            return self._break(
                rule,
                "keep separate masks and tables for each length, or compute them in forward",
            )
        return None

    def _check_rows(self) -> None:
        """Require that a row returns the same output by itself and as part of its batch."""
        batch = self._run_all()
        for row in range(ROWS):
            rows = slice(row, row + 1)
            single = self._run(self._tokens_BT[rows], self._positions_BT[rows])
            if not differs(single.out, batch.out[rows], CLOSE):
                continue
            path = blame(batch, single, row_of_batch(row), CLOSE)
            rule = f"returns different outputs for a row by itself and in its batch: {self._describe(path)}"
            if self._sees_other_rows(batch):
                fix = "normalize each token separately (nn.LayerNorm, nn.RMSNorm), and use no expert capacity"
                return self._break(f"{rule} mixes rows", fix)
            if path in self._drawing:
                fix = "draw no random numbers in forward: each rank has only some rows, so it draws different numbers"
                return self._break(
                    f"{rule} draws random numbers that depend on the number of rows", fix
                )
            return self._break(
                f"{rule} depends on the number of rows",
                "make no output depend on the batch size",
            )
        return None

    def _sees_other_rows(self, batch: Trace) -> bool:
        """True if replacing the tokens of the other rows changes the output of a row."""
        # A repeated token exceeds the capacity of its expert. The router's choice for a token is unknown, so
        # try six tokens.
        vocabulary = self._shape.vocab_size
        stride = -(-vocabulary // 6)
        for row, token in itertools.product(range(ROWS), range(0, vocabulary, stride)):
            tokens_BT = torch.full_like(self._tokens_BT, token)
            tokens_BT[row] = self._tokens_BT[row]
            run = self._run(tokens_BT, self._positions_BT)
            if differs(run.out[row], batch.out[row], CLOSE):
                return True
        return False

    def _check_causal(self) -> None:
        """Require that no token depends on later tokens, except through attention in an encoder."""
        half = self._count // 2
        original = self._run_all()
        changed = self._run(self._with_other_tokens(slice(half, None)), self._positions_BT)
        if not differs(changed.out[:, :half], original.out[:, :half], CLOSE):
            return
        path = blame(original, changed, unchanged_tokens(self._count, slice(0, half)), CLOSE)
        where = self._describe(path)

        # Attention may see later tokens on purpose. If the layout names no core, a module with the style
        # "gather" may be attention. In a transformers model, any module may be.
        may_be_attention = self._is_core(path) or self._is_foreign
        if not self._layout.context and self._has_style(path, "gather"):
            may_be_attention = True
        if may_be_attention:
            self.result.notes.append(
                f"tokens see later tokens in {where}: correct for an encoder, but in a language model the targets leak"
            )
            rule = (
                f"is not causal, but attention over a split sequence is: {where} sees later tokens"
            )
            self._exclude("cp", rule, "do not split sequences")
            return
        # Only context parallelism changes the result then. Other meshes leak the targets in the
        # same way as one process.
        if bool(getattr(self._module, "CAUSAL", True)):
            rule = f"lets a token see later tokens in {where}, outside of an attention core, so its targets leak"
            self._break(
                rule,
                "read only earlier positions; in an encoder, name the core in LAYOUT.context",
                "cp",
            )

    def _check_ranks(self) -> None:
        """Require that nothing depends on the rank or the number of ranks."""
        if self._folder is None:
            return
        fix = "do not read the rank, the number of ranks (RANK, WORLD_SIZE, torch.distributed), the clock or the host"
        error = self._folder / "error"
        if error.exists():
            text = error.read_text(encoding="utf-8")
            return self._break(f"fails as one of two ranks, but not on one process: {text}", fix)
        for rank in range(2):
            path = self._folder / f"peer-{rank}.safetensors"
            if not path.exists():
                continue
            rule = self._peer_difference(path, rank)
            if rule:
                return self._break(rule, fix)
        return None

    def _peer_difference(self, path: Path, rank: int) -> str:
        """Return the difference between a file of ``run_with_peers`` and one process, or ""."""
        facts, peer = _read_peer(path)
        on_rank = f"on rank {rank} of 2"
        # The initial weights, then their shapes, then the outputs.
        for pattern, draw in _initial_draws(self._module, self._shape).items():
            peer_draw = facts["draws"].get(pattern)
            if peer_draw != draw:
                return (
                    f"starts from other weights {on_rank}: initial() returns {peer_draw} for "
                    f"{pattern}, but {draw} on one process"
                )
        sizes = _sizes(self._model)
        for name in sorted({*sizes, *facts["parameters"]}):
            size = sizes.get(name, "absent")
            peer_size = facts["parameters"].get(name, "absent")
            if peer_size != size:
                return f"has other weights {on_rank}: the size of {name} is {peer_size}, but {size} on one process"
        if "error" in facts:
            return f"fails {on_rank}, but not on one process: {facts['error']}"

        rows = slice(rank, rank + 1)
        single = self._run(self._tokens_BT[rows], self._positions_BT[rows])
        peer.out = peer.calls[-1].outputs[0]
        if differs(peer.out, single.out, CLOSE):
            culprit = self._describe(blame(single, peer, entire, CLOSE))
            return f"returns different outputs {on_rank} than on one process, first in {culprit}"
        return ""

    def _check_precision(self) -> None:
        """Require that the model computes in float32, the dtype of its weights, and in no shorter dtype."""
        finder = ShortDtypeFinder(self._model)
        with finder:
            self._run(self._tokens_BT[:1], self._positions_BT[:1])
        finder.remove()
        if finder.first:
            path, dtype = finder.first
            rule = (
                f"computes in {dtype} in {self._describe(path)} for weights of any dtype, "
                "and each mesh rounds differently"
            )
            self._break(
                rule,
                "remove the cast: training.mixed_precision_param sets the dtype of the computation",
            )

    def _check_in_place_writes(self) -> None:
        """Require that no layer modifies its input.

        Recomputation and pipelines reuse the input in the backward pass.
        """
        calls = self._run_all().calls
        layers = f"{self._layout.layers}."
        for call in calls:
            is_layer = call.path.startswith(layers) and call.path.count(".") == layers.count(".")
            if not is_layer or not call.changed:
                continue
            # Calls are sorted by their end, so the first call with a modified input is the innermost.
            innermost = next(c.path for c in calls if c.changed)
            where = self._describe(innermost)
            rule = f"writes into its input in {where}, so recomputation would start from a changed input"
            return self._break(rule, "write x = x + y instead of x += y", "pp", RECOMPUTE)
        return None

    def _check_token_mixing(self) -> None:
        """Exclude cp and tp if tokens of a sequence mix where these axes split the sequence."""
        if self._is_foreign:
            return
        # Context parallelism allows attention cores to mix tokens, and sequence parallelism allows it in
        # modules with the style "gather". Of nested modules, take the outermost.
        cores = self._outermost_cores()
        gathered = []
        for path, _ in self._model.named_modules():
            parent = path.rpartition(".")[0]
            if style_of(self._layout, path) == "gather" and not self._has_style(parent, "gather"):
                gathered.append(path)

        mixing = self._mixing_module(cores) if cores else None
        if mixing is not None:
            rule = f"mixes the tokens of a sequence outside of the attention core, in {self._describe(mixing)}"
            self._exclude("cp", rule, "move it into the attention core, or do not split sequences")
        mixing = self._mixing_module(gathered) if gathered else None
        if mixing is not None:
            where = self._describe(mixing)
            rule = f"mixes the tokens of a sequence in {where}, where activations are split along the sequence"
            self._exclude("tp", rule, 'do it in a module whose style in LAYOUT.tensor is "gather"')

    def _outermost_cores(self) -> list[str]:
        """Return the paths of attention cores that are not submodules of another core."""
        outermost = []
        for path, _ in self._model.named_modules():
            parent = path.rpartition(".")[0]
            if self._is_core(path) and not self._is_core(parent):
                outermost.append(path)
        return outermost

    def _mixing_module(self, fixed: Sequence[str]) -> str | None:
        """Return a module in which changing half of the tokens affects the other half, or None.

        The recorded outputs of the modules ``fixed`` are replayed, so mixing inside these modules
        has no effect.
        """
        original = self._run_all()
        replay = outputs_of(original, fixed)
        first_half = slice(0, self._count // 2)
        second_half = slice(self._count // 2, None)
        for kept, changed in ((second_half, first_half), (first_half, second_half)):
            tokens_BT = self._with_other_tokens(changed)
            run = self._run(tokens_BT, self._positions_BT, replay=replay, fit=replay_unchanged)
            pick = unchanged_tokens(self._count, kept)
            if differs(run.out[:, kept], original.out[:, kept], CLOSE):
                # The path of the model itself is "".
                path = blame(original, run, pick, CLOSE, skip=partial(_is_within, fixed))
                return path or ""
            # Mixing directly before a fixed module does not reach the output, so compare the inputs of the
            # fixed modules.
            affected = first_with_other_inputs(original, run, fixed, pick, CLOSE)
            if affected is not None:
                return blame(original, run, pick, CLOSE) or affected.rpartition(".")[0]
        return None

    def _check_positions(self) -> None:
        """Require the same outputs for half of a sequence as in the full sequence, with replayed
        attention outputs.
        """
        if self._is_foreign or "cp" in self.result.impossible or "tp" in self.result.impossible:
            return None
        fixed = self._outermost_cores()
        if not fixed:
            for path, _ in self._model.named_modules():
                if style_of(self._layout, path) == "gather":
                    fixed.append(path)
        # Half of a sequence needs the attention outputs of the full sequence. They cannot be replayed if the
        # layout does not locate the attention.
        if not fixed and self._mixing_module([]) is not None:
            return None

        # A model that counts positions from 0 is correct for the first half and wrong for the second.
        first = self._difference_of_half(fixed, 0)
        second = self._difference_of_half(fixed, self._count // 2)
        if second is not None and first is None and self._ignores_positions(fixed):
            rule = (
                "must take positions from its argument: the second half of a sequence, "
                f"run alone with its positions, differs from the full sequence, {second}, "
                "and changing the positions has no effect"
            )
            return self._break(
                rule,
                "use positions_BT instead of torch.arange for the positions of tokens",
                "cp",
            )
        if first is None and second is None:
            return None
        half = "half" if first else "the second half"
        rule = (
            f"returns other outputs for {half} of a sequence, with its positions, "
            f"than in the full sequence, {first or second}"
        )
        fix = (
            "make outputs independent of the number of tokens in a row and of their first position"
        )
        return self._break(f"{rule}: a cp rank has a part of the row", fix, "cp")

    def _run_half(
        self, full: Trace, fixed: Sequence[str], start: int, first_position: int
    ) -> Trace:
        """Run half of the sequence, starting at token ``start``, with positions that start at
        ``first_position``.

        The modules ``fixed`` return their outputs for these tokens from ``full``.
        """
        length = self._count // 2
        return self._run(
            self._tokens_BT[:, start : start + length],
            self._positions_BT[:, first_position : first_position + length],
            replay=outputs_of(full, fixed),
            fit=partial(replay_half, start),
        )

    def _ignores_positions(self, fixed: Sequence[str]) -> bool:
        """True if the second half of a sequence returns the same output with the positions of the
        first half.
        """
        full = self._run_all()
        start = self._count // 2
        with_own_positions = self._run_half(full, fixed, start, start)
        with_first_positions = self._run_half(full, fixed, start, 0)
        if differs(with_own_positions.out, with_first_positions.out, CLOSE):
            return False
        affected = first_with_other_inputs(
            with_own_positions, with_first_positions, fixed, entire, CLOSE
        )
        return affected is None

    def _difference_of_half(self, fixed: Sequence[str], start: int) -> str | None:
        """Name the first module that differs between half of a sequence and the full sequence, or
        return None.
        """
        full = self._run_all()
        half = self._run_half(full, fixed, start, start)
        pick = half_of_tokens(self._count, start)
        # Position embeddings that are added to activations change the output.
        stop = start + self._count // 2
        if differs(half.out, full.out[:, start:stop], CLOSE):
            path = blame(full, half, pick, CLOSE, skip=partial(_is_within, fixed))
            return f"first in {self._describe(path)}"
        # Rotary embeddings of queries and keys change only the inputs of attention, because its
        # outputs are replayed.
        affected = first_with_other_inputs(full, half, fixed, pick, CLOSE)
        if affected is None:
            return None
        return f"where {affected} receives other queries, keys or values"

    def _check_shared_weights(self) -> None:
        """Reject a weight that a layer shares with another module, because each layer is sharded
        separately.
        """
        layers = self._layout.layers
        for names in tied_names(self._model):
            # FSDP and pipeline stages handle one unit at a time: a layer, or a module before or
            # after the layers.
            name_by_unit = {}
            for name in names:
                pieces = name.split(".")
                unit = pieces[:2] if pieces[0] == layers else pieces[:1]
                name_by_unit[".".join(unit)] = name
            has_layer = any(unit.startswith(f"{layers}.") for unit in name_by_unit)
            if len(name_by_unit) > 1 and has_layer:
                first, second, *_ = name_by_unit.values()
                rule = f"shares one weight between {first} and {second}, but each layer is sharded separately"
                return self._break(rule, "use separate weights in each layer")


def _with_parents(path: str) -> list[str]:
    """Return a path followed by the paths of its parents: a.b.c, a.b, a."""
    paths = [path]
    while "." in path:
        path = path.rpartition(".")[0]
        paths.append(path)
    return paths


def _is_within(modules: Sequence[str], path: str) -> bool:
    """True if a module is one of ``modules``, or a submodule of one."""
    return any(start in modules for start in _with_parents(path))
