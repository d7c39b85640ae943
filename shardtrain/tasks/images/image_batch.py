"""Rows with images, and batches of them. A batch has padded tokens, and the images of all rows.

A batch without images gets a filler image, for whose tokens no loss is computed. All data-parallel ranks
then run the same modules, which FSDP requires. The parameters for images get gradients of zero instead of
None, so the results do not depend on how rows are divided into batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from shardtrain.data.image_decoder import BadImage, ImageDecoder, Pixels
from shardtrain.data.images import Image
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks.images import packing
from shardtrain.tasks.images.image_processor import ImageProcessor
from shardtrain.tasks.images.image_work import ImageWork
from shardtrain.utils.errors import DataError

TOKENS = "tokens_BT"
TARGETS = "targets_BT"


@dataclass(frozen=True)
class ImageRow:
    """A conversation with images.

    Attributes:
        text: the rendered conversation, with one placeholder for each image.
        images: the images, which are loaded when a batch is built.
        sizes: width and height of each image.
        tokens: token ids, including those of images, truncated to seq_len.
        learned: True for tokens whose loss is computed.
        work: work of the vision tower.
    """

    text: str
    images: tuple[Image, ...]
    sizes: tuple[tuple[int, int], ...]
    tokens: npt.NDArray[np.int32]
    learned: npt.NDArray[np.bool_]
    work: ImageWork

    def targets(self) -> Tensor:
        """Return the target of each token except the last one. IGNORE where no loss is computed."""
        targets = np.where(self.learned[1:], self.tokens[1:], IGNORE)
        return torch.from_numpy(targets.astype(np.int64))


@dataclass(frozen=True)
class Loader:
    """Loads the images of rows and builds batches.

    Attributes:
        processor: converts text and images to inputs of the model.
        decoder: the process that decodes images.
        max_bytes: size limit of an image file.
        length_multiple: the lengths of sequences are multiples of this number.
        filler: rendered text of a row with one image, for batches without images.
        capacity: tokens of a sequence that rows are packed into. 0 if each row is a sequence.
    """

    processor: ImageProcessor
    decoder: ImageDecoder
    max_bytes: int
    length_multiple: int
    filler: str
    capacity: int = 0

    def collate(self, rows: Sequence[ImageRow]) -> dict[str, Tensor]:
        """Return tokens and targets (B, T), and the other inputs of the model by their names.

        Raises:
            DataError: an image cannot be decoded, or has changed since the rows were read.
        """
        inputs_of_rows = [self._inputs(row) for row in rows]
        # Add the filler image to the shortest row, because that changes the length of the batch least.
        if not any(row.images for row in rows):
            pixels = np.zeros((32, 32, 3), dtype=np.uint8)
            filler = self.processor.inputs(self.filler, [pixels])
            shortest = min(range(len(rows)), key=lambda number: len(rows[number].tokens))
            inputs_of_rows[shortest] = _with_filler(inputs_of_rows[shortest], filler)

        lengths = [inputs[packing.IDS].shape[1] for inputs in inputs_of_rows]
        if self.capacity:
            return self._packed(rows, inputs_of_rows, lengths)
        # Pad each row to the longest one.
        T = -(-max(lengths) // self.length_multiple) * self.length_multiple
        targets_BT = torch.full((len(rows), T), IGNORE, dtype=torch.int64)
        for number, row in enumerate(rows):
            targets = row.targets()
            targets_BT[number, : len(targets)] = targets

        return {TARGETS: targets_BT, **self.joined(inputs_of_rows, T)}

    def _packed(
        self,
        rows: Sequence[ImageRow],
        inputs_of_rows: Sequence[Mapping[str, Tensor]],
        lengths: Sequence[int],
    ) -> dict[str, Tensor]:
        """Return a batch of sequences with one or more rows. ``packing.ROWS`` has the row number of each token."""
        sequences = packing.first_fit(lengths, self.capacity)
        used = [sum(lengths[number] for number in numbers) for numbers in sequences]
        longest = max(used)
        T = -(-longest // self.length_multiple) * self.length_multiple
        targets_BT = torch.full((len(sequences), T), IGNORE, dtype=torch.int64)
        rows_BT = torch.full_like(targets_BT, -1)
        inputs_of_sequences = []
        for place, numbers in enumerate(sequences):
            start = 0
            for number in numbers:
                targets = rows[number].targets()
                targets_BT[place, start : start + len(targets)] = targets
                rows_BT[place, start : start + lengths[number]] = number
                start += lengths[number]
            inputs = [inputs_of_rows[number] for number in numbers]
            joined = packing.concatenated(inputs, self.processor.row_inputs)
            inputs_of_sequences.append(joined)
        return {
            TARGETS: targets_BT,
            packing.ROWS: rows_BT,
            **self.joined(inputs_of_sequences, T),
        }

    def joined(self, inputs_of_rows: Sequence[Mapping[str, Tensor]], T: int) -> dict[str, Tensor]:
        """Combine the inputs of rows to tokens (B, T) and the other inputs of the model."""
        # Rows may have different inputs, because not every row has an image.
        names: dict[str, None] = {}
        for inputs in inputs_of_rows:
            names |= dict.fromkeys(inputs)
        batch = {}
        for name in names:
            batch_name = TOKENS if name == packing.IDS else name
            batch[batch_name] = self._stacked(name, inputs_of_rows, T)
        return batch

    def _inputs(self, row: ImageRow) -> dict[str, Tensor]:
        """Return the inputs of one row, truncated like ``row.tokens``.

        Raises:
            DataError: an image has changed since the rows were read, or the processor's tokens differ.
        """
        images = [self.load(image) for image in row.images]
        for image, pixels, size in zip(row.images, images, row.sizes, strict=True):
            height, width, _ = pixels.shape
            if (width, height) != tuple(size):
                raise DataError(
                    f"image {image.place} is {width} x {height} pixels, and was {size[0]} x {size[1]} when the run "
                    "started; restart the run"
                )
        inputs = self.processor.inputs(row.text, images)
        ids = inputs[packing.IDS][0, : len(row.tokens)].numpy()
        if not np.array_equal(ids, row.tokens):
            raise DataError(
                f"the processor in {self.processor.folder} and the tokenizer of the run return different tokens for "
                "a row; use the tokenizer of this folder"
            )
        # Only inputs with a value for each token are truncated.
        num_tokens = inputs[packing.IDS].shape[1]
        truncated = {}
        for name, values in inputs.items():
            if _is_of_tokens(values, num_tokens):
                truncated[name] = values[:, : len(row.tokens)]
            else:
                truncated[name] = values
        return truncated

    def load(self, image: Image) -> Pixels:
        """Return the pixels of an image. Raises DataError."""
        try:
            return image.decode(self.decoder, self.max_bytes)
        except BadImage as error:
            raise DataError(
                f"image {image.place} {error}; replace it, or remove its row "
                '("shardtrain data check" decodes all images)'
            ) from None

    def _stacked(self, name: str, inputs_of_rows: Sequence[Mapping[str, Tensor]], T: int) -> Tensor:
        """Combine one input of all rows.

        Inputs with a value for each token are padded to (B, T). Inputs in ``row_inputs`` get one entry per
        row, also for rows without images. All others are concatenated over the images of all rows.
        """
        parts = []
        for inputs in inputs_of_rows:
            num_tokens = inputs[packing.IDS].shape[1]
            if name in inputs and _is_of_tokens(inputs[name], num_tokens):
                value = self.processor.pad_id if name == packing.IDS else 0
                later_dims = [0, 0] * (inputs[name].ndim - 2)
                padding = [*later_dims, 0, T - num_tokens]
                parts.append(F.pad(inputs[name], padding, value=value))
            elif name in inputs:
                parts.append(inputs[name])
            elif name in self.processor.row_inputs:
                # A row without images has 0 images in dim 1. The padding below adds zeros there.
                known = next(other[name] for other in inputs_of_rows if name in other)
                parts.append(known.new_zeros((1, 0, *known.shape[2:])))

        # Pad all dims except the first to the largest size. Images may differ in the number of tiles, for example.
        shapes = [part.shape[1:] for part in parts]
        largest = [max(sizes) for sizes in zip(*shapes, strict=True)]
        padded = []
        for part in parts:
            missing: list[int] = []
            for size, wanted in zip(reversed(part.shape[1:]), reversed(largest), strict=True):
                missing += [0, wanted - size]
            padded.append(F.pad(part, missing) if any(missing) else part)
        return torch.cat(padded)


def _is_of_tokens(values: Tensor, num_tokens: int) -> bool:
    """True for an input with a value for each token, (1, T)."""
    return values.ndim >= 2 and values.shape[:2] == (1, num_tokens)


def _with_filler(inputs: Mapping[str, Tensor], filler: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Append the tokens and the image of ``filler`` to the inputs of a row without images."""
    combined = dict(filler)
    # A row without images only has inputs with a value for each token.
    for name, values in inputs.items():
        combined[name] = torch.cat((values, filler[name].to(values.dtype)), dim=1)
    return combined


def replaced(
    text: str, spans: Sequence[tuple[int, int]], replacements: Sequence[Any]
) -> tuple[str, list[tuple[int, int]], list[tuple[int, int]]]:
    """Replace the placeholders of a text.

    Returns:
        The new text, the ranges ``spans`` in the new text, and the range of each replacement.

    >>> replaced("a<i>bc", [(4, 6)], [(1, 4, "<i><i>")])
    ('a<i><i>bc', [(7, 9)], [(1, 7)])
    """
    pieces = []
    image_spans = []
    last = 0
    length = 0
    for start, stop, new in replacements:
        pieces += [text[last:start], new]
        length += start - last
        image_spans.append((length, length + len(new)))
        length += len(new)
        last = stop
    pieces.append(text[last:])

    # A replacement shifts all later places by its change of length.
    def moved(place: int) -> int:
        shift = 0
        for start, stop, new in replacements:
            if stop <= place:
                shift += len(new) - (stop - start)
        return place + shift

    new_spans = [(moved(start), moved(stop)) for start, stop in spans]
    return "".join(pieces), new_spans, image_spans
