"""``shardtrain data prepare``: tokenize text into shards on all cores. The bytes do not depend on the number of cores.

The source is split into units of some megabytes. Worker processes tokenize units into files in the folder
``unfinished``. The main process appends these files to the shards in the order of the source, and saves
its progress every few seconds. A killed command continues from the saved progress.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.config import Config, check, load
from shardtrain.config.command_line import VerbOption, number_of, take
from shardtrain.data import build_dataset, sources
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.documents.encoded import Encoder
from shardtrain.data.documents.read_documents import BadRows, RowStats
from shardtrain.data.packing import fitted
from shardtrain.data.packing.fit_table import FitTableWriter
from shardtrain.data.packing.packed_rows import Packing
from shardtrain.data.prepared.shard_index import INDEX, UNFINISHED, ShardIndex, read_index
from shardtrain.data.prepared.shard_writer import ShardWriter, default_shard_tokens, storing
from shardtrain.data.prepared.shards import ShardTokenBuffer
from shardtrain.data.sources import Shards, Table
from shardtrain.tools.data import pool, work_units
from shardtrain.tools.data.work_progress import WorkProgress
from shardtrain.utils import atomic_io, bounded_reads, checked_json, output_target
from shardtrain.utils.errors import COMMAND_LINE, ConfigError, Problem
from shardtrain.utils.redact import visible
from shardtrain.utils.units import format_bytes, format_seconds
from shardtrain.utils.variables import is_whole_number

USAGE = """usage: shardtrain data prepare [CONFIG.toml] --output FOLDER [--processes N] [--shard_tokens N]
                               [--section.key VALUE ...]

Tokenize the dataset of a configuration (training.dataset and dataset_path, or each of [data.sources] into FOLDER/NAME)
and write shards of tokens for training.dataset = "tokens". If data.packing keeps documents whole, also fit them into
rows of training.seq_len. For another length, run the command again.

  --output FOLDER     output folder; a stopped command continues when it is started again
  --processes N       number of tokenizing processes (default: all cores); it does not change the result
  --shard_tokens N    tokens per file (default: 512 MB of tokens)
"""
FIT_DOCUMENTS = 100_000
"""Smallest number of documents for which rows are fitted in advance.

