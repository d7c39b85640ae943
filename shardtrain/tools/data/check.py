"""``shardtrain data check``: read entire datasets and report statistics and problems before a run does."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardtrain import models, tasks
from shardtrain.config import Config, check, derived, load, machine_notes
from shardtrain.config.command_line import VerbOption, number_of, take
from shardtrain.config.schema import Training, Validation
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS
from shardtrain.data import build_dataset, sources
from shardtrain.data.documents.bad_rows import attempt
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.documents.encoded import Document, Encoder
from shardtrain.data.documents.read_documents import BadRows, as_limit
from shardtrain.data.documents.row_template import template_of
from shardtrain.data.mix import Mixture
from shardtrain.data.packing.packed_rows import Packing, lost_documents
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.data.sources import BadRow, Table
from shardtrain.data.tokenizers.open_tokenizer import Tokenizer
from shardtrain.launch import environment
from shardtrain.tools.data.survey import Survey, survey_line, survey_rows
from shardtrain.tools.data.work_progress import WorkProgress
from shardtrain.utils.errors import ConfigError, DataError

USAGE = """usage: shardtrain data check [CONFIG.toml] [--world_size N] [--json] [--section.key VALUE ...]

Read the datasets of a configuration from end to end and print counts, bad rows by reason with file and line, exact
duplicates, documents that training and validation share, lengths, ids beyond the model's vocabulary, and the steps of
an epoch. Every byte of prepared shards is verified.

  --world_size N   number of ranks, for the steps per epoch (default: that of `train` on this machine); also --nproc
  --json           print one JSON object

