"""Build the data pipeline from the options: open, tokenize, pack and mix the datasets."""

from __future__ import annotations

import hashlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardtrain.config import derived
from shardtrain.config.schema import Config, DataSource, Training, Validation
from shardtrain.data import sandbox, shared_opening, sources
from shardtrain.data.chat.messages import messages_column
from shardtrain.data.documents import token_cache
from shardtrain.data.documents.columns import find
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.documents.growth import Growth
from shardtrain.data.documents.read_documents import (
    BadRows,
    RowStats,
    log_skipped_rows,
    read_documents,
)
from shardtrain.data.documents.row_template import TemplatedEncoder
from shardtrain.data.feed import Feed, IndexedFeed
from shardtrain.data.mix import Mixture, Stage
from shardtrain.data.packing.packed_rows import Packing, lost_documents
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer, TokenBuffer
from shardtrain.data.prepared.shard_index import read_index
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.data.sources import BadRow, Key, Request, Row, Shards, Table, every_row
from shardtrain.data.sources._data_files import FileSource
from shardtrain.data.streaming.stream import StreamFeed
from shardtrain.data.tokenizers.ends import described
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer, open_tokenizer
from shardtrain.utils.errors import ConfigError, Problem

logger = logging.getLogger(__name__)

_FIRST_ROWS = 8
"""A template is tested on this number of rows before all rows are read."""
_LOG_SECONDS = 5.0
"""Interval of the progress lines while a dataset is tokenized."""
MEMORY_BYTES = 64 * 2**20
"""Maximum size of a dataset that data.mode="auto" reads completely when the run starts."""


@dataclass(frozen=True)
class DataPipeline:
    """The inputs of the data loader.

    ``end`` is the position at which the data end. It is None if the data repeat, or if the end is unknown
    until the data are read.
    """

    feeds: list[Feed]
    mixture: Mixture
    packing: Packing
    tokenizer: Tokenizer
    end: int | None
    names: list[str]


class Counted(Protocol):
    """Interface of a feed that ``stages_of`` uses: its mean number of targets per row."""

    mean_targets: float


@dataclass(frozen=True)
class NamedDataset:
    """A data source, with its name and the names of its options for error messages."""

    name: str
    source: DataSource
    dataset_option: str
    path_option: str


def _set_limits(config: Config) -> None:
    """Limit memory and time for opening the user's files, which may be untrusted."""
    sandbox.set_limits(
        sandbox.Limits(config.data.artefact_memory_bytes, config.data.artefact_seconds)
    )


def tokenizer_of(config: Config) -> Tokenizer:
    """Open the tokenizer of the config."""
    _set_limits(config)
    if config.model.tokenizer_path is not None:
        return open_tokenizer(config.model.tokenizer_path, option="model.tokenizer_path")
    return open_tokenizer(config.model.hf_assets_path)


def named_sources(config: Config, section: Training | Validation) -> list[NamedDataset]:
    """Return the sources of a section: the section's dataset, or [data.sources] if it is set for training."""
    if isinstance(section, Training) and config.data.sources:
        named = []
        for name, source in config.data.sources.items():
            prefix = f"data.sources.{name}"
            named.append(NamedDataset(name, source, f"{prefix}.dataset", f"{prefix}.dataset_path"))
        return named
    is_validation = isinstance(section, Validation)
    prefix = "validation" if is_validation else "training"
    split = section.split if isinstance(section, Validation) else None
    source = DataSource(dataset=section.dataset, dataset_path=section.dataset_path, split=split)
    return [NamedDataset(section.dataset, source, f"{prefix}.dataset", f"{prefix}.dataset_path")]


def is_local(path: str) -> bool:
    """True if a dataset's path is a local file or folder, and not a name on the hub."""
    return Path(path).expanduser().exists()


