"""Health of NVIDIA devices from nvidia-smi: memory errors, throttled clocks, heat, and link width.

Field names are those of ``nvidia-smi --help-query-gpu``. If a driver reports a field as unknown, the query is
repeated without this field.
"""

from __future__ import annotations

import contextlib
import csv
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
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

    found = str(getattr(accelerator.module(device).get_device_properties(device), "uuid", ""))
    return found if not found or found.startswith(("GPU-", "MIG-")) else f"GPU-{found}"


def _query(uuid: str, fields: Sequence[str]) -> list[str]:
    return ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "-i", uuid]


class _Nothing:
    """Placeholder for the process of a query that cannot run."""

    def poll(self) -> int:
        return 1


@contextlib.contextmanager
def asking(uuid: str) -> Iterator[Any]:
    """Start a query of the driver, and terminate it on exit."""
    if not uuid or shutil.which("nvidia-smi") is None:
        yield _Nothing()
        return
    process = subprocess.Popen(_query(uuid, FIELDS), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def answer(asked: Any, uuid: str) -> Facts:
    """Return the result of a query. Raise OSError or subprocess.SubprocessError if it failed."""
    if isinstance(asked, _Nothing):
        return {"error": "nvidia-smi does not exist, or the device has no UUID"}
    text, _ = asked.communicate(timeout=SECONDS)
    # A driver names the first unknown field. Repeat the query with its old name, or without it.
    fields = list(FIELDS)
    for _ in FIELDS:
        unknown = re.search(r'Field "([^"]+)" is not a valid field', text)
        if unknown is None or unknown[1] not in fields:
            break
        place = fields.index(unknown[1])
        fields[place : place + 1] = [OLD_NAMES[unknown[1]]] if unknown[1] in OLD_NAMES else []
        text = _ask(_query(uuid, fields))
    found = parse(fields, text)
    if len(fields) < len(FIELDS) or set(fields) - set(FIELDS):
        found.pop("pcie.link.gen.current", None)  # repeated without load, when an idle link is slower
    found["nvlink"] = nvlink_rates(_ask(["nvidia-smi", "nvlink", "--status", "-i", uuid]))
    return found


def _ask(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False).stdout


def parse(fields: Sequence[str], text: str) -> Facts:
    """Return the text of each field. Fields that the device does not support are omitted."""
    rows = list(csv.reader(text.strip().splitlines(), skipinitialspace=True))
    if len(rows) != 1 or len(rows[0]) != len(fields):
        return {"error": text.strip().splitlines()[0][:120] if text.strip() else "nvidia-smi printed nothing"}
    current = {old: new for new, old in OLD_NAMES.items()}
    values = zip((current.get(field, field) for field in fields), rows[0], strict=True)
    return {name: value for name, value in values if not value.startswith("[") and value not in ("N/A", "")}


def nvlink_rates(text: str) -> list[float]:
    """Return the GB/s in one direction of each NVLink of one device, 0 for inactive links.

    >>> nvlink_rates("GPU 0: NVIDIA H100\\n  Link 0: 26.562 GB/s\\n  Link 1: <inactive>")
    [26.562, 0.0]
    """
    found = re.findall(r"Link \d+: (?:([\d.]+) GB/s|<?inactive>?)", text)
    return [float(value) if value else 0.0 for value in found]


def _number(facts: Facts, name: str) -> float:
    try:
        value = str(facts.get(name, "0")).split()[0]
        return float(int(value, 16) if value.startswith("0x") else value)
    except (ValueError, IndexError):
        return 0.0


def judge(reports: Reports, by_rank: dict[int, Facts]) -> Iterator[Finding]:
    """Yield a finding per kind of problem, with the affected ranks."""
    if not by_rank:
        return
    silent = {rank: facts["error"] for rank, facts in by_rank.items() if "error" in facts}
    if silent:
        text = f"{next(iter(silent.values()))} ({reports.who(list(silent))})"
        yield Finding(
            AREA, "health", "warn", text, "readable", "install the driver's nvidia-smi, or check the device manually"
        )
    asked = {rank: facts for rank, facts in by_rank.items() if rank not in silent}
    if not asked:
        return
    rows: list[tuple[str, Verdict, dict[int, str], str, str]] = [
        ("memory errors", "fail", _texts(asked, _memory_errors), "none", "reset the device or have it replaced"),
        ("corrected errors", "warn", _texts(asked, _corrected), f"under {_MANY_CORRECTED}", "watch this device"),
        ("throttled", "fail", _texts(asked, lambda f: _reasons(f, _HARD)), "no", "check cooling and power supply"),
        ("heat", "warn", _texts(asked, lambda f: _reasons(f, _SOFT)), "none", "check the cooling of this host"),
        ("PCIe link", "warn", _texts(asked, _pcie), "full width and generation", "reseat the card, or reset the host"),
        (
            "NVLink",
            "fail",
            _texts(asked, _nvlink),
            "all links up",
            "check nvidia-smi nvlink --status and the fabric manager",
        ),
        (
            "MIG",
            "warn",
            _texts(asked, _mig),
            "off",
            "switch it off with nvidia-smi -mig 0; slices of a device cannot train together",
        ),
    ]
    for subject, verdict, found, expected, fix in rows:
        if found:
            first = min(found)
            text = f"{found[first]} on {reports.who(list(found))}"
            yield Finding(AREA, subject, verdict, text, expected, fix, tuple(sorted(found)))
        else:
            yield Finding(AREA, subject, "pass", "none" if expected == "none" else "as expected", expected)


def _texts(by_rank: dict[int, Facts], look: Any) -> dict[int, str]:
    return {rank: text for rank, facts in by_rank.items() if (text := look(facts))}


def _memory_errors(facts: Facts) -> str:
    errors = int(_number(facts, "ecc.errors.uncorrected.volatile.total"))
    words = [f"{errors} uncorrected"] if errors else []
    states = {
        "remapped_rows.pending": "rows wait for remapping",
        "remapped_rows.failure": "remapping failed",
        "retired_pages.pending": "pages wait for retirement",
    }
    words += [text for name, text in states.items() if facts.get(name, "0") not in ("0", "No")]
    return ", ".join(words)


def _corrected(facts: Facts) -> str:
    errors = int(_number(facts, "ecc.errors.corrected.volatile.total"))
    return f"{errors}" if errors >= _MANY_CORRECTED else ""


def _reasons(facts: Facts, bits: dict[int, str]) -> str:
    active = int(_number(facts, "clocks_event_reasons.active"))
    words = [text for bit, text in bits.items() if active & bit]
    heat = f" at {facts['temperature.gpu']} C" if words and "temperature.gpu" in facts else ""
    return ", ".join(words) + heat


def _pcie(facts: Facts) -> str:
    words = []
    for name, sign in (("width", "x"), ("gen", "generation ")):
        current = _number(facts, f"pcie.link.{name}.current")
        most = _number(facts, f"pcie.link.{name}.max")
        if 0 < current < most:
            words.append(f"{sign}{current:.0f} of {sign}{most:.0f}")
    return ", ".join(words)


def _nvlink(facts: Facts) -> str:
    rates = facts.get("nvlink", [])
    down = sum(rate == 0 for rate in rates)
    return f"{down} of {len(rates)} links down" if 0 < down < len(rates) else ""


def _mig(facts: Facts) -> str:
    return "on" if facts.get("mig.mode.current") == "Enabled" else ""
