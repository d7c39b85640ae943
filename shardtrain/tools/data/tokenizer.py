"""``shardtrain data tokenizer train``: train a byte-level BPE tokenizer on the user's files.

It is the byte pair encoding of Sennrich et al. 2016 (arXiv 1508.07909) over bytes (Radford et al. 2019),
so every text can be encoded and decoded exactly. Numbers are split into groups of three digits, as in
Llama 3.
"""

from __future__ import annotations

import argparse
import glob
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from shardtrain.data.documents.bad_rows import attempt
from shardtrain.data.documents.columns import text
from shardtrain.data.sources import Request, every_row, find, place_of
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer, open_tokenizer
from shardtrain.data.tokenizers.tiktoken_model import PATTERN
from shardtrain.facts.file_kinds import COMPRESSIONS, dataset_of
from shardtrain.utils import atomic_io, libraries, output_target, storage_errors
from shardtrain.utils.arguments import StrictArgumentParser, print_requested_help
from shardtrain.utils.errors import ConfigError, DataError, Problem

PROGRAM = "shardtrain data tokenizer train"
BOS = "<|begin_of_text|>"
EOS = "<|end_of_text|>"
PAD = "<|pad|>"
HELD_OUT_EVERY = 50
"""Every Nth part of the text is held out to measure the tokenizer."""
_PART_CHARACTERS = 2**16
_MOST_HELD_OUT = 64
_LONGEST_TEXT_BYTES = 2**28


class TrainingTexts:
    """The texts of files in order, in parts, without the held-out parts. Iterate once to fill the counts.

    Attributes:
        documents: Number of texts.
        skipped: Number of skipped bad rows.
        bytes: Size of the text for training.
        held_out: Parts that are not trained on.
        first: First parts of the text, to measure if there is too little text to hold some out.
    """

    def __init__(
        self, paths: list[str], dataset: str | None, text_field: str, skip_bad_rows: bool
    ) -> None:
        self._field = text_field
        self._skip = skip_bad_rows
        self._sources = []
        wanted: list[str | None] = [*paths] or [None]  # some datasets need no path
        for path in wanted:
            module = find(dataset or _guess(path), "--dataset")
            if not hasattr(module, "open_source"):
                raise ConfigError(
                    Problem(
                        "--dataset",
                        dataset,
                        rule="contains tokens and no text",
                        fix="use the original text",
                    )
                )
            # As for data.text_field, a number selects a column of files without a header.
            header = not text_field.isdecimal()
            request = Request(
                path=path, option="--input", max_row_bytes=_LONGEST_TEXT_BYTES, header=header
            )
            self._sources.append(module.open_source(request))
        self.documents = self.skipped = self.bytes = 0
        self.held_out: list[str] = []
        self.first: list[str] = []

    def __iter__(self) -> Iterator[str]:
        number = 0
        for document in self._documents():
            # Long documents are split, so a part of a single document can be held out.
            for start in range(0, len(document), _PART_CHARACTERS):
                part = document[start : start + _PART_CHARACTERS]
                number += 1
                if number % HELD_OUT_EVERY == 0 and len(self.held_out) < _MOST_HELD_OUT:
                    self.held_out.append(part)
                    continue
                if len(self.first) < _MOST_HELD_OUT:
                    self.first.append(part)
                self.bytes += len(part.encode())
                yield part

    def _documents(self) -> Iterator[str]:
        read_text = partial(text, path=self._field)
        for source in self._sources:
            for key, row in every_row(source):
                document = attempt(read_text, row)
                if isinstance(document, str):
                    self.documents += 1
                    yield document
                elif not document.harmless:
                    self.skipped += 1
                    if not self._skip:
                        fix = "correct or remove the row, name its column with --text_field, or use --skip_bad_rows"
                        raise DataError(f"{place_of(source, key)}: {document.reason}; {fix}")


def main(arguments: list[str]) -> int:
    """Run the verb and return its exit status.

    Raises:
        ConfigError: an option is wrong, or the folder already has a tokenizer.
        DataError: a row has no text.
        StorageError: the folder cannot be written.
    """
    print_requested_help(arguments, _parser().format_help())
    if not arguments or arguments[0] != "train":
        problem = Problem(
            "shardtrain data tokenizer",
            arguments[0] if arguments else None,
            "requires an action",
            "use train",
        )
        raise ConfigError(problem)
    options = _parser().read(arguments[1:])
    special = _check(options)
    folder = Path(options.output)
    texts = TrainingTexts(options.input, options.dataset, options.text_field, options.skip_bad_rows)
    trained = train(texts, options.vocab_size, special)
    if texts.bytes == 0:
        raise DataError(
            f"the input has no text in column {options.text_field!r}; name its column with --text_field",
        )
    save(trained, folder)
    _report(open_tokenizer(str(folder), "--output"), texts, options.vocab_size, folder)
    return 0


def train(texts: TrainingTexts, vocab_size: int, special: list[str]) -> Any:
    """Train on all texts. The result is deterministic. Memory grows with the number of distinct words."""
    tokenizers = libraries.load("tokenizers", PROGRAM, install="tokenizers")
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single=f"{BOS} $A",
        pair=f"{BOS} $A {BOS}:1 $B:1",
        special_tokens=[(BOS, special.index(BOS))],
    )
    return tokenizer


