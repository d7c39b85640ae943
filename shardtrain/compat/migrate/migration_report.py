"""The rules by which a reader translates each key of a foreign file, and the report of the results."""

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
"""honoured: an option of the same name; renamed: an option of another name; ignored: has no effect on numbers;
unsupported: would change numbers; default: not in the file, the foreign system's default."""

NONE = (None, "", "null", "none", "None")
OFF = (*NONE, False, 0, 0.0, "no", "false", "False", "NO")


@dataclass(frozen=True)
class Entry:
    """The result for one key."""

    key: str
    value: Any
    where: str
    verdict: Verdict
    text: str
    option: str = ""

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {_short(shown(self.key, self.value))}"
        key = f"{self.where}: {self.key}{value}" if self.key else self.where
        line = f"{self.verdict:<11} {key}{' -> ' if self.option else ': '}{self.text}"
        return "".join(char if char.isprintable() else "?" for char in line)


def _short(value: Any) -> str:
    text = toml_value(value) if isinstance(value, str | bool | int | float | list | dict) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True)
class To:
    """A key with a corresponding option; ``translate`` converts its value of type ``kind``."""

    option: str
    kind: type
    translate: Callable[[Any], Any] | None = None
    why: str = ""


@dataclass(frozen=True)
class Idle:
    """A key that has no effect on numbers, or that the foreign system does not read."""

    why: str


@dataclass(frozen=True)
class Cannot:
    """A key without a corresponding option; ignored if its value is one of ``off``."""

    why: str
    off: tuple[Any, ...] = OFF


@dataclass(frozen=True)
class Joined:
    """A key whose meaning depends on other keys: the reader's ``finish`` translates it."""


Rule = To | Idle | Cannot | Joined
JOINED = Joined()


def of_kind(value: Any, kind: type) -> Any:
    """Convert a value to the type of its key; raises Unfit.

    Strings are parsed: YAML 1.1 reads 2e-05 as a string.
    """
    if kind is bool:
        words = {
            "true": True,
            "false": False,
            "yes": True,
            "no": False,
            "1": True,
            "0": False,
            "on": True,
            "off": False,
        }
        found = value if isinstance(value, bool) else words.get(str(value).lower())
        if found is None:
            raise Unfit("must be true or false", "correct it")
        return found
    if kind in (int, float):
        number = value
        if isinstance(value, str):
            try:
                number = float(value)
            except ValueError:
                raise Unfit("must be a number", "correct it") from None
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise Unfit("must be a number", "correct it")
        if kind is float:
            return float(number)
        if number != int(number):
            raise Unfit("must be a whole number", "correct it")
        return int(number)
    if kind is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        raise Unfit("must be text", "correct it")
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
    """The values of a file while it is read, and the results so far."""

    document: ForeignDocument
    system: str
    num_processes: int | None = None
    machine: ThisMachine = ThisMachine()
    launch: dict[str, Any] = field(default_factory=dict)
    """Command-line options of ``train`` that the file sets: nproc, nnodes, node_rank, rdzv_endpoint."""
    verb: str = "train"
    """The verb that does what the file is for."""
    notes: list[str] = field(default_factory=list)
    """Further requirements of a run, not tied to a key."""
    values: dict[str, Any] = field(default_factory=dict)
    settings: list[Setting] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def where(self, key: str) -> str:
        """Return the file and line of a dotted key."""
        return self.document.where(tuple(key.split("\0"))) if key else self.document.path.name

    def get(self, key: str, kind: type, otherwise: Any = None) -> Any:
        """Return the value of a key, or ``otherwise`` if it is missing, empty, "auto" or invalid (a problem)."""
        value = self.values.get(key)
        if value is None or value == "auto" or value == "":
            return otherwise
        try:
            return of_kind(value, kind)
        except Unfit as unfit:
            self.problems.append(Problem(_dotted(key), value, unfit.rule, unfit.fix, self.where(key)))
            return otherwise

    def has(self, key: str) -> bool:
        """True if the file sets this key to something other than an empty value or "auto"."""
        return self.values.get(key) not in (None, "", "auto")

    def answer(self, key: str, verdict: Verdict, text: str) -> None:
        """Record the result of a key that sets no option, unless it has a result already.

        A reader can therefore handle special values first and add the general case unconditionally.
        """
        if key in self.values and not self.answered(key):
            self.entries.append(Entry(_dotted(key), self.values[key], self.where(key), verdict, text))

    def answered(self, key: str) -> bool:
        """True if the key has a result."""
        return any(entry.key == _dotted(key) for entry in self.entries)

    def set(self, key: str, option: str, value: Any, why: str = "") -> None:
        """Set an option from ``key``, or from a default of the foreign system if ``key`` is ""."""
        in_file = key in self.values
        where = self.where(key) if in_file else self.document.path.name
        self.settings = [s for s in self.settings if s.option != option]
        self.entries = [e for e in self.entries if e.verdict != "default" or e.option != option]
        self.settings.append(Setting(option, value, where))
        if in_file:
            verdict: Verdict = "honoured" if _dotted(key).rpartition(".")[2] == option.rpartition(".")[2] else "renamed"
            name = _dotted(key)
            given = self.values[key]
        else:
            verdict = "default"
            name = ""
            given = None
        text = f"{option} = {_short(shown(option, value))}{f': {why}' if why else ''}"
        self.entries.append(Entry(name, given, where, verdict, text, option))

    def default(self, option: str, value: Any, why: str = "") -> None:
        """Set an option to the default of the foreign system, unless it has been set."""
        if not any(setting.option == option for setting in self.settings):
            self.set("", option, value, why or f"what {self.system} does unless told otherwise")