A run fits fewer in 0.1 s when it starts.
"""
_BLOCKS_AT_ONCE = 16
_COUNTS_OF_FIT = ("num_rows", "num_targets", "cut", "dropped", "single")
SAVE_SECONDS = 10.0
"""Time between two saves of the progress."""
_PROGRESS = "progress.json"
_MOST_STATE_BYTES = 2**28
_LOCK = "lock"


@dataclass(frozen=True)
class PrepareJob:
    """One dataset to prepare into one folder.

    An unfinished folder is only continued if its ``facts`` are equal.
    """

    name: str
    config: Config
    format: str
    source: Table | Shards
    encoder: Encoder
    folder: Path
    shard_tokens: int
    packing: Packing
    facts: Mapping[str, Any]


def main(arguments: list[str]) -> int:
    """Run the verb and return its exit status."""
    options = {
        "--output": VerbOption(output_target.folder_value, "FOLDER", once=True),
        "--processes": VerbOption(number_of(), "4", once=True),
        "--shard_tokens": VerbOption(number_of(), "100_000_000", once=True),
    }
    taken = take(arguments, options, usage=USAGE)
    if not taken.verb_options.get("--output"):
        raise ConfigError(
            Problem(
                "--output",
                None,
                rule="is required",
                fix="write --output FOLDER",
                where=COMMAND_LINE,
            )
        )
    loaded = load(*taken.configuration())
    problems = list(check(loaded))
    if problems:
        raise ConfigError(problems)

    processes = taken.verb_options.get("--processes") or len(os.sched_getaffinity(0))
    folder = Path(taken.verb_options["--output"])
    # Progress is saved, so Ctrl-C is a normal end.
    try:
        for job in jobs(loaded.config, folder, taken.verb_options.get("--shard_tokens")):
            print(visible(prepare(job, processes)), flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        return 130
    return 0


def jobs(config: Config, folder: Path, shard_tokens: int | None) -> Iterator[PrepareJob]:
    """Yield a job for each dataset of a configuration. A dataset is opened when its job is needed."""
    tokenizer = build_dataset.tokenizer_of(config)
    shard_tokens = shard_tokens or default_shard_tokens(tokenizer.vocab_size)
    for named in build_dataset.named_sources(config, config.training):
        module = sources.find(named.source.dataset, named.dataset_option)
        if not hasattr(module, "open_source"):
            raise ConfigError(
                Problem(
                    named.dataset_option,
                    named.source.dataset,
                    rule="is prepared already",
                    fix="name the text to prepare",
                )
            )
        request = build_dataset.request_for(config, named)
        source = module.open_source(request)
        encoder = open_encoder(tokenizer, config.data, named.source)
        build_dataset.check_template(source, encoder, named)
        # Everything that the bytes of the shards and of the units depend on.
        facts = {
            "dataset": named.source.dataset,
            "split": request.split,
            "subset": request.subset,
            "max_row_bytes": request.max_row_bytes,
            "files": dict(source.files()),
            "tokenizer": tokenizer.fingerprint,
            "encoder": encoder.fingerprint,
            "shard_tokens": shard_tokens,
            "rows_per_unit": work_units.rows_per_unit(source),
            "num_units": len(work_units.Units(source)),
        }
        # A configuration with [data.sources] has one folder per source.
        target = folder / named.name if config.data.sources else folder
        kind = named.source.format or config.data.format
        packing = build_dataset.packing_of(config, config.training, tokenizer, named)
        yield PrepareJob(
            named.name, config, kind, source, encoder, target, shard_tokens, packing, facts
        )


def prepare(job: PrepareJob, processes: int) -> str:
    """Prepare one dataset, or continue to prepare it. Return lines about the result.

    Raises:
        ConfigError: the folder has other content, or a source file changed.
        DataError: too many rows are bad, or no row is usable.
        StorageError: a file cannot be written.
        PeerError: a process died.
    """
    unfinished = job.folder / UNFINISHED
    if (job.folder / INDEX).exists():
        index = read_index(job.folder, "--output")
        _same_facts(job, {**index.prepared_from, "files": index.sources})
        shutil.rmtree(unfinished, ignore_errors=True)
        lines = [f"{job.folder} is prepared already: {_contents(index)}"]
        return "\n".join(lines + _fit(job, processes))

    _refuse_foreign(job.folder)
    with storing(job.folder):
        unfinished.mkdir(parents=True, exist_ok=True)
    with _locked(job.folder):
        work = _Work(job)
        try:
            with work.progress as progress:
                work.run(processes)
                index = work.finish()
        finally:
            work.close()
        # A process of a killed command may still write here, so errors are ignored. The index marks
        # a complete folder.
        shutil.rmtree(unfinished, ignore_errors=True)

    seconds = max(progress.seconds, 1e-9)
    result = f"prepared {job.folder}: {_contents(index)}, in {format_seconds(seconds)}"
    # If an earlier command tokenized everything, this one has no speed.
    if work.tokens:
        megabytes_per_second = progress.megabytes(done=1.0) / seconds
        result += f" ({megabytes_per_second:.2f} MB/s, {work.tokens / seconds:,.0f} tokens/s)"
    lines = [result]
    lines += [f"  skipped {reason}" for reason in work.tally.reasons()]
    return "\n".join(lines + _fit(job, processes))


def _fit(job: PrepareJob, processes: int) -> list[str]:
    """Fit the documents of prepared shards into rows, if that would take seconds at each start of a run.

    Return lines about the result. Empty if there is nothing to do.
    """
    packing = job.packing
    line = ShardTokenBuffer(job.folder, "--output")
    if packing.kind == "concat" or line.num_documents < FIT_DOCUMENTS:
        return []
    if fitted.table_of(line, packing, "--output", refuses_many=False) is not None:
        return []

    num_blocks = fitted.num_blocks(line)
    starts = range(0, num_blocks, _BLOCKS_AT_ONCE)

    def work(number: int, say: pool.Say) -> dict[str, Any]:
        first = starts[number]
        blocks = range(first, min(first + _BLOCKS_AT_ONCE, num_blocks))
        answers = []
        for block in blocks:
            fit = fitted.fit_block(line, block, packing)
            answer = {name: getattr(fit, name) for name in _COUNTS_OF_FIT}
            answer["order"] = base64.b64encode(fit.to_bytes()).decode()
            answers.append(answer)
        say({})  # exits this process if the command has ended
        return {"blocks": answers}

    # Processes finish in any order, but blocks are written in the order of the documents.
    began = time.monotonic()
    waiting: dict[int, list[dict[str, Any]]] = {}
    num_written = 0
    with storing(job.folder):
        writer = FitTableWriter(
            job.folder, packing, line.fingerprint, fitted.BLOCK_DOCUMENTS, num_blocks
        )
        try:
            with WorkProgress(f"fitting {job.name}", None) as progress:
                for number, news in pool.run(len(starts), set(), work, processes):
                    if number is not None:
                        waiting[number] = news["blocks"]
                    while num_written in waiting:
                        blocks = waiting.pop(num_written)
                        writer.add((block, base64.b64decode(block["order"])) for block in blocks)
                        num_written += 1
                    share = num_written / len(starts)
                    progress.advance(share, round(share * line.num_tokens))
            num_rows = writer.finish()
        finally:
            writer.close()
    seconds = format_seconds(time.monotonic() - began)
    return [f"  fitted into {num_rows:,} rows of {packing.seq_len} ({packing.kind}), in {seconds}"]


class _Work:
    """An unfinished folder: the units that are in the shards, and the finished units that wait for earlier ones."""

    def __init__(self, job: PrepareJob) -> None:
        self.job = job
        self.folder = job.folder / UNFINISHED
        self._units = work_units.Units(job.source)
        state = self._read_state()
        self.tally = work_units.tally_from_json(state["tally"])
        self.merged: int = state["merged"]
        self.tokens = 0
        self._writer = ShardWriter(
            job.folder, job.encoder.tokenizer.vocab_size, job.shard_tokens, state.get("position")
        )
        self._waiting: dict[int, Mapping[str, Any]] = {}
        self._to_remove: list[int] = []
        self._find_finished()
        self._saved = time.monotonic()
        # The last unit may be smaller, which a progress bar can ignore.
        self._share_done = (self.merged + len(self._waiting)) / max(1, len(self._units))
        self.progress = WorkProgress(
            f"preparing {job.name}", job.source.total_bytes, self._share_done
        )

    def run(self, processes: int) -> None:
        """Tokenize all units and append them to the shards."""
        job = self.job
        policy = BadRows.of(job.config.data)
        num_units = len(self._units)

        def work(number: int, say: pool.Say) -> dict[str, Any]:
            return work_units.write_unit(
                self.folder,
                job.source,
                job.encoder,
                policy,
                self._units[number],
                say,
            )

        # Each shard of a source has one reader, so a few shards keep only a few processes busy.
        if not isinstance(job.source, Table) and num_units < processes:
            parts = f"{num_units} parts"
            verb = "have"
            if num_units == 1:
                parts = "1 part"
                verb = "has"
            print(
                f"dataset {job.name} has {parts} (compressed files, row groups) with one reader each, so "
                f"{num_units} of {processes} processes {verb} work; split it into more files to use all",
                file=sys.stderr,
            )

        # Units finish in any order, but are appended in the order of the source.
        num_rows = 0
        skip = {*range(self.merged), *self._waiting}
        self._merge()
        for number, news in pool.run(num_units, skip, work, processes):
            if number is not None:
                self._waiting[number] = news
                self._merge()
            else:
                num_rows += news.get("rows", 0)
                self.tokens += news.get("tokens", 0)
            self.progress.advance(self._share(num_rows), self.tokens)
            if time.monotonic() - self._saved >= SAVE_SECONDS:
                self.save()
        self.save()

    def close(self) -> None:
        """Close the shard files, finished or not."""
        self._writer.close()

    def _share(self, rows: int) -> float:
        """Return the share of the work that is done, 0..1, after ``rows`` rows of this command."""
        source = self.job.source
        if isinstance(source, Table):
            return min(1.0, self._share_done + rows / max(1, source.num_rows))
        return (self.merged + len(self._waiting)) / max(1, len(self._units))

    def _merge(self) -> None:
        """Append the next units to the shards. Their files are removed after the next ``save``."""
        while self.merged in self._waiting:
            done = self._waiting.pop(self.merged)
            work_units.append_unit(self.folder, self._units[self.merged], done, self._writer)
            self.tally.merge(work_units.tally_from_json(done["tally"]))
            self._to_remove.append(self.merged)
            self.merged += 1

    def save(self) -> None:
        """Save the progress durably, then delete the files of units that the shards contain."""
        # The order matters: after a kill, units that the saved progress does not include are
        # appended again.
        position = self._writer.position()
        tally = work_units.tally_to_json(self.tally)
        self._write_state({"merged": self.merged, "position": position, "tally": tally})
        for number in self._to_remove:
            work_units.remove_unit(self.folder, self._units[number])
        self._to_remove = []
        self._saved = time.monotonic()

    def finish(self) -> ShardIndex:
        """Check the number of bad rows and that the source is unchanged, then write the index.

        Raises:
            DataError: too many rows are bad, or none is usable.
            ConfigError: a source file changed.
        """
        job = self.job
        BadRows.of(job.config.data).judge(self.tally, f"dataset {job.name}")
        job.source.check_unchanged()
        # The index stores the files of the source separately, as ``sources``.
        prepared_from = {key: fact for key, fact in job.facts.items() if key != "files"}
        return self._writer.finish(
            tokenizer=job.encoder.tokenizer.fingerprint,
            tokenizer_name=job.config.model.tokenizer_path or job.config.model.hf_assets_path,
            encoder=job.encoder.fingerprint,
            format=job.format,
            source_bytes=job.source.total_bytes,
            sources=dict(job.source.files()),
            tally=work_units.tally_to_json(self.tally),
            prepared_from=prepared_from,
        )

    def _read_state(self) -> dict[str, Any]:
        """Read the saved progress, or save and return an empty one."""
        path = self.folder / _PROGRESS
        fresh = {
            "merged": 0,
            "tally": work_units.tally_to_json(RowStats()),
            "facts": dict(self.job.facts),
        }
        if not path.exists():
            self._write_state(fresh)
            return fresh
        # The file is written atomically, so a file that cannot be read is not from a kill.
        try:
            state: dict[str, Any] = checked_json.parse(
                bounded_reads.read_all(path, _MOST_STATE_BYTES),
                memory_bytes=checked_json.LARGE_MEMORY_BYTES,
            )
            _same_facts(self.job, state["facts"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                Problem(
                    "--output",
                    str(path),
                    rule=f"cannot be continued ({error or type(error).__name__})",
                    fix=f"remove {self.job.folder}",
                )
            ) from error
        return state

    def _write_state(self, state: Mapping[str, Any]) -> None:
        content = json.dumps({**state, "facts": dict(self.job.facts)})
        with storing(self.folder):
            atomic_io.write(self.folder / _PROGRESS, content, durable=True)

    def _find_finished(self) -> None:
        """Keep the finished units of an earlier command, and remove its unfinished ones."""
        for path in self.folder.glob("unit-*"):
            number = path.name.removeprefix("unit-").partition(".")[0]
            if path.suffix == ".tmp" or not is_whole_number(number) or int(number) < self.merged:
                path.unlink(missing_ok=True)
            elif path.suffix == ".json" and int(number) < len(self._units):
                unit = self._units[int(number)]
                content = work_units.content_if_done(self.folder, unit)
                if content is not None:
                    self._waiting[unit.number] = content
                else:
                    work_units.remove_unit(self.folder, unit)


def _same_facts(job: PrepareJob, facts: Mapping[str, Any]) -> None:
    """Raise ConfigError if a folder was prepared from another source or with other options."""
    # JSON turns tuples into lists, so convert before comparing.
    now: dict[str, Any] = json.loads(json.dumps(dict(job.facts)))
    different = [key for key in now if now[key] != facts.get(key)]
    if not different:
        return
    # One difference suffices to show that the folder is a different one.
    key = different[0]
    before = facts.get(key)
    if key == "files":
        origin = _changed_file(before or {}, now[key])
    elif isinstance(now[key], str | int) and not key.endswith(("tokenizer", "encoder")):
        origin = f"{key} {before!r}, not {now[key]!r}"
    else:
        # Fingerprints and nested values would not help a user.
        origin = f"another {key}"
    raise ConfigError(
        Problem(
            "--output",
            str(job.folder),
            rule=f"was prepared from {origin}",
            fix="name another folder, or remove this one",
        )
    )


def _changed_file(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Describe the first file whose content differs between two sets of files."""
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            if name in before:
                return f"another content of {name}"
            return f"a set without {name}"
    return "other files"


