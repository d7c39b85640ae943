"""``shardtrain verify --real``: compare with float64 at sizes at which a small model would not
reveal a fault.

- ``sums``: gradient norms and losses on 1, 2 and 4 ranks.
- ``beyond``: tensors of more than 2^31 numbers.
- ``layers``: one layer, and the vocabulary, of the configured model.
- ``angles``: the rotary positions of the configured model.

A check that does not fit into memory is skipped and reported. Only these modules import torch.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardtrain import config as configs
from shardtrain.config import Loaded
from shardtrain.tools.verify import forked_workers
from shardtrain.utils.heartbeat import not_silent
from shardtrain.utils.limits import cgroup_memory, host_memory
from shardtrain.utils.temporary import temporary_folder
from shardtrain.utils.units import format_bytes

SUM_LIMIT = 1e-6
"""Maximum relative error of a norm or a loss, compared with float64."""
LIMIT_SECONDS = 3600
"""Time limit of one check."""
SPARE = 0.75
"""Fraction of the free memory that a check may use. ``--memory`` overrides it."""
MESHES: tuple[tuple[str, int, dict[str, int]], ...] = (
    ("1", 1, {}),
    ("tp=2", 2, {"tp": 2}),
    ("dp_shard=2", 2, {}),
    ("dp_shard=2,tp=2", 4, {"tp": 2}),
)
"""Name, number of ranks, and degrees. ``dp_shard`` is the number of ranks divided by the other degrees."""
REPLICAS = ("dp_replicate=2", 2, {"dp_replicate": 2})
WIDE = ("tp=4", 4, {"tp": 4})

Verdict = Literal["pass", "fail", "left out"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks. Tests use smaller ones."""

    numbers: int = 1 << 26
    """Number of float32 gradients: 67,108,864."""
    far_rows: int = (1 << 20) + 3
    """Rows of 2,048 numbers: 2^31 + 6,144 numbers in total."""
    far_samples: int = (1 << 33) + 7
    vocabularies: tuple[int, ...] = (128256, 151936, 262144)
    tokens: int = 1024
    """Number of targets in each loss sum. Each vocabulary size has one sum."""
    losses: int = 1 << 26
    """Number of targets in the long loss sum, which has a vocabulary of two."""


@dataclass(frozen=True)
class Check:
    """A check that has not run yet.

    ``needs`` is its memory in bytes over all ranks, ``limit`` its maximum error.
    """

    name: str
    size: str
    mesh: str
    ranks: int
    needs: int
    limit: float
    measure: Callable[[Path], tuple[float, str]]
    """Function that runs the check in the given folder. It returns the error and a note, which may
    be empty.
    """


@dataclass(frozen=True)
class CheckResult:
    """Result of one check. ``error`` is None if it did not run."""

    check: str
    size: str
    mesh: str
    ranks: int
    error: float | None
    limit: float
    verdict: Verdict
    seconds: float = 0.0
    note: str = ""


def main(request: Any, loaded: Loaded) -> int:
    """Run all checks, print their rows, and return ``exit_code``."""
    budget = int(SPARE * free_memory())
    if request.memory_gib:
        budget = int(request.memory_gib * 2**30)
    model = f"{loaded.config.model.name}/{loaded.config.model.flavor}"
    if not request.json:
        print(
            f"verify {model} at real size against float64, with up to {format_bytes(budget)} of memory"
        )
        print(_line(_HEADER), flush=True)
    rows = []
    for row in run(loaded, budget):
        rows.append(row)
        if not request.json:
            line = _line(_cells(row))
            if row.note:
                line += f"  {row.note}"
            print(line, flush=True)
            not_silent()
    if request.json:
        finite = []
        for row in rows:
            # JSON has no infinity and no NaN.
            if row.error is not None and not math.isfinite(row.error):
                row = replace(row, error=None)
            finite.append(asdict(row))
        document = {
            "model": model,
            "memory_bytes": budget,
            "rows": finite,
            "exit_code": exit_code(rows),
        }
        print(json.dumps(document, indent=2, allow_nan=False))
    else:
        print(summary(rows))
    return exit_code(rows)


