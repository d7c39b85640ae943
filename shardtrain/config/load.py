"""Loads a TOML file and arguments into a ``Config``; reports all problems at once, and keeps each value's origin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from shardtrain.config import nested, presets
from shardtrain.config.aliases import ALIASES, old_kinds, rewrite
from shardtrain.config.coerce import Unfit, coerce, from_texts, plain
from shardtrain.config.command_line import two_files
from shardtrain.config.folder_model import FolderModel, with_folder
from shardtrain.config.option_arguments import CONFIG_FILE, read_arguments
from shardtrain.config.options import nearest, options, sections, suggestion
from shardtrain.config.schema import Config
from shardtrain.config.settings import COMMAND_LINE, DEFAULT, Setting, Value
from shardtrain.config.toml_file import parse_file
from shardtrain.config.toml_lines import key_lines
from shardtrain.utils.errors import ConfigError, Problem

MAX_PROBLEMS = 100
"""Stop looking for mistakes after this many: a file with more is not a configuration of shardtrain."""


@dataclass(frozen=True)
class Loaded:
    """A config with the origin of every value.

    ``origins`` maps each dotted option (and each key of a table option, and of each entry of a table of tables) to
    "run.toml:12", "command line" or "default". ``notices`` are lines for the user about older names; ``renames`` are
    those where only the name has changed, and results have not. ``problems`` are those of reading, if they were to be
    kept; the options that they are about have their defaults.
    """

    config: Config
    origins: Mapping[str, str] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    path: Path | None = None
    renames: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    def __repr__(self) -> str:
        num_set = sum(origin != DEFAULT for origin in self.origins.values())
        return f"Loaded({self.path or 'defaults'}: {num_set} options are set)"

    def value(self, option: str) -> Value:
        """Return the value of a dotted option."""
        return value_of(self.config, option)

    def is_set(self, option: str) -> bool:
        """Whether the file or the command line gives this option."""
        return self.origins.get(option, DEFAULT) != DEFAULT

    def is_from_preset(self, option: str) -> bool:
        """True if a preset of the package sets this option, and no override does."""
        is_preset = self.path is not None and self.path.parent == presets.FOLDER
        return is_preset and self.is_set(option) and self.origins[option] != COMMAND_LINE

    def where(self, option: str) -> str:
        """Return the origin for an error message: empty for a default."""
        return self.origins[option] if self.is_set(option) else ""


def value_of(config: Config, option: str) -> Value:
    """Return the value of a dotted option of a config, or of an entry: ``data.sources.web.weight``."""
    value: Any = config
    for part in option.split("."):
        if isinstance(value, Mapping):
            value = value[part]
        else:
            value = value[int(part)] if isinstance(value, list) else getattr(value, part)
    return value


def load(
    path: str | Path | None, arguments: Sequence[str] = (), preset: str | None = None, keep_problems: bool = False
) -> Loaded:
    """Read a TOML file (or none) and ``--section.key value`` arguments; command line beats file beats default.

    ``--job.config_file F`` says the same as ``path``, and either may be a preset's name; ``preset`` is taken, with a
    notice, where no file is named at all. Raises ConfigError with all problems of both at once, and where two files
    are named. Rules between options are checked by ``check``. With ``keep_problems`` a wrong key or value is not an
    error: it is in ``Loaded.problems``, and ``problems_of`` reports it with all others.
    """
    line = read_arguments(arguments, old_kinds())
    problems = list(line.problems)

    # Which file: that of --job.config_file, that of ``path``, or the preset where neither is given
    named = [setting for setting in line.settings if setting.option == CONFIG_FILE]
    file: Path | None = None
    if named:
        file = Path(named[-1].value[0])
    elif path is not None:
        file = Path(path)
    if named and path is not None and file != Path(path):
        raise ConfigError([*problems, two_files(str(file), str(path))])
    is_preset_of_ours = file is None and preset is not None
    if is_preset_of_ours:
        file = Path(str(preset))
    if file is not None:
        file = presets.find(file)

    # A file that cannot be read at all is an error even where problems are kept: all of it would be defaults
    unread: list[Problem] = []
    settings = _read_file(file, unread) if file is not None else []
    problems += unread
    loaded = _resolve(settings, line.settings, problems, file, keep_problems=keep_problems and not unread)
    if not is_preset_of_ours:
        return loaded
    notice = f"no configuration is named: this is the preset {preset}; the presets are {', '.join(presets.names())}"
    return replace(loaded, notices=(notice, *loaded.notices))


def load_settings(
    settings: Sequence[Setting], arguments: Sequence[str] = (), path: Path | None = None, follow: bool = True
) -> Loaded:
    """As ``load``, from settings that were read from a file of another kind.

    Without ``follow`` the model stays as the settings name it, and no folder is looked into.
    """
    line = read_arguments(arguments, old_kinds())
    return _resolve(list(settings), line.settings, list(line.problems), path, follow)


def read_settings(path: Path) -> list[Setting]:
    """The settings of a TOML file as they are in it, older names too; raises ConfigError."""
    problems: list[Problem] = []
    settings = _read_file(path, problems)
    if problems:
        raise ConfigError(problems)
    return settings


def _resolve(
    from_file: list[Setting],
    from_line: list[Setting],
    problems: list[Problem],
    file: Path | None,
    follow: bool = True,
    keep_problems: bool = False,
) -> Loaded:
    """Rename, type and merge the settings of the file and of the command line; raise all problems, or keep them."""
    # The command line replaces the file's value of the same name; a list, with all its entries
    given = {setting.option for setting in from_line}
    lists = tuple(f"{name}." for name in given if nested.names_list(name))
    kept = [s for s in from_file if s.option not in given and not s.option.startswith(lists)]
    spread = [part for setting in from_line for part in nested.spread_text(setting)]

    # Older names become the current ones
    rewritten = rewrite([*kept, *spread])
    problems += rewritten.problems
    renames = tuple(notice for notice in rewritten.notices if notice not in rewritten.changes)

    # Type and store each setting, the file's first, so that the command line overwrites them. One that comes twice from
    # the same of the two was given under an older name and the current one
    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(options(), DEFAULT)
    seen: dict[tuple[str, bool], Setting] = {}
    for setting in sorted(rewritten.settings, key=lambda s: s.where == COMMAND_LINE):
        place = (setting.option, setting.where == COMMAND_LINE)
        if place in seen and seen[place].value == setting.value and seen[place].is_text == setting.is_text:
            rewritten.notices.append(f"{setting.where}: {setting.option} is given at {seen[place].where} too, as here")
            continue
        if place in seen:
            rule = f"is given twice, also at {seen[place].where} under another name"
            problems.append(Problem(setting.option, setting.shown, rule, "keep one", setting.where))
            continue
        seen[place] = setting
        _take(setting, values, origins, problems)
        if len(problems) >= MAX_PROBLEMS:
            problems.append(Problem("the file", None, "has more mistakes than are listed", "correct these first"))
            break
    if problems and not keep_problems:
        raise ConfigError(problems)
    config = _build("", values)

    # The model may be that of a Hugging Face folder, whose config.json sets options that nobody has given
    followed = with_folder(config, origins) if follow else FolderModel(config)
    if isinstance(followed, Problem):
        if not keep_problems:
            raise ConfigError(followed)
        problems.append(followed)
        followed = FolderModel(config)
    notices = (*rewritten.notices, *followed.notices)
    all_origins = MappingProxyType({**origins, **followed.origins})
    return Loaded(followed.config, all_origins, notices, file, renames, tuple(problems))


def _take(setting: Setting, values: dict[str, Any], origins: dict[str, str], problems: list[Problem]) -> None:
    """Convert one setting to its option's type and store it, or add a problem."""
    name = setting.option
    table, _, key = name.rpartition(".")
    option = options().get(name)
    try:
        place = nested.find(name)
        if place is not None:
            # A key of an entry of a table of tables, as data.sources.web.weight
            nested.take(place, setting, values.setdefault(place.option.name, {}))
            if place.entry:
                # An entry has many keys: its origin is that of the first one
                origins.setdefault(f"{place.option.name}.{place.entry}", setting.where)
            if origins[place.option.name] == DEFAULT or setting.where == COMMAND_LINE:
                origins[place.option.name] = setting.where
        elif option is not None:
            kind = option.kind
            value = from_texts(setting.value, kind) if setting.is_text else coerce(setting.value, kind)
            if option.is_table:
                values[name] = {**values.get(name, {}), **value}
                origins |= {f"{name}.{inner}": setting.where for inner in value}
            else:
                values[name] = value
        elif table in options() and options()[table].is_table:
            # A key of a free table, as model.overrides.dim: text of the command line becomes what it looks like
            kind = get_args(options()[table].kind)[1]
            value = setting.value
            if setting.is_text:
                value = setting.value[0] if kind is str else plain(setting.value[0])
            values[table] = {**values.get(table, {}), key: coerce(value, kind)}
            origins[table] = setting.where
        else:
            problems.append(_unknown(setting))
            return
    except Unfit as unfit:
        problems.append(Problem(name, setting.shown, unfit.rule, unfit.fix, setting.where))
        return
    origins[name] = setting.where


