"""Rules about data: names of datasets, mixtures and their stages, and options that only some kinds
of data use.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterator
from pathlib import Path

from shardtrain.config.derived import packing_kind
from shardtrain.config.load import Loaded
from shardtrain.config.options import nearest, options
from shardtrain.config.rules.values import problem
from shardtrain.config.schema.data_options import END_OPTIONS, ROLES, DataSource
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS, OF_PAIRS
from shardtrain.facts.file_kinds import ENDINGS
from shardtrain.utils.errors import Problem

SOURCES_FOLDER = Path(__file__).parents[2] / "data" / "sources"
FILE_DATASETS = (*ENDINGS, "tokens")
"""Datasets that read the user's files: they have a path, and neither splits nor configurations."""
NEED_A_PATH = (*FILE_DATASETS, "huggingface")
# Datasets that have neither splits nor subsets.
_WITHOUT_SPLITS = (*FILE_DATASETS, "python_stdlib", "c4_test")
_MAX_READERS = 65536
_MIN_ROW_BYTES = 1024
_MIN_ARTEFACT_BYTES = 2**28
# Options of [data] that only affect reading rows and their templates.
_TO_READ_ROWS = ("mode", "readers", "bad_rows", "bad_rows_max_fraction", "max_row_bytes")
_OF_TEMPLATES = ("tools_field", "chat_template", "learn_turn_separator", "turn_end")
_FIELDS = {
    "text": ("text_field",),
    "prompt_completion": ("prompt_field", "completion_field", *_OF_TEMPLATES),
    "chat": ("messages_field", *_OF_TEMPLATES),
}
"""Columns and templates that the encoder of each data.format reads."""
_FIELDS_OF_TASKS = {
    **dict.fromkeys(("classification", "masked_language_model"), ("text_field",)),
    **dict.fromkeys(OF_PAIRS, ("prompt_field", *_OF_TEMPLATES)),
    "kto": ("prompt_field", "completion_field", *_OF_TEMPLATES),
    "sequence_to_sequence": ("prompt_field", "completion_field"),
    "image_text": ("messages_field", *_OF_TEMPLATES),
}
"""Columns and templates that each task of rows reads, regardless of data.format."""
# Columns of all formats, without duplicates.
_ALL_FIELDS = tuple(dict.fromkeys(field for fields in _FIELDS.values() for field in fields))


def source_names() -> list[str]:
    """Return the names of the datasets of this package, from the files in data/sources without
    importing them.
    """
    return sorted(
        file.stem for file in SOURCES_FOLDER.glob("*.py") if not file.stem.startswith("_")
    )


def datasets(loaded: Loaded) -> dict[str, DataSource]:
    """Return the datasets that are read, by the prefix of their options: training,
    data.sources.web, validation.
    """
    c = loaded.config
    sources = {}
    for name, source in c.data.sources.items():
        sources[f"data.sources.{name}"] = source
    # Without a mixture, [training] names the only source.
    if not sources:
        sources["training"] = DataSource(c.training.dataset, c.training.dataset_path)
    if c.validation.enable:
        v = c.validation
        sources["validation"] = DataSource(v.dataset, v.dataset_path, split=v.split)
    return sources


def formats(loaded: Loaded) -> set[str]:
    """Return the formats of the datasets' rows: text, prompt_completion, chat."""
    default = loaded.config.data.format
    return {source.format or default for source in datasets(loaded).values()}


def is_changed(loaded: Loaded, option: str) -> bool:
    """True if a user set an option to a value other than its default."""
    default = options(type(loaded.config))[option].default
    return loaded.is_set(option) and loaded.value(option) != default


