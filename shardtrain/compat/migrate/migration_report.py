"""Rules that translate the keys of a foreign file, and the record of their results."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shardtrain.compat.migrate.document import ForeignDocument
from shardtrain.config.coerce import Unfit
from shardtrain.config.options import nearest
from shardtrain.config.settings import Setting
from shardtrain.config.toml_writer import toml_value
from shardtrain.utils.errors import Problem
from shardtrain.utils.redact import shown

Verdict = Literal["honoured", "renamed", "ignored", "unsupported", "default"]
"""Result for one key.

- honoured: sets an option with the same name.
- renamed: sets an option with another name.
- ignored: has no effect on the numbers of training.
- unsupported: would change the numbers, and has no counterpart.
- default: not a key of the file, but a default of the foreign system that sets an option.
"""

# Spellings of a missing value in JSON, YAML and command lines.
_EMPTY = (None, "", "null", "none", "None")
OFF = (*_EMPTY, False, 0, 0.0, "no", "false", "False", "NO")


@dataclass(frozen=True)
class Entry:
    """Result for one key: a line of the report."""

    key: str
    value: Any
    where: str
    verdict: Verdict
    text: str
    option: str = ""

    def __str__(self) -> str:
        source = self.where
        if self.key:
            source += f": {self.key}"
        # The value of a secret must not appear in a report.
        if self.key and self.value is not None:
            source += f" = {_short(shown(self.key, self.value))}"
        separator = " -> " if self.option else ": "
        line = f"{self.verdict:<11} {source}{separator}{self.text}"

        # The file is not trusted: a control character could rewrite the terminal.
        return "".join(char if char.isprintable() else "?" for char in line)


def _short(value: Any) -> str:
    """Format a value as TOML, cut to 80 characters."""
    is_toml = isinstance(value, str | bool | int | float | list | dict)
    text = toml_value(value) if is_toml else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class To:
    """Rule of a key with a corresponding option.

    ``translate`` converts its value, which has the type ``kind``.
    """

    option: str
    kind: type
    translate: Callable[[Any], Any] | None = None
    why: str = ""


@dataclass(frozen=True)
class Idle:
    """Rule of a key that has no effect on numbers, or that the foreign system does not read."""

    why: str


@dataclass(frozen=True)
class Cannot:
    """Rule of a key without a corresponding option. It is unsupported, unless its value is one of ``off``."""

    why: str
    off: tuple[Any, ...] = OFF


@dataclass(frozen=True)
class Joined:
    """Rule of a key whose meaning depends on other keys. The reader's ``finish`` translates it."""


Rule = To | Idle | Cannot | Joined
JOINED = Joined()

_TRUE = ("true", "yes", "1", "on")
_FALSE = ("false", "no", "0", "off")


def of_kind(value: Any, kind: type) -> Any:
    """Convert a value to bool, int, float, str or list.

    Numbers and booleans may be strings, because YAML 1.1 reads 2e-05 as a string.

    Raises:
        Unfit: the value cannot be converted.
    """
    if kind is bool:
        if isinstance(value, bool):
            return value
        text = str(value).lower()
        if text not in (*_TRUE, *_FALSE):
            raise Unfit("must be true or false", "correct it")
        return text in _TRUE
    # bool is a subclass of int, so it must be rejected explicitly.
    if kind in (int, float):
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                raise Unfit("must be a number", "correct it") from None
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not math.isfinite(number)
        ):
            raise Unfit("must be a number", "correct it")
        if kind is float:
            return float(number)
        # YAML and JSON may write an integer as 2.0, but 2.5 must not be cut to 2.
        if number != int(number):
            raise Unfit("must be a whole number", "correct it")
        return int(number)
    if kind is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise Unfit("must be text", "correct it")
    # Lists are used as they are. Their user checks the elements.
    if kind is list:
        if isinstance(value, list):
            return value
        raise Unfit("must be a list", "correct it")
    raise AssertionError(kind)


@dataclass(frozen=True)
class ThisMachine:
    """Requested processes and available devices, for files whose batch size depends on them."""

    nproc: int | None = None
    """Processes per node, from the command line or the environment."""
    nodes: int | None = None
    """Nodes, from the command line or the environment."""
    devices: int = 0
    """Accelerators of this machine."""