def _unknown(setting: Setting) -> Problem:
    """Return the problem of a name that no option has."""
    name = setting.option
    if isinstance(setting.value, dict) and not setting.is_text:
        tables = [option.name for option in options().values() if option.entry]
        near = nearest(name, [*filter(None, sections()), *tables])
        fix = f"did you mean [{near}]?"
        if not near:
            fix = "sections are " + ", ".join(section for section in sections() if section and "." not in section)
        return Problem(f"[{name}]", None, "is not a section", fix, setting.where)
    if name in sections():
        return Problem(
            name, setting.shown, "is a section, not an option", f"write [{name}] above its keys", setting.where
        )
    return Problem(name, setting.shown, "is not an option", suggestion(name, ALIASES), setting.where)


def _build(section: str, values: Mapping[str, Any]) -> Value:
    """Build the dataclass of a section from the values that are set; the others keep their defaults."""
    cls = sections()[section]
    prefix = f"{section}." if section else ""
    given: dict[str, Any] = {}
    for name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        dotted = f"{prefix}{name}"
        if dotted in sections():
            given[name] = _build(dotted, values)
        elif dotted in values:
            value = values[dotted]
            given[name] = nested.build(options()[dotted], value) if options()[dotted].entry else value
    return cls(**given)


def _read_file(file: Path, problems: list[Problem]) -> list[Setting]:
    """Read a TOML file into settings; enters a problem where it cannot be read."""
    table, text = parse_file(file, problems)
    return list(_flatten(table, (), key_lines(text), file.name))


def _flatten(
    table: Mapping[str, Any], prefix: tuple[str, ...], lines: Mapping[tuple[str, ...], int], file: str
) -> list[Setting]:
    """Turn nested tables into dotted settings; a table that is not a section stays one setting."""

    def where(path: tuple[str, ...]) -> str:
        return f"{file}:{lines[path]}" if path in lines else file

    settings: list[Setting] = []
    for key, value in table.items():
        path = (*prefix, key)
        name = ".".join(path)
        is_section = isinstance(value, dict) and (
            name in sections()
            or (name in options() and options()[name].is_table)
            or any(old.startswith(f"{name}.") for old in ALIASES)  # a section of an older file
        )
        if nested.holds(path):
            settings += nested.spread(path, value, where)
        elif is_section:
            settings += _flatten(value, path, lines, file)
        else:
            settings.append(Setting(name, value, where(path)))
    return settings
