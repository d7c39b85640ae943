"""Mapping between a model's tensors and those of a Hugging Face folder: check the folder, and read parts of tensors."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardtrain.hf.weights import HubWeights
from shardtrain.hub_formats.format import ExpertTensors, HubFormat, MergedExperts, Source, Stacked, TensorPiece, pieces
from shardtrain.ops.dtensor import local_slices, local_tensor
from shardtrain.utils.errors import CheckpointError

Shape = tuple[int, ...]
_SHOWN = 10


@dataclass(frozen=True)
class Translation:
    """Mapping of a model's tensors to a Hugging Face format.

    Attributes:
        shapes: Shapes of our tensors by name, without a head that is tied to the embedding.
        config: The model's Config.
        sources: Source of each of our tensors in the Hugging Face format.
    """

    hub: HubFormat
    shapes: Mapping[str, Shape]
    config: Any
    sources: Mapping[str, Source]

    def pieces_of(self, name: str) -> Iterable[TensorPiece]:
        """Return the pieces of Hugging Face tensors of which one of our tensors consists."""
        return pieces(self.sources[name], self.shapes[name], self.config.head_dim)

    def their_shapes(self) -> dict[str, Shape]:
        """Return the shapes of all tensors in the Hugging Face format, by name."""
        found: dict[str, Shape] = {}
        for name, source in self.sources.items():
            shape = self.shapes[name]
            if isinstance(source, str):
                found[source] = shape
            elif isinstance(source, ExpertTensors):
                found |= {piece.name: shape[1:] for piece in self.pieces_of(name)}
            elif isinstance(source, MergedExperts):
                rows = shape[1] // len(source.names)
                found |= {piece.name: (rows, *shape[2:]) for piece in self.pieces_of(name)}
            elif isinstance(source, Stacked):
                *rest, outputs = (shape[0], *shape[2:], shape[1]) if source.transposed else shape
                found[source.name] = (*rest, source.parts * outputs)
            else:
                found[source.name] = (source.parts * shape[0], *shape[1:])
        return found


def translate(hub: HubFormat, config: Any, shapes: Mapping[str, Shape]) -> Translation:
    """Map each tensor of a model to the Hugging Face format. Names have no prefix.

    Raises:
        CheckpointError: the format cannot represent a tensor.
    """
    found = {name: hub.source(name, config) for name in shapes}
    unmapped = [name for name, source in found.items() if source is None]
    if unmapped:
        raise CheckpointError(
            f"the format of {hub.architecture} cannot represent {_first(unmapped)}; train without it, or use "
            "shardtrain checkpoints"
        )
    return Translation(hub, shapes, config, {name: source for name, source in found.items() if source is not None})


def check(translation: Translation, weights: HubWeights, passed_over: Iterable[str] = ()) -> list[str]:
    """Require exactly the tensors of a model in a folder, and return the names of skipped tensors.

    A tied head is skipped if its copy in the file equals the embedding.

    Args:
        passed_over: Regular expressions for further tensors to skip.

    Raises:
        CheckpointError: tensors are missing, unexpected, have other shapes, or an integer or one-byte dtype.
            The message lists the first ten of each kind.
    """
    hub = translation.hub
    expected = translation.their_shapes()
    there = set(weights.names())
    missing = sorted(set(expected) - there)
    surplus: list[str] = []
    ignored: list[str] = []
    for name in sorted(there - set(expected)):
        # Some files contain a tied head as a copy of the embedding, which must be equal.
        known = hub.is_ignored(name) or any(re.fullmatch(pattern, name) for pattern in passed_over)
        if known or _repeats(name, translation, weights):
            ignored.append(name)
        else:
            surplus.append(name)
    wrong = [
        f"{name} {list(weights.shape(name))} instead of {list(shape)}"
        for name, shape in sorted(expected.items())
        if name in there and weights.shape(name) != shape
    ]
    # Integers and one-byte floats are quantized weights. Reading them here would ignore their scales.
    integral = [
        f"{name} {weights.dtype(name)}"
        for name in sorted(set(expected) & there)
        if not weights.dtype(name).is_floating_point or weights.dtype(name).itemsize == 1
    ]
    problems = [
        f"{len(names)} {what}: {_first(names)}"
        for what, names in (
            ("missing", missing),
            ("not in this model", surplus),
            ("with another shape", wrong),
            ("with an unsupported dtype", integral),
        )
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{weights.folder} does not fit the configured {hub.architecture}: {'; '.join(problems)}; "
            "use the model and sizes of its config.json"
        )
    return ignored


def fill(tensors: Mapping[str, Tensor], translation: Translation, weights: HubWeights) -> None:
    """Fill this rank's part of our tensors in place. Only this part of each tensor is read from the files."""
    for name, tensor in tensors.items():
        _fill(local_tensor(tensor).detach(), name, local_slices(tensor), translation, weights)