def request_for(config: Config, named: NamedDataset) -> Request:
    """Return the arguments for the module that opens the source."""
    _set_limits(config)
    source = named.source
    # In messages, name the option that sets the value: the source's own option, or the default in [data].
    split_option = "data.split"
    if source.split:
        split_option = named.path_option.replace("dataset_path", "split")
    subset_option = "data.subset"
    if source.subset:
        subset_option = named.path_option.replace("dataset_path", "subset")
    # A text field such as "0" is the number of a column, so the file has no line with column names.
    text_field = source.text_field or config.data.text_field
    return Request(
        path=source.dataset_path,
        option=named.path_option,
        split=source.split or config.data.split,
        split_option=split_option,
        subset=source.subset or config.data.subset,
        subset_option=subset_option,
        streaming=config.data.streaming,
        max_row_bytes=config.data.max_row_bytes,
        header=not text_field.isdecimal(),
    )


def packing_of(
    config: Config,
    section: Training | Validation,
    tokenizer: Tokenizer,
    named: NamedDataset,
    formats: Mapping[str, str] | None = None,
) -> Packing:
    """Return how documents of a source are packed into rows.

    Sources may differ only in how they treat long documents. The kind of packing and the document mask are
    the same for all sources, because one attention kernel processes all rows of a batch.

    Args:
        config: the configuration.
        section: the section of the source.
        tokenizer: the tokenizer, for its padding token.
        named: the source.
        formats: result of ``formats_of``. Pass it to avoid computing it again for each of many sources.
    """
    options = config.data
    formats = formats or formats_of(config, section)
    all_formats = set(formats.values())
    kind = derived.packing_kind(options, all_formats)
    masks_documents = options.document_mask == "on"
    if options.document_mask == "auto":
        masks_documents = kind != "concat" or all_formats != {"text"}
    # "concat" ignores long_documents.
    # Use a constant, because the fingerprint of the data must not depend on it.
    long_documents = "split"
    if kind != "concat":
        long_documents = derived.long_documents(options, formats[named.name])
    padding_ids = [token for token in (tokenizer.pad_id, tokenizer.eos_id) if token is not None]
    padding_id = padding_ids[0] if padding_ids else 0
    return Packing(section.seq_len, kind, masks_documents, long_documents, padding_id)  # type: ignore[arg-type]


def formats_of(config: Config, section: Training | Validation) -> dict[str, str]:
    """Return the format of each source's rows, such as "text" or "chat", by the source's name."""
    return {named.name: _format(config, named) for named in named_sources(config, section)}


def _format(config: Config, named: NamedDataset) -> str:
    """Return the format of a source's rows. For prepared shards, it is stored in their index."""
    source = named.source
    if source.dataset == "tokens" and source.dataset_path is not None:
        index = read_index(Path(source.dataset_path), named.path_option, checks_files=False)
        return index.format
    return source.format or config.data.format


def format_of_rows(config: Config, section: Training | Validation) -> str:
    """Guess the format of a dataset from the columns of its first row.

    Return data.format if the row has the columns of this format, or if the row fits no format.
    """
    options = config.data
    named = named_sources(config, section)[0]
    module = sources.find(named.source.dataset, option=named.dataset_option)
    if options.template or hasattr(module, "open_line"):
        return options.format
    # The first rows may be bad, so look at the first good row.
    rows = itertools.islice(every_row(module.open_source(request_for(config, named))), _FIRST_ROWS)
    first = next((row for _, row in rows if not isinstance(row, BadRow)), {})
    columns_of = {
        "text": (options.text_field,),
        "prompt_completion": (options.prompt_field, options.completion_field),
        "chat": (messages_column(first, options.messages_field),),
    }
    fitting = []
    for form, columns in columns_of.items():
        if all(find(first, column) is not None for column in columns):
            fitting.append(form)
    if options.format in fitting or not fitting:
        return options.format
    return fitting[0]


