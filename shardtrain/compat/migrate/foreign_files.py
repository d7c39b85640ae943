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
from shardtrain.compat.migrate.migration_report import (
    Entry,
    FileMigration,
    Rule,
    ThisMachine,
    apply,
    flatten,
)
from shardtrain.config.settings import Setting
from shardtrain.utils.errors import ConfigError, Problem


class SystemReader(Protocol):
    """Interface of the modules that translate files of one system.

    ``migration_report`` explains the rules.
    """

    SYSTEM: str
    OPEN: str
    KEYS: dict[str, Rule]
    LEAVES: frozenset[str]

    def looks(self, values: Any) -> bool:
        """True if the top-level keys belong to this system."""

    def finish(self, migration: FileMigration) -> None:
        """Translate the keys that depend on each other, and set the system's defaults."""


READERS: tuple[Any, ...] = (
    universal_trainer,
    accelerate,
    torchtune,
    axolotl,
    deepspeed,
    training_arguments,
)
"""Readers in the order of recognition. Each is recognized by keys that later ones do not have."""


@dataclass(frozen=True)
class Migration:
    """Result of a migration: options to set, and a report on each key of the files.

    Attributes:
        files: The files.
        systems: System of each file, including files that a command line names.
        settings: Options to set.
        entries: Results of the keys.
        notices: Notes that belong to no key.
        launch: Command-line options of ``train`` that the files set, by field name.
        verb: Verb of the command line that the files are for: train or test.
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
        """Entries of keys that affect training or checkpoints and have no counterpart here."""
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
        ConfigError: with the problems of all files.
    """
    machine = machine or ThisMachine()
    if len(files) == 1 and files[0].suffix.lower() == ".toml" and not flags:
        return _toml(files[0])

    # Read the files. FMEngine's command lines also contain the path of its JSON file and the number of
    # processes.
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

    # Find the number of ranks, for batch sizes per rank: the argument, accelerate's file, or this
    # machine. A file of the universal trainer contains its own number of nodes.
    chosen = [(reader_of(document), document) for document in documents]
    for reader, document in chosen:
        named_processes = None
        if accelerate.looks(document.values):
            named_processes = document.values.get("num_processes")
        if num_processes is None and type(named_processes) is int and named_processes > 0:
            num_processes = named_processes
        if num_processes is None and machine.nproc and reader is not universal_trainer:
            num_processes = machine.nproc * (machine.nodes or 1)

    # Translate each file, and join the settings.
    # The parallelism flags of a command line determine how many of the ranks are data-parallel.
    copies = lines[0].num_copies(num_processes) if lines else num_processes
    parts: list[FileMigration] = []
    for reader, document in chosen:
        parts.append(_read(reader, document, copies, bool(lines), machine))
    parts += [line.read(num_processes, parts) for line in lines]
    # Two files may report the same problem.
    distinct_problems: dict[str, Problem] = {}
    for part in parts:
        for problem in part.problems:
            distinct_problems[str(problem)] = problem
    problems = list(distinct_problems.values())
    settings = _join(parts, problems)
    if problems:
        raise ConfigError(problems)

    entries: list[Entry] = []
    notes: list[str] = []
    launch: dict[str, Any] = {}
    verb = "train"
    for part in parts:
        entries += part.entries
        notes += [f"{part.document.path.name}: {note}" for note in part.notes]
        launch |= part.launch
        # Of several verbs, the first one that is not the default applies.
        if verb == "train":
            verb = part.verb
    systems = tuple(part.system for part in parts)
    return Migration(
        tuple(files), systems, tuple(settings), tuple(entries), tuple(notes), launch, verb
    )