def check_dataset(loaded: Loaded) -> Iterator[Problem]:
    """Yield unknown datasets, and datasets without a path that they require."""
    names = source_names()
    for option, source in datasets(loaded).items():
        # The order of the cases matters: a path may look like the name of a dataset.
        name = source.dataset
        if not name and loaded.config.task.name.endswith(".py"):
            # A user's task file may read its own data.
            continue
        if not name:
            yield problem(
                loaded,
                f"{option}.dataset",
                rule="is not set, and no data are held out automatically",
                fix="name a dataset, or set validation.enable = false",
            )
        elif name.endswith(".py"):
            if not Path(name).is_file():
                yield problem(
                    loaded,
                    f"{option}.dataset",
                    rule="does not exist",
                    fix="name a file with a function open_source, or a dataset of this package",
                )
        elif name not in names:
            yield Problem(
                f"{option}.dataset",
                name,
                rule="is not a dataset",
                fix=_dataset_fix(option, name, names),
                where=loaded.where(f"{option}.dataset"),
            )
        elif name in NEED_A_PATH and not source.dataset_path:
            needed = "a file or folder"
            if name == "huggingface":
                needed = "a name on the hub, or a folder"
            yield Problem(
                f"{option}.dataset_path",
                None,
                rule=f'is not set, and the dataset "{name}" requires {needed}',
                fix="set it",
                where=loaded.where(f"{option}.dataset") or loaded.where(option),
            )


def _dataset_fix(option: str, name: str, names: list[str]) -> str:
    """Return a fix for an unknown dataset, which may be a path, a repository of the hub, or a
    misspelt name.
    """
    # A path belongs into dataset_path. The dataset names the reader of its files.
    if Path(name).exists():
        return f'set {option}.dataset_path to it, and {option}.dataset to its reader, such as "text" or "jsonl"'
    # OWNER/NAME is a repository of the hub.
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
        return (
            f'for the hub, use {option}.dataset="huggingface" with {option}.dataset_path="{name}"'
        )
    all_names = f"datasets are {', '.join(names)}"
    near = nearest(name, names)
    if near:
        return f"did you mean {near}? {all_names}"
    return all_names


def check_data_ranges(loaded: Loaded) -> Iterator[Problem]:
    """Yield numbers of [data] outside their range, and empty names of columns."""
    data = loaded.config.data
    if not 1 <= data.readers <= _MAX_READERS:
        yield problem(loaded, "data.readers", f"must be between 1 and {_MAX_READERS}", "use 256")
    if data.max_row_bytes < _MIN_ROW_BYTES:
        yield problem(
            loaded,
            "data.max_row_bytes",
            rule=f"must be at least {_MIN_ROW_BYTES}",
            fix="use for example 16777216",
        )
    if data.artefact_memory_bytes < _MIN_ARTEFACT_BYTES:
        yield problem(
            loaded,
            "data.artefact_memory_bytes",
            rule=f"must be at least {_MIN_ARTEFACT_BYTES}",
            fix="use for example 1073741824",
        )
    if data.artefact_seconds < 1:
        yield problem(loaded, "data.artefact_seconds", "must be at least 1", "use for example 30")
    if data.separator == "":
        yield problem(loaded, "data.separator", "must not be empty", "remove it")
    # An empty name would select no column, and each row would fail.
    for field in _ALL_FIELDS:
        if loaded.value(f"data.{field}") == "":
            yield problem(
                loaded,
                f"data.{field}",
                rule="must not be empty",
                fix="name a column, or remove it",
            )


def check_sources(loaded: Loaded) -> Iterator[Problem]:
    """Yield problems of each source of a mixture, and options that cannot be combined with a mixture."""
    data = loaded.config.data
    training = loaded.config.training
    if not data.sources:
        return
    for name, source in data.sources.items():
        yield from _check_source(loaded, name, source)
    # Stages have their own weights, which check_stages compares.
    has_positive_weight = any(source.weight > 0 for source in data.sources.values())
    if not data.stages and not has_positive_weight:
        yield Problem(
            "data.sources",
            None,
            rule="has no weight above 0",
            fix="set a positive weight for a source",
            where=loaded.where("data.sources"),
        )
    # The mixture replaces the single dataset and its epochs.
    for option in ("training.dataset", "training.dataset_path"):
        if is_changed(loaded, option):
            yield problem(
                loaded,
                option,
                rule="is not supported with [data.sources]",
                fix="remove it, or make it one of the sources",
            )
    if training.epochs is not None:
        yield problem(
            loaded,
            "training.epochs",
            rule="is not supported with [data.sources], which have their own epochs",
            fix="set training.steps, and data.sources.NAME.epochs",
        )