def open_data(
    config: Config, section: Training | Validation, *, shuffle: bool, loop: bool | None
) -> DataPipeline:
    """Open all sources of a section.

    Args:
        config: the configuration.
        section: the section.
        shuffle: True to shuffle the rows of each source.
        loop: True to repeat the data forever, False for a single pass. None repeats them as training.epochs
            and training.on_data_end require.

    Raises:
        ConfigError: a dataset or the tokenizer is unknown or cannot be opened.
        DataError: rows are bad, or no row is usable.
    """
    tokenizer = tokenizer_of(config)
    all_named = named_sources(config, section)
    formats = formats_of(config, section)
    is_mixture = len(all_named) > 1
    # Log how documents begin and end. This does not concern chats, whose template writes their special
    # tokens, and prepared tokens, which contain them already.
    for named in all_named:
        if named.source.dataset != "tokens" and formats[named.name] != "chat":
            logger.info(described(tokenizer, config.data))
            break

    packings = []
    all_passes = []
    feeds = []
    for named in all_named:
        packing = packing_of(config, section, tokenizer, named, formats)
        passes = _passes(config, section, loop, named.source, is_mixture)
        seed = config.debug.seed
        if is_mixture:
            # A source's shuffle depends only on the seed and its name, so adding a source to a mixture does
            # not change the order of the others.
            digest = hashlib.sha256(f"{seed} {named.name}".encode()).digest()
            seed = int.from_bytes(digest[:7], "little")
        seed_of_order = seed if shuffle else None
        feeds.append(_open_feed(config, section, named, tokenizer, packing, seed_of_order, passes))
        packings.append(packing)
        all_passes.append(passes)

    mixture_stages = stages_of(config, feeds) if is_mixture else [Stage((1.0,))]
    mixture = Mixture(mixture_stages)
    for stage, index in mixture.unread:
        text = "dataset %s is not read in stage %d: its weight is less than 1 in 65,536"
        logger.warning(text, all_named[index].name, stage + 1)

    # The data end when the first source has finished all its passes.
    ends = []
    for index, (feed, passes) in enumerate(zip(feeds, all_passes, strict=True)):
        if passes is None or feed.num_rows is None:
            continue
        end_of_source = mixture.first_position_beyond(index, passes * feed.num_rows)
        if end_of_source is not None:
            ends.append(end_of_source)
    end = min(ends, default=None)
    names = [named.name for named in all_named]
    return DataPipeline(feeds, mixture, packings[0], tokenizer, end, names)


def _passes(
    config: Config,
    section: Training | Validation,
    loop: bool | None,
    source: DataSource,
    is_mixture: bool,
) -> int | None:
    """Return the number of passes over a source, or None to repeat it forever.

    If ``loop`` is not None, it overrides the options. In a mixture, only the source's own option counts.
    """
    if loop is not None:
        return None if loop else 1
    if source.epochs is not None or is_mixture:
        return source.epochs
    if isinstance(section, Validation):
        return 1
    if section.epochs is not None:
        return section.epochs
    return None if section.on_data_end == "repeat" else 1


def _open_feed(
    config: Config,
    section: Training | Validation,
    named: NamedDataset,
    tokenizer: Tokenizer,
    packing: Packing,
    seed: int | None,
    passes: int | None,
) -> Feed:
    """Open one source as a feed (a collective while ranks open data together)."""
    module = sources.find(named.source.dataset, option=named.dataset_option)
    request = request_for(config, named)
    started = time.perf_counter()

    # Prepared shards contain tokens already.
    if hasattr(module, "open_line"):
        shards: ShardTokenBuffer = module.open_line(request, tokenizer)
        return _indexed(config, shards, packing, seed, passes, named, shards.files, started)

    # From here on there are collectives, so all ranks must open the sources in the same order.
    source: Table | Shards = module.open_source(request)
    encoder = open_encoder(tokenizer, config.data, named.source)
    place = source.listed_at if isinstance(source, FileSource) else ""
    shared_opening.once(place, lambda: check_template(source, encoder, named))

    # Tokenize a large dataset during training.
    if _streams(config, section, named, source, passes):
        feed = StreamFeed(
            source,
            encoder,
            packing,
            readers=config.data.readers,
            seed=seed,
            passes=passes,
            vocab_size=tokenizer.vocab_size,
            name=named.name,
        )
        logger.info(
            "dataset %s is tokenized during training, by %d virtual readers",
            named.name,
            feed.num_readers,
        )
        return feed

    # Tokenize other datasets now, once for all ranks, unless the tokens are cached from an earlier start.
    def tokens() -> dict[str, Any]:
        def read() -> dict[str, Any]:
            return _read(config, source, encoder, tokenizer, named)

        # Cache only datasets of files, which are recognized as unchanged by size and times. A user's code may
        # return different rows each time.
        is_own_code = named.source.dataset.endswith(".py")
        if not config.data.cache_tokens or not isinstance(source, FileSource) or is_own_code:
            return read()
        facts = (config.data, named.source, request, encoder, tokenizer.vocab_size)
        return token_cache.cached_or_computed(named.name, source.members, facts, read)

    tokenized = shared_opening.once(place, tokens)
    log_skipped_rows(f"dataset {named.name}", tokenized["left_out"], tokenized["num_bad"])
    line = MemoryTokenBuffer.from_arrays(tokenized["line"])
    return _indexed(config, line, packing, seed, passes, named, source.files(), started)


