"""Load a TOML file and arguments into a ``Config`` with the origin of each value.

All problems are reported together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from shardtrain.config import custom_sections, nested, presets
from shardtrain.config.aliases import ALIASES, old_kinds, rewrite
from shardtrain.config.coerce import Unfit, coerce, from_texts, plain
from shardtrain.config.command_line import two_files
from shardtrain.config.folder_model import FolderModel, with_folder
from shardtrain.config.option_arguments import CONFIG_FILE, read_arguments
from shardtrain.config.options import nearest, options, sections, suggestion
from shardtrain.config.schema import Config
from shardtrain.config.settings import DEFAULT, Setting, Value
from shardtrain.config.toml_file import parse_file
from shardtrain.config.toml_lines import key_lines
from shardtrain.utils.errors import COMMAND_LINE, ConfigError, Problem

RESOLVED_CONFIG = "config.resolved.toml"
"""File in a run's folder with the effective value of every option."""

MAX_PROBLEMS = 100
"""Maximum number of reported problems. A file with more is probably not a configuration."""


@dataclass(frozen=True)
class Loaded:
    """A config with the origin of every value.

    Attributes:
        config: the configuration.
        origins: maps each dotted option to "run.toml:12", "command line" or "default". Also has each key of a
            table option, and each key of the entries of nested tables.
        notices: lines for the user about older names.
        path: the TOML file, or None.
        renames: the notices about options whose name changed but whose results did not.
        problems: problems of reading, if ``load`` was called with ``keep_problems``. Their options have
            default values.
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
        """True if the file or the command line sets this option."""
        return self.origins.get(option, DEFAULT) != DEFAULT

    def is_from_preset(self, option: str) -> bool:
        """True if a preset of the package sets this option and the command line does not.

        The same holds for the file that a run has written. It has all options of the run's preset.
        """
        if self.path is None:
            return False
        is_preset = self.path.parent == presets.FOLDER or self.path.name == RESOLVED_CONFIG
        return is_preset and self.is_set(option) and self.origins[option] != COMMAND_LINE

    def where(self, option: str) -> str:
        """Return the origin for an error message. Empty for a default value."""
        return self.origins[option] if self.is_set(option) else ""


def value_of(config: Config, option: str) -> Value:
    """Return the value of a dotted option, or of a key of a nested table: ``data.sources.web.weight``."""
    value: Any = config
    for part in option.split("."):
        if isinstance(value, Mapping):
            value = value[part]
        elif isinstance(value, list):
            value = value[int(part)]
        else:
            value = getattr(value, part)
    return value


def load(
    path: str | Path | None,
    arguments: Sequence[str] = (),
    preset: str | None = None,
    keep_problems: bool = False,
) -> Loaded:
    """Load an optional TOML file and ``--section.key value`` arguments, which take precedence over the file.

    ``check`` validates combinations of options. This function does not.

    Args:
        path: a TOML file or the name of a preset. ``--job.config_file`` in the arguments is equivalent.
        arguments: command-line arguments.
        preset: preset to use, with a notice, if no file is named.
        keep_problems: store invalid keys and values in ``Loaded.problems`` instead of raising an error.
            ``problems_of`` then reports them with all other problems.

    Raises:
        ConfigError: the file or the arguments have problems, or two files are named. The message lists all problems.
    """
    line = read_arguments(arguments, old_kinds())

    # Choose the file: --job.config_file, ``path``, or the preset if neither is given.
    named = [setting for setting in line.settings if setting.option == CONFIG_FILE]
    file: Path | None = None
    if named:
        file = Path(named[-1].value[0])
    elif path is not None:
        file = Path(path)
    if named and path is not None and file != Path(path):
        raise ConfigError([*line.problems, two_files(str(file), str(path))])
    is_preset_of_ours = file is None and preset is not None
    if file is not None:
        file = presets.find(file)
    elif preset is not None:
        file = presets.file_of(preset)

    # An unreadable file is an error even with keep_problems, because all its options would have defaults.
    unread: list[Problem] = []
    table: dict[str, Any] = {}
    text = ""
    if file is not None:
        table, text = parse_file(file, unread)
        # A power failure may leave a file of 0 bytes. With only default options the run would have another
        # tokenizer or model.
        if file.name == RESOLVED_CONFIG and not table and not unread:
            rule = "has no options, but a run writes every option to this file"
            unread.append(Problem(CONFIG_FILE, str(file), rule, "name the TOML file of the run"))
    settings = _settings_of(table, text, file)

    # A file with sections of the user's own changes how the rest is read.
    schema = _schema(settings, line.settings)
    if schema is not Config:
        settings = _settings_of(table, text, file, schema)
        line = read_arguments(arguments, old_kinds(), schema)
    loaded = _resolve(
        settings,
        line.settings,
        [*line.problems, *unread],
        file,
        keep_problems=keep_problems and not unread,
        schema=schema,
    )
    if not is_preset_of_ours:
        return loaded
    notice = f"no configuration is named: this is the preset {preset}; the presets are {', '.join(presets.names())}"
    return replace(loaded, notices=(notice, *loaded.notices))


def load_settings(
    settings: Sequence[Setting],
    arguments: Sequence[str] = (),
    path: Path | None = None,
    follow: bool = True,
) -> Loaded:
    """Like ``load``, but with settings from a file in another format.

    Without ``follow``, the model is not read from a Hugging Face folder.
    """
    line = read_arguments(arguments, old_kinds())
    schema = _schema(settings, line.settings)
    if schema is not Config:
        line = read_arguments(arguments, old_kinds(), schema)
    return _resolve(list(settings), line.settings, list(line.problems), path, follow, schema=schema)


def _schema(*sources: Sequence[Setting]) -> type[Config]:
    """Return ``Config``, or its extension by the file that the last setting of the option names."""
    last = None
    for settings in sources:
        for setting in settings:
            if setting.option == custom_sections.OPTION:
                last = setting
    if last is None:
        return Config
    path = last.value[0] if last.is_text else last.value
    if not path or not isinstance(path, str):
        return Config  # ``_resolve`` reports a value that is no text
    return custom_sections.config_class(path, last.where)


def read_settings(path: Path) -> list[Setting]:
    """Return the settings of a TOML file without translating older names. Raises ConfigError."""
    problems: list[Problem] = []
    table, text = parse_file(path, problems)
    settings = _settings_of(table, text, path)
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
    schema: type[Config] = Config,
) -> Loaded:
    """Rename, convert and merge the settings of file and command line. Raise or keep all problems."""
    # The command line replaces a value of the file. For a list it replaces all entries.
    given = {setting.option for setting in from_line}
    lists = tuple(f"{name}." for name in given if nested.names_list(name))
    settings = [s for s in from_file if s.option not in given and not s.option.startswith(lists)]
    for setting in from_line:
        settings += nested.spread_text(setting)

    # Translate older names. Options that the user's file has added have none.
    added = options(schema).keys() - options().keys()
    rewritten = rewrite([setting for setting in settings if setting.option not in added])
    rewritten.settings += [setting for setting in settings if setting.option in added]
    problems += rewritten.problems
    renames = tuple(notice for notice in rewritten.notices if notice not in rewritten.changes)

    # Convert and store each setting. The file comes first, so the command line overwrites it. A repeated
    # option within the file or the command line was set under an older and the current name.
    values: dict[str, Any] = {}
    origins: dict[str, str] = dict.fromkeys(options(schema), DEFAULT)
    seen: dict[tuple[str, bool], Setting] = {}
    for setting in sorted(rewritten.settings, key=lambda s: s.where == COMMAND_LINE):
        place = (setting.option, setting.where == COMMAND_LINE)
        if place in seen:
            # The same value twice is harmless.
            other = seen[place]
            if other.value == setting.value and other.is_text == setting.is_text:
                notice = f"{setting.where}: {setting.option} is given at {other.where} too, as here"
                rewritten.notices.append(notice)
                continue
            problems.append(
                Problem(
                    setting.option,
                    setting.shown,
                    rule=f"is given twice, also at {other.where} under another name",
                    fix="keep one",
                    where=setting.where,
                )
            )
            continue
        seen[place] = setting
        _take(setting, values, origins, problems, schema)
        if len(problems) >= MAX_PROBLEMS:
            problems.append(
                Problem(
                    "the file",
                    None,
                    rule="has more mistakes than are listed",
                    fix="correct these first",
                )
            )
            break
    if problems and not keep_problems:
        raise ConfigError(problems)
    config = _build("", values, schema)

    # The config.json of a Hugging Face folder may set the model options that the user left unset.
    followed = with_folder(config, origins) if follow else FolderModel(config)
    if isinstance(followed, Problem):
        if not keep_problems:
            raise ConfigError(followed)
        problems.append(followed)
        followed = FolderModel(config)
    notices = (*rewritten.notices, *followed.notices)
    all_origins = MappingProxyType({**origins, **followed.origins})
    return Loaded(followed.config, all_origins, notices, file, renames, tuple(problems))


def _take(
    setting: Setting,
    values: dict[str, Any],
    origins: dict[str, str],
    problems: list[Problem],
    schema: type[Config],
) -> None:
    """Convert a setting to its option's type and store it, or add a problem."""
    name = setting.option
    table, _, key = name.rpartition(".")
    known = options(schema)
    option = known.get(name)
    try:
        place = nested.find(name)
        if place is not None:
            # A key of an entry of nested tables, such as data.sources.web.weight.
            nested.take(place, setting, values.setdefault(place.option.name, {}))
            if place.entry:
                # The origin of an entry is that of its first key.
                origins.setdefault(f"{place.option.name}.{place.entry}", setting.where)
            if origins[place.option.name] == DEFAULT or setting.where == COMMAND_LINE:
                origins[place.option.name] = setting.where
        elif option is not None:
            convert = from_texts if setting.is_text else coerce
            value = convert(setting.value, option.kind)
            if option.is_table:
                values[name] = {**values.get(name, {}), **value}
                origins |= {f"{name}.{inner}": setting.where for inner in value}
            else:
                values[name] = value
        elif table in known and known[table].is_table:
            # A key of a free table, such as model.overrides.dim. The type of command-line text is inferred.
            kind = get_args(known[table].kind)[1]
            value = setting.value
            if setting.is_text:
                value = setting.value[0]
                if kind is not str:
                    value = plain(value)
            values[table] = {**values.get(table, {}), key: coerce(value, kind)}
            origins[table] = setting.where
        else:
            problems.append(_unknown(setting, schema))
            return
    except Unfit as unfit:
        problems.append(Problem(name, setting.shown, unfit.rule, unfit.fix, setting.where))
        return
    origins[name] = setting.where