Exit status: 0 usable; 3 bad rows or nothing usable; 2 the configuration must be corrected.
"""
DUPLICATES_WARN = 0.01
"""Share of duplicates above which there is a warning."""


@dataclass(frozen=True)
class Report:
    """Findings in all datasets.

    Attributes:
        tables: Facts to print, by name, for each dataset.
        warnings: Messages that do not stop a run.
        problems: Errors of the configuration.
        bad: Errors of the data.
    """

    tables: dict[str, dict[str, Any]]
    warnings: list[str]
    problems: list[str]
    bad: list[str]

    @property
    def exit_code(self) -> int:
        """Exit status of the verb."""
        if self.problems:
            return ConfigError.exit_code
        return DataError.exit_code if self.bad else 0


def main(words: list[str]) -> int:
    """Run the verb and return its exit status."""
    options = {name: VerbOption(number_of(), "8", once=True) for name in ("--world_size", "--nproc")}
    found = take(words, options, ("--json",), USAGE)
    loaded = load(*found.configuration())
    world_size = found.own.get("--world_size") or found.own.get("--nproc")
    problems = list(check(loaded))
    if world_size:
        problems += machine_notes(loaded, world_size, None, None)
    if problems:
        raise ConfigError(problems)

    # The steps of an epoch depend on the number of ranks. By default, assume those that train would
    # start here.
    if not world_size:
        world_size = environment.choose_processes_here(loaded.config, None).count
    report = examine(loaded.config, world_size)

    if "--json" in found.own:
        document = {
            "datasets": report.tables,
            "warnings": report.warnings,
            "problems": [*report.problems, *report.bad],
            "exit_code": report.exit_code,
        }
        print(json.dumps(document, indent=1))
    else:
        print("\n".join(_as_text(report)))
    return report.exit_code


def examine(config: Config, world_size: int) -> Report:
    """Read all datasets of training, and those of validation if it is enabled."""
    tokenizer = build_dataset.tokenizer_of(config)
    report = Report({}, [], [], [])
    _, shape = models.configured(config.model)
    vocab_size = int(shape.vocab_size)
    if tokenizer.vocab_size > vocab_size:
        report.problems.append(
            f"the tokenizer has {tokenizer.vocab_size} ids, but the model's vocabulary has {vocab_size}; set "
            f"model.overrides.vocab_size to {tokenizer.vocab_size} or more"
        )

    training = list(surveys(config, config.training, tokenizer))
    packings = _packings(config, config.training, tokenizer)
    for survey, epoch in zip(training, _epochs(config, training, packings, world_size), strict=True):
        packing = packings.get(survey.name)
        report.tables[survey.name] = _facts(survey, packing) | epoch
        _judge(survey, config, vocab_size, packing, BadRows.of(config.data), report)

    # Validation sets, and their documents that are also in the training data.
    if config.validation.enable:
        packings = _packings(config, config.validation, tokenizer)
        for survey in surveys(config, config.validation, tokenizer):
            packing = packings.get(survey.name)
            name = f"validation: {survey.name}"
            count = survey.rows(packing).num_rows if packing else survey.tally.documents
            report.tables[name] = _facts(survey, packing) | {"sequences per pass": count}
            # Evaluating a task needs each row of a held-out set, so bad rows cannot be skipped.
            policy = BadRows.of(config.data) if packing else BadRows()
            _judge(survey, config, vocab_size, packing, policy, report)
            count, examples = survey.shared_with(training)
            if count:
                report.warnings.append(
                    f"validation set {survey.name}: {count} of {survey.tally.documents} documents are in the training "
                    f"data ({', '.join(examples)}{', ...' if count > len(examples) else ''})"
                )
    return report


def _packings(config: Config, section: Training | Validation, tokenizer: Tokenizer) -> dict[str, Packing]:
    """Return the packing of each source, by its name. A task of rows has none."""
    if config.task.name not in OF_NEXT_TOKENS:
        return {}
    every = build_dataset.named_sources(config, section)
    return {named.name: build_dataset.packing_of(config, section, tokenizer, named) for named in every}


def surveys(config: Config, section: Training | Validation, tokenizer: Tokenizer) -> Iterator[Survey]:
    """Read the datasets of a section, one after the other."""
    for named in build_dataset.named_sources(config, section):
        module = sources.find(named.source.dataset, named.dataset_option)
        request = build_dataset.request_for(config, named)
        if hasattr(module, "open_line"):
            line: ShardTokenBuffer = module.open_line(request, tokenizer)
            size = sum(file.bytes for file in line.index.files())
            with WorkProgress(f"checking {named.name}", size) as progress:
                yield survey_line(named.name, line, _Ticker(progress, line.num_documents))
            continue
        source = module.open_source(request)
        encoder: Encoder
        if config.task.name in OF_NEXT_TOKENS:
            encoder = open_encoder(tokenizer, config.data, named.source)
        else:
            encoder = _TaskEncoder(config, "train" if section is config.training else "validation", tokenizer)
        build_dataset.check_template(source, encoder, named)
        num_rows = source.num_rows if isinstance(source, Table) else None
        with WorkProgress(f"checking {named.name}", source.total_bytes) as progress:
            yield survey_rows(named.name, source, encoder, _Ticker(progress, num_rows))


class _TaskEncoder:
    """Adapter that lets the survey of documents read the rows of a task.

    A document concatenates all texts of a row.
    """

    fingerprint = ""

    def __init__(self, config: Config, split: str, tokenizer: Tokenizer) -> None:
        task = tasks.open_task(config)
        assert isinstance(task, tasks.RowTask)
        self.tokenizer = tokenizer
        self._task = task
        self._split = split
        self._template = template_of(config.data, None, "row")

    def encode(self, rows: Sequence[Mapping[str, Any]]) -> list[Document | BadRow]:
        """Encode rows as training does. Return one document per row, or the reason why it has none."""
        completed = rows if self._template is None else [attempt(self._template.row, row) for row in rows]
        encoded = self._task.encode(completed, self._split)
        return [one if isinstance(one, BadRow) else self._document(one) for one in encoded]

    def _document(self, row: Any) -> Document:
        texts = self._task.shown(row)
        learned = np.concatenate([text.learned or np.zeros(len(text.tokens), bool) for text in texts])
        return Document(np.concatenate([text.tokens for text in texts]).astype(np.int32), learned)


class _Ticker:
    """Callback that adds up rows and updates the progress bar."""

    def __init__(self, progress: WorkProgress, total: int | None) -> None:
        self._progress = progress
        self._total = total
        self._read = 0

    def __call__(self, count: int) -> None:
        self._read += count
        self._progress.advance(self._read / self._total if self._total else 0.0, 0)


def _facts(survey: Survey, packing: Packing | None) -> dict[str, Any]:
    """Return the facts of one dataset, by their printed names."""
    tally = survey.tally
    lengths = survey.lengths
    num_duplicates, examples = survey.duplicates()
    shape = (int(lengths.min()), int(np.median(lengths)), int(lengths.max())) if len(lengths) else (0, 0, 0)
    return {
        "rows": tally.rows,
        "documents": tally.documents,
        "tokens": tally.tokens,
        "learned tokens": tally.learned,
        "bad rows": tally.num_bad,
        "empty rows": tally.harmless.total(),
        "reasons": tally.reasons(),
        "notes": [f"{count} {'row' if count == 1 else 'rows'}: {note}" for note, count in tally.notes.most_common()],
        "shortest document": shape[0],
        "median document": shape[1],
        "longest document": shape[2],
        **({"longer than seq_len": int((lengths - 1 > packing.seq_len).sum())} if packing else {}),
        "duplicates": num_duplicates,
        "first duplicates": [f"{again} = {first}" for again, first in examples],
        "largest id": survey.max_id,
    }


@dataclass
class _Counted:
    """Stand-in for a source in a mixture that is only counted."""

    mean_targets: float


def _epochs(
    config: Config, surveys: list[Survey], packings: dict[str, Packing], world_size: int
) -> list[dict[str, Any]]:
    """Return the sequences and steps of one pass over each training set, counted as training does.

    The last step of a pass may be smaller. In a mixture, the number of steps is that until the last row of a source is
    reached with the configured weights and stages. It is missing if the row is never reached.
    """
    batch = derived.global_batch_size(config, world_size)
    if not packings:
        return [_row_epochs(config, surveys[0], world_size)]
    packed = [survey.rows(packings[survey.name]) for survey in surveys]
    rows = [one.num_rows for one in packed]
    ends: list[int | None] = list(rows)
    if len(surveys) > 1 and all(rows):
        feeds = [_Counted(one.num_targets / one.num_rows) for one in packed]
        mixture = Mixture(build_dataset.stages_of(config, feeds))
        ends = [mixture.first_position_beyond(index, count) for index, count in enumerate(rows)]
    tables = []
    for count, end in zip(rows, ends, strict=True):
        table: dict[str, Any] = {"sequences per epoch": count, "sequences per step": batch}
        if end is not None:
            table["steps per epoch"] = -(-end // batch)
        tables.append(table)
    return tables


def _row_epochs(config: Config, survey: Survey, world_size: int) -> dict[str, Any]:
    """Return the rows of a task in an epoch, and its steps: the last one depends on ``training.last_batch``."""
    table = {"sequences per epoch": 0, "sequences per step": derived.global_batch_size(config, world_size)}
    if survey.tally.documents:
        every_good_row = dataclasses.replace(
            config.data, bad_rows="skip", bad_rows_max_fraction=1.0, long_rows_max_fraction=1.0
        )
        stream = tasks.open_task(dataclasses.replace(config, data=every_good_row)).open_dataloader(
            batch_rank=0,
            num_batch_ranks=derived.data_parallel_degree(config, world_size),
            accumulation=derived.accumulation_steps(config, world_size),
        )
        table["sequences per epoch"] = stream.num_samples or 0
        table["steps per epoch"] = -(-(stream.places_per_epoch or 0) // stream.global_batch)
    return table


def _judge(
    survey: Survey, config: Config, vocab_size: int, packing: Packing | None, policy: BadRows, report: Report
) -> None:
    """Add the problems of one dataset to the report."""
    tally = survey.tally
    report.bad.extend(survey.damage)

    # Bad rows. data.bad_rows allows none of them, or a share.
    if not policy.skip and tally.num_bad:
        allowed = as_limit(tally.num_bad, tally.rows)
        fix = f'correct or remove them, or set data.bad_rows="skip" and data.bad_rows_max_fraction={allowed}'
        if tally.num_bad == tally.rows:
            fix = "check training.dataset, data.format and the names of the columns"
        report.bad.append(f"dataset {survey.name} has {tally.num_bad} bad of {tally.rows} rows; {fix}")
    packed = survey.rows(packing) if packing else None
    try:
        if policy.skip or not tally.num_bad:
            policy.judge(tally, f"dataset {survey.name}")
        if packed and packed.packing.long_documents == "cut":
            policy.judge_long(packed.dropped, tally.documents, f"dataset {survey.name}")
    except DataError as error:
        report.bad.append(str(error))

    # No token with a target, or no sequence after packing.
    if packed and tally.documents and not tally.learned and not survey.damage:
        report.bad.append(f"dataset {survey.name} has no token that is learned; check data.format")
    elif packed and tally.documents and not survey.damage and not packed.num_rows:
        rule = f"has no sequence with packing {packed.packing.kind} and seq_len {packed.packing.seq_len}"
        report.bad.append(f"dataset {survey.name} {rule}; check data.long_documents, and documents of one token")
    if packed:
        report.warnings.extend(f"dataset {survey.name}: {lost}" for lost in lost_documents(packed, tally.documents))
    if survey.max_id >= vocab_size:
        report.problems.append(
            f"dataset {survey.name} has the id {survey.max_id}, but the model's vocabulary has {vocab_size} ids; set "
            f"model.overrides.vocab_size to {survey.max_id + 1} or more"
        )
    num_duplicates, _ = survey.duplicates()
    if num_duplicates > DUPLICATES_WARN * max(1, tally.documents):
        share = 100 * num_duplicates / tally.documents
        report.warnings.append(
            f"dataset {survey.name}: {share:.1f} % of the documents are exact copies of earlier ones"
        )


def _as_text(report: Report) -> Iterator[str]:
    """Yield the lines of the printed report."""
    for name, table in report.tables.items():
        yield f"dataset {name}"
        width = max(map(len, table))
        for word, value in table.items():
            if isinstance(value, list):
                yield from (f"  {word:{width}}  {line}" for line in value)
            else:
                yield f"  {word:{width}}  {value:,}"
    yield from (f"warning: {line}" for line in report.warnings)
    yield from (f"problem: {line}" for line in [*report.problems, *report.bad])
    if not report.warnings and not report.problems and not report.bad:
        yield "no problems"
