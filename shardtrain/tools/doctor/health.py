"""Health of NVIDIA devices from nvidia-smi: memory errors, throttled clocks, heat, and link width.

Field names are those of ``nvidia-smi --help-query-gpu``. If a driver reports a field as unknown, the query is
repeated without this field.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict

AREA = "devices"

FIELDS = (
    "driver_version",
    "mig.mode.current",
    "pcie.link.gen.current",
    "pcie.link.gen.max",
    "pcie.link.width.current",
    "pcie.link.width.max",
    "clocks.sm",
    "clocks.max.sm",
    "clocks_event_reasons.active",
    "temperature.gpu",
    "power.draw",
    "power.limit",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "ecc.errors.corrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
    "retired_pages.pending",
)
OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}
SECONDS = 10.0
"""Timeout of one query of the driver."""
_HARD = {0x08: "hardware slowdown", 0x40: "heat (hardware)", 0x80: "power brake"}
_SOFT = {0x20: "heat (driver)"}
"""Bits of nvmlClocksEventReasons in NVIDIA's NVML reference.

Bit 0x1 means idle. Bit 0x4 means the power cap, which a large product reaches on a healthy device.
"""
_MANY_CORRECTED = 1000


def uuid_of(device: Any) -> str:
    """Return the UUID of a device in the format of nvidia-smi, or "" if PyTorch does not report it."""
    from shardtrain.ops import accelerator

    properties = accelerator.module(device).get_device_properties(device)
    uuid = str(getattr(properties, "uuid", ""))
    if uuid and not uuid.startswith(("GPU-", "MIG-")):
        uuid = f"GPU-{uuid}"
    return uuid


def _query_command(uuid: str, fields: Sequence[str]) -> list[str]:
    return [
        "nvidia-smi",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
        "-i",
        uuid,
    ]


class _Nothing:
    """Placeholder for the process of a query that cannot run."""

    def poll(self) -> int:
        return 1


@contextlib.contextmanager
def query(uuid: str) -> Iterator[Any]:
    """Start a query of the driver, and terminate it on exit."""
    if not uuid or shutil.which("nvidia-smi") is None:
        yield _Nothing()
        return
    process = subprocess.Popen(
        _query_command(uuid, FIELDS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answer(query: Any, uuid: str) -> Facts:
    """Return the result of a query. Raise OSError or subprocess.SubprocessError if it failed."""
    if isinstance(query, _Nothing):
        return {"error": "nvidia-smi does not exist, or the device has no UUID"}
    text, _ = query.communicate(timeout=SECONDS)

    # A driver names the first unknown field. Repeat the query with its old name, or without it.
    fields = list(FIELDS)
    for _ in FIELDS:
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown is None or unknown[1] not in fields:
            break
        place = fields.index(unknown[1])
        if unknown[1] in OLD_NAMES:
            fields[place] = OLD_NAMES[unknown[1]]
        else:
            del fields[place]
        text = _ask(_query_command(uuid, fields))

    facts = parse(fields, text)
    # A repeated query runs without load, when an idle link is slower.
    if fields != list(FIELDS):
        facts.pop("pcie.link.gen.current", None)
    facts["nvlink"] = nvlink_rates(_ask(["nvidia-smi", "nvlink", "--status", "-i", uuid]))
    return facts


def _ask(command: Sequence[str]) -> str:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False
    ).stdout


def parse(fields: Sequence[str], text: str) -> Facts:
    """Return the text of each field. Fields that the device does not support are omitted."""
    text = text.strip()
    if not text:
        return {"error": "nvidia-smi printed nothing"}
    lines = text.splitlines()
    rows = list(csv.reader(lines, skipinitialspace=True))
    # A driver prints its error instead of the one row of values.
    if len(rows) != 1 or len(rows[0]) != len(fields):
        return {"error": lines[0][:120]}

    current_names = {old: new for new, old in OLD_NAMES.items()}
    facts: Facts = {}
    for field, value in zip(fields, rows[0], strict=True):
        is_supported = not value.startswith("[") and value not in ("N/A", "")
        if is_supported:
            facts[current_names.get(field, field)] = value
    return facts


def nvlink_rates(text: str) -> list[float]:
    """Return the GB/s in one direction of each NVLink of one device, 0 for inactive links.

    >>> nvlink_rates("GPU 0: NVIDIA H100\\n  Link 0: 26.562 GB/s\\n  Link 1: <inactive>")
    [26.562, 0.0]
    """
    # The group of an inactive link is empty.
    values = re.findall(r"Link \d+: (?:([\d.]+) GB/s|<?inactive>?)", text)
    return [float(value or 0.0) for value in values]


def _number(facts: Facts, name: str) -> float:
    """Return the number of a field in decimal or hexadecimal notation, or 0 if it has none."""
    try:
        value = str(facts.get(name, "0")).split()[0]
        if value.startswith("0x"):
            return float(int(value, 16))
        return float(value)
    except (ValueError, IndexError):
        return 0.0


@dataclasses.dataclass(frozen=True)
class HealthRule:
    """One kind of problem of a device.

    Attributes:
        verdict: Verdict of devices with the problem.
        describe: Returns a description of the problem, or "" if a device does not have it.
    """

    subject: str
    verdict: Verdict
    describe: Callable[[Facts], str]
    expected: str
    fix: str


def judge(reports: Reports, by_rank: dict[int, Facts]) -> Iterator[Finding]:
    """Yield a finding per kind of problem, with the affected ranks."""
    errors = {rank: facts["error"] for rank, facts in by_rank.items() if "error" in facts}
    if errors:
        first_error = next(iter(errors.values()))
        text = f"{first_error} ({reports.who(list(errors))})"
        fix = "install the driver's nvidia-smi, or check the device manually"
        yield Finding(AREA, "health", "warn", text, "readable", fix)

    answered = {rank: facts for rank, facts in by_rank.items() if rank not in errors}
    if not answered:
        return
    for rule in RULES:
        problems: dict[int, str] = {}
        for rank, facts in answered.items():
            problem = rule.describe(facts)
            if problem:
                problems[rank] = problem
        if problems:
            # Show the problem of the first rank. The fix is the same for all.
            text = f"{problems[min(problems)]} on {reports.who(list(problems))}"
            ranks = tuple(sorted(problems))
            yield Finding(AREA, rule.subject, rule.verdict, text, rule.expected, rule.fix, ranks)
        else:
            text = "none" if rule.expected == "none" else "as expected"
            yield Finding(AREA, rule.subject, "pass", text, rule.expected)


def _memory_errors(facts: Facts) -> str:
    problems = []
    errors = int(_number(facts, "ecc.errors.uncorrected.volatile.total"))
    if errors:
        problems.append(f"{errors} uncorrected")
    states = {
        "remapped_rows.pending": "rows wait for remapping",
        "remapped_rows.failure": "remapping failed",
        "retired_pages.pending": "pages wait for retirement",
    }
    for name, text in states.items():
        if facts.get(name, "0") not in ("0", "No"):
            problems.append(text)
    return ", ".join(problems)


def _corrected(facts: Facts) -> str:
    errors = int(_number(facts, "ecc.errors.corrected.volatile.total"))
    # A device in good health also corrects a few bit flips.
    if errors < _MANY_CORRECTED:
        return ""
    return str(errors)


def _hardware_throttling(facts: Facts) -> str:
    return _reasons(facts, _HARD)


def _driver_throttling(facts: Facts) -> str:
    return _reasons(facts, _SOFT)


def _reasons(facts: Facts, bits: dict[int, str]) -> str:
    active = int(_number(facts, "clocks_event_reasons.active"))
    reasons = []
    for bit, text in bits.items():
        if active & bit:
            reasons.append(text)
    joined = ", ".join(reasons)
    if reasons and "temperature.gpu" in facts:
        joined += f" at {facts['temperature.gpu']} C"
    return joined


def _pcie(facts: Facts) -> str:
    problems = []
    for name, sign in (("width", "x"), ("gen", "generation ")):
        current = _number(facts, f"pcie.link.{name}.current")
        most = _number(facts, f"pcie.link.{name}.max")
        # An unknown value is 0.
        if 0 < current < most:
            problems.append(f"{sign}{current:.0f} of {sign}{most:.0f}")
    return ", ".join(problems)


def _nvlink(facts: Facts) -> str:
    rates = facts.get("nvlink", [])
    down = rates.count(0.0)
    # If no link is up, the device is not connected by NVLink.
    if down == len(rates) or not down:
        return ""
    return f"{down} of {len(rates)} links down"


def _mig(facts: Facts) -> str:
    is_on = facts.get("mig.mode.current") == "Enabled"
    return "on" if is_on else ""


RULES = (
    HealthRule(
        "memory errors", "fail", _memory_errors, "none", "reset the device or have it replaced"
    ),
    HealthRule(
        "corrected errors", "warn", _corrected, f"under {_MANY_CORRECTED}", "watch this device"
    ),
    HealthRule("throttled", "fail", _hardware_throttling, "no", "check cooling and power supply"),
    HealthRule("heat", "warn", _driver_throttling, "none", "check the cooling of this host"),
    HealthRule(
        "PCIe link",
        "warn",
        _pcie,
        "full width and generation",
        "reseat the card, or reset the host",
    ),
    HealthRule(
        "NVLink",
        "fail",
        _nvlink,
        "all links up",
        "check nvidia-smi nvlink --status and the fabric manager",
    ),
    HealthRule(
        "MIG",
        "warn",
        _mig,
        "off",
        "switch it off with nvidia-smi -mig 0; slices of a device cannot train together",
    ),
)