def free_memory() -> int:
    """Return the free memory of this machine or container in bytes."""
    host = host_memory()
    limit, used = cgroup_memory()
    free = host.get("available", host["total"])
    if limit:
        return min(free, limit - used)
    return free


def exit_code(rows: Sequence[CheckResult]) -> int:
    """Return 0 if at least one check passed and none failed, else 4."""
    verdicts = {row.verdict for row in rows}
    return 0 if "pass" in verdicts and "fail" not in verdicts else 4


def summary(rows: Sequence[CheckResult]) -> str:
    """Return one line with the numbers of checks that passed, failed, and were skipped."""
    verdicts = Counter(row.verdict for row in rows)
    text = f"{verdicts['pass']} passed, {verdicts['fail']} failed, {verdicts['left out']} left out"
    if verdicts["left out"]:
        text += ": checks that were left out have no result"
    return text


def run(loaded: Loaded, budget: int, sizes: Sizes | None = None) -> Iterator[CheckResult]:
    """Run the checks sequentially, each in separate processes."""
    # Run them sequentially, because the checks of a model share files that exist while this generator runs.
    for check in itertools.chain(general(sizes or Sizes()), of_model(loaded, budget)):
        yield measured(check, budget)


def measured(check: Check, budget: int) -> CheckResult:
    """Run one check, or skip it if it needs more than ``budget`` bytes."""
    row = CheckResult(
        check.name, check.size, check.mesh, check.ranks, None, check.limit, "left out"
    )
    if check.needs > budget:
        return replace(
            row,
            note=f"needs {format_bytes(check.needs)} of memory, {format_bytes(budget)} allowed",
        )
    started = time.perf_counter()
    try:
        with temporary_folder("real") as folder:
            error, note = check.measure(folder)
    except forked_workers.RankFailed as failed:
        return replace(row, verdict="fail", seconds=time.perf_counter() - started, note=str(failed))
    except _NotPossible as reason:
        return replace(row, note=str(reason))
    # NaN <= limit is false, so an error of NaN fails.
    verdict: Verdict = "pass" if error <= check.limit else "fail"
    return replace(
        row, error=error, verdict=verdict, seconds=time.perf_counter() - started, note=note
    )


class _NotPossible(Exception):
    """The configuration does not allow a check. The message contains the reason."""


def _on_ranks(
    folder: Path,
    ranks: int,
    function: Callable[..., Any],
    *arguments: Any,
    alone: bool = False,
) -> Any:
    backend = "" if alone else "gloo"
    return forked_workers.run(
        ranks,
        function,
        *arguments,
        folder=folder,
        backend=backend,
        limit_seconds=LIMIT_SECONDS,
    )