def _read(
    config: Config,
    source: Table | Shards,
    encoder: Encoder,
    tokenizer: Tokenizer,
    named: NamedDataset,
) -> dict[str, Any]:
    """Tokenize all rows. Return the tokens, and the reasons why rows were skipped.

    One rank can send the returned values to the others.
    """
    policy = BadRows.of(config.data)
    stats = RowStats()
    rows: Iterable[tuple[Key, Row]] = every_row(source)
    # Compressed files may expand to many times their size. Limit this, unless the user has requested to read
    # everything into memory, by data.mode="memory" or by a dataset in Python code.
    growth = None
    if config.data.mode == "auto" and not named.source.dataset.endswith(".py"):
        growth = Growth(
            named.name, source.total_bytes, ', or set data.mode to "stream" or "memory"'
        )
        rows = growth.rows(rows)
    documents = read_documents(source, encoder, policy, stats, rows)
    logged = _logged(documents, named.name, getattr(source, "num_rows", None))
    line = MemoryTokenBuffer(logged, tokenizer.vocab_size, growth)
    policy.judge(stats, f"dataset {named.name}")
    return {"line": line.arrays(), "left_out": [*stats.reasons()], "num_bad": stats.num_bad}


def _logged(documents: Iterable[Document], name: str, num_rows: int | None) -> Iterator[Document]:
    """Yield the documents unchanged, and log progress every few seconds."""
    logged = time.monotonic()
    for count, document in enumerate(documents):
        yield document
        if time.monotonic() - logged < _LOG_SECONDS:
            continue
        logged = time.monotonic()
        unit = f" of {num_rows:,} rows" if num_rows else " documents"
        logger.info(f"dataset {name}: tokenized {count + 1:,}{unit}")


def check_template(source: Table | Shards, encoder: Encoder, named: NamedDataset) -> None:
    """Try a template on the first rows. Raise ConfigError if it returns no document for any of them."""
    if not isinstance(encoder, TemplatedEncoder):
        return
    rows = itertools.islice(every_row(source), _FIRST_ROWS)
    good_rows = [row for _, row in rows if not isinstance(row, BadRow)]
    results = encoder.encode(good_rows)
    bad_rows = [result for result in results if isinstance(result, BadRow)]
    if results and len(bad_rows) == len(results):
        path = named.source.dataset_path or named.name
        raise ConfigError(
            Problem(
                encoder.option,
                None,
                rule=f"returns no document for the first {len(results)} rows of {path}: {bad_rows[0]}",
                fix="correct the template",
            )
        )