def _unknown(setting: Setting, schema: type[Config]) -> Problem:
    """Return the problem of an unknown option."""
    name = setting.option
    # A table in the file is a section. Suggest sections and tables of tables.
    if isinstance(setting.value, dict) and not setting.is_text:
        tables = [option.name for option in options().values() if option.entry]
        near = nearest(name, [*filter(None, sections(schema)), *tables])
        fix = f"did you mean [{near}]?"
        if not near:
            fix = "sections are " + ", ".join(
                section for section in sections(schema) if section and "." not in section
            )
        return Problem(f"[{name}]", None, "is not a section", fix, setting.where)
    if name in sections(schema):
        return Problem(
            name,
            setting.shown,
            rule="is a section, not an option",
            fix=f"write [{name}] above its keys",
            where=setting.where,
        )
    return Problem(
        name,
        setting.shown,
        rule="is not an option",
        fix=suggestion(name, ALIASES, schema),
        where=setting.where,
    )


def _build(section: str, values: Mapping[str, Any], schema: type[Config]) -> Value:
    """Build the dataclass of a section. Fields without a value keep their defaults."""
    cls = sections(schema)[section]
    prefix = f"{section}." if section else ""
    given: dict[str, Any] = {}
    for name in cls.__dataclass_fields__:  # type: ignore[attr-defined]
        dotted = f"{prefix}{name}"
        if dotted in sections(schema):
            given[name] = _build(dotted, values, schema)
        elif dotted in values:
            given[name] = values[dotted]
            option = options(schema)[dotted]
            if option.entry:
                given[name] = nested.build(option, values[dotted])
    return cls(**given)