def load(
    path: Path, arguments: Sequence[str] = (), num_processes: int | None = None
) -> config.Loaded:
    """Return only the configuration of ``open_file``."""
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
        ConfigError: a key is not supported, or the file is for testing and ``verb`` is "train".
    """
    migration = migrate([path], num_processes, machine=machine)
    if verb == "train" and migration.verb != verb:
        raise ConfigError(
            Problem(
                "mode",
                migration.verb,
                rule="is for testing, but this command trains",
                fix=f"run shardtrain {migration.verb} {path}",
                where=path.name,
            )
        )
    return _followed(migration, arguments, path), migration.launch


def load_flags(
    arguments: Sequence[str], num_processes: int | None = None, follow: bool = True
) -> config.Loaded:
    """Return the configuration of FMEngine's flags mixed with overrides (flags with a dot, such as --optimizer.lr).

    Without ``follow``, do not read the model's folder, so the result can be written as a configuration file.
    """
    flags: list[str] = []
    own_flags: list[str] = []
    into = flags
    for argument in arguments:
        if argument.startswith("--"):
            into = own_flags if "." in argument.partition("=")[0] else flags
        into.append(argument)
    fmengine.parse(flags, "command line").refuse_stray(flags)
    return _followed(migrate([], num_processes, flags), own_flags, None, follow)


def _followed(
    migration: Migration, arguments: Sequence[str], path: Path | None, follow: bool = True
) -> config.Loaded:
    """Load the configuration of a migration.

    Raises:
        ConfigError: a key is not supported.
    """
    problems = []
    for entry in migration.unsupported:
        rule = f"is not supported: {entry.text}"
        problems.append(Problem(entry.key, entry.value, rule, "remove it", entry.where))
    if problems:
        raise ConfigError(problems)
    loaded = config.load_settings(migration.settings, arguments, path, follow)
    recognized: tuple[str, ...] = ()
    if path:
        systems = " and ".join(migration.systems)
        recognized = (f"{path.name} was recognized as a file of {systems}",)
    entries = tuple(map(str, migration.entries))
    notices = (*recognized, *entries, *unnamed(loaded), *migration.notices, *loaded.notices)
    return config.Loaded(
        loaded.config,
        loaded.origins,
        notices,
        loaded.path,
        (*recognized, *entries, *loaded.renames),
    )


def unnamed(loaded: config.Loaded) -> list[str]:
    """Return notes on required options that the files do not set, with their defaults."""
    notes = []
    named = {
        "data": ("training.dataset", "training.dataset_path", "data.sources"),
        "model": ("model.name", "model.flavor", "model.hf_assets_path"),
    }
    for topic, options in named.items():
        if not any(loaded.is_set(option) for option in options):
            option = options[0]
            notes.append(
                f'the files set no {topic}; the default is {option} = "{loaded.value(option)}"'
            )
    return notes


def reader_of(document: ForeignDocument) -> Any:
    """Return the reader module that recognizes a document.

    Raises:
        ConfigError: no reader recognizes its keys.
    """
    for reader in READERS:
        if reader.looks(document.values):
            return reader
    names = ", ".join(reader.SYSTEM for reader in READERS)
    seen = ", ".join(list(document.values)[:4]) or "nothing"
    raise ConfigError(
        Problem(
            "the file",
            str(document.path),
            rule=f"must be from a known system (its first keys are {seen})",
            fix=f"use a file of {names}, torchtitan or FMEngine",
        )
    )


def _is_script(file: Path) -> bool:
    return file.suffix.lower() in (".sh", ".slurm", ".sbatch")


def _read(
    reader: Any,
    document: ForeignDocument,
    num_processes: int | None,
    has_flags: bool,
    machine: ThisMachine,
) -> FileMigration:
    """Translate all keys of a document. ``has_flags`` is true if FMEngine's flags are translated too."""
    migration = FileMigration(document, reader.SYSTEM, num_processes, machine)
    migration.values = dict(flatten(document.values, reader.LEAVES))
    if hasattr(reader, "prepare"):
        reader.prepare(migration)
    apply(migration, reader.KEYS, reader.OPEN)
    if not migration.problems:
        if has_flags and reader is deepspeed:
            fmengine.before(migration)
        reader.finish(migration)
    if not migration.problems:
        for key in migration.values:
            migration.record(key, "ignored", "only used with keys that this file does not have")
    return migration


def _join(parts: Sequence[FileMigration], problems: list[Problem]) -> list[Setting]:
    """Join the settings of all files, and add contradictions to ``problems``.

    A setting in one file takes precedence over a default of another.
    """
    settings: dict[str, Setting] = {}
    explicit_options: set[str] = set()
    for part in parts:
        explicit = {entry.option for entry in part.entries if entry.verdict != "default"}
        for setting in part.settings:
            option = setting.option
            is_explicit = option in explicit
            earlier = settings.get(option)
            if (
                earlier
                and is_explicit
                and option in explicit_options
                and earlier.value != setting.value
            ):
                problems.append(
                    Problem(
                        option,
                        setting.value,
                        rule=f"contradicts {earlier.value!r} at {earlier.where}",
                        fix="make the files agree",
                        where=setting.where,
                    )
                )
            elif not earlier or (is_explicit and option not in explicit_options):
                settings[option] = setting
                if is_explicit:
                    explicit_options.add(option)
    return list(settings.values())


def _toml(file: Path) -> Migration:
    """Translate a TOML file of torchtitan or of this package. ``config`` itself translates older names."""
    settings = config.read_settings(file)
    loaded = config.load_settings(settings, path=file, follow=False)
    option_at = {where: option for option, where in loaded.origins.items() if where != "default"}
    entries = []
    for setting in settings:
        option = option_at.get(setting.where)
        has_same_name = loaded.origins.get(setting.option) == setting.where
        notice = next((n for n in loaded.notices if n.startswith(f"{setting.where}: ")), None)
        if has_same_name:
            entries.append(
                Entry(
                    setting.option,
                    setting.value,
                    setting.where,
                    "honoured",
                    setting.option,
                    setting.option,
                )
            )
        else:
            text = notice.partition(": ")[2] if notice else f"{option}"
            verdict = "renamed" if option else "ignored"
            entry = Entry(
                setting.option,
                setting.value,
                setting.where,
                verdict,  # type: ignore[arg-type]
                text,
                option or "",
            )
            entries.append(entry)
    return Migration((file,), ("torchtitan",), tuple(settings), tuple(entries), loaded.notices)