def _check_source(loaded: Loaded, name: str, source: DataSource) -> Iterator[Problem]:
    option = f"data.sources.{name}"
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        yield Problem(
            option,
            None,
            rule="must consist of letters, digits, _ and -",
            fix="use another name",
            where=loaded.where(option),
        )
    yield from _check_weight(loaded, f"{option}.weight", source.weight)
    # Epochs end a source, so they need a number of repetitions and must not be overridden by "repeat".
    if source.epochs is not None and source.epochs < 1:
        yield problem(
            loaded,
            f"{option}.epochs",
            rule="must be at least 1",
            fix="use 1 or more, or remove it",
        )
    if source.epochs is not None and loaded.config.training.on_data_end == "repeat":
        yield problem(
            loaded,
            "training.on_data_end",
            rule=f"repeats the data, which end with the epochs of {option}",
            fix=f'use "stop" or "error", or remove {option}.epochs',
        )
    # Only the format "text" reads text_field. The other formats have their own columns.
    source_format = source.format or loaded.config.data.format
    if source.text_field and source_format != "text":
        yield problem(
            loaded,
            f"{option}.text_field",
            rule=f"has no effect on the format {source_format}",
            fix="remove it",
        )
    if source.text_field == "":
        yield problem(
            loaded,
            f"{option}.text_field",
            rule="must not be empty",
            fix="name a column, or remove it",
        )


def check_stages(loaded: Loaded) -> Iterator[Problem]:
    """Yield stages with unknown sources, or with wrong ends: ends must rise, and only the last may
    be open.
    """
    stages = loaded.config.data.stages
    names = list(loaded.config.data.sources)
    if stages and len(names) < 2:
        yield Problem(
            "data.stages",
            None,
            rule=f"requires at least two sources, and there {'is one' if names else 'is no source'}",
            fix="write [data.sources.NAME] for each, or remove it",
            where=loaded.where("data.stages"),
        )
        return
    # Ends count from the start of the run, so they must increase.
    previous_end = 0
    for number, stage in enumerate(stages):
        option = f"data.stages.{number}"
        is_last = number == len(stages) - 1
        if stage.until_tokens < 0 or (stage.until_tokens == 0 and not is_last):
            yield Problem(
                f"{option}.until_tokens",
                stage.until_tokens,
                rule="must be above 0 because only the last stage may be open",
                fix="write the tokens of the run at which the stage ends",
                where=loaded.where(f"{option}.until_tokens") or loaded.where(option),
            )
        elif 0 < stage.until_tokens <= previous_end:
            yield problem(
                loaded,
                f"{option}.until_tokens",
                rule=f"must exceed the end of the previous stage, {previous_end} tokens",
                fix="count from the start of the run, in rising order",
            )
        previous_end = max(previous_end, stage.until_tokens)
        # A misspelled source would silently keep its previous weight.
        for name, weight in stage.weights.items():
            if name not in names:
                near = nearest(name, names)
                fix = f"did you mean {near}?"
                if near is None:
                    fix = f"sources are {', '.join(names)}"
                yield problem(
                    loaded,
                    f"{option}.weights.{name}",
                    rule="does not name a source",
                    fix=fix,
                )
            yield from _check_weight(loaded, f"{option}.weights.{name}", weight)
        if not any(weight > 0 for weight in stage.weights.values()):
            yield Problem(
                f"{option}.weights",
                None,
                rule="has no weight above 0",
                fix="set a positive weight for a source",
                where=loaded.where(f"{option}.weights") or loaded.where(option),
            )


def _check_weight(loaded: Loaded, option: str, weight: float) -> Iterator[Problem]:
    if not (weight >= 0 and math.isfinite(weight)):
        yield problem(loaded, option, "must be a finite number, not negative", "use 0 or more")


def check_kinds(loaded: Loaded) -> Iterator[Problem]:
    """Yield options of [data] that have no effect because of other options, or that streaming does not support."""
    # A user's task file may read any column.
    used_formats = formats(loaded)
    task = loaded.config.task.name
    if task in OF_NEXT_TOKENS or task in _FIELDS_OF_TASKS:
        yield from unread_fields(loaded, used_formats)
    if used_formats == {"chat"}:
        yield from chat_ends(loaded)
    yield from unused_data_options(loaded, used_formats)
    yield from stream_options(loaded)


