"""Open the data of a configuration as a run does, but read only the first rows of a large dataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from shardtrain.config import derived, frozen_models
from shardtrain.config.schema import Config, Training, Validation
from shardtrain.config.schema.data_options import DataSource
from shardtrain.data import build_dataset, sources
from shardtrain.data.data_budget import check_enough
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.documents.read_documents import BadRows, RowStats, read_documents, text_size
from shardtrain.data.sources import Key, Row, every_row
from shardtrain.data.tokenizers import ends
from shardtrain.train.preflight import own_files
from shardtrain.utils.errors import ConfigError, ShardtrainError
from shardtrain.utils.log import kept_warnings

SMALL_BYTES = 2 * 2**20
"""Maximum size of a dataset that is read completely. This takes a slow tokenizer about one second."""
FIRST_ROWS = 64
"""Maximum number of rows to read from a larger dataset."""
FIRST_CHARACTERS = 2**17
"""Stop reading after the row that reaches this number of characters (about a tenth of a second)."""
_LANGUAGE_MODELS = ("language_model", "distillation")


def find_errors(
    config: Config, section: str, world_size: int | None
) -> tuple[list[ShardtrainError], list[str]]:
    """Open the data of the section "training" or "validation". Return the errors and notes.

    If ``world_size`` is given, also check that the training data are enough for all steps of the run.
    """
    part: Training | Validation = config.training if section == "training" else config.validation
    with kept_warnings() as notes:
        try:
            if config.task.name in _LANGUAGE_MODELS:
                end = _open(config, part, notes)
            else:
                end = _read_rows(config, part, world_size)
            trains = section == "training" and not config.checkpoint.create_seed_checkpoint
            if end is not None and world_size and trains and not _has_a_checkpoint(config):
                num_steps = derived.step_sizes(config, world_size).num_steps(0, end)
                check_enough(config.training, 0, num_steps, config.training.steps)
        except ShardtrainError as error:
            return [error], notes
        except (Exception, SystemExit) as error:
            return [own_files.explain(error, config)], notes
    return [], notes


def _open(config: Config, part: Training | Validation, notes: list[str]) -> int | None:
    """Open datasets of documents. Return the number of rows, or None if it is not known."""
    # Encode the first rows of each large dataset. Small datasets are read completely at the end.
    tokenizer = build_dataset.tokenizer_of(config)
    _check_ids(config, tokenizer.vocab_size)
    are_all_small = True
    for named in build_dataset.named_sources(config, part):
        if _is_remote(named.source):
            notes.append(
                f"{named.path_option}={named.source.dataset_path}: is on the hub, and was not checked"
            )
            are_all_small = False
            continue
        module = sources.find(named.source.dataset, option=named.dataset_option)
        request = build_dataset.request_for(config, named)
        if hasattr(module, "open_line"):
            module.open_line(request, tokenizer)
            continue
        source = module.open_source(request)
        # Skip small datasets here, because they are opened below with all their rows. This is impossible in a
        # stream.
        is_small = source.total_bytes is not None and source.total_bytes <= SMALL_BYTES
        if is_small and config.data.mode != "stream":
            continue

        # Encode the first rows.
        are_all_small = False
        encoder = open_encoder(tokenizer, config.data, named.source)
        build_dataset.check_template(source, encoder, named)
        policy = BadRows.of(config.data)
        stats = RowStats()
        rows = every_row(source)
        # A source without a known size may be a slow stream, so read only one row.
        if source.total_bytes is None:
            rows = itertools.islice(rows, 1)
        elif not is_small:
            rows = _first_rows(rows)
        for _ in read_documents(source, encoder, policy, stats, rows):
            pass
        if is_small:
            policy.judge(stats, f"dataset {named.name}")

    # This raises if data.add_eos or another option requires a token that the tokenizer lacks.
    ends.ends_of(tokenizer, config.data)

    # Read small datasets completely, which also counts their rows.
    if not are_all_small:
        return None
    is_validation = isinstance(part, Validation)
    loop = False if is_validation else None
    return build_dataset.open_data(config, part, shuffle=not is_validation, loop=loop).end


def _first_rows(rows: Iterator[tuple[Key, Row]]) -> Iterator[tuple[Key, Row]]:
    """Yield rows up to FIRST_ROWS or FIRST_CHARACTERS."""
    characters = 0
    for key, row in itertools.islice(rows, FIRST_ROWS):
        yield key, row
        characters += text_size(row)
        if characters >= FIRST_CHARACTERS:
            return


def _read_rows(config: Config, part: Training | Validation, world_size: int | None) -> int | None:
    """Read all rows of a small dataset of a row task. Return their number, or None if it is not small."""
    from shardtrain import tasks
    from shardtrain.tasks import _files

    task = tasks.open_task(config)
    split = "validation" if isinstance(part, Validation) else "train"
    if not config.task.name.endswith(".py"):
        _, named = _files.section_of(config, split)
        if _is_remote(named.source):
            return None
        source = _files.open_files(config, split)
        if source.total_bytes is None or source.total_bytes > SMALL_BYTES:
            return None
    # Open the data with the arguments that the run's first data-parallel rank will use.
    accumulation = num_batch_ranks = 1
    if world_size:
        accumulation = derived.accumulation_steps(config, world_size)
        num_batch_ranks = derived.data_parallel_degree(config, world_size)
    options: dict[str, Any] = (
        {"section": part, "loop": False} if isinstance(part, Validation) else {}
    )
    loader = task.open_dataloader(
        batch_rank=0, num_batch_ranks=num_batch_ranks, accumulation=accumulation, **options
    )
    _check_ids(config, loader.vocab)
    return loader.end


def _check_ids(config: Config, num_ids: int) -> None:
    """Raise ConfigError if the tokenizer has more ids than the vocabulary of the model or a frozen model."""
    problems = list(frozen_models.check_ids(config, num_ids))
    if problems:
        raise ConfigError(problems)


def _is_remote(source: DataSource) -> bool:
    """True if a dataset is on the hub. The checks do not contact the hub."""
    path = source.dataset_path or ""
    return "://" in path or (source.dataset == "huggingface" and not build_dataset.is_local(path))


def _has_a_checkpoint(config: Config) -> bool:
    """True if the run would resume from its own checkpoint. It then needs data for fewer steps."""
    if not config.checkpoint.enable:
        return False
    from shardtrain.checkpoint import retention
    from shardtrain.checkpoint.storage import folder_of

    try:
        return bool(retention.steps(folder_of(config.job.dump_folder, config.checkpoint.folder)))
    except (OSError, ShardtrainError):
        # Unknown, because the storage does not answer. The run itself will read it and report the error.
        return True