def general(sizes: Sizes) -> Iterator[Check]:
    """Yield the checks that do not depend on the model."""
    from shardtrain.tools.verify.real import beyond, sums

    columns = 4096
    rows = sizes.numbers // columns
    # A tensor with more elements than a 32-bit index can address.
    far_columns = beyond.COLUMNS
    far_numel = sizes.far_rows * far_columns

    # Each kind of check has a function that creates one from its sizes. The loops below yield the checks.
    def norm(
        mesh: tuple[str, int, dict[str, int]], shape: tuple[int, int], values: str, dtype: str
    ) -> Check:
        name, ranks, degrees = mesh
        numel = shape[0] * shape[1]

        def measure(folder: Path) -> tuple[float, str]:
            answers = _on_ranks(folder, ranks, sums.gradient_norm, degrees, *shape, values, dtype)
            return sums.norm_error(answers), sums.VALUES[values]

        bytes_per_number = 2 if dtype == "bfloat16" else 4
        needed_bytes = numel * bytes_per_number * degrees.get("dp_replicate", 1)
        size = f"{numel + 4097:,} {dtype}"
        return Check("gradient norm", size, name, ranks, needed_bytes, SUM_LIMIT, measure)

    for mesh in (*MESHES, REPLICAS):
        yield norm(mesh, (rows, columns), "normal", "float32")
    for values in ("offset", "tiny", "one large"):
        yield norm(MESHES[0], (rows, columns), values, "float32")
    far_shape = (sizes.far_rows, far_columns)
    yield norm(MESHES[0], far_shape, "one large", "bfloat16")
    yield norm(MESHES[1], far_shape, "normal", "bfloat16")
    yield norm(MESHES[3], far_shape, "offset", "bfloat16")

    def loss(
        mesh: tuple[str, int, dict[str, int]], vocabulary: int, tokens: int, batches: int
    ) -> Check:
        name, ranks, degrees = mesh

        def measure(folder: Path) -> tuple[float, str]:
            answers = _on_ranks(folder, ranks, sums.loss_sum, degrees, vocabulary, tokens, batches)
            return sums.loss_error(answers), ""

        # Logits, their gradient, and two chunks in float32.
        tokens_per_batch = tokens // batches
        one_batch = tokens_per_batch * vocabulary * 4 * 4
        table = sums.PREFIXES * vocabulary * 12
        needed_bytes = ranks * (table + one_batch)
        size = f"{tokens:,} tokens x {vocabulary:,}"
        return Check("loss sum", size, name, ranks, needed_bytes, SUM_LIMIT, measure)

    for mesh in MESHES:
        for vocabulary in sizes.vocabularies:
            yield loss(mesh, vocabulary, sizes.tokens, 64)
        # A small vocabulary leaves room for many more tokens, and so for a longer sum.
        yield loss(mesh, 2, sizes.losses, 256)

    def exact(
        name: str, size: str, needs: int, function: Callable[..., Any], *arguments: Any
    ) -> Check:
        """Create a check whose error is the number of wrong values."""

        def measure(folder: Path) -> tuple[float, str]:
            # The type Path among the arguments is a placeholder for the folder, which exists only now.
            values = []
            for argument in arguments:
                values.append(str(folder) if argument is Path else argument)
            (answer,) = _on_ranks(folder, 1, function, *values, alone=True)
            return answer["wrong"], "numbers that are wrong"

        return Check(name, size, "1", 1, needs, 0, measure)

    size = f"{far_numel:,} bfloat16"
    far_bytes = 2 * far_numel
    small = 1 << 28
    yield exact("initial draws", f"{far_numel:,} float32", small, beyond.drawn, sizes.far_rows)
    yield exact(
        "order of samples",
        f"{sizes.far_samples:,} samples",
        small,
        beyond.ordered,
        sizes.far_samples,
    )
    yield exact("checkpoint, far rows", size, small, beyond.stored_far, sizes.far_rows, Path)
    yield exact("checkpoint, whole", size, 2 * far_bytes, beyond.written, sizes.far_rows, Path)
    yield exact("scaled gradient", size, far_bytes, beyond.scaled, sizes.far_rows)
    yield exact("embedding rows", size, far_bytes, beyond.looked_up, sizes.far_rows)
    yield exact("AdamW update", size, 4 * far_bytes, beyond.updated, sizes.far_rows)
    vocabulary = sizes.vocabularies[0]
    tokens = -(-far_numel // vocabulary)  # rounded up

    def scored(folder: Path) -> tuple[float, str]:
        (answer,) = _on_ranks(folder, 1, beyond.scored, vocabulary, tokens, alone=True)
        return answer["error"], ""

    size = f"{tokens:,} tokens x {vocabulary:,} bfloat16"
    yield Check("cross entropy", size, "1", 1, far_bytes + (1 << 29), SUM_LIMIT, scored)


def of_model(loaded: Loaded, budget: int) -> Iterator[Check]:
    """Yield the checks of the configured model: rotary angles, then one step of each piece on each mesh."""
    from shardtrain.tools.verify.real import angles, real_layers

    model = f"{loaded.config.model.name}/{loaded.config.model.flavor}"
    for length in angles.lengths(loaded.config):
        # The check runs later, so bind the length of this iteration.
        def measure(folder: Path, length: int = length) -> tuple[float, str]:
            (answer,) = _on_ranks(folder, 1, angles.error, loaded.config, length, alone=True)
            if answer["error"] is None:
                raise _NotPossible("the model has no rotary angles of this package")
            return answer["error"], answer["note"]

        size = f"position {length - 1:,}"
        yield Check("rotary angles", size, "1", 1, 1 << 28, angles.limit(length), measure)

    with temporary_folder("real") as folder:
        # Count in a separate process, which returns the memory of the model when it ends.
        def count(piece: real_layers.PartialModel) -> real_layers.PartialModel:
            (counts,) = _on_ranks(
                folder,
                1,
                real_layers.count,
                piece.loaded.config,
                piece.cut_embedding,
                alone=True,
            )
            numel, largest_unit, widest = counts
            return replace(piece, numel=numel, largest_unit=largest_unit, widest=widest)

        if loaded.config.model.name == "transformers":
            pieces = real_layers.network_pieces(loaded, folder, budget, count)
        else:
            pieces = real_layers.pieces(loaded, budget, count)
        for piece in pieces:
            yield from _of_piece(model, piece, folder / "gradients.safetensors")


def _of_piece(model: str, piece: Any, path: Path) -> Iterator[Check]:
    """Yield the checks of one piece: loss, norm and gradients on each mesh, against one float64 reference."""
    from shardtrain.tools.verify.real import real_layers
    from shardtrain.train import trainer
    from shardtrain.train.preflight import meta_model

    # The loss check of a mesh runs its step. The other two checks of the mesh read the results of that step.
    # The loss check of the first mesh also computes the reference.
    expected: dict[str, float] = {}
    step: dict[str, Any] = {}
    size = f"{piece.numel:,} float32"

    def first(kind: str, ranks: int, degrees: dict[str, int], folder: Path) -> tuple[float, str]:
        step.clear()
        if not expected:
            path.unlink(missing_ok=True)
            (answer,) = _on_ranks(folder, 1, real_layers.reference, piece, str(path), alone=True)
            expected.update(answer)
        config = real_layers.on_mesh(piece, degrees)
        problems: Sequence[object] = configs.check(config)
        if not problems and degrees.get("tp", 1) > 1 and config.config.model.name == "transformers":
            problems = meta_model.build(config.config, ranks)[0]
        if problems:
            raise _NotPossible("; ".join(str(problem) for problem in problems))
        arguments = (trainer, config.config, piece, str(path))
        answers = _on_ranks(folder, ranks, real_layers.step, *arguments)
        step.update(real_layers.errors(answers, expected))
        return step[kind], piece.size_text

    def later(kind: str, _: Path) -> tuple[float, str]:
        if not step:
            raise _NotPossible("the step did not run, see above")
        where = step["where"] if kind == "gradient" else ""
        return step[kind], where

    for name, ranks, degrees in (*MESHES, WIDE):
        needs = piece.bytes_on(degrees, ranks)
        yield Check(
            f"{piece.name}: loss",
            size,
            name,
            ranks,
            needs,
            SUM_LIMIT,
            functools.partial(first, "loss", ranks, degrees),
        )
        yield Check(
            f"{piece.name}: norm",
            size,
            name,
            ranks,
            needs,
            SUM_LIMIT,
            functools.partial(later, "norm"),
        )
        bound = real_layers.gradient_limit(piece.widest)
        yield Check(
            f"{piece.name}: gradients",
            size,
            name,
            ranks,
            needs,
            bound,
            functools.partial(later, "gradient"),
        )


_HEADER = ("check", "size", "mesh", "error", "limit", "verdict", "seconds")
_WIDTHS = (32, 38, 15, 8, 8, 8, 7)


def _line(cells: Iterable[str]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, _WIDTHS, strict=True)]
    return "  ".join(padded).rstrip()


def _cells(row: CheckResult) -> tuple[str, ...]:
    error = "-"
    seconds = "-"
    if row.error is not None:
        error = f"{row.error:.1e}" if row.error else "0"
        seconds = f"{row.seconds:.1f}"
    limit = f"{row.limit:.1e}" if row.limit else "0"
    return row.check, row.size, row.mesh, error, limit, row.verdict, seconds
