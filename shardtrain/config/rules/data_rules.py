"""Rules of data: names of datasets, mixtures and their stages, and options that go with some kinds of data alone."""

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
from shardtrain.config.schema.data_options import DataSource
from shardtrain.config.schema.task_options import OF_NEXT_TOKENS, OF_PAIRS
from shardtrain.utils.errors import Problem

SOURCES_FOLDER = Path(__file__).parents[2] / "data" / "sources"
FILE_DATASETS = ("jsonl", "text", "tsv", "parquet", "tokens")
"""Datasets that read files of the user's alone: they have a path, and neither splits nor configurations."""
NEED_A_PATH = (*FILE_DATASETS, "huggingface")
_WITHOUT_SPLITS = (*FILE_DATASETS, "python_stdlib", "c4_test")
_MAX_READERS = 65536
_MIN_ROW_BYTES = 1024
_MIN_ARTEFACT_BYTES = 2**28
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
}
"""Columns and templates that each task of rows reads, whatever data.format is."""
_ALL_FIELDS = tuple(dict.fromkeys(field for fields in _FIELDS.values() for field in fields))
_ENDS = ("add_bos", "add_eos", "separator")


def source_names() -> list[str]:
    """Return the datasets of this package: the files of data/sources, which are not imported."""
    return sorted(file.stem for file in SOURCES_FOLDER.glob("*.py") if not file.stem.startswith("_"))


def datasets(loaded: Loaded) -> dict[str, DataSource]:
    """Return what the config reads, by the start of its options' names: training, data.sources.web, validation."""
    c = loaded.config
    found = {f"data.sources.{name}": source for name, source in c.data.sources.items()}
    if not found:
        found["training"] = DataSource(c.training.dataset, c.training.dataset_path)
    if c.validation.enable:
        v = c.validation
        found["validation"] = DataSource(v.dataset, v.dataset_path, split=v.split)
    return found


def formats(loaded: Loaded) -> set[str]:
    """Return what the rows of the datasets are: text, prompt_completion, chat."""
    return {source.format or loaded.config.data.format for source in datasets(loaded).values()}


def is_changed(loaded: Loaded, option: str) -> bool:
    """Whether somebody wrote an option down with another value than its default."""
    return loaded.is_set(option) and loaded.value(option) != options()[option].default


def check_dataset(loaded: Loaded) -> Iterator[Problem]:
    """Names of datasets, and the path that some of them need."""
    names = source_names()
    for option, source in datasets(loaded).items():
        name = source.dataset
        if not name and loaded.config.task.name.endswith(".py"):
            continue  # the task file reads what it likes
        if not name:
            rule = "is not set, and no data are held out by themselves"
            yield problem(loaded, f"{option}.dataset", rule, "name a dataset, or set validation.enable = false")
        elif name.endswith(".py"):
            if not Path(name).is_file():
                fix = "name a file with a function open_source, or a dataset of this package"
                yield problem(loaded, f"{option}.dataset", "does not exist", fix)
        elif name not in names:
            near = nearest(name, names)
            # What was meant: a path of files, a repository of the hub, or a name that is misspelt
            if Path(name).exists():
                fix = f"set {option}.dataset_path to it, and {option}.dataset to what reads it, "
                fix += 'such as "text" or "jsonl"'
            elif re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name):
                fix = f'one of the hub is {option}.dataset="huggingface" with {option}.dataset_path="{name}"'
            else:
                fix = (f"did you mean {near}? " if near else "") + f"datasets are {', '.join(names)}"
            yield Problem(f"{option}.dataset", name, "is not a dataset", fix, loaded.where(f"{option}.dataset"))
        elif name in NEED_A_PATH and not source.dataset_path:
            what = "a file or folder" if name != "huggingface" else "a name on the hub, or a folder"
            where = loaded.where(f"{option}.dataset") or loaded.where(option)
            rule = f'is not set, and the dataset "{name}" reads {what} of yours'
            yield Problem(f"{option}.dataset_path", None, rule, "set it", where)


def check_data_ranges(loaded: Loaded) -> Iterator[Problem]:
    """Numbers of [data] that lie outside their range, and columns without a name."""
    data = loaded.config.data
    if not 1 <= data.readers <= _MAX_READERS:
        yield problem(loaded, "data.readers", f"must lie between 1 and {_MAX_READERS}", "use 256")
    if data.max_row_bytes < _MIN_ROW_BYTES:
        yield problem(loaded, "data.max_row_bytes", f"must be at least {_MIN_ROW_BYTES}", "use for example 16777216")
    if data.artefact_memory_bytes < _MIN_ARTEFACT_BYTES:
        rule = f"must be at least {_MIN_ARTEFACT_BYTES}"
        yield problem(loaded, "data.artefact_memory_bytes", rule, "use for example 1073741824")
    if data.artefact_seconds < 1:
        yield problem(loaded, "data.artefact_seconds", "must be at least 1", "use for example 30")
    if data.separator == "":
        yield problem(loaded, "data.separator", "must not be empty", "remove it")
    for field in _ALL_FIELDS:
        if loaded.value(f"data.{field}") == "":
            yield problem(loaded, f"data.{field}", "must not be empty", "name a column, or remove it")


