"""Translate configuration files of other systems.

Each file is recognized by its keys and translated by its reader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shardtrain import config
from shardtrain.compat.migrate import (
    accelerate,
    axolotl,
    deepspeed,
    fmengine,
    torchtune,
    training_arguments,
    universal_trainer,
)
from shardtrain.compat.migrate.document import ForeignDocument, read, read_text
from shardtrain.compat.migrate.migration_report import Entry, FileMigration, Rule, ThisMachine, apply, flatten
from shardtrain.config.settings import Setting
from shardtrain.utils.errors import ConfigError, Problem


class SystemReader(Protocol):
    """Interface of a reader module."""

    SYSTEM: str
    OPEN: str
    KEYS: dict[str, Rule]
    LEAVES: frozenset[str]

    def looks(self, values: Any) -> bool:
        """True if a file's keys are those of this system."""

    def finish(self, found: FileMigration) -> None:
        """Translate keys that depend on each other."""


READERS: tuple[Any, ...] = (universal_trainer, accelerate, torchtune, axolotl, deepspeed, training_arguments)
"""Readers in the order of recognition. Each is recognized by keys that later ones do not have."""


@dataclass(frozen=True)
class Migration:
    """Result of a migration.

    Attributes:
        files: The files.
        systems: The system of each document.
        settings: Options to set.
        entries: The result for each key.
        notices: Further notes.
        launch: Options of the command line of ``train`` that the files set, by field name.
        verb: The verb that the files need: train or test.
    """

    files: tuple[Path, ...]
    systems: tuple[str, ...]
    settings: tuple[Setting, ...]
    entries: tuple[Entry, ...]
    notices: tuple[str, ...] = ()
    launch: Mapping[str, Any] = field(default_factory=dict)
    verb: str = "train"

    @property
    def unsupported(self) -> tuple[Entry, ...]:
        """Keys that affect training or checkpoints and have no counterpart."""
        return tuple(entry for entry in self.entries if entry.verdict == "unsupported")


def migrate(
    files: Sequence[Path],
    num_processes: int | None = None,
    flags: Sequence[str] = (),
    machine: ThisMachine | None = None,
) -> Migration:
    """Translate files that configure one run together.

    Args:
        files: The files.
        num_processes: Number of ranks, for files with a batch size per rank.
        flags: FMEngine's command-line flags.
        machine: Requested processes and available devices, used if the number of ranks is unknown.

    Raises:
        ConfigError: with all problems of all files.
    """
    machine = machine or ThisMachine()
    if len(files) == 1 and files[0].suffix.lower() == ".toml" and not flags:
        return _toml(files[0])

    # Read the files. Command lines of FMEngine also name its JSON file and the number of processes.
    documents = [read(file) for file in files if not _is_script(file)]
    lines = [fmengine.command_line(file, read_text(file)) for file in files if _is_script(file)]
    if flags:
        lines.append(fmengine.parse(flags, "command line"))
    for line in lines:
        named = line.documents(documents)
        documents += named
        num_processes = num_processes or line.num_processes
        for document in named:
            fmengine.require_deepspeed(document, reader_of(document).SYSTEM)

    # Number of ranks, for batch sizes per rank: as given, from accelerate's file, or from this
    # machine. A file of the universal trainer has its own number of nodes.
    chosen = [(reader_of(document), document) for document in documents]
    for reader, document in chosen:
        named_processes = document.values.get("num_processes") if accelerate.looks(document.values) else None
        if num_processes is None and type(named_processes) is int and named_processes > 0:
            num_processes = named_processes
        if num_processes is None and machine.nproc and reader is not universal_trainer:
            num_processes = machine.nproc * (machine.nodes or 1)

    # Translate each file, and join the settings.
    copies = next((line.num_copies(num_processes) for line in lines), num_processes)
    parts: list[FileMigration] = [_read(reader, document, copies, bool(lines), machine) for reader, document in chosen]
    parts += [line.read(num_processes, parts) for line in lines]
    problems = list({str(problem): problem for part in parts for problem in part.problems}.values())
    settings = _join(parts, problems)
    if problems:
        raise ConfigError(problems)
    names = tuple(part.system for part in parts)
    entries = tuple(entry for part in parts for entry in part.entries)
    launch = {name: value for part in parts for name, value in part.launch.items()}
    verb = next((part.verb for part in parts if part.verb != "train"), "train")
    notes = tuple(f"{part.document.path.name}: {note}" for part in parts for note in part.notes)
    return Migration(tuple(files), names, tuple(settings), entries, notes, launch, verb)


def load(path: Path, arguments: Sequence[str] = (), num_processes: int | None = None) -> config.Loaded:
    """Same as ``open_file``, but return only the configuration."""
    return open_file(path, arguments, num_processes)[0]


def open_file(
    path: Path,
    arguments: Sequence[str] = (),
    num_processes: int | None = None,
    machine: ThisMachine | None = None,
    verb: str = "train",
) -> tuple[config.Loaded, Mapping[str, Any]]:
    """Return the configuration of a foreign file for ``train`` or ``test``, and its launch options.

    Raises:
        ConfigError: a key is not supported, or the file is for a test instead of training.
    """
    found = migrate([path], num_processes, machine=machine)
    if verb == "train" and found.verb != verb:
        rule = "is for a test, and this command trains"
        fix = f"run shardtrain {found.verb} {path}"
        raise ConfigError(Problem("mode", found.verb, rule, fix, path.name))
    return _followed(found, arguments, path), found.launch


