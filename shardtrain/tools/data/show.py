"""``shardtrain data show``: print the decoded sequences of a step, with the tokens that are learned."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from shardtrain import config as configs
from shardtrain import data, tasks
from shardtrain.config import derived
from shardtrain.config.command_line import VerbOption, number_of, take
from shardtrain.config.schema import Config
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.data.batch import Batch
from shardtrain.data.build_dataset import tokenizer_of
from shardtrain.data.loader import SOURCE_BITS
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.utils.errors import COMMAND_LINE, ConfigError, Problem

USAGE = """usage: shardtrain data show [CONFIG.toml | RUN_FOLDER] [--step N] [--rows N] [--world_size N] [--json]
                            [--section.key VALUE ...]

Print the sequences that the model reads at a training step: the text of each document, the positions of its tokens, and
the tokens that are learned. For a task of rows, print each text of a row, such as the chosen and the rejected answer.
With the folder of a run, print what that run has read or will read.

  --step N        training step, from 1 (1)
  --rows N        number of sequences of that step (3)
  --world_size N  number of ranks, which determines the sequences of a step if training.global_batch_size is not
                  set (1); also --nproc
  --json          one JSON object per sequence, with token ids, instead of text

Learned text, which has a loss, is green and other text is gray. Without colors, learned text is between « and ».
"""
_LEGEND = {
    True: "learned text is green, other text is gray",
    False: "learned text is between « and »",
}
_LEARNED = "\033[32m"
_IGNORED = "\033[90m"
_FRAME = "\033[36m"
_END = "\033[0m"


@dataclass(frozen=True)
class TokenRun:
    """Consecutive tokens of one document that are either all learned or all not learned."""

    learned: bool
    tokens: list[int]


@dataclass(frozen=True)
class DocumentPart:
    """Part of a document in a sequence. It starts at index ``column`` with position ``first_position``."""

    column: int
    first_position: int
    pieces: list[TokenRun]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of this part, without padding."""
        return sum(len(piece.tokens) for piece in self.pieces)


@dataclass(frozen=True)
class ShownSequence:
    """One sequence.

    Attributes:
        position: Index in the order of training.
        dataset: Name of the dataset.
        sample: Number in the dataset.
        num_targets: Number of learned tokens.
        parts: Documents in the sequence.
        filler: Padding tokens at the end.
    """

    position: int
    dataset: str
    sample: int
    num_targets: int
    parts: list[DocumentPart]
    filler: int


@dataclass(frozen=True)
class ShownRow:
    """One row of a task: its index in the order of training, its number in the dataset, and its texts with names."""

    position: int
    dataset: str
    sample: int
    texts: list[tuple[str, list[TokenRun]]]


def main(arguments: list[str]) -> int:
    """Run the verb and return its exit status."""
    number = VerbOption(number_of(), "4", once=True)
    numbers = dict.fromkeys(("--step", "--rows", "--world_size", "--nproc"), number)
    taken = take(arguments, numbers, ["--json"], USAGE)
    world_size = taken.verb_options.get("--world_size") or taken.verb_options.get("--nproc")
    path, overrides = taken.configuration()
    config, world_size = _open(path, overrides, world_size)
    # Find the first row of the step. Ramps change the number and the length of sequences per step.
    step = taken.verb_options.get("--step", 1)
    sizes = derived.step_sizes(config, world_size)
    first = sizes.after(0, step - 1)
    length = sizes.length_at(first) or config.training.seq_len
    sequences_per_row = config.training.seq_len // length
    sequences_of_step = sizes.batch_at(first) * sequences_per_row
    count = min(taken.verb_options.get("--rows", 3), sequences_of_step)

    # Print color codes only to a terminal.
    as_json = "--json" in taken.verb_options
    color = sys.stdout.isatty() and not config.metrics.disable_color_printing
    if not as_json:
        print(_LEGEND[color])
    if config.task.name in OF_NEXT_TOKENS:
        num_shown = _print_sequences(config, first, count, length, as_json, color)
    else:
        num_shown = 0
        for row, tokenizer in task_rows(config, first, count):
            num_shown += 1
            if as_json:
                print(json.dumps(asdict(row)))
            else:
                print(render_row(row, tokenizer, color))
    if not num_shown:
        raise ConfigError(
            Problem(
                "--step",
                step,
                rule="is beyond the end of the data",
                fix="name an earlier step",
                where=COMMAND_LINE,
            )
        )
    return 0


def _print_sequences(
    config: Config, first: int, count: int, length: int, as_json: bool, color: bool
) -> int:
    """Print sequences and, unless ``as_json``, the share of padding in them. Return the number of sequences.

    ``length`` is the number of tokens per sequence.
    """
    loader = open_rows(config)
    num_shown = 0
    num_padding = 0
    for shown in rows(loader, config, first, count, length):
        num_shown += 1
        num_padding += shown.filler
        if as_json:
            print(json.dumps(asdict(shown)))
        else:
            print(render(shown, loader.tokenizer, color))
    if num_shown and not as_json:
        num_tokens = num_shown * length
        print(padding_line(num_padding / num_tokens, loader.padding_by_source()))
    return num_shown


