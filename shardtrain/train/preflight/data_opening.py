"""The data of a configuration, opened as a run opens them: all of a small set, the first rows of a large one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from shardtrain.config import derived
from shardtrain.config.schema import Config, Training, Validation
from shardtrain.config.schema.data_options import DataSource
from shardtrain.data import build_dataset, sources
from shardtrain.data.data_budget import check_enough
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.documents.read_documents import BadRows, RowStats, read_documents, text_size
from shardtrain.data.sources import Key, Row, every_row
from shardtrain.data.tokenizers import ends
from shardtrain.train.preflight import own_files
from shardtrain.utils.errors import ShardtrainError
from shardtrain.utils.log import kept_warnings

SMALL_BYTES = 2 * 2**20
"""Bytes of a dataset up to which all of it is read: a second's work for a slow tokenizer."""
FIRST_ROWS = 64
"""Rows of a larger one that are read,"""
FIRST_CHARACTERS = 2**17
"""or fewer, once they have so many characters: a tenth of a second's work."""
_LANGUAGE_MODELS = ("language_model", "distillation")


def look(config: Config, section: str, world_size: int | None) -> tuple[list[ShardtrainError], list[str]]:
    """What opening the data of "training" or "validation" would raise, and lines worth telling.

    ``world_size`` lets the steps of the data be counted against those of the run.
    """
    part: Training | Validation = config.training if section == "training" else config.validation
    with kept_warnings() as notes:
        try:
            if config.task.name in _LANGUAGE_MODELS:
                end = _open(config, part, notes)
            else:
                end = _read_rows(config, part, world_size)
            steps_are_made = section == "training" and not config.checkpoint.create_seed_checkpoint
            if end is not None and world_size and steps_are_made and not _has_a_checkpoint(config):
                batch = derived.global_batch_size(config, world_size)
                check_enough(config.training, 0, -(-end // batch), config.training.steps)
        except ShardtrainError as error:
            return [error], notes
        except (Exception, SystemExit) as error:
            return [own_files.explain(error, config)], notes
    return [], notes


def _open(config: Config, part: Training | Validation, notes: list[str]) -> int | None:
    """Open sources of documents; gives where they end, where that is known."""
    tokenizer = build_dataset.tokenizer_of(config)
    every = build_dataset.named_sources(config, part)
    small = True
    for named in every:
        if _is_elsewhere(named.source):
            notes.append(f"{named.path_option}={named.source.dataset_path}: is on the hub, and was not looked at")
            small = False
            continue
        module = sources.find(named.source.dataset, option=named.dataset_option)
        request = build_dataset.request_for(config, named)
        if hasattr(module, "open_line"):
            module.open_line(request, tokenizer)
            continue
        source = module.open_source(request)
        # a small set that is not streamed is opened whole below, with all its rows
        is_small = source.total_bytes is not None and source.total_bytes <= SMALL_BYTES
        if is_small and config.data.mode != "stream":
            continue
        small = False
        encoder = open_encoder(tokenizer, config.data, named.source)
        build_dataset.check_template(source, encoder, named)
        policy = BadRows.of(config.data)
        tally = RowStats()
        rows = every_row(source)
        if not is_small:
            rows = itertools.islice(rows, 1) if source.total_bytes is None else _first(rows)
        for _ in read_documents(source, encoder, policy, tally, rows):
            pass
        if is_small:
            policy.judge(tally, f"dataset {named.name}")
    ends.ends_of(tokenizer, config.data)
    if not small:
        return None
    validates = isinstance(part, Validation)
    return build_dataset.open_data(config, part, shuffle=not validates, loop=False if validates else None).end


def _first(rows: Iterator[tuple[Key, Row]]) -> Iterator[tuple[Key, Row]]:
    """The first rows: by their number, and by their size."""
    characters = 0
    for keyed in itertools.islice(rows, FIRST_ROWS):
        yield keyed
        characters += text_size(keyed[1])
        if characters >= FIRST_CHARACTERS:
            return


def _read_rows(config: Config, part: Training | Validation, world_size: int | None) -> int | None:
    """Read the rows of a task; gives where they end."""
    from shardtrain import tasks
    from shardtrain.tasks import _files

    task = tasks.open_task(config)
    split = "validation" if isinstance(part, Validation) else "train"
    if not config.task.name.endswith(".py"):
        _, named = _files.section_of(config, split)
        if _is_elsewhere(named.source):
            return None
        source = _files.open_files(config, split)
        if source.total_bytes is None or source.total_bytes > SMALL_BYTES:
            return None
    # of a small set all rows are opened, as the run will
    ranks = max(1, world_size or 1)
    per_step = derived.accumulation_steps(config, ranks) if world_size else 1
    options: dict[str, Any] = {"section": part, "loop": False} if isinstance(part, Validation) else {}
    shares = derived.data_parallel_degree(config, ranks) if world_size else 1
    return task.open_dataloader(batch_rank=0, num_batch_ranks=shares, accumulation=per_step, **options).end


def _is_elsewhere(source: DataSource) -> bool:
    """Whether a dataset is on the hub, where nothing is asked before the run does."""
    path = source.dataset_path or ""
    return "://" in path or (source.dataset == "huggingface" and not build_dataset.is_local(path))


def _has_a_checkpoint(config: Config) -> bool:
    """Whether a run would continue from a step of its own, from which it counts."""
    if not config.checkpoint.enable:
        return False
    from shardtrain.checkpoint import retention
    from shardtrain.checkpoint.storage import folder_of

    try:
        return bool(retention.steps(folder_of(config.job.dump_folder, config.checkpoint.folder)))
    except (OSError, ShardtrainError):
        return True  # a store that is asked when the run begins
