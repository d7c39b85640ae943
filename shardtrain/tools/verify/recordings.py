"""Read recordings of ``shardtrain.record`` and combine the parts of all ranks into full tensors."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.record import FORMAT, NUM_PROJECTIONS, PRECISIONS
from shardtrain.utils import atomic_io, checked_json
from shardtrain.utils.errors import DataError
from shardtrain.utils.variables import is_whole_number

MAX_LINE_BYTES = 1 << 28
"""Maximum bytes of one step of one rank, enough for 600,000 parameter tensors."""
REPLICA_TOLERANCE = 1e-6
"""Maximum relative distance of ranks that hold the same part. Replicas have the same bits in a correct program."""

_ZEROS = [0.0] * NUM_PROJECTIONS


@dataclass(frozen=True)
class Vector:
    """Norm and projections of a full tensor.

    Attributes:
        norm: Norm of the tensor; NaN if it is not finite.
        projections: ``NUM_PROJECTIONS`` random projections.
        replicas_differ: True if ranks hold different numbers for the same part.
    """

    norm: float
    projections: tuple[float, ...]
    replicas_differ: bool = False


@dataclass(frozen=True)
class Step:
    """One step of a recording, over all ranks. Values that were not recorded are None.

    Attributes:
        losses: Mean loss of each rank with other samples.
        num_tokens: Tokens with a loss of each rank with other samples.
        samples: Identifiers of the samples of all ranks, sorted.
    """

    number: int
    losses: tuple[float, ...] | None
    num_tokens: tuple[int, ...] | None
    lr: float | None
    grad_norm: float | None
    samples: tuple[str, ...] | None
    gradients: Mapping[str, Vector]
    weights: Mapping[str, Vector]


@dataclass(frozen=True)
class Recording:
    """A recording of all ranks of a program.

    Attributes:
        num_data_ranks: Number of ranks with other samples.
        shapes: Shape of each parameter by name, in the order of the model.
        precision: Lowest precision of the computation.
    """

    folder: Path
    num_ranks: int
    num_data_ranks: int
    seed: int
    precision: str
    shapes: Mapping[str, tuple[int, ...]]
    steps: tuple[Step, ...]


def read(folder: Path) -> Recording:
    """Read a recording.

    Raises:
        DataError: the folder has no recording, a rank's file is missing, or a file is damaged.
    """
    paths = {}
    for path in folder.glob("rank-*.jsonl"):
        paths[_rank_of(path)] = path
    if not paths:
        raise DataError(
            f"{folder} has no recording (rank-0.jsonl); write a recording with shardtrain.record.Recorder"
        )
    headers = {}
    steps_of_ranks: dict[int, dict[int, dict[str, Any]]] = {}
    for rank, path in sorted(paths.items()):
        lines = _lines(path)
        first_line = next(lines, {})
        headers[rank] = _header(path, first_line)
        # A step that is recorded again, for example after a restart, replaces the earlier record.
        steps = {}
        for line in lines:
            steps[_step_number(path, line)] = line
        steps_of_ranks[rank] = steps

    # Without the part of a rank, a tensor would silently be compared as if it were complete.
    lowest_rank = min(headers)
    num_ranks = headers[lowest_rank]["num_ranks"]
    missing = sorted(set(range(num_ranks)) - paths.keys())
    if missing or len(paths) != num_ranks:
        what = f"has files of {len(paths)} ranks"
        if missing:
            what = f"has no rank-{missing[0]}.jsonl"
        raise DataError(
            f"{folder} {what}, but its program had {num_ranks} ranks; record into a new folder"
        )

    shapes: dict[str, tuple[int, ...]] = {}
    for header in headers.values():
        # With pipeline stages, each rank has other parameters.
        shapes |= {name: tuple(shape) for name, shape in header["shapes"].items()}
    # A killed program may have recorded its last step only on some ranks.
    common = set.intersection(*(set(steps) for steps in steps_of_ranks.values()))
    # Ranks with the same samples count once.
    groups: dict[int, list[int]] = {}
    for rank in range(num_ranks):
        data_rank = headers[rank]["data_rank"]
        groups.setdefault(data_rank, []).append(rank)
    combined = []
    for number in sorted(common):
        records = [steps_of_ranks[rank][number] for rank in range(num_ranks)]
        # Records come from a file, so any of these errors means a value of the wrong kind.
        try:
            combined.append(_combined(number, records, [*groups.values()], shapes))
        except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"{folder}: step {number} is damaged ({type(error).__name__}); record it again"
            ) from None
    if not combined:
        raise DataError(
            f"{folder} has no step that all {num_ranks} ranks recorded; call write on every rank"
        )
    first = headers[0]
    return Recording(
        folder=folder,
        num_ranks=num_ranks,
        num_data_ranks=len(groups),
        seed=first["seed"],
        precision=first["precision"],
        shapes=shapes,
        steps=tuple(combined),
    )


def _rank_of(path: Path) -> int:
    number = path.stem.removeprefix("rank-")
    if not is_whole_number(number):
        raise DataError(
            f"{path} is not a file of a recording; remove it, or record into a new folder"
        )
    return int(number)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with open(path, "rb", opener=atomic_io.without_waiting) as file:
            while line := file.readline(MAX_LINE_BYTES):
                if len(line) == MAX_LINE_BYTES:
                    raise ValueError(f"a line has {MAX_LINE_BYTES} bytes or more")
                # The last line of a killed program may be incomplete.
                if not line.endswith(b"\n"):
                    return
                checked_json.check_memory(line, checked_json.LARGE_MEMORY_BYTES)
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("a line is not an object")
                yield record
    except OSError as error:
        raise DataError(
            f"cannot read {path}: {error.strerror or error}; check its permissions"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is damaged ({str(error)[:100]}); record it again") from None


def _header(path: Path, header: Mapping[str, Any]) -> Mapping[str, Any]:
    # The pattern checks each field and its type, because the file may be damaged or of another program.
    match header:
        case {
            "format": int(number),
            "num_ranks": int(num_ranks),
            "data_rank": int(),
            "seed": int(),
            "precision": str(precision),
            "shapes": dict(),
        } if num_ranks > 0 and precision in PRECISIONS:
            if number == FORMAT:
                return header
            raise DataError(
                f"{path} has format {number}, but this version reads {FORMAT}; record it with this version"
            )
    raise DataError(f"{path} does not start with the description of a recording; record it again")


def _step_number(path: Path, record: Mapping[str, Any]) -> int:
    number = record.get("step")
    if not isinstance(number, int) or isinstance(number, bool):
        raise DataError(f"{path} has a line without the number of a step; record it again")
    return number


def _combined(
    number: int,
    records: list[dict[str, Any]],
    groups: list[list[int]],
    shapes: Mapping[str, tuple[int, ...]],
) -> Step:
    """Combine the records of all ranks about a step. Each of ``groups`` contains the ranks with the same samples."""

    def of_groups(key: str) -> list[Any]:
        """Return one recorded value per group, or None. With pipeline stages, only the last stage has a loss."""
        values = []
        for ranks in groups:
            recorded = None
            for rank in ranks:
                if recorded is None:
                    recorded = records[rank][key]
            values.append(recorded)
        return values

    # A value is known only if each group has recorded it. A part of the losses has another mean.
    losses = None
    losses_of_groups = of_groups("loss")
    if None not in losses_of_groups:
        losses = tuple(map(float, losses_of_groups))
    num_tokens = None
    tokens_of_groups = of_groups("num_tokens")
    if None not in tokens_of_groups:
        num_tokens = tuple(map(int, tokens_of_groups))
    samples = of_groups("samples")
    all_samples = None
    if None not in samples:
        names: list[str] = []
        for ids in samples:
            names += map(str, ids)
        all_samples = tuple(sorted(names))
    # A gradient may be None on some ranks, for example for an expert without tokens. It counts as zero there.
    has_gradient: set[str] = set()
    for record in records:
        has_gradient |= record["gradients"].keys()
    gradients = []
    for record in records:
        with_zeros = {}
        for name, (slices, *_) in record["weights"].items():
            if name in has_gradient:
                with_zeros[name] = [slices, 0.0, _ZEROS]
        gradients.append(with_zeros | record["gradients"])
    return Step(
        number=number,
        losses=losses,
        num_tokens=num_tokens,
        lr=records[0]["lr"],
        grad_norm=records[0]["grad_norm"],
        samples=all_samples,
        gradients=_vectors(gradients, shapes),
        weights=_vectors([record["weights"] for record in records], shapes),
    )


def _vectors(
    parts_of_ranks: list[dict[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Vector]:
    vectors = {}
    for name, shape in shapes.items():
        parts = [parts[name] for parts in parts_of_ranks if name in parts]
        if parts:
            vectors[name] = _full(parts, math.prod(shape))
    return vectors


def _full(parts: list[Any], numel: int) -> Vector:
    """Combine the parts of a tensor: add the parts at different positions, and compare replicas of each part."""
    squared_norm = 0.0
    sums = [0.0] * NUM_PROJECTIONS
    num_elements = 0
    replicas_differ = False
    # The first replica of each part: its squared norm and projections.
    first_at: dict[str, tuple[float, list[float]]] = {}
    for slices, squared, projections in parts:
        numbers = [_number(projection) for projection in projections]
        if len(numbers) != NUM_PROJECTIONS:
            raise ValueError("wrong number of projections")
        squared = _number(squared)
        position = json.dumps(slices)
        if position in first_at:
            squared_of_first, numbers_of_first = first_at[position]
            norm = math.sqrt(abs(squared_of_first))
            if distance(numbers, numbers_of_first) > REPLICA_TOLERANCE * norm:
                replicas_differ = True
            continue
        first_at[position] = (squared, numbers)
        # Projections are linear and parts are disjoint, so both add up to those of the full tensor.
        squared_norm += squared
        sums = [total + number for total, number in zip(sums, numbers, strict=True)]
        num_elements += math.prod(stop - start for start, stop in slices)
    if num_elements != numel:
        raise ValueError("parts of a tensor are missing")
    # The square root of NaN is NaN.
    norm = math.sqrt(abs(squared_norm))
    return Vector(norm, tuple(sums), replicas_differ)


def _number(recorded: Any) -> float:
    """Return a recorded number. JSON has no NaN and no infinity, so they are recorded as null."""
    if recorded is None:
        return math.nan
    return float(recorded)


def distance(one: list[float] | tuple[float, ...], other: list[float] | tuple[float, ...]) -> float:
    """Estimate the distance of two tensors from their projections. NaN counts as infinity."""
    total = 0.0
    for a, b in zip(one, other, strict=True):
        total += (a - b) ** 2
    if math.isnan(total):
        return math.inf
    return math.sqrt(total / NUM_PROJECTIONS)