def _settings_of(
    table: Mapping[str, Any], text: str, file: Path | None, schema: type[Config] = Config
) -> list[Setting]:
    """Return the settings of a parsed TOML file, with their lines in ``text``."""
    if file is None:
        return []
    return _flatten(table, (), key_lines(text), file.name, schema)


def _flatten(
    table: Mapping[str, Any],
    prefix: tuple[str, ...],
    lines: Mapping[tuple[str, ...], int],
    file: str,
    schema: type[Config],
) -> list[Setting]:
    """Flatten tables into dotted settings. A table that is not a section stays a single setting."""

    def where(path: tuple[str, ...]) -> str:
        return f"{file}:{lines[path]}" if path in lines else file

    settings: list[Setting] = []
    for key, value in table.items():
        path = (*prefix, key)
        name = ".".join(path)
        if nested.holds(path):
            settings += nested.spread(path, value, where)
        elif isinstance(value, dict) and _is_section(name, schema):
            settings += _flatten(value, path, lines, file, schema)
        else:
            settings.append(Setting(name, value, where(path)))
    return settings


def _is_section(name: str, schema: type[Config]) -> bool:
    """True if the options of a table are set one by one: a section of today's or an older schema."""
    if name in sections(schema):
        return True
    if name in options(schema) and options(schema)[name].is_table:
        return True
    return any(old.startswith(f"{name}.") for old in ALIASES)