def _indexed(
    config: Config,
    line: TokenBuffer,
    packing: Packing,
    seed: int | None,
    passes: int | None,
    named: NamedDataset,
    files: Mapping[str, str],
    started: float,
) -> IndexedFeed:
    """Return a feed of tokens that have been read completely, and log its size."""
    feed = IndexedFeed(
        line, packing, seed=seed, passes=passes, option=named.path_option, files=files
    )
    text = "dataset %s: %d documents, %d tokens, %d rows; opened in %.1f s"
    seconds = time.perf_counter() - started
    logger.info(text, named.name, line.num_documents, line.num_tokens, feed.num_rows, seconds)
    # Packing may drop documents, for example if they are too long.
    for lost in lost_documents(feed.rows, line.num_documents):
        logger.warning("dataset %s: %s", named.name, lost)
    if packing.long_documents == "cut":
        BadRows.of(config.data).judge_long(
            feed.rows.dropped, line.num_documents, f"dataset {named.name}"
        )
    return feed


def _streams(
    config: Config,
    section: Training | Validation,
    named: NamedDataset,
    source: Table | Shards,
    passes: int | None,
) -> bool:
    """True if a source is tokenized during training.

    Raises:
        ConfigError: the source is tokenized during training, and an option is set that does not support this.
    """
    mode = config.data.mode
    is_small = source.total_bytes is not None and source.total_bytes <= MEMORY_BYTES
    streams = mode == "stream" or (mode == "auto" and not is_small)
    # Validation on the complete set needs the number of steps. So read the set at start, however large it is.
    if isinstance(section, Validation) and section.steps == -1 and streams:
        if source.total_bytes is None:
            raise ConfigError(
                Problem(
                    "validation.steps",
                    -1,
                    rule="requires a dataset of known size",
                    fix="set validation.steps, or name a local dataset",
                )
            )
        return False
    if not streams:
        return False

    # Reject options that need the number of rows, which is unknown for a stream.
    size = "of unknown size"
    if source.total_bytes is not None:
        size = f"of {source.total_bytes / 2**20:.0f} MiB"
    fix = 'run "shardtrain data prepare" and use dataset "tokens", or set data.mode="memory"'
    if config.data.bad_rows == "skip":
        raise ConfigError(
            Problem(
                "data.bad_rows",
                "skip",
                rule=f"cannot count the bad rows of a dataset {size}, which is tokenized during training",
                fix=fix,
            )
        )
    if isinstance(section, Training) and section.epochs is not None:
        raise ConfigError(
            Problem(
                "training.epochs",
                section.epochs,
                rule=f"requires the number of rows, but the dataset {named.name} {size} is tokenized during training",
                fix=fix,
            )
        )
    if passes is not None and config.data.sources and len(config.data.sources) > 1:
        raise ConfigError(
            Problem(
                f"data.sources.{named.name}.epochs",
                passes,
                rule=f"requires the number of rows, but the dataset {size} is tokenized during training",
                fix=fix,
            )
        )
    return True


def stages_of(config: Config, feeds: Sequence[Counted]) -> list[Stage]:
    """Return the stages of [data], converted from tokens to rows.

    Options give weights per token and limits in tokens. Stages have weights per row and limits in rows.
    """
    names = list(config.data.sources)
    stages = [(stage.until_tokens, stage.weights) for stage in config.data.stages]
    # Without stages, the weights of the sources apply to the entire run.
    if not stages:
        stages = [(0, {name: source.weight for name, source in config.data.sources.items()})]
    # The last stage has no limit (0). If the user has set one, its weights apply until the end.
    if stages[-1][0]:
        stages.append((0, stages[-1][1]))
    result = []
    tokens = 0
    rows = 0.0
    for until_tokens, weights in stages:
        per_token = [weights.get(name, 0.0) for name in names]
        per_row = [
            weight / feed.mean_targets for weight, feed in zip(per_token, feeds, strict=True)
        ]
        if not until_tokens:
            result.append(Stage(tuple(per_row)))
            break
        # On average, a row has sum(per_token) / sum(per_row) targets.
        # Divide the stage's tokens by this number.
        rows += (until_tokens - tokens) * sum(per_row) / sum(per_token)
        tokens = until_tokens
        result.append(Stage(tuple(per_row), stop=round(rows)))
    return result