def save(tokenizer: Any, folder: Path) -> None:
    """Write tokenizer.json, and tokenizer_config.json with the special tokens, each atomically.

    Raises:
        StorageError: the folder cannot be written.
    """
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "tokenizer_config.json": json.dumps(config, indent=2) + "\n",
        "tokenizer.json": tokenizer.to_str(pretty=True),
    }
    with storage_errors.writing(folder, "name another folder with --output"):
        for name, content in files.items():
            atomic_io.write(folder / name, content, create_folder=True)


def _parser() -> StrictArgumentParser:
    parser = StrictArgumentParser(PROGRAM, "Train a byte-level BPE tokenizer on your own files.")
    parser.add_argument(
        "--input",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files or folders of text; some datasets need none",
    )
    parser.add_argument(
        "--vocab_size",
        type=int,
        required=True,
        metavar="N",
        help="number of ids, including special tokens",
    )
    parser.add_argument(
        "--output",
        type=output_target.folder_argument,
        required=True,
        metavar="FOLDER",
        help="output folder of tokenizer.json",
    )
    parser.add_argument(
        "--dataset", metavar="NAME", help="format of the files (default: by their ending)"
    )
    parser.add_argument(
        "--text_field", default="text", metavar="COLUMN", help='column of the text ("text")'
    )
    parser.add_argument(
        "--special",
        nargs="+",
        default=[],
        metavar="TOKEN",
        help='additional special tokens, e.g. "<|im_end|>"',
    )
    parser.add_argument(
        "--skip_bad_rows", action="store_true", help="skip and count rows without text"
    )
    parser.add_argument("--force", action="store_true", help="replace an existing tokenizer")
    return parser


def _check(options: argparse.Namespace) -> list[str]:
    """Return the special tokens, with the begin and end tokens first.

    Raise ConfigError for unusable options.
    """
    # Collect all problems, so the user can correct them together.
    special = [BOS, EOS, PAD, *options.special]
    problems: list[Problem | str] = []
    if len(set(special)) < len(special) or "" in special:
        problems.append(
            Problem(
                "--special",
                " ".join(options.special),
                rule=f"has an empty token, a repeated token, or one of {BOS}, {EOS}, {PAD}",
                fix="name each other token once",
            )
        )
    # A byte-level vocabulary contains every byte, so any text can be encoded.
    least = 256 + len(special)
    if not least <= options.vocab_size <= 2**24:
        problems.append(
            Problem(
                "--vocab_size",
                options.vocab_size,
                rule=f"must be between {least} (256 bytes and {len(special)} special tokens) and {2**24}",
                fix="32000 is usual for one language",
            )
        )
    folder = Path(options.output)
    if folder.is_file():
        problems.append(Problem("--output", options.output, "is a file", "name a folder"))
    existing = []
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / name).exists():
            existing.append(name)
    if existing and not options.force:
        problems.append(
            Problem(
                "--output",
                options.output,
                rule=f"already contains {' and '.join(existing)}",
                fix="name another folder, or use --force",
            )
        )
    if problems:
        raise ConfigError(problems)
    return special


def _guess(path: str | None) -> str:
    """Return the name of the dataset that reads a path, by the ending of its name.

    A folder counts as its first file.
    """
    if path is None:
        raise ConfigError(
            Problem(
                "--input",
                None,
                rule="is not given",
                fix="name files or folders, or a dataset that needs none, e.g. --dataset python_stdlib",
            )
        )
    file = Path(path)
    if not glob.has_magic(path) and not file.exists():
        raise ConfigError(
            Problem(
                "--input",
                path,
                rule="does not exist",
                fix="name files or folders of text",
            )
        )
    if file.is_dir():
        files = [entry for entry in sorted(file.rglob("*")) if entry.is_file()]
        file = files[0] if files else file
    uncompressed_name = file.name.lower()
    for ending in COMPRESSIONS:
        uncompressed_name = uncompressed_name.removesuffix(ending)
    # A Python file is text here. For training, it would be a dataset's code.
    dataset = dataset_of(file.name)
    if uncompressed_name.endswith(".py"):
        dataset = "text"
    if dataset is None:
        raise ConfigError(
            Problem(
                "--input",
                path,
                rule="has no ending of a known format",
                fix="set its format with --dataset, e.g. --dataset text",
            )
        )
    return dataset


def _report(tokenizer: Tokenizer, texts: TrainingTexts, wanted: int, folder: Path) -> None:
    """Print the compression of text that was not trained on, if there is some, and check that it decodes exactly."""
    # Compression is measured on text that was not trained on, because a tokenizer fits its own text better.
    parts = texts.held_out
    origin = "held-out text"
    if not parts:
        parts = texts.first
        origin = "the text it was trained on (there is too little to hold some out)"
    num_bytes = 0
    num_tokens = 0
    num_equal = 0
    for part, ids in zip(parts, tokenizer.encode_batch(parts), strict=True):
        num_bytes += len(part.encode())
        num_tokens += len(ids)
        if tokenizer.decode(ids, keep_special=True) == part:
            num_equal += 1
    bytes_per_token = num_bytes / max(num_tokens, 1)
    print(
        f"trained on {texts.bytes} bytes of {texts.documents} texts, {texts.skipped} bad rows skipped"
    )
    if tokenizer.vocab_size < wanted:
        print(
            f"{tokenizer.vocab_size} ids instead of {wanted}: the text has no more pairs to merge"
        )
    print(
        f"{bytes_per_token:.2f} bytes per token on {origin}: {num_bytes} bytes, {num_tokens} tokens"
    )
    print(f"{num_equal} of {len(parts)} parts are unchanged after encoding and decoding")
    print(f"wrote {folder / 'tokenizer.json'} with {tokenizer.vocab_size} ids")