def load_flags(words: Sequence[str], num_processes: int | None = None, follow: bool = True) -> config.Loaded:
    """Return the configuration of FMEngine's flags, mixed with overrides (flags with a dot).

    Without ``follow``, the model keeps the name in the flags, so a file can be written from the result.
    """
    flags: list[str] = []
    own: list[str] = []
    into = flags
    for word in words:
        if word.startswith("--"):
            into = own if "." in word.partition("=")[0] else flags
        into.append(word)
    fmengine.parse(flags, "command line").refuse_stray(flags)
    return _followed(migrate([], num_processes, flags), own, None, follow)


def _followed(found: Migration, arguments: Sequence[str], path: Path | None, follow: bool = True) -> config.Loaded:
    """Return the configuration of a migration.

    Raises:
        ConfigError: a key is not supported.
    """
    problems = [
        Problem(entry.key, entry.value, f"is not supported: {entry.text}", "remove it", entry.where)
        for entry in found.unsupported
    ]
    if problems:
        raise ConfigError(problems)
    loaded = config.load_settings(found.settings, arguments, path, follow)
    said = (f"{path.name} was taken for a file of {' and '.join(found.systems)}",) if path else ()
    entries = tuple(map(str, found.entries))
    notices = (*said, *entries, *unnamed(loaded), *found.notices, *loaded.notices)
    return config.Loaded(loaded.config, loaded.origins, notices, loaded.path, (*said, *entries, *loaded.renames))


def unnamed(loaded: config.Loaded) -> list[str]:
    """Return notes on required options that no file sets, with their defaults."""
    found = []
    named = {
        "data": ("training.dataset", "training.dataset_path", "data.sources"),
        "model": ("model.name", "model.flavor", "model.hf_assets_path"),
    }
    for what, options in named.items():
        if not any(loaded.is_set(option) for option in options):
            option = options[0]
            found.append(f'the files name no {what}: {option} is "{loaded.value(option)}" unless it is set')
    return found


def reader_of(document: ForeignDocument) -> Any:
    """Return the reader of a document.

    Raises:
        ConfigError: no reader recognizes it.
    """
    for reader in READERS:
        if reader.looks(document.values):
            return reader
    names = ", ".join(reader.SYSTEM for reader in READERS)
    seen = ", ".join(list(document.values)[:4]) or "nothing"
    rule = f"is not from a known system (its first keys are {seen})"
    raise ConfigError(
        Problem("the file", str(document.path), rule, f"known systems are {names}, torchtitan and FMEngine")
    )


def _is_script(file: Path) -> bool:
    return file.suffix.lower() in (".sh", ".slurm", ".sbatch")


def _read(
    reader: Any, document: ForeignDocument, num_processes: int | None, beside_flags: bool, machine: ThisMachine
) -> FileMigration:
    """Translate each key of a document."""
    found = FileMigration(document, reader.SYSTEM, num_processes, machine)
    found.values = dict(flatten(document.values, reader.LEAVES))
    if hasattr(reader, "prepare"):
        reader.prepare(found)
    apply(found, reader.KEYS, reader.OPEN)
    if not found.problems:
        if beside_flags and reader is deepspeed:
            fmengine.before(found)
        reader.finish(found)
    if not found.problems:
        for key in found.values:
            found.answer(key, "ignored", "only read together with keys that this file does not have")
    return found


def _join(parts: Sequence[FileMigration], problems: list[Problem]) -> list[Setting]:
    """Join the settings of all files. A setting in one file takes precedence over a default of another."""
    # The setting of each option, and True if its file sets it explicitly.
    settings: dict[str, tuple[Setting, bool]] = {}
    for part in parts:
        own = {entry.option for entry in part.entries if entry.verdict != "default"}
        for setting in part.settings:
            said = setting.option in own
            have = settings.get(setting.option)
            if have and have[1] and said and have[0].value != setting.value:
                rule = f"is {have[0].value!r} at {have[0].where}"
                problems.append(Problem(setting.option, setting.value, rule, "make the files agree", setting.where))
            elif not have or (said and not have[1]):
                settings[setting.option] = (setting, said)
    return [setting for setting, _ in settings.values()]


def _toml(file: Path) -> Migration:
    """Translate a TOML file of torchtitan or of this package. The configuration itself knows older names."""
    settings = config.read_settings(file)
    loaded = config.load_settings(settings, path=file, follow=False)
    new = {where: option for option, where in loaded.origins.items() if where != "default"}
    entries = []
    for setting in settings:
        option = new.get(setting.where)
        same = loaded.origins.get(setting.option) == setting.where
        notice = next((n for n in loaded.notices if n.startswith(f"{setting.where}: ")), None)
        if same:
            entries.append(
                Entry(setting.option, setting.value, setting.where, "honoured", setting.option, setting.option)
            )
        else:
            text = notice.partition(": ")[2] if notice else f"{option}"
            verdict = "renamed" if option else "ignored"
            entries.append(Entry(setting.option, setting.value, setting.where, verdict, text, option or ""))  # type: ignore[arg-type]
    return Migration((file,), ("torchtitan",), tuple(settings), tuple(entries), loaded.notices)
