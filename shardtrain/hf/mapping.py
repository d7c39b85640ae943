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
from shardtrain.hub_formats.format import (
    ExpertTensors,
    HeadGroups,
    HubFormat,
    MergedExperts,
    Source,
    Stacked,
    TensorPiece,
    pieces,
)
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
        shapes: dict[str, Shape] = {}
        for name, source in self.sources.items():
            shape = self.shapes[name]
            if isinstance(source, str):
                shapes[source] = shape
            elif isinstance(source, HeadGroups):
                shapes[source.name] = shape
            elif isinstance(source, ExpertTensors | MergedExperts):
                # We stack the experts. Each published tensor holds one expert, or one of its matrices.
                shape_of_piece = shape[1:]
                if isinstance(source, MergedExperts):
                    rows = shape[1] // len(source.names)
                    shape_of_piece = (rows, *shape[2:])
                for piece in self.pieces_of(name):
                    shapes[piece.name] = shape_of_piece
            elif isinstance(source, Stacked):
                # The published stack may have inputs before outputs. The parts share the last dimension.
                if source.transposed:
                    shape = (shape[0], *shape[2:], shape[1])
                shapes[source.name] = (*shape[:-1], source.parts * shape[-1])
            else:
                shapes[source.name] = (source.parts * shape[0], *shape[1:])
        return shapes


def translate(hub: HubFormat, config: Any, shapes: Mapping[str, Shape]) -> Translation:
    """Map each tensor of a model to the Hugging Face format. Names have no prefix.

    Raises:
        CheckpointError: the format cannot represent a tensor.
    """
    sources = {}
    unmapped = []
    for name in shapes:
        source = hub.source(name, config)
        if source is None:
            unmapped.append(name)
        else:
            sources[name] = source
    if unmapped:
        raise CheckpointError(
            f"the format of {hub.architecture} cannot represent {_first(unmapped)}; train without it, or use "
            "shardtrain checkpoints"
        )
    return Translation(hub, shapes, config, sources)


def check(
    translation: Translation, weights: HubWeights, passed_over: Iterable[str] = ()
) -> list[str]:
    """Require exactly the tensors of a model in a folder, and return the names of skipped tensors.

    A tied head, or another copy of a tensor, is skipped if it equals the original.

    Args:
        passed_over: Regular expressions for further tensors to skip.

    Raises:
        CheckpointError: tensors are missing, unexpected, have other shapes, or an integer or one-byte dtype.
            The message lists the first ten of each kind.
    """
    hub = translation.hub
    expected = translation.their_shapes()
    existing = set(weights.names())
    surplus: list[str] = []
    ignored: list[str] = []
    copies = hub.copies(translation.config)
    different: list[str] = []
    for name in sorted(existing - expected.keys()):
        if name in copies:
            if _equals(name, copies[name], translation, weights):
                ignored.append(name)
            else:
                different.append(name)
            continue
        # Some files contain a tied head as a copy of the embedding, which must be equal.
        is_passed_over = any(re.fullmatch(pattern, name) for pattern in passed_over)
        is_skipped = is_passed_over or hub.is_ignored(name)
        if is_skipped or _repeats(name, translation, weights):
            ignored.append(name)
        else:
            surplus.append(name)
    wrong_shapes = []
    wrong_dtypes = []
    for name in sorted(existing & expected.keys()):
        shape = weights.shape(name)
        if shape != expected[name]:
            wrong_shapes.append(f"{name} {list(shape)} instead of {list(expected[name])}")
        # Integers and one-byte floats are quantized weights. Reading them here would ignore their scales.
        dtype = weights.dtype(name)
        if not dtype.is_floating_point or dtype.itemsize == 1:
            wrong_dtypes.append(f"{name} {dtype}")
    # Report all problems together.
    names_by_problem = {
        "missing": sorted(expected.keys() - existing),
        "not in this model": surplus,
        "unequal to the tensor they must repeat": different,
        "with another shape": wrong_shapes,
        "with an unsupported dtype": wrong_dtypes,
    }
    problems = []
    for kind, names in names_by_problem.items():
        if names:
            problems.append(f"{len(names)} {kind}: {_first(names)}")
    if problems:
        raise CheckpointError(
            f"{weights.folder} does not fit the configured {hub.architecture}: {'; '.join(problems)}; "
            "use the model and sizes of its config.json"
        )
    return ignored


def fill(tensors: Mapping[str, Tensor], translation: Translation, weights: HubWeights) -> None:
    """Fill this rank's part of our tensors in place. Only this part of each tensor is read from the files."""
    for name, tensor in tensors.items():
        shard = local_tensor(tensor).detach()
        _fill(shard, name, local_slices(tensor), translation, weights)


def in_hub_format(
    tensors: Iterable[tuple[str, Tensor]], translation: Translation
) -> Iterator[tuple[str, Tensor]]:
    """Yield unsharded tensors of a model under their names in the Hugging Face format.

    A tensor that consists of several of ours is yielded after the last of them.
    """
    shapes = translation.their_shapes()
    # tensors with missing parts, and their numbers of missing elements
    unfinished: dict[str, tuple[Tensor, int]] = {}
    for name, tensor in tensors:
        for piece in translation.pieces_of(name):
            shape = shapes[piece.name]
            # A scalar has no dimension to slice.
            if not piece.theirs:
                yield piece.name, tensor
                continue
            part = tensor[piece.ours]
            if piece.transposed:
                part = part.transpose(-2, -1)
            # Our tensor contains the entire tensor of the format, so no copy is needed.
            if part.numel() == math.prod(shape):
                yield piece.name, part.reshape(shape)
                continue
            if piece.name not in unfinished:
                unfinished[piece.name] = tensor.new_empty(shape), math.prod(shape)
            complete, num_missing = unfinished.pop(piece.name)
            target = complete[piece.theirs]
            target.copy_(part.reshape(target.shape))
            num_missing -= part.numel()
            if num_missing:
                unfinished[piece.name] = complete, num_missing
            else:
                yield piece.name, complete