def _open(
    path: str | None, overrides: tuple[str, ...], world_size: int | None
) -> tuple[Config, int]:
    """Load a configuration file, or the configuration and number of ranks of a run folder."""
    if path is not None and Path(path).is_dir():
        run = RunFolder(Path(path))
        loaded = run.load(overrides)
        world_size = world_size or run.world_size()
    else:
        loaded = configs.load(path, overrides)
    problems = configs.check(loaded)
    if problems:
        raise ConfigError(problems)
    return loaded.config, world_size or 1


def open_rows(config: Config) -> data.DataLoader:
    """Open the data with one sequence per batch, in the order of training."""
    # Workers would prefetch rows that are not shown.
    options = replace(
        config.training.dataloader,
        num_workers=0,
        prefetch_factor=None,
        persistent_workers=False,
    )
    training = replace(config.training, local_batch_size=1, dataloader=options)
    config = replace(config, training=training)
    return data.open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)


def rows(
    loader: data.DataLoader, config: Config, first: int, count: int, length: int | None = None
) -> Iterator[ShownSequence]:
    """Yield ``count`` sequences in the order of training from the row ``first`` on.

    A sequence ramp divides rows of ``training.seq_len`` tokens into sequences of ``length`` tokens.
    """
    length = length or config.training.seq_len
    names = list(config.data.sources) or [config.training.dataset]
    loader.seek(first)
    sequences_per_row = config.training.seq_len // length
    num_rows = -(-count // sequences_per_row)
    for index in range(num_rows):
        batch = next(loader, None)
        if batch is None:
            return
        batch = batch.divided(length)
        # The last row may have more sequences than are requested.
        num_left = count - index * sequences_per_row
        num_parts = min(sequences_per_row, num_left)
        for part in range(num_parts):
            yield describe(batch, part, first + index, names, loader.pad_id)


def padding_line(fraction: float, of_sources: Mapping[str, float]) -> str:
    """Format the share of padding in the shown sequences, and in all sequences of each source.

    >>> padding_line(0.25, {"jsonl": 0.031})
    'padding: 25.0 % of these sequences, 3.1 % of all of jsonl'
    """
    shares = [f"{100 * fraction:.1f} % of these sequences"]
    for name, of_source in of_sources.items():
        shares.append(f"{100 * of_source:.1f} % of all of {name}")
    return "padding: " + ", ".join(shares)


def task_rows(config: Config, first: int, count: int) -> Iterator[tuple[ShownRow, Tokenizer]]:
    """Yield ``count`` rows of a task in the order of training from ``first`` on, and the tokenizer.

    Raises:
        ConfigError: the task does not define how to show a row.
    """
    # With "rollover", no row at the end of an epoch is dropped.
    training = replace(config.training, last_batch="rollover")
    task = tasks.open_task(replace(config, training=training))
    assert isinstance(task, tasks.RowTask)
    stream = task.open_dataloader(batch_rank=0, num_batch_ranks=1, accumulation=1)
    tokenizer: Tokenizer = tokenizer_of(config)
    end = first + count
    if stream.end is not None:
        end = min(end, stream.end)
    for position in range(first, end):
        (number,) = stream.feed.rows_at(position, position + 1)
        row = stream.feed.read(position, number)
        texts = []
        for text in task.shown(row):
            # A text without a mask, such as a prompt, is not learned.
            mask = text.learned or [False] * len(text.tokens)
            pieces: list[TokenRun] = []
            for token, learned in zip(text.tokens, mask, strict=True):
                _append(pieces, learned, token)
            texts.append((text.name, pieces))
        yield ShownRow(position, config.training.dataset, number, texts), tokenizer


def describe(batch: Batch, row: int, position: int, names: list[str], pad_id: int) -> ShownSequence:
    """Split a row of a batch into documents.

    The last target, which is no input, belongs to the last document.
    """
    tokens = batch.tokens_BT[row].tolist()
    targets = batch.targets_BT[row].tolist()
    positions = batch.positions_BT[row].tolist()
    documents = [0] * len(tokens)
    if batch.documents_BT is not None:
        documents = batch.documents_BT[row].tolist()
    length = _without_filler(tokens, targets, documents, pad_id)

    # Targets are shifted by one: a token is learned if it is the target of the token before it. The
    # first token of a document is never learned.
    parts: list[DocumentPart] = []
    for column, token in enumerate(tokens[:length]):
        is_first = column == 0 or documents[column] != documents[column - 1]
        if is_first:
            parts.append(DocumentPart(column, positions[column], []))
        pieces = parts[-1].pieces
        is_learned = not is_first and targets[column - 1] != IGNORE
        _append(pieces, is_learned, token)
        # The last token of a document may be only a target, and no input.
        is_last = column + 1 == length or documents[column + 1] != documents[column]
        if is_last and targets[column] != IGNORE:
            _append(pieces, True, targets[column])

    # The upper bits of a sample id are the number of its source. A sequence of padding has a negative id.
    sample_id = int(batch.sample_ids_B[row])
    dataset = "filler"
    sample = -1
    if sample_id >= 0:
        dataset = names[sample_id >> SOURCE_BITS]
        sample = sample_id & ((1 << SOURCE_BITS) - 1)
    num_targets = len(targets) - targets.count(IGNORE)
    filler = len(tokens) - length
    return ShownSequence(position, dataset, sample, num_targets, parts, filler)


def _without_filler(
    tokens: list[int], targets: list[int], documents: list[int], pad_id: int
) -> int:
    """Return the number of tokens before the padding.

    With document numbers, padding is a separate document.
    """
    length = len(tokens)
    while length and tokens[length - 1] == pad_id and targets[length - 1] == IGNORE:
        length -= 1
    if not documents[-1]:
        return length
    # The pad token may also be the end token of a document. It is padding only if the entire last document
    # consists of it.
    start_of_last = documents.index(documents[-1])
    if length <= start_of_last:
        return start_of_last
    return len(tokens)


def _append(pieces: list[TokenRun], learned: bool, token: int) -> None:
    """Append a token to the last run, or to a new one if the last run is of the other kind."""
    if not pieces or pieces[-1].learned != learned:
        pieces.append(TokenRun(learned, []))
    pieces[-1].tokens.append(token)


def render(shown: ShownSequence, tokenizer: Tokenizer, color: bool) -> str:
    """Format a sequence: a header, and each document with a header."""
    noun = "document" if len(shown.parts) == 1 else "documents"
    title = f"== position {shown.position}: sample {shown.sample} of {shown.dataset}"
    lines = [_framed(f"{title}, {shown.num_targets} targets, {len(shown.parts)} {noun}", color)]
    for number, part in enumerate(shown.parts):
        last = part.first_position + part.num_tokens - 1
        header = f"-- document {number}: positions {part.first_position}..{last}"
        lines.append(_framed(header, color))
        lines.append(_marked(part.pieces, tokenizer, color))
    if shown.filler:
        lines.append(_framed(f"-- {shown.filler} filler tokens", color))
    return "\n".join(lines)


def render_row(row: ShownRow, tokenizer: Tokenizer, color: bool) -> str:
    """Format a row of a task: a header, and each text with a header."""
    lines = [_framed(f"== position {row.position}: row {row.sample} of {row.dataset}", color)]
    for name, pieces in row.texts:
        num_tokens = 0
        num_learned = 0
        for piece in pieces:
            num_tokens += len(piece.tokens)
            if piece.learned:
                num_learned += len(piece.tokens)
        lines.append(_framed(f"-- {name}: {num_tokens} tokens, {num_learned} in the loss", color))
        lines.append(_marked(pieces, tokenizer, color))
    return "\n".join(lines)


def _framed(text: str, color: bool) -> str:
    if not color:
        return text
    return f"{_FRAME}{text}{_END}"


def _marked(pieces: list[TokenRun], tokenizer: Tokenizer, color: bool) -> str:
    """Decode a document and mark the learned text.

    All tokens are decoded together and the text is cut where pieces end, because a piece decoded by
    itself may lose or gain a space. So the text without the marks is the text that is trained on.
    """
    tokens = []
    for piece in pieces:
        tokens += piece.tokens
    text = tokenizer.decode(tokens, keep_special=True)
    marked = []
    num_tokens = 0
    start = 0
    for number, piece in enumerate(pieces, start=1):
        num_tokens += len(piece.tokens)
        stop = len(text)
        if number < len(pieces):
            # A piece may end within a character. Its bytes then decode to another character than in
            # the entire text, so cut before the first difference.
            before = tokenizer.decode(tokens[:num_tokens], keep_special=True)
            stop = max(start, _common_length(before, text))
        marked.append(_mark(_safe(text[start:stop]), piece.learned, color))
        start = stop
    return "".join(marked)


def _common_length(one: str, other: str) -> int:
    """Return the number of characters before the first difference."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length


def _mark(text: str, is_learned: bool, color: bool) -> str:
    if color:
        code = _LEARNED if is_learned else _IGNORED
        return f"{code}{text}{_END}"
    if is_learned:
        return f"«{text}»"
    return text


def _safe(text: str) -> str:
    """Escape control characters except newline and tab, so the text cannot control the terminal."""
    characters = []
    for character in text:
        if character not in "\n\t" and not character.isprintable():
            character = character.encode("unicode_escape").decode()
        characters.append(character)
    return "".join(characters)
