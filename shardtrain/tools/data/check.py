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
from shardtrain.utils.redact import visible

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
        if self.bad:
            return DataError.exit_code
        return 0


def main(arguments: list[str]) -> int:
    """Run the verb and return its exit status."""
    number = VerbOption(number_of(), "8", once=True)
    taken = take(arguments, {"--world_size": number, "--nproc": number}, ("--json",), USAGE)
    loaded = load(*taken.configuration())
    world_size = taken.verb_options.get("--world_size") or taken.verb_options.get("--nproc")
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
    if "--json" in taken.verb_options:
        document = {
            "datasets": report.tables,
            "warnings": report.warnings,
            "problems": [*report.problems, *report.bad],
            "exit_code": report.exit_code,
        }
        print(json.dumps(document, indent=1))
    else:
        # Reasons quote the rows and the chat template.
        lines = [visible(line, lines=False) for line in _as_text(report)]
        print("\n".join(lines))
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
    epochs = _epochs(config, training, packings, world_size)
    for survey, epoch in zip(training, epochs, strict=True):
        packing = packings.get(survey.name)
        report.tables[survey.name] = _facts(survey, packing) | epoch
        _judge(survey, vocab_size, packing, BadRows.of(config.data), report)

    # Validation sets, and their documents that are also in the training data.
    if not config.validation.enable:
        return report
    packings = _packings(config, config.validation, tokenizer)
    for survey in surveys(config, config.validation, tokenizer):
        packing = packings.get(survey.name)
        facts = _facts(survey, packing)
        if packing:
            policy = BadRows.of(config.data)
            facts["sequences per pass"] = survey.rows(packing).num_rows
        else:
            # Evaluating a task needs each row of a held-out set, so bad rows cannot be skipped.
            policy = BadRows()
            facts["sequences per pass"] = survey.tally.documents
        report.tables[f"validation: {survey.name}"] = facts
        _judge(survey, vocab_size, packing, policy, report)
        num_shared, examples = survey.shared_with(training)
        if num_shared:
            if num_shared > len(examples):
                examples.append("...")
            report.warnings.append(
                f"validation set {survey.name}: {num_shared} of {survey.tally.documents} documents are in the "
                f"training data ({', '.join(examples)})"
            )
    return report


def _packings(
    config: Config, section: Training | Validation, tokenizer: Tokenizer
) -> dict[str, Packing]:
    """Return the packing of each source, by its name. A task of rows has none."""
    packings: dict[str, Packing] = {}
    if config.task.name in OF_NEXT_TOKENS:
        for named in build_dataset.named_sources(config, section):
            packings[named.name] = build_dataset.packing_of(config, section, tokenizer, named)
    return packings


def surveys(
    config: Config, section: Training | Validation, tokenizer: Tokenizer
) -> Iterator[Survey]:
    """Read the datasets of a section, one after the other."""
    for named in build_dataset.named_sources(config, section):
        module = sources.find(named.source.dataset, named.dataset_option)
        request = build_dataset.request_for(config, named)

        # Prepared shards have tokens instead of rows, so nothing needs to be encoded.
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
            split = "train" if section is config.training else "validation"
            encoder = _TaskEncoder(config, split, tokenizer)
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
        completed: Sequence[Mapping[str, Any] | BadRow] = rows
        if self._template is not None:
            completed = [attempt(self._template.row, row) for row in rows]
        documents: list[Document | BadRow] = []
        for row in self._task.encode(completed, self._split):
            if isinstance(row, BadRow):
                documents.append(row)
                continue
            tokens = []
            learned = []
            for text in self._task.shown(row):
                tokens.append(text.tokens)
                # A text without a mask, such as a prompt, is not learned.
                learned.append(text.learned or np.zeros(len(text.tokens), bool))
            all_tokens = np.concatenate(tokens).astype(np.int32)
            documents.append(Document(all_tokens, np.concatenate(learned)))
        return documents


class _Ticker:
    """Callback that adds up rows and updates the progress bar."""

    def __init__(self, progress: WorkProgress, total: int | None) -> None:
        self._progress = progress
        self._total = total
        self._read = 0

    def __call__(self, count: int) -> None:
        self._read += count
        # Without a known total, the share stays 0.
        share = self._read / self._total if self._total else 0.0
        self._progress.advance(share, 0)


def _facts(survey: Survey, packing: Packing | None) -> dict[str, Any]:
    """Return the facts of one dataset, by their printed names."""
    tally = survey.tally
    lengths = survey.lengths
    num_duplicates, examples = survey.duplicates()
    notes = []
    for note, count in tally.notes.most_common():
        noun = "row" if count == 1 else "rows"
        notes.append(f"{count} {noun}: {note}")
    facts = {
        "rows": tally.rows,
        "documents": tally.documents,
        "tokens": tally.tokens,
        "learned tokens": tally.learned,
        "bad rows": tally.num_bad,
        "empty rows": tally.harmless.total(),
        "reasons": tally.reasons(),
        "notes": notes,
        "shortest document": 0,
        "median document": 0,
        "longest document": 0,
    }
    if len(lengths):
        facts["shortest document"] = int(lengths.min())
        facts["median document"] = int(np.median(lengths))
        facts["longest document"] = int(lengths.max())
    # The last token of a document is only a target.
    if packing:
        facts["longer than seq_len"] = int((lengths - 1 > packing.seq_len).sum())
    facts["duplicates"] = num_duplicates
    facts["first duplicates"] = [f"{again} = {first}" for again, first in examples]
    facts["largest id"] = survey.max_id
    return facts


