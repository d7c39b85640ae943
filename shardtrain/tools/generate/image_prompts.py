"""Prompts with images: text and images become the inputs of a network of ``transformers``."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardtrain import data, models
from shardtrain.config import Config
from shardtrain.data.chat.conversations import Conversations
from shardtrain.data.documents.columns import Unusable
from shardtrain.data.documents.encode import open_conversations
from shardtrain.data.image_decoder import BadImage, ImageDecoder
from shardtrain.data.images import Image, user_message
from shardtrain.data.tokenizers.ends import ends_of
from shardtrain.models import architecture
from shardtrain.tasks.images.image_processor import ImageProcessor
from shardtrain.utils.errors import ConfigError, DataError, Problem


@dataclass(frozen=True)
class ImageInputs:
    """Inputs of a network for a prompt with images, without its tokens.

    Attributes:
        num_tokens: number of tokens of the prompt.
        inputs: inputs by their names in ``transformers``.
    """

    num_tokens: int
    inputs: Mapping[str, Tensor]

    def of_length(self, length: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """Return the inputs for the prompt and new tokens, ``length`` in total, which are text like its end."""
        extended = {}
        for name, values in self.inputs.items():
            if values.ndim >= 2 and values.shape[:2] == (1, self.num_tokens):
                last = values[:, -1:]
                missing = length - self.num_tokens
                repeats = [1, missing, *[1] * (values.ndim - 2)]
                values = torch.cat((values, last.repeat(repeats)), dim=1)
            if values.is_floating_point():
                values = values.to(dtype)
            extended[name] = values.to(device)
        return extended


class ImagePrompts:
    """Encodes prompts with images for one model.

    Raises:
        ConfigError: the model does not read images, or has no processor for them.
    """

    def __init__(self, config: Config, tokenizer: data.Tokenizer, paths: Sequence[str]) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._paths = list(paths)
        self._processor = ImageProcessor(check_model(config, self._paths))

    @cached_property
    def conversations(self) -> Conversations:
        """The chat template of the processor, if it has one, or of the tokenizer."""
        tokenizer = copy.copy(self._tokenizer)
        template = self._processor.chat_template()
        if template is not None:
            tokenizer.chat_template = template
        return open_conversations(tokenizer, self._config.data)

    def encode(self, prompt: str, chat: bool) -> tuple[list[int], ImageInputs]:
        """Return tokens and the other inputs of a prompt.

        With ``chat``, images are in the places of ``<image>`` of the prompt, or before it. Otherwise the prompt
        must have the placeholders of the model.

        Raises:
            ConfigError: the prompt has another number of places than there are images.
            DataError: an image cannot be decoded.
            Unusable: the chat template fails.
        """
        placeholder = self._processor.placeholder
        if chat:
            message = user_message(prompt, len(self._paths))
            text = self.conversations.prompt_text([message])
        else:
            options = replace(self._config.data, add_eos=None, separator=None)
            prefix = ends_of(self._tokenizer, options).prefix
            text = self._tokenizer.decode(prefix, keep_special=True) + prompt
        num_places = text.count(placeholder)
        if num_places != len(self._paths):
            alternative = "<image>" if chat else "add --chat"
            fix = f"write {placeholder} in the prompt for each image, or {alternative}"
            rule = f"has {num_places} places for {len(self._paths)} images"
            raise ConfigError(Problem("--prompt", prompt, rule, fix, "command line"))
        images = self._decoded()
        try:
            inputs = self._processor.inputs(text, images)
        except Exception as error:  # a processor may raise anything for an image that it refuses
            reason = " ".join(str(error).split())[:200]
            raise Unusable(f"the model's processor refuses the images ({reason})") from error
        ids: list[int] = inputs.pop("input_ids")[0].tolist()
        return ids, ImageInputs(len(ids), inputs)

    def _decoded(self) -> list[Any]:
        """Return the pixels of the images. Raises DataError."""
        options = self._config.data
        decoder = ImageDecoder(options.max_image_pixels)
        pixels = []
        try:
            for path in self._paths:
                pixels.append(Image(path, path).decode(decoder, options.max_image_bytes))
        except BadImage as error:
            raise DataError(f"--image {path} {error}; use another image") from None
        finally:
            decoder.close()
        return pixels


def check_model(config: Config, paths: Sequence[str]) -> str:
    """Return the Hugging Face folder of a model that reads images. Raises ConfigError for another model."""
    _, shape = models.configured(config.model)
    folder = str(getattr(shape, "path", ""))
    if not folder or not architecture.reads_images(folder, shape.class_name):
        raise ConfigError(
            Problem(
                "--image",
                ", ".join(paths),
                rule="requires a model that reads images, and this model reads only text",
                fix="remove it, or use a model such as LLaVA, Qwen2.5-VL or Gemma 3",
                where="command line",
            )
        )
    return folder
