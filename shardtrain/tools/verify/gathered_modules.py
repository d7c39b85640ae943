"""Compare modules on a mesh with float64, on the inputs and gradients that its ranks recorded.

``module_rounding`` runs on one process, so it does not see code that only a mesh executes. The tolerances of
gradients and losses are too wide to find small errors of such code. Here, the tensors of the ranks are put
together, and these results are computed again in float64:

- attention cores under cp: output, and gradients of queries, keys and values
- router logits and norms: outputs, and gradients of inputs
- embeddings: the gradient of the first step
- losses: each micro-batch of the first step
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from shardtrain.config import derived
from shardtrain.distributed.mesh import AXES
from shardtrain.layout import matches
from shardtrain.tools.verify import (
    backward_rounding,
    casts,
    gathered_losses,
    promised_precision,
)
from shardtrain.tools.verify.compare import assemble
from shardtrain.tools.verify.evidence import Evidence
from shardtrain.tools.verify.module_rounding import sentence
from shardtrain.tools.verify.module_watch import EMBEDDING
from shardtrain.tools.verify.rounding_limits import LEAST, Excess, deviation, distance
from shardtrain.tools.verify.verify_rank import RankRecord, model_of

MORE_THAN_ONE_PROCESS = 1.6
"""Allowed error of a core on a mesh, divided by the error of one process's core in the same dtype."""
RESULTS = ("output", "gradient of queries", "gradient of keys", "gradient of values")
SEQUENCE_DIM = 1
"""Dimension of tokens in the tensors of a core, (B, T, N, H), unless it has heads first."""