def chat_ends(loaded: Loaded) -> Iterator[Problem]:
    """The chat template, not these options, determines the tokens around a conversation."""
    for field in END_OPTIONS:
        # add_bos also applies to the prompt of samples
        is_read = field == "add_bos" and loaded.config.metrics.sample_prompt
        if is_changed(loaded, f"data.{field}") and not is_read:
            yield problem(
                loaded,
                f"data.{field}",
                rule="has no effect on data.format chat, which uses the chat template",
                fix="change the template (data.chat_template), or remove it",
            )


def unused_data_options(loaded: Loaded, used_formats: set[str]) -> Iterator[Problem]:
    """Options that the packing, ``bad_rows`` or ``mode`` ignores."""
    data = loaded.config.data
    # Prepared shards store their packing, so "auto" is unknown here.
    has_shards = any(source.dataset == "tokens" for source in datasets(loaded).values())
    is_packing_known = not (has_shards and data.packing == "auto")
    is_concat = is_packing_known and packing_kind(data, used_formats) == "concat"
    if is_concat and is_changed(loaded, "data.long_documents"):
        yield problem(
            loaded,
            "data.long_documents",
            rule="has no effect on packing = concat, which cuts documents",
            fix='set data.packing = "first_fit" or "padded", or remove it',
        )
    if data.bad_rows != "skip" and is_changed(loaded, "data.bad_rows_max_fraction"):
        yield problem(
            loaded,
            "data.bad_rows_max_fraction",
            rule="has no effect while bad_rows stops the run",
            fix='set data.bad_rows = "skip", or remove it',
        )
    if data.mode == "memory" and is_changed(loaded, "data.readers"):
        yield problem(
            loaded,
            "data.readers",
            rule="has no effect on data in memory, which have an index",
            fix="remove it, or set another data.mode",
        )


def stream_options(loaded: Loaded) -> Iterator[Problem]:
    """The number of rows of a stream is unknown. Prepared shards store it, so they are not affected."""
    data = loaded.config.data
    training = loaded.config.training
    trained = [source for name, source in datasets(loaded).items() if name != "validation"]
    is_prepared = all(source.dataset == "tokens" for source in trained)
    if data.mode != "stream" or is_prepared:
        return
    fix = 'prepare the data first ("shardtrain data prepare"), or set data.mode = "memory"'
    rule = "requires the number of rows, which is unknown for a stream"
    if training.epochs is not None:
        yield problem(loaded, "training.epochs", rule, f'{fix}; or training.on_data_end = "stop"')
    if data.bad_rows == "skip":
        yield problem(
            loaded,
            "data.bad_rows",
            rule="cannot count the bad rows of a stream in advance",
            fix=fix,
        )
    for name, source in data.sources.items():
        if source.epochs is not None and len(data.sources) > 1 and source.dataset != "tokens":
            yield problem(loaded, f"data.sources.{name}.epochs", rule, fix)


def unread_fields(loaded: Loaded, used_formats: set[str]) -> Iterator[Problem]:
    """Columns and templates that neither the formats of the rows nor the task reads."""
    task = loaded.config.task.name
    if task in OF_NEXT_TOKENS:
        reader = f"data.format {' or '.join(sorted(used_formats))}"
        fields_read: set[str] = set()
        for name in used_formats:
            fields_read.update(_FIELDS[name])
    else:
        reader = f"task.name = {task}"
        fields_read = set(_FIELDS_OF_TASKS[task])
    # Only report an option that the user has changed.
    for field in _ALL_FIELDS:
        if field in fields_read or not is_changed(loaded, f"data.{field}"):
            continue
        fix = "remove it"
        if task in OF_NEXT_TOKENS:
            readers = [f'"{name}"' for name, fields in _FIELDS.items() if field in fields]
            fix = f"set data.format = {' or '.join(readers)}, or remove it"
        yield problem(loaded, f"data.{field}", f"has no effect on {reader}", fix)