def read_whole(name: str, translation: Translation, weights: HubWeights, dtype: torch.dtype) -> Tensor:
    """Return one of our tensors, unsharded, on the CPU."""
    return read_part(name, tuple(slice(0, size) for size in translation.shapes[name]), translation, weights, dtype)


def read_part(
    name: str, box: tuple[slice, ...], translation: Translation, weights: HubWeights, dtype: torch.dtype
) -> Tensor:
    """Return a box of one of our tensors on the CPU."""
    # If one piece covers the box, return the tensor from the file without a copy.
    overlaps = [(piece, _overlap(piece, box)) for piece in translation.pieces_of(name)]
    found = [(piece, overlap) for piece, overlap in overlaps if overlap is not None]
    if len(found) == 1:
        piece, (theirs, place) = found[0]
        sizes = [part.stop - part.start for part in box]
        if [part.stop - part.start for part in place] == sizes:
            return _read(piece, theirs, weights).reshape(sizes).to(dtype)
    tensor = torch.zeros([part.stop - part.start for part in box], dtype=dtype)
    _fill(tensor, name, box, translation, weights)
    return tensor


def row_blocks(shape: Shape, row_limit_bytes: int = 2**25, item_bytes: int = 4) -> Iterator[tuple[slice, ...]]:
    """Yield boxes of full rows that cover a tensor. A box has up to ``row_limit_bytes``, but at least one row.

    >>> [box[0] for box in row_blocks((5, 4), row_limit_bytes=32)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    rest = tuple(slice(0, size) for size in shape[1:])
    step = max(1, row_limit_bytes // max(1, math.prod(shape[1:]) * item_bytes))
    for begin in range(0, shape[0] if shape else 0, step):
        yield (slice(begin, min(begin + step, shape[0])), *rest)
    if not shape:
        yield ()


def _fill(into: Tensor, name: str, own: tuple[slice, ...], translation: Translation, weights: HubWeights) -> None:
    for piece in translation.pieces_of(name):
        box = _overlap(piece, own)
        if box is None:
            continue
        theirs, place = box
        part = _read(piece, theirs, weights)
        target = into[place]
        target.copy_(part.reshape(target.shape))


def _read(piece: TensorPiece, theirs: tuple[slice, ...], weights: HubWeights) -> Tensor:
    """Read a box of a Hugging Face tensor, and transpose it if needed.

    A step is applied after a contiguous read.
    """
    if not theirs:
        return weights.read(piece.name, theirs)
    found = weights.read(piece.name, (*theirs[:-1], slice(theirs[-1].start, theirs[-1].stop)))[..., :: theirs[-1].step]
    return (found.transpose(-2, -1) if piece.transposed else found).contiguous()


def _overlap(piece: TensorPiece, own: tuple[slice, ...]) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of a piece with a box of our tensor, or None if they do not overlap.

    The overlap is returned as its box in the file's tensor and its box within ``own``.
    """
    theirs = []
    place = []
    # Our tensor may have an additional first dimension: the expert.
    extra = len(piece.ours) - len(piece.theirs)
    in_our_order = (*piece.theirs[:-2], *piece.theirs[:-3:-1]) if piece.transposed else piece.theirs
    for dim, (mine, whole) in enumerate(zip(own, piece.ours, strict=True)):
        start = max(mine.start, whole.start)
        stop = min(mine.stop, whole.stop)
        if start >= stop:
            return None
        place.append(slice(start - mine.start, stop - mine.start))
        if dim >= extra:
            found = in_our_order[dim - extra]
            step = found.step or 1
            begin = found.start + (start - whole.start) * step
            theirs.append(slice(begin, begin + (stop - start - 1) * step + 1, found.step))
    if piece.transposed:
        theirs[-2:] = theirs[:-3:-1]
    return tuple(theirs), tuple(place)


def _repeats(name: str, translation: Translation, weights: HubWeights) -> bool:
    """True if a Hugging Face tensor is a tied head that equals the embedding."""
    hub = translation.hub
    if not translation.config.tied_embeddings or name != hub.source("head.weight", translation.config):
        return False
    embed = hub.source("embed.weight", translation.config)
    if not isinstance(embed, str) or weights.shape(name) != weights.shape(embed):
        return False
    box = [slice(0, size) for size in weights.shape(name)]
    return torch.equal(weights.read(name, box), weights.read(embed, box))


def _first(names: list[str]) -> str:
    rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + rest