@dataclass
class FileMigration:
    """Translation of one file: its values, and the results so far.

    Keys of nested tables are joined by NUL, because a key may contain a dot.

    Attributes:
        document: The file.
        system: Name of the foreign system.
        num_processes: Number of ranks of the run. None if it is unknown.
        machine: Requested processes and available devices.
        launch: Command-line options of ``train`` that the file sets: nproc, nnodes, node_rank, rdzv_endpoint.
        verb: Verb of the command line that the file is for: train or test.
        notes: Further requirements of a run that no key of the file states.
        values: Values of the file by flat key.
        settings: Options that the file sets.
        entries: Results for the keys translated so far.
        problems: Invalid values.
    """

    document: ForeignDocument
    system: str
    num_processes: int | None = None
    machine: ThisMachine = ThisMachine()
    launch: dict[str, Any] = field(default_factory=dict)
    verb: str = "train"
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def where(self, key: str) -> str:
        """Return the file and line of a flat key."""
        return self.document.where(tuple(key.split("\0"))) if key else self.document.path.name

    def get(self, key: str, kind: type, otherwise: Any = None) -> Any:
        """Return the value of a key, or ``otherwise`` if it is missing, empty or "auto".

        An invalid value also returns ``otherwise``, and is added to ``problems``.
        """
        value = self.values.get(key)
        # "auto" leaves the value to another program, so it is not a value of this file.
        if value is None or value == "auto" or value == "":
            return otherwise
        try:
            return of_kind(value, kind)
        except Unfit as unfit:
            self.problems.append(
                Problem(
                    _dotted(key),
                    value,
                    rule=unfit.rule,
                    fix=unfit.fix,
                    where=self.where(key),
                )
            )
            return otherwise

    def has(self, key: str) -> bool:
        """True if the file sets this key to something other than an empty value or "auto"."""
        return self.values.get(key) not in (None, "", "auto")

    def record(self, key: str, verdict: Verdict, text: str) -> None:
        """Record the result of a key that sets no option. Do nothing if the key is missing or has a result.

        A reader can therefore handle special values first, and then record the general case without a
        condition.
        """
        if key in self.values and not self.is_recorded(key):
            self.entries.append(
                Entry(_dotted(key), self.values[key], self.where(key), verdict, text)
            )

    def is_recorded(self, key: str) -> bool:
        """True if the key has a result."""
        return any(entry.key == _dotted(key) for entry in self.entries)

    def set(self, key: str, option: str, value: Any, why: str = "") -> None:
        """Set an option from ``key``, or from a default of the foreign system if ``key`` is ""."""
        # A later value of an option replaces an earlier one.
        self.settings = [s for s in self.settings if s.option != option]
        self.entries = [e for e in self.entries if e.verdict != "default" or e.option != option]

        verdict: Verdict = "default"
        name = ""
        given = None
        where = self.document.path.name
        if key in self.values:
            name = _dotted(key)
            given = self.values[key]
            where = self.where(key)
            # A key that only moved to another section kept its name.
            has_same_name = name.rpartition(".")[2] == option.rpartition(".")[2]
            verdict = "honoured" if has_same_name else "renamed"
        text = f"{option} = {_short(shown(option, value))}"
        if why:
            text += f": {why}"
        self.settings.append(Setting(option, value, where))
        self.entries.append(Entry(name, given, where, verdict, text, option))

    def default(self, option: str, value: Any, why: str = "") -> None:
        """Set an option to the default of the foreign system, unless it has been set."""
        if not any(setting.option == option for setting in self.settings):
            self.set("", option, value, why or f"the default of {self.system}")


def translate_offload(migration: FileMigration, key: str) -> None:
    """Translate the device of DeepSpeed's ``offload_optimizer`` or ``offload_param``."""
    device = migration.get(key, str)
    if device == "cpu":
        migration.set(
            key,
            "training.enable_cpu_offload",
            True,
            "parameters, gradients and optimizer state are offloaded together",
        )
    elif device == "nvme":
        migration.record(
            key,
            "unsupported",
            "offloading to disk is not supported; use host memory: training.enable_cpu_offload",
        )
    migration.record(key, "ignored", "nothing is offloaded")


def default_to_constant_rate(migration: FileMigration, why: str) -> None:
    """Default to a constant learning rate, for systems without a default schedule."""
    migration.default("lr_scheduler.name", "transformers", why)
    migration.default("lr_scheduler.warmup_steps", 0)
    migration.default("lr_scheduler.warmup_proportion", 0.0)
    migration.default("lr_scheduler.min_lr_factor", 1.0)