def _refuse_foreign(folder: Path) -> None:
    """Raise ConfigError if the folder has content that is not from this command."""
    # Preparing into a folder with other files could overwrite them.
    if folder.exists() and not folder.is_dir():
        raise ConfigError(
            Problem(
                "--output",
                str(folder),
                rule="is a file",
                fix="name a folder",
                where=COMMAND_LINE,
            )
        )
    if not folder.is_dir() or (folder / UNFINISHED).is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    if names:
        some_names = ", ".join(names[:3])
        if len(names) > 3:
            some_names += ", ..."
        raise ConfigError(
            Problem(
                "--output",
                str(folder),
                rule=f"is not empty ({some_names})",
                fix="name a new or empty folder",
                where=COMMAND_LINE,
            )
        )


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock the folder against a second command.

    The system releases the lock when this process ends in any way.
    """
    with storing(folder):
        atomic_io.guard(folder)  # raises an error for symbolic links
        file = open(folder / UNFINISHED / _LOCK, "w", opener=atomic_io.open_file)  # noqa: SIM115
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                Problem(
                    "--output",
                    str(folder),
                    rule="is being prepared by another process",
                    fix="wait for it, or stop it",
                )
            ) from None
        yield


def _contents(index: ShardIndex) -> str:
    """Describe the content of a prepared folder."""
    tokens = f"{index.num_tokens:,} tokens"
    learned = index.tally.get("learned", index.num_tokens)
    if learned != index.num_tokens:
        tokens += f" ({learned:,} learned)"
    noun = "shards" if len(index.shards) > 1 else "shard"
    size = format_bytes(sum(file.bytes for file in index.files()))
    return f"{index.num_documents:,} documents, {tokens} in {len(index.shards)} {noun}, {size}"