def check_sources(loaded: Loaded) -> Iterator[Problem]:
    """Each source of a mixture, and what may not be set beside them."""
    data = loaded.config.data
    training = loaded.config.training
    if not data.sources:
        return
    for name, source in data.sources.items():
        option = f"data.sources.{name}"
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            rule = "is a name of other characters than letters, digits, _ and -"
            fix = "use another name"
            yield Problem(option, None, rule, fix, loaded.where(option))
        yield from _check_weight(loaded, f"{option}.weight", source.weight)
        if source.epochs is not None and source.epochs < 1:
            yield problem(loaded, f"{option}.epochs", "must be at least 1", "use 1 or more, or remove it")
        if source.epochs is not None and training.on_data_end == "repeat":
            rule = f"repeats the data, which end with the epochs of {option}"
            yield problem(loaded, "training.on_data_end", rule, f'use "stop" or "error", or remove {option}.epochs')
        form = source.format or data.format
        if source.text_field and form != "text":
            yield problem(loaded, f"{option}.text_field", f"has no effect on the format {form}", "remove it")
        if source.text_field == "":
            yield problem(loaded, f"{option}.text_field", "must not be empty", "name a column, or remove it")
    if not data.stages and not any(source.weight > 0 for source in data.sources.values()):
        where = loaded.where("data.sources")
        yield Problem("data.sources", None, "has no weight above 0", "give a source a positive weight", where)
    for option in ("training.dataset", "training.dataset_path"):
        if is_changed(loaded, option):
            yield problem(loaded, option, "does not go with [data.sources]", "remove it, or make it one of the sources")
    if training.epochs is not None:
        rule = "does not go with [data.sources], which have passes of their own"
        yield problem(loaded, "training.epochs", rule, "set training.steps, and data.sources.NAME.epochs")


def check_stages(loaded: Loaded) -> Iterator[Problem]:
    """Stages name sources, rise in tokens, and only the last may be open."""
    stages = loaded.config.data.stages
    names = list(loaded.config.data.sources)
    if stages and len(names) < 2:
        where = loaded.where("data.stages")
        rule = f"needs several sources, and there {'is 1' if names else 'are none'}"
        yield Problem("data.stages", None, rule, "write [data.sources.NAME] for each, or remove it", where)
        return
    before = 0
    for number, stage in enumerate(stages):
        option = f"data.stages.{number}"
        last = number == len(stages) - 1
        if stage.until_tokens < 0 or (stage.until_tokens == 0 and not last):
            where = loaded.where(f"{option}.until_tokens") or loaded.where(option)
            rule = "must be above 0, for only the last stage is open"
            fix = "write the tokens of the run at which the stage ends"
            yield Problem(f"{option}.until_tokens", stage.until_tokens, rule, fix, where)
        elif 0 < stage.until_tokens <= before:
            rule = f"does not lie beyond the stage before it, which ends at {before} tokens"
            yield problem(loaded, f"{option}.until_tokens", rule, "count from the start of the run, in rising order")
        before = max(before, stage.until_tokens)
        for name, weight in stage.weights.items():
            if name not in names:
                near = nearest(name, names)
                fix = f"did you mean {near}?" if near else f"sources are {', '.join(names)}"
                yield problem(loaded, f"{option}.weights.{name}", "is the weight of no source", fix)
            yield from _check_weight(loaded, f"{option}.weights.{name}", weight)
        if not any(weight > 0 for weight in stage.weights.values()):
            rule = "has no weight above 0"
            fix = "give a source a positive weight"
            yield Problem(
                f"{option}.weights", None, rule, fix, loaded.where(f"{option}.weights") or loaded.where(option)
            )


def _check_weight(loaded: Loaded, option: str, weight: float) -> Iterator[Problem]:
    if not (weight >= 0 and math.isfinite(weight)):
        yield problem(loaded, option, "must be a finite number, not negative", "use 0 or more")