class GatheredModules:
    """The modules of a mesh in its first forward and backward pass.

    Args:
        evidence: Records of the ranks, and the rows and positions of each rank.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        _, _, self._model = model_of(evidence.config)
        self._layout = evidence.layout
        self._compute = getattr(torch, derived.compute_dtype(evidence.config))

    def excess(self) -> Iterator[Excess]:
        """Yield the results with more error than the promised precision explains."""
        for path in self._evidence.expected.record.facts["calls"]:
            module = self._submodule(path)
            if module is None:
                continue
            if self._layout.context and matches(path, self._layout.context):
                # Only context parallelism replaces a core.
                if self._evidence.size("cp") > 1:
                    yield from self._core(path, module)
            elif isinstance(module, promised_precision.ON_EACH_TOKEN):
                yield from self._on_each_token(path, module)
        yield from self._embeddings()
        yield from gathered_losses.excess(self._evidence.config, self._evidence.records)

    def _submodule(self, path: str) -> nn.Module | None:
        # A recorded path may not exist in the plain model.
        try:
            return self._model.get_submodule(path)
        except AttributeError:
            return None

    def _core(self, path: str, core: nn.Module) -> Iterator[Excess]:
        """Compare an attention core for each group of ranks that share sequences."""
        groups: dict[tuple[int, ...], list[RankRecord]] = defaultdict(list)
        for record in self._evidence.records:
            if path in record.facts["calls"]:
                place = record.place
                group = (place["pp"], place["dp_replicate"], place["dp_shard"])
                groups[group].append(record)
        for records in groups.values():
            yield from self._core_of_group(path, core, records)

    def _core_of_group(
        self, path: str, core: nn.Module, records: Sequence[RankRecord]
    ) -> Iterator[Excess]:
        # Put together the tensors of one process's core from the parts of its ranks.
        call = records[0].facts["calls"].index(path)
        prefix = f"trace/{call}/in/"
        num_inputs = sum(key.startswith(prefix) for key in records[0].parts)
        inputs = []
        for index in range(num_inputs):
            inputs.append(self._gathered(path, records, f"in/{index}", "trace"))
        output = self._gathered(path, records, "out/0", "trace")
        gradient = self._gathered(path, records, "out/0", "back")
        # Without all inputs, and at least queries, keys and values, the core cannot run again.
        known = [tensor for tensor in inputs if tensor is not None]
        if len(known) < 3 or len(known) < len(inputs) or output is None:
            return
        # Compare the ranks' error with the error of the same core on one process, which rounds too.
        exact = _run_core(core, known, gradient, torch.float64)
        plain = _run_core(core, known, gradient, self._compute)
        if exact is None or plain is None or exact[0].shape != output.shape:
            return
        actual: list[Tensor | None] = [output]
        for index in range(len(exact) - 1):
            actual.append(self._gathered(path, records, f"in/{index}", "back"))
        for result, mine, theirs, wanted in zip(RESULTS, actual, plain, exact, strict=False):
            if mine is not None:
                yield from self._judged(path, result, mine, theirs, wanted)

    def _judged(
        self, path: str, what: str, actual: Tensor, plain: Tensor, exact: Tensor
    ) -> Iterator[Excess]:
        """Compare the error of a result with the error of one process's core on the same inputs."""
        error = distance(actual.double(), exact)
        error_of_one_process = distance(plain.double(), exact)
        # The core of one process may round less than its dtype allows, so allow at least one rounding.
        rounded = exact.to(self._compute)
        of_rounding = deviation(rounded, exact, 1, is_by_row=False, promised=self._compute)
        allowed = max(MORE_THAN_ONE_PROCESS * error_of_one_process, of_rounding.allowed)
        if error <= allowed:
            return
        cause = (
            "the merge of the parts of cp rounds more than attention on one process: "
            "log-sum-exp and sums must be float32"
        )
        yield Excess(path, what, error, allowed, cause)

    def _gathered(
        self, path: str, records: Sequence[RankRecord], side: str, kind: str
    ) -> Tensor | None:
        """Join the parts of a tensor: heads of tp ranks, and tokens of cp ranks. None if a part is missing."""
        head_dim = 2
        token_dim = SEQUENCE_DIM
        if getattr(self._submodule(path), "heads_first", False):
            head_dim = 1
            token_dim = 2
        # For each part of the sequence, list its heads in the order of tp.
        of_cp: dict[int, list[Tensor]] = defaultdict(list)
        for record in sorted(records, key=lambda record: record.place["tp"]):
            call = record.facts["calls"].index(path)
            key = f"{kind}/{call}/{side}"
            if key not in record.parts:
                return None
            of_cp[record.place["cp"]].append(record.parts[key])
        parts = {}
        for place, of_tp in of_cp.items():
            if of_tp[0].ndim == 1:
                # One number for each head, such as a sink. Ranks of cp have copies.
                return torch.cat(of_tp)
            if of_tp[0].ndim != 4:
                return None
            parts[place] = torch.cat(of_tp, dim=head_dim)
        if len(parts) == 1:
            return next(iter(parts.values()))
        # A rank of cp may have two separate pieces of the sequence, so sort all tokens by position.
        in_rank_order = []
        positions: list[int] = []
        for place in sorted(parts):
            in_rank_order.append(parts[place])
            positions += self._evidence.context_part(place)
        tokens = torch.cat(in_rank_order, dim=token_dim)
        if len(positions) != tokens.size(token_dim):
            return None
        order = torch.tensor(positions).argsort()
        return tokens.index_select(token_dim, order)

    def _on_each_token(self, path: str, module: nn.Module) -> Iterator[Excess]:
        """Compare a module that computes each token separately, on the inputs of each rank."""
        weights = {}
        for name, _ in module.named_parameters():
            key = f"initial/{path}.{name}"
            full = self._evidence.expected.record.parts.get(key)
            if full is None:
                return
            weights[name] = full.to(self._compute).double()
        promised = promised_precision.dtype_of_outputs(module, self._compute)
        for record in self._evidence.records:
            # A pipeline stage has an identity instead of each module of other stages.
            has_weights = all(f"initial/{path}.{name}" in record.parts for name in weights)
            if path not in record.facts["calls"] or not has_weights:
                continue
            call = record.facts["calls"].index(path)
            x = record.parts.get(f"trace/{call}/in/0")
            actual = record.parts.get(f"trace/{call}/out/0")
            if x is None or actual is None:
                continue
            with casts.off(torch.float64), torch.no_grad():
                exact = torch.func.functional_call(module, weights, (x.double(),))
            if exact.shape != actual.shape:
                continue
            compared = deviation(actual, exact, 2, is_by_row=True, promised=promised)
            if not compared.is_rounding:
                cause = promised_precision.cause_of(module, actual)
                if not cause:
                    cause = "computed in a shorter dtype on this mesh than on one process"
                what = f"output on rank {record.rank}"
                yield Excess(path, what, compared.error, compared.allowed, cause)
                return

            # The forward pass agrees. Compare the gradient of the input, on the same inputs.
            of_output = record.parts.get(f"back/{call}/out/0")
            of_input = record.parts.get(f"back/{call}/in/0")
            if of_output is None or of_input is None:
                continue
            exact, _ = backward_rounding.exact_gradients(module, weights, x, of_output)
            what = f"gradient of the input on rank {record.rank}"
            excess = list(backward_rounding.excess_of(path, what, of_input, exact))
            if excess:
                yield from excess
                return

    def _embeddings(self) -> Iterator[Excess]:
        """Compare the gradients of embeddings with the sum over tokens, micro-batches and ranks."""
        # Gradients that are added in a shorter dtype have no exact expected sum.
        training = self._evidence.config.training
        if training.mixed_precision_reduce != "float32" or training.dtype != "float32":
            return
        for name in self._layout.first:
            # A padding index has no gradient, and a shared weight also has gradients of other modules. The
            # sum below has neither.
            embedding = self._submodule(name)
            if not isinstance(embedding, nn.Embedding) or embedding.padding_idx is not None:
                continue
            weight = f"{name}.weight"
            if _num_uses(self._model, embedding.weight) > 1:
                continue
            expected = self._evidence.expected.record.parts.get(f"gradient/0/{weight}")
            if expected is None:
                continue
            actual = assemble(self._evidence.records, f"gradient/0/{weight}", expected.shape)
            rounded = self._sum_of_embeddings(name, expected.shape)
            if actual is None or rounded is None:
                continue
            for excess in _compare_sums(name, actual, rounded):
                yield self._with_cause(excess, name, actual)

    def _rounded(self, tensor: Tensor) -> Tensor:
        """Round once to the compute dtype, and return the result in float64."""
        return torch.empty_like(tensor, dtype=self._compute).copy_(tensor).double()

    def _with_cause(self, excess: Excess, name: str, actual: Tensor) -> Excess:
        """Name micro-batches as the cause if rounding their sum, instead of a sum within one, explains the gradient."""
        added_short = self._sum_of_embeddings(name, actual.shape, rounds_sums=True)
        if added_short is None or any(True for _ in _compare_sums(name, actual, added_short)):
            return excess
        dtype = str(self._compute).removeprefix("torch.")
        cause = (
            f"gradients of several micro-batches are added in {dtype} instead of float32; "
            "other weights have the same error, which rounding hides"
        )
        return replace(excess, cause=cause)

    def _sum_of_embeddings(
        self, name: str, shape: torch.Size, rounds_sums: bool = False
    ) -> Tensor | None:
        """Return the gradient in float64 if each micro-batch of each rank is rounded once to the compute dtype.

        With ``rounds_sums``, the sum of the micro-batches before the last one is rounded, too, after each of them.
        """
        total = torch.zeros(shape, dtype=torch.float64)
        has_part = False
        scale = 1.0
        if self._compute == torch.float16:
            scale = self._evidence.config.training.initial_loss_scale
        # Ranks of tp look up different tokens in the same rows of the table. Each has some of the rows.
        groups: dict[tuple[int, ...], list[RankRecord]] = defaultdict(list)
        for record in self._evidence.records:
            group = tuple(record.place[axis] for axis in AXES if axis != "tp")
            groups[group].append(record)
        for records in groups.values():
            if not _splits_rows(records, f"initial/{name}.weight"):
                return None
            # A micro-batch rounds the sum of its lookups once. Later sums do not round visibly.
            of_rank = torch.zeros(shape, dtype=torch.float64)
            for number in itertools.count():
                key = f"{EMBEDDING}/{name}/{number}"
                if f"{key}/ids" not in records[0].parts:
                    break
                of_batch = torch.zeros(shape, dtype=torch.float64)
                for record in records:
                    gradient = record.parts.get(f"{key}/gradient")
                    if gradient is None:
                        return None
                    ids = record.parts[f"{key}/ids"]
                    # With sequence parallelism, a rank of tp has the gradients of its part of the tokens.
                    if ids.shape != gradient.shape[:-1]:
                        ids = ids.chunk(len(records), dim=1)[record.place["tp"]]
                    of_batch.index_add_(0, ids.flatten(), gradient.flatten(0, -2).double())
                has_part = True
                if rounds_sums:
                    of_rank = self._rounded(of_rank)
                of_rank += self._rounded(of_batch)
            total += of_rank / scale
        if not has_part:
            return None
        return total