def check_templates(loaded: Loaded) -> Iterator[Problem]:
    """Yield templates with syntax errors, and templates for columns or roles that the data format does not use."""
    data = loaded.config.data
    yield from _check_template(loaded, "data.template", data.template, data.format, data.text_field)
    for name, source in data.sources.items():
        source_format = source.format or data.format
        text_field = source.text_field or data.text_field
        option = f"data.sources.{name}.template"
        yield from _check_template(loaded, option, source.template, source_format, text_field)


def _check_template(
    loaded: Loaded, option: str, entries: dict[str, str], row_format: str, text_field: str
) -> Iterator[Problem]:
    """Yield problems of one template, whose rows have ``row_format`` and whose text is in ``text_field``."""
    if not entries:
        return
    data = loaded.config.data
    where = loaded.where(option)
    # Check the syntax before the first row is read.
    yield from _check_jinja(option, entries, where)
    # Other tasks choose the columns themselves.
    if loaded.config.task.name not in OF_NEXT_TOKENS:
        return
    if row_format == "chat":
        unknown = [name for name in entries if name not in ROLES]
        if unknown:
            yield Problem(
                option,
                None,
                rule=f"has the entry {unknown[0]!r}, which is not a role of a conversation",
                fix=f"use {', '.join(ROLES)}",
                where=where,
            )
        elif "user" not in entries or "assistant" not in entries:
            yield Problem(
                option,
                None,
                rule="must have both user and assistant",
                fix="add the missing one",
                where=where,
            )
        return
    columns = [data.prompt_field, data.completion_field]
    if row_format == "text":
        columns = [text_field]
    if not set(columns) & set(entries):
        yield Problem(
            option,
            None,
            rule=f"creates {', '.join(entries)}, and data.format {row_format} reads {' and '.join(columns)}",
            fix="name its entries like the columns that are read",
            where=where,
        )


def _check_jinja(option: str, entries: dict[str, str], where: str) -> Iterator[Problem]:
    if importlib.util.find_spec("jinja2") is None:
        yield Problem(
            option,
            None,
            rule="requires the jinja2 library",
            fix='pip install "shardtrain[hf]"',
            where=where,
        )
        return
    # jinja2 is optional, so it is imported only here.
    import jinja2

    for name, text in entries.items():
        try:
            jinja2.Environment().parse(text)
        except (jinja2.TemplateSyntaxError, ValueError, RecursionError) as error:
            message = "it nests too deeply"
            if isinstance(error, jinja2.TemplateSyntaxError):
                message = str(error.message)
            elif isinstance(error, ValueError):
                message = "it contains a number with too many digits"
            yield Problem(
                f"{option}.{name}",
                text,
                rule=f"is not a Jinja template ({message})",
                fix="write columns like {{ question }}",
                where=where,
            )


def check_validation(loaded: Loaded) -> Iterator[Problem]:
    """Yield options of the validation that conflict with a pipeline, a mixture or a stream."""
    c = loaded.config
    if not c.validation.enable:
        return
    # A pipeline is built for one sequence length.
    is_pipeline = c.parallelism.pipeline_parallel_degree > 1
    if is_pipeline and c.validation.seq_len != c.training.seq_len:
        yield problem(
            loaded,
            "validation.seq_len",
            rule=f"must be training.seq_len {c.training.seq_len}, for which the pipeline is built",
            fix=f"use {c.training.seq_len}",
        )
    if not c.validation.per_epoch:
        return

    # validation.freq and validation.per_epoch determine the same interval.
    if is_changed(loaded, "validation.freq"):
        yield problem(
            loaded,
            "validation.freq",
            rule="has no effect with validation.per_epoch",
            fix="remove one of the two",
        )
    if c.data.sources:
        yield problem(
            loaded,
            "validation.per_epoch",
            rule="requires a single dataset, and each of [data.sources] has its own epochs",
            fix="use validation.freq",
        )
    elif c.data.mode == "stream" and c.training.dataset != "tokens":
        yield problem(
            loaded,
            "validation.per_epoch",
            rule="requires the number of rows, which is unknown for a stream",
            fix="use validation.freq, or prepare the data first",
        )