def check_kinds(loaded: Loaded) -> Iterator[Problem]:
    """Options of [data] that the rest of it leaves without effect, or that need what a stream has not."""
    data = loaded.config.data
    training = loaded.config.training

    # A task file of the user's may read any column
    used = formats(loaded)
    task = loaded.config.task.name
    if task in OF_NEXT_TOKENS or task in _FIELDS_OF_TASKS:
        yield from _check_fields(loaded, used)
    if used == {"chat"}:
        for field in _ENDS:
            is_read = field == "add_bos" and loaded.config.metrics.sample_prompt  # begins the sample's prompt
            if is_changed(loaded, f"data.{field}") and not is_read:
                rule = "has no effect on data.format chat: a conversation is what the chat template writes"
                yield problem(loaded, f"data.{field}", rule, "change the template (data.chat_template), or remove it")

    # What packing, bad rows and the mode leave without effect
    packing = packing_kind(data, used)
    prepared = any(source.dataset == "tokens" for source in datasets(loaded).values())
    if packing == "concat" and not (prepared and data.packing == "auto") and is_changed(loaded, "data.long_documents"):
        fix = 'set data.packing = "first_fit" or "padded", or remove it'
        yield problem(loaded, "data.long_documents", "has no effect on packing = concat, which cuts documents", fix)
    if data.bad_rows != "skip" and is_changed(loaded, "data.bad_rows_max_fraction"):
        rule = "has no effect while bad_rows stops the run"
        fix = 'set data.bad_rows = "skip", or remove it'
        yield problem(loaded, "data.bad_rows_max_fraction", rule, fix)
    if data.mode == "memory" and is_changed(loaded, "data.readers"):
        rule = "has no effect on data in memory, which have an index"
        yield problem(loaded, "data.readers", rule, "remove it, or set another data.mode")

    # A stream has no number of rows before it is read; prepared shards have one whatever the mode is
    reads = any(source.dataset != "tokens" for name, source in datasets(loaded).items() if name != "validation")
    if data.mode != "stream" or not reads:
        return
    way_out = 'prepare the data first ("shardtrain data prepare"), or set data.mode = "memory"'
    if training.epochs is not None:
        rule = "needs the number of rows, which a stream has not"
        yield problem(loaded, "training.epochs", rule, f'{way_out}; or training.on_data_end = "stop"')
    if data.bad_rows == "skip":
        yield problem(loaded, "data.bad_rows", "cannot count the bad rows of a stream beforehand", way_out)
    for name, source in data.sources.items():
        if source.epochs is not None and len(data.sources) > 1 and source.dataset != "tokens":
            rule = "needs the number of rows, which a stream has not"
            yield problem(loaded, f"data.sources.{name}.epochs", rule, way_out)


def _check_fields(loaded: Loaded, used: set[str]) -> Iterator[Problem]:
    """Columns and templates that are set, and that neither the formats ``used`` nor the task of rows reads."""
    task = loaded.config.task.name
    reader = f"data.format {' or '.join(sorted(used))}"
    read = {field for form in used for field in _FIELDS[form]}
    if task not in OF_NEXT_TOKENS:
        reader, read = f"task.name = {task}", set(_FIELDS_OF_TASKS[task])
    for field in _ALL_FIELDS:
        if field in read or not is_changed(loaded, f"data.{field}"):
            continue
        fix = "remove it"
        if task in OF_NEXT_TOKENS:
            forms = " or ".join(f'"{form}"' for form, fields in _FIELDS.items() if field in fields)
            fix = f"set data.format = {forms}, or remove it"
        yield problem(loaded, f"data.{field}", f"has no effect on {reader}", fix)


def check_templates(loaded: Loaded) -> Iterator[Problem]:
    """Entries of a template make columns that are read, and turns of a conversation that it can have."""
    data = loaded.config.data
    task = loaded.config.task
    found = {"data": (data.template, data.format, data.text_field)}
    for name, source in data.sources.items():
        form = source.format or data.format
        field = source.text_field or data.text_field
        found[f"data.sources.{name}"] = (source.template, form, field)
    for option, (entries, form, text_field) in found.items():
        if not entries:
            continue
        where = loaded.where(f"{option}.template")
        yield from _check_jinja(f"{option}.template", entries, where)
        if task.name in OF_NEXT_TOKENS and form == "chat":
            known = ("system", "user", "assistant")
            unknown = [name for name in entries if name not in known]
            if unknown:
                rule = f"has the entry {unknown[0]!r}, which is not a turn of a conversation"
                yield Problem(f"{option}.template", None, rule, f"use {', '.join(known)}", where)
            elif "user" not in entries or "assistant" not in entries:
                rule = "has no user or no assistant, of which one is answered and one is learned"
                yield Problem(f"{option}.template", None, rule, "give both", where)
            continue
        read = {"text": (text_field,), "prompt_completion": (data.prompt_field, data.completion_field)}.get(form, ())
        if task.name in OF_NEXT_TOKENS and not set(read) & set(entries):
            rule = f"makes {', '.join(entries)}, and data.format {form} reads {' and '.join(read)}"
            yield Problem(f"{option}.template", None, rule, "name its entries as the columns that are read", where)