def _splits_rows(records: Sequence[RankRecord], key: str) -> bool:
    """True if each of the ranks has different rows of a table, or there is only one rank.

    A table with fewer rows than ranks is replicated, and each rank rounds the sum of its own lookups.
    """
    if len(records) == 1:
        return True
    first_rows = set()
    for record in records:
        if key in record.slices:
            rows, *_ = record.slices[key]
            first_rows.add(rows.start)
    return len(first_rows) == len(records)


def _run_core(
    core: nn.Module, inputs: Sequence[Tensor], gradient: Tensor | None, dtype: torch.dtype
) -> list[Tensor] | None:
    """Return the output of a core and, with ``gradient``, the gradients of queries, keys and values.

    Return None if a user's core does not run with these inputs.
    """
    leaves = []
    for tensor in inputs:
        leaves.append(tensor.detach().to(dtype).requires_grad_())
    # The fourth input of a core with sinks is known. The meaning of others is not.
    named = {}
    if len(leaves) == 4 and getattr(core, "has_sinks", False):
        named["sinks_N"] = leaves[3]
    elif len(leaves) > 3:
        return None
    # A cast to float32 inside the core would round the reference.
    context: AbstractContextManager[None] = nullcontext()
    if dtype == torch.float64:
        context = casts.off(torch.float64)
    try:
        with context, torch.enable_grad():
            output = core(*leaves[:3], **named)
            if not isinstance(output, Tensor):
                return None
            if gradient is None:
                return [output.detach()]
            gradients = torch.autograd.grad(output, leaves[:3], gradient.to(dtype))
    except Exception:  # a user's core may not run in float64, or require positions
        return None
    return [output.detach(), *gradients]