@dataclass
class _Counted:
    """Stand-in for a source in a mixture that is only counted."""

    mean_targets: float


def _epochs(
    config: Config, surveys: list[Survey], packings: dict[str, Packing], world_size: int
) -> list[dict[str, Any]]:
    """Return the sequences and steps of one pass over each training set, counted as training does.

    The last step of a pass may be smaller. In a mixture, the number of steps is that until the last row
    of a source is reached with the configured weights and stages. It is missing if the row is never
    reached.
    """
    if not packings:
        return [_row_epochs(config, surveys[0], world_size)]
    packed = [survey.rows(packings[survey.name]) for survey in surveys]
    counts = [rows.num_rows for rows in packed]

    # Position in the order of training after the last row of each source.
    ends: list[int | None] = list(counts)
    if len(surveys) > 1 and all(counts):
        feeds = [_Counted(rows.num_targets / rows.num_rows) for rows in packed]
        mixture = Mixture(build_dataset.stages_of(config, feeds))
        for index, count in enumerate(counts):
            ends[index] = mixture.first_position_beyond(index, count)

    sizes = derived.step_sizes(config, world_size)
    batch_size = derived.global_batch_size(config, world_size)
    tables = []
    for count, end in zip(counts, ends, strict=True):
        table: dict[str, Any] = {"sequences per epoch": count, "sequences per step": batch_size}
        if end is not None:
            table["steps per epoch"] = sizes.num_steps(0, end)
        tables.append(table)
    return tables


def _row_epochs(config: Config, survey: Survey, world_size: int) -> dict[str, Any]:
    """Return the rows of a task in an epoch, and its steps: the last one depends on ``training.last_batch``."""
    table = {
        "sequences per epoch": 0,
        "sequences per step": derived.global_batch_size(config, world_size),
    }
    if not survey.tally.documents:
        return table
    # Count good rows even if there are too many bad ones. The report has both numbers.
    data = dataclasses.replace(
        config.data,
        bad_rows="skip",
        bad_rows_max_fraction=1.0,
        long_rows_max_fraction=1.0,
    )
    task = tasks.open_task(dataclasses.replace(config, data=data))
    stream = task.open_dataloader(
        batch_rank=0,
        num_batch_ranks=derived.data_parallel_degree(config, world_size),
        accumulation=derived.accumulation_steps(config, world_size),
    )
    table["sequences per epoch"] = stream.num_samples or 0
    sizes = derived.step_sizes(config, world_size)
    table["steps per epoch"] = sizes.num_steps(0, stream.places_per_epoch or 0)
    return table


def _judge(
    survey: Survey, vocab_size: int, packing: Packing | None, policy: BadRows, report: Report
) -> None:
    """Add the problems of one dataset to the report."""
    tally = survey.tally
    title = f"dataset {survey.name}"
    report.bad.extend(survey.damage)

    # Bad rows. data.bad_rows allows none of them, or a share.
    if not policy.skip and tally.num_bad:
        allowed = as_limit(tally.num_bad, tally.rows)
        fix = f'correct or remove them, or set data.bad_rows="skip" and data.bad_rows_max_fraction={allowed}'
        if tally.num_bad == tally.rows:
            fix = "check training.dataset, data.format and the names of the columns"
        report.bad.append(f"{title} has {tally.num_bad} bad of {tally.rows} rows; {fix}")
    packed = survey.rows(packing) if packing else None
    try:
        if policy.skip or not tally.num_bad:
            policy.judge(tally, title)
        if packed and packed.packing.long_documents == "cut":
            policy.judge_long(packed.dropped, tally.documents, title)
    except DataError as error:
        report.bad.append(str(error))

    # No token with a target, or no sequence after packing. Damage would explain both.
    if packed and tally.documents and not survey.damage:
        if not tally.learned:
            report.bad.append(f"{title} has no token that counts in the loss; check data.format")
        elif not packed.num_rows:
            rule = f"has no sequence with packing {packed.packing.kind} and seq_len {packed.packing.seq_len}"
            report.bad.append(
                f"{title} {rule}; check data.long_documents, and documents of one token"
            )
    if packed:
        for lost in lost_documents(packed, tally.documents):
            report.warnings.append(f"{title}: {lost}")

    # An id beyond the vocabulary would fail in the embedding, in the middle of a run.
    if survey.max_id >= vocab_size:
        report.problems.append(
            f"{title} has the id {survey.max_id}, but the model's vocabulary has {vocab_size} ids; set "
            f"model.overrides.vocab_size to {survey.max_id + 1} or more"
        )
    num_duplicates, _ = survey.duplicates()
    if num_duplicates > DUPLICATES_WARN * max(1, tally.documents):
        share = 100 * num_duplicates / tally.documents
        report.warnings.append(
            f"{title}: {share:.1f} % of the documents are exact copies of earlier ones"
        )


def _as_text(report: Report) -> Iterator[str]:
    """Yield the lines of the printed report."""
    for name, table in report.tables.items():
        yield f"dataset {name}"
        width = max(len(fact) for fact in table)
        for fact, value in table.items():
            texts = value if isinstance(value, list) else [f"{value:,}"]
            for text in texts:
                yield f"  {fact:{width}}  {text}"
    for warning in report.warnings:
        yield f"warning: {warning}"
    for problem in report.problems + report.bad:
        yield f"problem: {problem}"
    if not report.warnings and not report.problems and not report.bad:
        yield "no problems"