def _check_jinja(option: str, entries: dict[str, str], where: str) -> Iterator[Problem]:
    if importlib.util.find_spec("jinja2") is None:
        yield Problem(option, None, "needs the jinja2 library", 'pip install "shardtrain[hf]"', where)
        return
    import jinja2

    for name, text in entries.items():
        try:
            jinja2.Environment().parse(text)
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            message = error.message if isinstance(error, jinja2.TemplateSyntaxError) else "it nests too deeply"
            rule = f"is not a Jinja template ({message})"
            fix = "write columns like {{ question }}"
            yield Problem(f"{option}.{name}", text, rule, fix, where)


def check_validation(loaded: Loaded) -> Iterator[Problem]:
    """What a pipeline fixes for training it fixes for validation too."""
    c = loaded.config
    piped = c.parallelism.pipeline_parallel_degree > 1
    if c.validation.enable and piped and c.validation.seq_len != c.training.seq_len:
        rule = f"is not training.seq_len {c.training.seq_len}, for which the pipeline is built"
        yield problem(loaded, "validation.seq_len", rule, f"use {c.training.seq_len}")
    if c.validation.enable and c.validation.per_epoch and is_changed(loaded, "validation.freq"):
        rule = "has no effect beside validation.per_epoch"
        yield problem(loaded, "validation.freq", rule, "remove one of the two")
    reads = c.training.dataset != "tokens"
    if c.validation.enable and c.validation.per_epoch and not c.data.sources and c.data.mode == "stream" and reads:
        rule = "needs the number of rows, which a stream has not"
        yield problem(loaded, "validation.per_epoch", rule, "use validation.freq, or prepare the data first")
    if c.validation.enable and c.validation.per_epoch and c.data.sources:
        rule = "needs the rows of one dataset, and [data.sources] has passes of its own for each"
        yield problem(loaded, "validation.per_epoch", rule, "use validation.freq")


def data_notes(loaded: Loaded) -> list[str]:
    """Return what about data is not an error and still worth a line."""
    c = loaded.config
    found = datasets(loaded)
    notes = []
    if c.data.packing == "concat" and formats(loaded) != {"text"}:
        notes.append(
            'data.packing="concat": an answer can end in another sequence than that of its question; "first_fit" keeps '
            "them together"
        )
    if c.data.document_mask == "off" and formats(loaded) != {"text"} and c.data.packing != "padded":
        notes.append(
            'data.document_mask="off": examples that share a sequence attend to each other; "auto" keeps them apart'
        )
    if all(source.dataset == "tokens" for source in found.values()):
        fields = [*_ENDS, "template", *_ALL_FIELDS]
        idle = [f"data.{key}" for key in (*_TO_READ_ROWS, *fields) if is_changed(loaded, f"data.{key}")]
        if idle:
            notes.append(f"{', '.join(idle)}: without effect on prepared shards, whose rows are read and tokenized")
    if all(source.dataset in _WITHOUT_SPLITS for source in found.values()):
        idle = [f"data.{key}" for key in ("split", "subset", "streaming") if is_changed(loaded, f"data.{key}")]
        idle += ["validation.split"] * (c.validation.enable and is_changed(loaded, "validation.split"))
        if idle:
            names = ", ".join(sorted({source.dataset for source in found.values()}))
            notes.append(f"{', '.join(idle)}: without effect on {names}, which has neither splits nor subsets")
    for name, source in c.data.sources.items():
        idle = [f"data.sources.{name}.{key}" for key in ("split", "subset") if getattr(source, key) is not None]
        if idle and source.dataset in _WITHOUT_SPLITS:
            notes.append(f"{', '.join(idle)}: without effect on {source.dataset}, which has neither splits nor subsets")
    idle = [f"data.sources.{name}.weight" for name, source in c.data.sources.items() if source.weight != 1.0]
    if c.data.stages and idle:
        notes.append(f"{', '.join(idle)}: without effect beside [[data.stages]], which have weights of their own")
    return notes + _validation_notes(loaded, found)


def _validation_notes(loaded: Loaded, found: dict[str, DataSource]) -> list[str]:
    c = loaded.config
    held_out = found.get("validation")
    if held_out is None:
        return []
    notes = []
    has_one_split = held_out.dataset in (*_WITHOUT_SPLITS, "c4_mini", "c4_validation")
    for option, source in found.items():
        same = (held_out.dataset, held_out.dataset_path) == (source.dataset, source.dataset_path)
        same = same and (has_one_split or held_out.split == (source.split or c.data.split))
        if option != "validation" and same:
            notes.append(f"validation.dataset: the data of {option} too, so the loss is not one on held-out data")
    if c.parallelism.pipeline_parallel_degree > 1 and is_changed(loaded, "validation.local_batch_size"):
        notes.append("validation.local_batch_size: without effect, a pipeline takes the rows of a training step")
    return notes