def answer_offload(found: FileMigration, key: str) -> None:
    """Translate the device of DeepSpeed's ``offload_optimizer`` or ``offload_param``."""
    device = found.get(key, str)
    if device == "cpu":
        found.set(key, "training.enable_cpu_offload", True, "parameters, gradients and state together")
    elif device == "nvme":
        found.answer(key, "unsupported", "host memory is the nearest: training.enable_cpu_offload")
    found.answer(key, "ignored", "nothing is offloaded")


def default_to_constant_rate(found: FileMigration, why: str) -> None:
    """Default to a constant learning rate, for systems without a default schedule."""
    found.default("lr_scheduler.name", "transformers", why)
    found.default("lr_scheduler.warmup_steps", 0)
    found.default("lr_scheduler.warmup_proportion", 0.0)
    found.default("lr_scheduler.min_lr_factor", 1.0)


def _dotted(key: str) -> str:
    return key.replace("\0", ".")


def flatten(values: Mapping[str, Any], leaves: frozenset[str] | set[str], start: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested keys, joined by NUL because keys may contain dots, and values.

    Tables in ``leaves`` are values.
    """
    for name, value in values.items():
        key = f"{start}{name}"
        if isinstance(value, dict) and value and key not in leaves:
            yield from flatten(value, leaves, f"{key}\0")
        else:
            yield key, value


def apply(found: FileMigration, rules: Mapping[str, Rule], is_open: str) -> None:
    """Translate each key by its rule. A key without a rule is unsupported for the reason ``is_open``, or, if that is
    "", a problem."""
    for key, value in found.values.items():
        rule = _rule(_dotted(key), rules)
        where = found.where(key)
        if rule is None and any(name.startswith(f"{_dotted(key)}.") for name in rules):
            if value in ({}, [], None, ""):
                found.answer(key, "ignored", "it is empty")
            else:
                inner = next(name for name in rules if name.startswith(f"{_dotted(key)}."))
                rule_text = "must be a table"
                fix = f"write its keys in it, as {inner}"
                found.problems.append(Problem(_dotted(key), value, rule_text, fix, where))
        elif rule is None:
            near = nearest(_dotted(key), rules, 0.92 if is_open else 0.8)
            if near or not is_open:
                fix = f"did you mean {near}?" if near else "correct it, or take it out"
                text = f"is not a key of {found.system}, which this file was taken for"
                found.problems.append(Problem(_dotted(key), value, text, fix, where))
            else:
                found.answer(key, "unsupported", is_open)
        elif isinstance(rule, Idle):
            found.answer(key, "ignored", rule.why)
        elif isinstance(rule, Cannot):
            off = any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in rule.off)
            empty = value in ([], {})
            found.answer(
                key, "ignored" if off or empty else "unsupported", "it asks for nothing" if off or empty else rule.why
            )
        elif isinstance(rule, To):
            _to(found, key, value, rule)


def _rule(key: str, rules: Mapping[str, Rule]) -> Rule | None:
    """Return the rule of a key, or of its table (``"autotuning.*"``)."""
    while key not in rules and not f"{key}.*".startswith("."):
        table = key.rpartition(".")[0]
        if f"{table}.*" in rules:
            return rules[f"{table}.*"]
        if not table:
            return rules.get(key)
        key = table
        if key in rules:
            return None
    return rules.get(key)


def _to(found: FileMigration, key: str, value: Any, rule: To) -> None:
    if value is None or value == "auto" or value == "":
        found.answer(key, "ignored", "it is empty" if value != "auto" else "left to another file, or the default")
        return
    try:
        new = of_kind(value, rule.kind)
        new = rule.translate(new) if rule.translate else new
    except Unfit as unfit:
        found.problems.append(Problem(_dotted(key), value, unfit.rule, unfit.fix, found.where(key)))
        return
    found.set(key, rule.option, new, rule.why)