def data_notes(loaded: Loaded) -> list[str]:
    """Return notes about options of data that have no effect or probably an unwanted one."""
    c = loaded.config
    sources = datasets(loaded)
    notes = []
    # Packing can cut rows of prompts and answers in two, or let them attend to each other. Both harm training.
    if c.data.packing == "concat" and formats(loaded) != {"text"}:
        notes.append(
            'data.packing="concat": a question and its answer may be in different sequences; '
            '"first_fit" keeps them '
            "together"
        )
    if c.data.document_mask == "off" and formats(loaded) != {"text"} and c.data.packing != "padded":
        notes.append(
            'data.document_mask="off": examples that share a sequence attend to each other; "auto" keeps them apart'
        )
    notes += _shard_notes(loaded, sources)
    notes += _split_notes(loaded, sources)
    # Weights of 1 are the default.
    weights = []
    for name, source in c.data.sources.items():
        if source.weight != 1.0:
            weights.append(f"data.sources.{name}.weight")
    if c.data.stages and weights:
        notes.append(
            f"{', '.join(weights)}: without effect with [[data.stages]], which have their own weights",
        )
    return notes + _validation_notes(loaded, sources)


def _shard_notes(loaded: Loaded, sources: dict[str, DataSource]) -> list[str]:
    """Return a note about options of reading and tokenizing if all data are prepared shards."""
    # Other datasets still read and tokenize rows with these options.
    if any(source.dataset != "tokens" for source in sources.values()):
        return []
    keys = (*_TO_READ_ROWS, *END_OPTIONS, "template", *_ALL_FIELDS)
    unused = [f"data.{key}" for key in keys if is_changed(loaded, f"data.{key}")]
    if not unused:
        return []
    return [f"{', '.join(unused)}: without effect on prepared shards, which are tokenized already"]


def _split_notes(loaded: Loaded, sources: dict[str, DataSource]) -> list[str]:
    """Return notes about splits and subsets of datasets that have neither."""
    c = loaded.config
    notes = []
    if all(source.dataset in _WITHOUT_SPLITS for source in sources.values()):
        options_of_splits = ["data.split", "data.subset", "data.streaming"]
        if c.validation.enable:
            options_of_splits.append("validation.split")
        unused = [option for option in options_of_splits if is_changed(loaded, option)]
        if unused:
            names = ", ".join(sorted({source.dataset for source in sources.values()}))
            notes.append(
                f"{', '.join(unused)}: without effect on {names}, which has neither splits nor subsets",
            )
    for name, source in c.data.sources.items():
        unused = []
        if source.split is not None:
            unused.append(f"data.sources.{name}.split")
        if source.subset is not None:
            unused.append(f"data.sources.{name}.subset")
        if unused and source.dataset in _WITHOUT_SPLITS:
            dataset = source.dataset
            notes.append(
                f"{', '.join(unused)}: without effect on {dataset}, which has neither splits nor subsets",
            )
    return notes


def _validation_notes(loaded: Loaded, sources: dict[str, DataSource]) -> list[str]:
    """Return notes about a validation on training data, and about its batch size in a pipeline."""
    c = loaded.config
    validation = sources.get("validation")
    if validation is None:
        return []
    notes = []
    # The data are the same only if dataset, path and split are. Some datasets have a single split.
    has_one_split = validation.dataset in (*_WITHOUT_SPLITS, "c4_mini", "c4_validation")
    for option, source in sources.items():
        if option == "validation":
            continue
        validated = (validation.dataset, validation.dataset_path)
        is_same_path = validated == (source.dataset, source.dataset_path)
        is_same_split = has_one_split or validation.split == (source.split or c.data.split)
        if is_same_path and is_same_split:
            notes.append(
                f"validation.dataset: also the data of {option}, so the loss is not on held-out data",
            )
    is_pipeline = c.parallelism.pipeline_parallel_degree > 1
    if is_pipeline and is_changed(loaded, "validation.local_batch_size"):
        notes.append(
            "validation.local_batch_size: without effect, a pipeline uses the batch size of training",
        )
    return notes
