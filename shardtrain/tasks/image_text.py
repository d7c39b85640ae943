"""Fine-tuning on images and text: answer questions about images, with loss on the assistant's turns.

A row is a conversation with images (``data/images.py`` lists the formats). The chat template renders it as
text with one placeholder for each image. The processor of the model's folder replaces each placeholder by
the tokens of the image, and returns the other inputs of the model. By default a row is one sequence, and
a batch is padded to its longest row.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shardtrain import models
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.data.chat.conversations import Conversations, Written
from shardtrain.data.chat.messages import template_variables
from shardtrain.data.digest import digest
from shardtrain.data.documents.bad_rows import around_bad_rows, attempt
from shardtrain.data.documents.encode import open_conversations
from shardtrain.data.documents.read_documents import TOO_LONG
from shardtrain.data.image_decoder import BadImage, ImageDecoder
from shardtrain.data.images import Image, ImageReader
from shardtrain.data.row_stream import RowBatch, RowDataLoader
from shardtrain.data.sources import BadRow
from shardtrain.layout import Layout, matches
from shardtrain.models import architecture
from shardtrain.ops.cross_entropy import cross_entropy_sum
from shardtrain.ops.targets import IGNORE
from shardtrain.tasks import _files
from shardtrain.tasks.images import packing
from shardtrain.tasks.images.image_batch import TARGETS, TOKENS, ImageRow, Loader, replaced
from shardtrain.tasks.images.image_processor import ImageProcessor
from shardtrain.tasks.images.image_work import ImageFlops, ImageWork, VisionTower
from shardtrain.tasks.task import ShownText, accuracy
from shardtrain.tasks.text_task import TextTask
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

METRICS = {"accuracy": "max"}
DEGREES = ("tensor_parallel_degree",)

_IMAGES_TOO_LONG = "an image does not fit into seq_len"


class _Rendered(NamedTuple):
    """A rendered conversation and its images."""

    written: Written
    images: list[Image]
    sizes: list[tuple[int, int]]


class ImageText(TextTask):
    """The task ``image_text``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._tests_isolation = False
        self._dtype = getattr(torch, derived.compute_dtype(config))

    # The model

    def adapt(self, model: nn.Module, layout: Layout) -> nn.Module:
        """Check the model, freeze ``task.frozen_modules``, and return the model.

        Raises:
            ConfigError: the model does not read images, does not support packing, or has no module with a name
                in ``frozen_modules``.
        """
        network = getattr(model, "hf", None)
        if network is None:
            fix = 'use "transformers" with the folder of a model that does'
            model_name = self.config.model.name
            raise ConfigError(Problem("model.name", model_name, "does not read images", fix))
        # The class of the folder determines what the network can read.
        folder = self.folder
        name = type(network).__name__
        if not architecture.reads_images(folder, name):
            rule = f"contains {name}, which does not generate text from images"
            fix = "use the folder of a model that does, such as LLaVA, Qwen2.5-VL or Gemma 3"
            raise ConfigError(Problem("model.overrides.path", folder, rule, fix))
        # Packing needs control over positions and attention, which not every network offers.
        if self._packs:
            reason = packing.problem_of(network)
            if reason:
                rule = f"is not supported by {name}, which {reason}"
                raise ConfigError(Problem("data.packing", packing.PACKING, rule, "remove it"))
        self._tests_isolation = self._packs and not packing.computes_positions(network)
        for name in self.config.task.frozen_modules:
            _freeze(model, name)
        return model

    @cached_property
    def folder(self) -> str:
        """The Hugging Face folder of the model, which also has its processor."""
        _, shape = models.configured(self.config.model)
        return str(shape.path)

    def open_dataloader(self, **options: Any) -> RowDataLoader:
        """Open the data.

        ``masks_documents`` tells the trainer to test that tokens attend only to tokens of their row.
        """
        stream = super().open_dataloader(**options)
        stream.masks_documents = self._tests_isolation
        return stream

    def num_outputs(self, shape: Any) -> int:
        """Return the vocabulary size."""
        return int(shape.vocab_size)

    # Rows

    @cached_property
    def processor(self) -> ImageProcessor:
        """The processor of the model's folder. Raises ConfigError if it cannot be opened."""
        # Open the tokenizer in a process with limits first, because the processor opens it again without limits.
        _ = self.tokenizer
        return ImageProcessor(self.folder)

    @cached_property
    def conversations(self) -> Conversations:
        """The chat template with the tokenizer."""
        # The processor may have its own template, with placeholders for images.
        tokenizer = copy.copy(self.tokenizer)
        template = self.processor.chat_template()
        if template is not None:
            tokenizer.chat_template = template
        return open_conversations(tokenizer, self.config.data)

    @cached_property
    def decoder(self) -> ImageDecoder:
        """The process that decodes images."""
        return ImageDecoder(self.config.data.max_image_pixels)

    @cached_property
    def loader(self) -> Loader:
        """Loads images, and builds batches from rows."""
        return Loader(
            self.processor,
            self.decoder,
            self.config.data.max_image_bytes,
            self.config.parallelism.tensor_parallel_degree,
            self._filler(),
            self.config.training.seq_len if self._packs else 0,
        )

    @property
    def _packs(self) -> bool:
        """True if short rows share a sequence."""
        return self.config.data.packing == packing.PACKING

    def _filler(self) -> str:
        """Return the text of a row with one image, for batches without images."""
        # A batch without images still needs one: ranks must run the vision tower together.
        question = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}
        answer = {"role": "assistant", "content": "!"}
        text = self.conversations.write([question, answer], {}).text
        if text.count(self.processor.placeholder) != 1:
            raise ConfigError(
                Problem(
                    "data.chat_template",
                    self.config.data.chat_template,
                    rule=f"does not write {self.processor.placeholder} for an image of a message",
                    fix="use the chat template of the model",
                )
            )
        return text

    def reader(self, split: str) -> ImageReader:
        """Return the reader of the images of a split's rows."""
        data = self.config.data
        _, named = _files.section_of(self.config, split)
        folder = data.image_folder or folder_of(named.source.dataset_path)
        return ImageReader(folder, data.messages_field, data.images_field, data.max_image_bytes)

    def read_rows(self, split: str) -> _files.FileRows[ImageRow]:
        """Read the files of a split. Raises what ``_files.read`` raises."""
        section, _ = _files.section_of(self.config, split)
        # Open the processor first, to report its errors before those of rows.
        _ = self.loader
        # Only sizes are needed to count tokens. Decoding every image would delay the start.
        encode = partial(self.encode, split=split, decodes=False)
        rows: _files.FileRows[ImageRow] = _files.read(self.config, split, encode)

        # Fingerprint everything that determines the inputs.
        parts: list[Any] = [self.tokenizer.fingerprint, self.processor.fingerprint, section.seq_len]
        for row in rows:
            parts += [row.tokens.tobytes(), row.learned.tobytes(), repr(row.sizes)]
            parts += [image.identity() for image in row.images]
        rows.fingerprint = digest(*parts)

        num_tokens = sum(len(row.tokens) for row in rows)
        num_images = sum(len(row.images) for row in rows)
        num_full = sum(len(row.tokens) == section.seq_len for row in rows)
        logger.info(
            f"{split}: {len(rows)} rows, {num_images} images, {num_tokens} tokens; "
            f"{num_full} rows fill seq_len or were truncated to it"
        )
        return rows

    def encode(
        self, rows: Sequence[Mapping[str, Any] | BadRow], split: str, decodes: bool = True
    ) -> Iterator[ImageRow | BadRow]:
        """Render and tokenize rows. Yield an ImageRow or a BadRow for each.

        With ``decodes``, all images are decoded. Otherwise only their sizes are read.
        """
        section, _ = _files.section_of(self.config, split)
        reader = self.reader(split)

        def render(row: Mapping[str, Any]) -> _Rendered | BadRow:
            return self.render(row, reader, section.seq_len, decodes)

        def tokenize(rendered: list[_Rendered]) -> Iterator[ImageRow | BadRow]:
            for conversation in rendered:
                yield self._row(conversation, section.seq_len)

        return around_bad_rows([attempt(render, row) for row in rows], tokenize)

    def render(
        self, row: Mapping[str, Any], reader: ImageReader, seq_len: int, decodes: bool
    ) -> _Rendered | BadRow:
        """Render a conversation, and read the sizes of its images. Raises Unusable."""
        conversation = reader.read(row)
        # Unusable rows are returned, so the caller can count or report them.
        if isinstance(conversation, BadRow):
            return conversation
        messages, images = conversation
        variables = template_variables(row, self.config.data.tools_field)
        written = self.conversations.write(messages, variables)
        placeholder = self.processor.placeholder
        num_placeholders = written.text.count(placeholder)
        if num_placeholders != len(images):
            return BadRow(
                f"the rendered conversation must have one {placeholder} for each image; remove {placeholder} from the "
                "texts, or use the chat template of the model",
                detail=f"{len(images)} images, {num_placeholders} placeholders",
            )
        # Each image needs at least one token.
        if len(images) > seq_len:
            return BadRow(_IMAGES_TOO_LONG, harmless=True)
        sizes = []
        for image in images:
            try:
                if decodes:
                    height, width, _ = image.decode(self.decoder, reader.max_bytes).shape
                    sizes.append((width, height))
                else:
                    sizes.append(image.size(self.decoder, reader.max_bytes))
            except BadImage as error:
                return BadRow(f"has an image that {error}", detail=image.place)
        return _Rendered(written, images, sizes)

    def _row(self, rendered: _Rendered, seq_len: int) -> ImageRow | BadRow:
        """Tokenize a row, and truncate it to ``seq_len``. All of its images must fit."""
        written, images, sizes = rendered
        try:
            replacements = self.processor.replacements(written.text, sizes)
        except Exception as error:  # a processor may raise anything for an image that it rejects
            reason = " ".join(str(error).split())[:200]
            return BadRow("has an image that the model's processor rejects", detail=reason)

        # Tokenize the text with the tokens of its images.
        text, spans, image_spans = replaced(written.text, written.spans, replacements)
        (document,) = self.conversations.documents([Written(text, spans, written.exact)])
        assert document.learned is not None
        learned = document.learned.copy()
        ((tokens, places),) = self.tokenizer.encode_spans([text])

        # Never compute a loss for tokens of images, which may be part of an answer.
        end_of_last_image = 0
        for start, stop in image_spans:
            is_image = (places[:, 0] < stop) & (places[:, 1] > start)
            learned &= ~is_image
            end_of_last_image = int(is_image.nonzero()[0][-1]) + 1

        # Only text may be truncated, because the placeholders of an image belong together.
        if end_of_last_image > seq_len:
            return BadRow(_IMAGES_TOO_LONG, harmless=True)
        learned = learned[:seq_len]
        if not learned[1:].any():
            return BadRow(TOO_LONG, harmless=True)
        return ImageRow(
            written.text,
            tuple(images),
            tuple(sizes),
            tokens[:seq_len],
            learned,
            self.processor.work(sizes),
        )

    def lengths(self, row: ImageRow) -> list[int]:
        """Return the number of tokens of the row."""
        return [len(row.tokens)]

    def shown(self, row: ImageRow) -> list[ShownText]:
        """Return the conversation with the tokens of its images."""
        return [ShownText("conversation", row.tokens.tolist(), row.learned.tolist())]

    # Plans

    def flops_per_row(self, model: nn.Module) -> Callable[[ImageRow], float] | None:
        """Return a function from a row to the FLOPs of the vision tower. None if its sizes are unknown."""
        tower = VisionTower.of(self.folder)
        if tower is None:
            return None
        flops = ImageFlops.of(model, tower)
        return lambda row: flops.per_row(row.work)

    def _planned_sizes(self) -> list[tuple[int, int]]:
        """Return width and height of the images in ``task.planned_images``."""
        sizes = []
        for size in self.config.task.planned_images:
            width, height = size.split("x")
            sizes.append((int(width), int(height)))
        return sizes

    def planned_work(self) -> ImageWork:
        """Return the work for the images of a row in plans and dry runs.

        Raises:
            ConfigError: the images of ``task.planned_images`` do not fit into a sequence.
        """
        work = self.processor.work(self._planned_sizes())
        seq_len = self.config.training.seq_len
        if work.tokens >= seq_len:
            raise ConfigError(
                Problem(
                    "task.planned_images",
                    # A row needs at least one token of text, so equality is too much, too.
                    self.config.task.planned_images,
                    rule=f"takes {work.tokens} tokens, which do not fit into training.seq_len={seq_len}",
                    fix="set it to the sizes of the images in the data, or use a larger seq_len",
                )
            )
        return work

    def planned_flops_per_row(self, model: nn.Module) -> float:
        """Return the FLOPs of the vision tower for the images of ``task.planned_images``."""
        tower = VisionTower.of(self.folder)
        if tower is None:
            return 0.0
        return ImageFlops.of(model, tower).per_row(self.planned_work())

    def planned_batch(self, num_rows: int) -> RowBatch:
        """Return a batch of black images, with rows of seq_len tokens."""
        self.planned_work()  # checks that the images fit
        images = []
        for width, height in self._planned_sizes():
            images.append(np.zeros((height, width, 3), dtype=np.uint8))
        # Separate the images by a text, because Qwen's networks would read adjacent images as one.
        text = "!".join(["", *[self.processor.placeholder] * len(images), ""])
        inputs = [self.processor.inputs(text, images) for _ in range(num_rows)]
        seq_len = self.config.training.seq_len
        tensors = self.loader.joined(inputs, seq_len)
        tensors[TARGETS] = torch.zeros((num_rows, seq_len), dtype=torch.int64)
        return RowBatch(tensors, torch.arange(num_rows), num_rows * seq_len, num_rows * seq_len)

    def plan_notes(self) -> list[str]:
        """Return a note on the images of a row."""
        work = self.planned_work()
        return [
            f"each row is counted with the images task.planned_images={self.config.task.planned_images}: "
            f"{work.tokens} image tokens of training.seq_len, {work.patches} patches in the vision tower"
        ]

    # Batches and loss

    def collate(self, rows: list[Any]) -> dict[str, Tensor]:
        """Return tokens and targets (B, T), and the other inputs of the network."""
        return self.loader.collate(rows)

    def num_targets(self, batch: Mapping[str, Tensor]) -> int:
        """Return the number of tokens whose loss is computed."""
        return int((batch[TARGETS] != IGNORE).sum())

    def forward(self, model: nn.Module, batch: RowBatch) -> Tensor:
        """Return the logits (B, T, V)."""
        images = {}
        for name, values in batch.tensors.items():
            if name not in (TOKENS, TARGETS, packing.ROWS):
                # The processor returns float32, and the network computes in another dtype.
                images[name] = values.to(self._dtype) if values.is_floating_point() else values
        # Positions restart in each row of a packed sequence.
        if packing.ROWS in batch.tensors:
            network: Any = model.hf
            inputs = {"input_ids": batch[TOKENS], **images}
            images["position_ids"] = packing.positions(network, inputs, batch[packing.ROWS])
        return model(batch[TOKENS], images=images)  # type: ignore[no-any-return]

    def loss_sum(self, outputs: Tensor, batch: RowBatch, weight: Tensor) -> Tensor:
        """Return the weighted sum of the cross-entropy of the assistant's tokens."""
        return cross_entropy_sum(outputs, batch[TARGETS], weight)

    def predictions(self, outputs: Tensor, batch: RowBatch) -> dict[str, Tensor]:
        """Return the number of correctly predicted target tokens, and of all target tokens, of each row.

        Each prediction is based on the true previous tokens.
        """
        targets_BT = batch[TARGETS]
        is_target_BT = targets_BT != IGNORE
        right_BT = (outputs.argmax(-1) == targets_BT) & is_target_BT
        counts = {"right": right_BT, "tokens": is_target_BT}
        # Without packing, each sequence is a row.
        if packing.ROWS not in batch.tensors:
            return {name: values_BT.sum(1) for name, values_BT in counts.items()}
        sums = {}
        num_rows = batch.sample_ids_B.numel()
        for name, values_BT in counts.items():
            sums[name] = packing.sums_of_rows(values_BT, batch[packing.ROWS], num_rows)
        return sums

    def metrics(self, rows: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the share of the assistant's tokens that are predicted correctly."""
        return {"accuracy": accuracy(rows["right"], rows["tokens"])}

    def prediction_text(self, row: Mapping[str, Tensor]) -> str:
        """Return the number of correct tokens and of all target tokens of a row, separated by a tab."""
        return f"{int(row['right'])}\t{int(row['tokens'])}"


def _freeze(model: nn.Module, name: str) -> None:
    """Exclude modules from training. Raises ConfigError if no module with weights has this name."""
    frozen = 0
    num_parts = name.count(".") + 1
    # A name may be the end of a path, such as "vision_tower".
    for path, module in model.named_modules():
        end_of_path = ".".join(path.split(".")[-num_parts:])
        if matches(end_of_path, name):
            for parameter in module.parameters():
                parameter.requires_grad_(False)
                frozen += 1
    if not frozen:
        network: Any = model.hf
        names = [path for path, _ in getattr(network, "model", network).named_children()]
        raise ConfigError(
            Problem(
                "task.frozen_modules",
                name,
                rule="matches no module with weights in the model",
                fix=f"use names like {', '.join(names)}",
            )
        )


def folder_of(dataset_path: str | None) -> str:
    """Return the folder of a dataset of files, to which paths of images are relative. Empty if there is none.

    >>> folder_of("data/*/rows.jsonl"), folder_of("nobody/nothing")
    ('data', '')
    """
    if not dataset_path:
        return ""
    if os.path.isdir(dataset_path):
        return dataset_path
    # Return the folder before the first component with a wildcard.
    parts = Path(dataset_path).parts
    for number, part in enumerate(parts):
        if any(letter in part for letter in "*?["):
            return str(Path(*parts[:number]))
    if os.path.isfile(dataset_path):
        return str(Path(dataset_path).parent)
    return ""


Task = ImageText
