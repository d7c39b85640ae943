"""Run ``shardtrain generate`` as one rank: stream one continuation, or write a file of predictions."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Iterator, Sequence

import torch

from shardtrain.config.schema import Comm
from shardtrain.data.documents.columns import Unusable
from shardtrain.data.documents.encode import open_conversations
from shardtrain.distributed import process_group
from shardtrain.distributed.process_group import World
from shardtrain.hf.generation_config import unused_settings
from shardtrain.ops.cpu import packed_linear
from shardtrain.ops.sampling import Sampling
from shardtrain.tools.generate import image_prompts
from shardtrain.tools.generate.engine import Generator, Watch
from shardtrain.tools.generate.generate_request import GenerateOptions, TextOptions
from shardtrain.tools.generate.generated_text import Printer, Text
from shardtrain.tools.generate.image_prompts import ImageInputs, ImagePrompts
from shardtrain.tools.generate.locate_checkpoint import load_config
from shardtrain.tools.generate.prompts import GenerationPrompts, PromptRow, check_output, write_rows
from shardtrain.tools.generate.trained_model import OpenedModel, open_model
from shardtrain.train.build import use_fastest_kernels
from shardtrain.utils import variables
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.heartbeat import heartbeat
from shardtrain.utils.redact import visible


def run(options: GenerateOptions, rows: Sequence[PromptRow] | None) -> None:
    """Open the model and generate, as one rank of the job that the environment describes.

    Args:
        rows: Rows of ``--input``, or None to continue ``--prompt``.

    Raises:
        ShardtrainError: an error that the user can correct.
    """
    config = load_config(options.source, options.config, options.tokenizer).config
    if options.image:
        image_prompts.check_model(config, options.image)
    with join(options.device or config.training.device) as world:
        is_first = world.rank == 0
        # Only rank 0 reports progress.
        heartbeat_seconds = None if is_first else 0
        use_fastest_kernels(config, world.device)
        with heartbeat(f"opening {options.source}", heartbeat_seconds):
            opened = open_model(
                options.source,
                options.config,
                options.dtype,
                world,
                tokenizer_path=options.tokenizer,
                base=options.base,
                adapter=options.adapter,
                step=options.step,
                use_ema=options.use_ema,
                may_read_images=True,
            ).with_data(add_bos=options.add_bos)
            # Packing the weights takes time, which only pays off for enough passes.
            num_rows = 1 if rows is None else len(rows)
            num_batches = math.ceil(num_rows / options.batch_size)
            num_passes = num_batches * options.max_new_tokens
            rows_per_batch = min(num_rows, options.batch_size)
            packed_linear.use_where_it_pays(opened.model, num_passes, rows_per_batch)
        if is_first:
            print(f"shardtrain generate: {opened.name}", file=sys.stderr, flush=True)
            unused = unused_settings(opened.settings)
            if unused:
                advice = "set --temperature, --top_p and other options instead"
                print(
                    f"ignored generation settings of the model: {unused}; {advice}", file=sys.stderr
                )

        answers = Answers(options, opened, is_first)
        if rows is None:
            answers.print_one(options.prompt or "", options.image)
            return
        with heartbeat(f"generating {len(rows)} rows", heartbeat_seconds):
            predictions = answers.of(rows, options.field)
        if is_first and options.output is not None:
            # Another process may have created the file in the meantime.
            check_output(options.output)
            write_rows(options.output, rows, predictions, options.prediction_field)
            print(f"{options.output}: {len(predictions)} rows", file=sys.stderr)


@contextlib.contextmanager
def join(device: str) -> Iterator[World]:
    """Join the process group that the launcher describes. A single process needs no process group."""
    if variables.rank_and_size(os.environ)[1] > 1:
        with process_group.join(Comm(), device) as world:
            yield world
        return
    yield World(0, 1, 0, torch.device(process_group.pick_device_type(device)))


class Answers:
    """Generates text with an opened model."""

    def __init__(self, options: TextOptions, opened: OpenedModel, is_first: bool = True) -> None:
        self._options = options
        self._opened = opened
        self._is_first = is_first
        tokenizer = opened.tokenizer
        conversations = open_conversations(tokenizer, opened.config.data) if options.chat else None
        self._encoder = GenerationPrompts(tokenizer, opened.config.data, conversations)
        self._sampling = Sampling(
            options.repetition_penalty,
            options.temperature,
            options.top_k,
            options.top_p,
        )
        if opened.token_mixing is not None and not options.no_cache:
            # Keep the part before ", but". The rest explains why ranks cannot split the tokens.
            place, _, _ = opened.token_mixing.rule.partition(", but")
            raise ConfigError(
                Problem(
                    "model.name",
                    opened.config.model.name,
                    rule=f"{place}, so keys and values cannot be cached",
                    fix=f"add --no_cache, or {opened.token_mixing.fix}",
                )
            )
        self._generator = Generator(
            opened.model, opened.layout, tokenizer.vocab_size, not options.no_cache, opened.width
        )

        # A row ends at an end token, at the end of a turn, or at a stop text. A stop text that spells a
        # special token becomes an end token, because decoded text does not contain special tokens.
        stop_ids = set(opened.end_ids)
        turn_end = None if conversations is None else conversations.turn_end()
        if turn_end is not None:
            stop_ids.add(turn_end)
        stop_texts = []
        for stop in options.stops:
            (encoded,) = tokenizer.encode_spans([stop])
            ids = encoded[0].tolist()
            if len(ids) == 1 and ids[0] in tokenizer.special_ids:
                stop_ids.add(ids[0])
            else:
                stop_texts.append(stop)
        self._stop_ids = frozenset(stop_ids)
        self._stops = tuple(stop_texts)

    def print_one(self, prompt: str, image_paths: Sequence[str] = ()) -> None:
        """Print the continuation of the prompt with images, token by token."""
        images = None
        try:
            if image_paths:
                encoder = ImagePrompts(self._opened.config, self._opened.tokenizer, image_paths)
                ids, images = encoder.encode(prompt, self._options.chat)
            else:
                ids = self._encoder.value(prompt, "--prompt")
        except Unusable as error:
            raise ConfigError(
                Problem(
                    "--prompt",
                    prompt,
                    rule=f"cannot be used: {error.reason}",
                    fix="give another",
                )
            ) from None
        self._warn_if_long([ids])
        text = self._text(ids)
        printer = Printer(text)
        # On a terminal, print the prompt before its continuation. A pipe receives only the new text.
        if sys.stdout.isatty() and not self._options.chat:
            self._print(prompt)

        def watch(_: int, new: list[int]) -> bool:
            self._print(printer.more(new))
            return text.has_ended(new)

        new = self._generate([ids], [0], watch, images)[0]
        self._print(printer.rest(new) + "\n")

    def of(self, rows: Sequence[PromptRow], field: str) -> list[str]:
        """Return the continuation of each row's prompt. ``field`` is the name of the prompt field."""
        tools_field = self._opened.config.data.tools_field
        prompts = [self._encoder.row(row, field, tools_field) for row in rows]
        self._warn_if_long(prompts)
        texts = [self._text(prompt) for prompt in prompts]

        # Batch rows of similar length, because the longest row of a batch determines the cost of a pass.
        order = sorted(range(len(rows)), key=lambda number: len(prompts[number]))
        batch_size = self._options.batch_size
        predictions = [""] * len(rows)
        for start in range(0, len(order), batch_size):
            numbers = order[start : start + batch_size]

            def watch(row: int, new: list[int], numbers: list[int] = numbers) -> bool:
                return texts[numbers[row]].has_ended(new)

            prompts_of_batch = [prompts[number] for number in numbers]
            new_of_batch = self._generate(prompts_of_batch, numbers, watch)
            for number, new in zip(numbers, new_of_batch, strict=True):
                predictions[number] = texts[number].of(new)
        return predictions

    def _generate(
        self,
        prompts: list[list[int]],
        numbers: list[int],
        watch: Watch,
        images: ImageInputs | None = None,
    ) -> list[list[int]]:
        max_new_tokens = self._options.max_new_tokens
        seed = self._options.seed
        return self._generator.generate(
            prompts,
            max_new_tokens,
            self._sampling,
            seed,
            numbers,
            self._stop_ids,
            watch,
            images,
        )

    def _warn_if_long(self, prompts: Sequence[Sequence[int]]) -> None:
        longest = max(map(len, prompts)) + self._options.max_new_tokens
        trained = self._opened.config.training.seq_len
        if longest > trained and self._is_first:
            print(
                f"warning: up to {longest} tokens, but the model was trained on sequences of "
                f"{trained}: later text may make no sense",
                file=sys.stderr,
            )

    def _text(self, prompt: list[int]) -> Text:
        # The end token stays in the text: special tokens decode to nothing, and transformers keeps the text
        # of other end tokens.
        return Text(self._opened.tokenizer, prompt, frozenset(), self._stops)

    def _print(self, text: str) -> None:
        if not self._is_first:
            return
        # Generated text may contain control characters, which a terminal would execute.
        if sys.stdout.isatty():
            text = visible(text)
        print(text, end="", flush=True)