def read_whole(
    name: str, translation: Translation, weights: HubWeights, dtype: torch.dtype
) -> Tensor:
    """Return one of our tensors, unsharded, on the CPU."""
    full = tuple(slice(0, size) for size in translation.shapes[name])
    return read_part(name, full, translation, weights, dtype)


def read_part(
    name: str,
    box: tuple[slice, ...],
    translation: Translation,
    weights: HubWeights,
    dtype: torch.dtype,
) -> Tensor:
    """Read a box, one slice per dimension, of a tensor of the model. Return it on the CPU."""
    # If one piece covers the box, return the tensor from the file without a copy.
    shape = _shape_of(box)
    overlaps = []
    for piece in translation.pieces_of(name):
        overlap = _overlap(piece, box)
        if overlap is not None:
            overlaps.append((piece, *overlap))
    if len(overlaps) == 1:
        piece, theirs, place = overlaps[0]
        if _shape_of(place) == shape:
            return _read(piece, theirs, weights).reshape(shape).to(dtype)
    # Otherwise assemble it from its pieces.
    tensor = torch.zeros(shape, dtype=dtype)
    _fill(tensor, name, box, translation, weights)
    return tensor


def row_blocks(
    shape: Shape,
    row_limit_bytes: int = 2**25,
    item_bytes: int = 4,
) -> Iterator[tuple[slice, ...]]:
    """Yield boxes of full rows that cover a tensor. A box has up to ``row_limit_bytes``, but at least one row.

    >>> [box[0] for box in row_blocks((5, 4), row_limit_bytes=32)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    if not shape:
        yield ()
        return
    num_rows, *sizes = shape
    full = [slice(0, size) for size in sizes]
    row_bytes = math.prod(sizes) * item_bytes
    rows_per_box = max(1, row_limit_bytes // max(1, row_bytes))
    for begin in range(0, num_rows, rows_per_box):
        end = min(begin + rows_per_box, num_rows)
        yield (slice(begin, end), *full)


def _shape_of(box: tuple[slice, ...]) -> list[int]:
    return [part.stop - part.start for part in box]


def _fill(
    into: Tensor,
    name: str,
    box: tuple[slice, ...],
    translation: Translation,
    weights: HubWeights,
) -> None:
    """Read a box of our tensor ``name`` into ``into``, which has the shape of the box."""
    for piece in translation.pieces_of(name):
        overlap = _overlap(piece, box)
        if overlap is None:
            continue
        theirs, place = overlap
        part = _read(piece, theirs, weights)
        target = into[place]
        target.copy_(part.reshape(target.shape))


def _read(piece: TensorPiece, theirs: tuple[slice, ...], weights: HubWeights) -> Tensor:
    """Read a box of a Hugging Face tensor, and transpose it if needed."""
    if not theirs:
        return weights.read(piece.name, theirs)
    # Apply a step after the read, because safetensors reads only consecutive elements.
    last = theirs[-1]
    without_step = (*theirs[:-1], slice(last.start, last.stop))
    tensor = weights.read(piece.name, without_step)
    tensor = tensor[..., :: last.step]
    if piece.transposed:
        tensor = tensor.transpose(-2, -1)
    return tensor.contiguous()


def _overlap(
    piece: TensorPiece,
    box: tuple[slice, ...],
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of a piece with a box of our tensor, or None if they do not overlap.

    The overlap has two coordinates: its place in the tensor of the file, and its place within ``box``.
    """
    theirs = []
    place = []
    # Our tensor may have an additional first dimension: the expert.
    extra = len(piece.ours) - len(piece.theirs)
    # Work in the order of our dimensions, and exchange the last two back at the end.
    in_our_order = list(piece.theirs)
    if piece.transposed:
        in_our_order[-2:] = in_our_order[:-3:-1]
    for dim, (box_range, our_range) in enumerate(zip(box, piece.ours, strict=True)):
        start = max(box_range.start, our_range.start)
        stop = min(box_range.stop, our_range.stop)
        if start >= stop:
            return None
        place.append(slice(start - box_range.start, stop - box_range.start))
        # A step skips the elements of interleaved tensors.
        if dim >= extra:
            their_range = in_our_order[dim - extra]
            step = their_range.step or 1
            begin = their_range.start + (start - our_range.start) * step
            end = begin + (stop - start - 1) * step + 1
            theirs.append(slice(begin, end, their_range.step))
    if piece.transposed:
        theirs[-2:] = theirs[:-3:-1]
    return tuple(theirs), tuple(place)


def _repeats(name: str, translation: Translation, weights: HubWeights) -> bool:
    """True if a Hugging Face tensor is a tied head that equals the embedding."""
    if not translation.config.tied_embeddings:
        return False
    head = translation.hub.source("head.weight", translation.config)
    if name != head:
        return False
    return _equals(name, "embed.weight", translation, weights)


def _equals(name: str, ours: str, translation: Translation, weights: HubWeights) -> bool:
    """True if a Hugging Face tensor equals the one from which our tensor ``ours`` is read."""
    original = translation.hub.source(ours, translation.config)
    if not isinstance(original, str) or original not in weights:
        return False
    if weights.shape(name) != weights.shape(original):
        return False
    full = [slice(0, size) for size in weights.shape(name)]
    return torch.equal(weights.read(name, full), weights.read(original, full))


def _first(names: list[str]) -> str:
    text = ", ".join(names[:_SHOWN])
    if len(names) > _SHOWN:
        text += f" and {len(names) - _SHOWN} more"
    return text