def _dotted(key: str) -> str:
    return key.replace("\0", ".")


def flatten(
    values: Mapping[str, Any], leaves: frozenset[str] | set[str], start: str = ""
) -> Iterator[tuple[str, Any]]:
    """Yield the flat key and the value of each entry of nested tables.

    Nested keys are joined by NUL, because a key may contain a dot. Tables in ``leaves`` are values and
    stay nested.
    """
    for name, value in values.items():
        key = f"{start}{name}"
        if isinstance(value, dict) and value and key not in leaves:
            yield from flatten(value, leaves, f"{key}\0")
        else:
            yield key, value


def apply(migration: FileMigration, rules: Mapping[str, Rule], unknown_reason: str) -> None:
    """Translate each key by its rule.

    Args:
        migration: The file.
        rules: Rule of each dotted key.
        unknown_reason: Reason why a key without a rule is unsupported. If "", such a key is a problem.
    """
    # Keys with the rule JOINED have no result here. The reader's ``finish`` translates them.
    for key, value in migration.values.items():
        rule = _rule(_dotted(key), rules)
        if rule is None:
            _without_rule(migration, key, value, rules, unknown_reason)
        elif isinstance(rule, Idle):
            migration.record(key, "ignored", rule.why)
        elif isinstance(rule, Cannot) and _is_off(value, rule.off):
            migration.record(key, "ignored", "this value needs no option")
        elif isinstance(rule, Cannot):
            migration.record(key, "unsupported", rule.why)
        elif isinstance(rule, To):
            _to(migration, key, value, rule)


def _without_rule(
    migration: FileMigration, key: str, value: Any, rules: Mapping[str, Rule], unknown_reason: str
) -> None:
    """Report a key without a rule. See ``apply`` for ``unknown_reason``."""
    name = _dotted(key)
    where = migration.where(key)

    # Keys inside this key have rules, so it must be a table.
    inner = next((other for other in rules if other.startswith(f"{name}.")), None)
    if inner is not None:
        if value in ({}, [], None, ""):
            migration.record(key, "ignored", "it is empty")
        else:
            migration.problems.append(
                Problem(
                    name,
                    value,
                    rule="must be a table",
                    fix=f"write {name} as a table with its own keys",
                    where=where,
                )
            )
        return

    # A name very close to a known one is a typing error, even where unknown keys are allowed.
    near = nearest(name, rules, 0.92 if unknown_reason else 0.8)
    if unknown_reason and not near:
        migration.record(key, "unsupported", unknown_reason)
        return
    fix = f"did you mean {near}?" if near else "correct or remove it"
    text = f"is not a key of {migration.system}, the system recognized from this file's keys"
    migration.problems.append(Problem(name, value, text, fix, where))


def _is_off(value: Any, off: tuple[Any, ...]) -> bool:
    """True if a value is an empty table or list, or one of ``off``. 0 and False are different values."""
    if value in ([], {}):
        return True
    # Python considers 0 and False equal.
    is_boolean = isinstance(value, bool)
    return any(value == item and is_boolean == isinstance(item, bool) for item in off)


def _rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a dotted key, or of the nearest table around it (``"autotuning.*"``)."""
    # Look for a rule of the key itself, then of each table around it, from the inside out.
    while key not in rules and not f"{key}.*".startswith("."):
        table = key.rpartition(".")[0]
        if f"{table}.*" in rules:
            return rules[f"{table}.*"]
        if not table:
            return rules.get(key)
        key = table
        # The rule of a value does not apply to keys inside a table of this name.
        if key in rules:
            return None
    return rules.get(key)


def _to(migration: FileMigration, key: str, value: Any, rule: To) -> None:
    """Set the option of a key."""
    # These two are not values: do not try to convert them.
    if value == "auto":
        migration.record(key, "ignored", '"auto": another file or the default determines it')
        return
    if value is None or value == "":
        migration.record(key, "ignored", "it is empty")
        return
    try:
        new = of_kind(value, rule.kind)
        if rule.translate:
            new = rule.translate(new)
    except Unfit as unfit:
        migration.problems.append(
            Problem(
                _dotted(key),
                value,
                rule=unfit.rule,
                fix=unfit.fix,
                where=migration.where(key),
            )
        )
        return
    migration.set(key, rule.option, new, rule.why)