def _num_uses(model: nn.Module, weight: Tensor) -> int:
    """Return the number of modules that share a weight."""
    named = model.named_parameters(remove_duplicate=False)
    return sum(parameter is weight for _, parameter in named)


def _compare_sums(name: str, actual: Tensor, rounded: Tensor) -> Iterator[Excess]:
    """Compare a gradient with a sum of exactly rounded parts. A few parts may be near ties."""
    # Compare each element with the largest element of its row. Rows of tokens that do not occur are zero.
    error = (actual.double() - rounded).abs()
    largest = rounded.abs().amax(-1, keepdim=True)
    has_gradient = largest > 0
    is_wrong = has_gradient & (error > LEAST * largest)
    num_compared = int(has_gradient.sum()) * actual.size(-1)
    share = float(is_wrong.sum() / max(1, num_compared))
    if share <= promised_precision.ROUNDED_ONCE:
        return
    cause = (
        "gradients of a token that occurs several times are added in a shorter dtype than float32: "
        f"{share:.0%} of the numbers differ"
    )
    total_error = distance(actual.double(), rounded)
    yield Excess(name, "gradient of the weight", total_error, LEAST, cause)


def found_in(evidence: Evidence) -> Mapping[str, str] | None:
    """Return the fields of ``verify_report.MeshResult`` if a result has too large an error, or None."""
    excess = list(GatheredModules(evidence).excess())
    if not excess:
        return None
    first = sentence(vars(excess[0]))
    if len(excess) > 1:
        first += f" (and {len(excess) - 1} more results)"
    return {"first": first, "cause": excess[0].cause}
