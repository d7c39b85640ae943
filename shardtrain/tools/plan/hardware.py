"""Devices and links of a plan: rows of ``facts/devices.toml``, or a user's file of the same form.

No device is queried, because a plan is usually for other machines.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from shardtrain.config.coerce import parse_toml
from shardtrain.config.toml_file import MAX_FILE_BYTES
from shardtrain.facts import devices
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.units import GIB

_LARGEST = {
    "memory_gib": 100_000,
    "memory_bytes_per_second": 1e15,
    "bytes_per_second": 1e14,
    "latency_seconds": 1,
    "power_watts": 100_000,
    "launch_seconds": 1,
    "devices_per_node": 10_000,
    "devices_per_link": 100_000,
    "flops": 1e18,
}
"""Largest plausible value of each key. A larger value has a wrong unit."""


@dataclass(frozen=True)
class Link:
    """A link between devices.

    Attributes:
        name: Name of the link.
        bytes_per_second: Bandwidth per device in one direction.
        latency_seconds: Smallest time of a message.
        efficiency: Share of the bandwidth that large collectives reach.
        source: Origin of the numbers.
        peers: Number of other devices that share the bandwidth if there is no switch. 0 with a switch.
    """

    name: str
    bytes_per_second: float
    latency_seconds: float
    efficiency: float
    source: str
    peers: int = 0


@dataclass(frozen=True)
class Device:
    """One accelerator, or one core of a CPU.

    Attributes:
        flops: Dense peaks per second by dtype.
        devices_per_node: Devices of a node.
        link, network: Links within a node and between nodes.
        matmul_efficiency, attention_efficiency, memory_efficiency: Shares of the peaks that large
            kernels reach.
        launch_seconds: Time of the host to start a kernel.
        source: Origin of the numbers.
        devices_per_link: Devices that ``link`` connects. 0 for those of a node.
    """

    name: str
    memory_gib: float
    memory_bytes_per_second: float
    flops: Mapping[str, float] = field(hash=False)
    power_watts: float
    devices_per_node: int
    link: Link
    network: Link
    matmul_efficiency: float
    attention_efficiency: float
    memory_efficiency: float
    launch_seconds: float
    source: str
    devices_per_link: int = 0
    driver: str = ""
    torch_device: str = "cuda"

    @property
    def linked(self) -> int:
        """Number of devices that the link connects."""
        return self.devices_per_link or self.devices_per_node

    @property
    def is_cpu(self) -> bool:
        """True for a CPU core."""
        return self.name == "cpu"

    @property
    def memory_bytes(self) -> int:
        """Memory of the device in bytes."""
        return int(self.memory_gib * GIB)

    def peak(self, dtype: str) -> float:
        """Return the dense FLOPs per second of a dtype.

        Raises:
            ConfigError: the device has no peak for it.
        """
        if dtype not in self.flops:
            raise ConfigError(
                Problem(
                    "--device",
                    self.name,
                    rule=f"has no peak for {dtype} in its row, only for {', '.join(sorted(self.flops))}",
                    fix=f"add {dtype} to its flops, or compute in another dtype",
                )
            )
        return self.flops[dtype]

    def slower(self, times: float) -> Device:
        """Return the device with all rates divided by ``times``."""

        def of(link: Link) -> Link:
            rate = link.bytes_per_second / times
            latency = link.latency_seconds * times
            return replace(link, bytes_per_second=rate, latency_seconds=latency)

        flops = {}
        for dtype, rate in self.flops.items():
            flops[dtype] = rate / times
        return replace(
            self,
            flops=flops,
            memory_bytes_per_second=self.memory_bytes_per_second / times,
            launch_seconds=self.launch_seconds * times,
            link=of(self.link),
            network=of(self.network),
        )

    def with_nodes_of(self, per_node: int, link: str | None = None) -> Device:
        """Return the device in nodes of another size, optionally with another link from devices.toml."""
        link_of_node = self.link
        if link is not None:
            link_of_node = _link(link, devices.table()["links"], "link", "devices.toml")
        return replace(self, devices_per_node=per_node, link=link_of_node)


def find(name: str, option: str = "--device") -> Device:
    """Return a known device, or the only device in a TOML file. ``option`` is the option with the name.

    Raises:
        ConfigError: the name is unknown (the message lists the known names), or a number is impossible.
    """
    links = devices.table()["links"]
    if name.endswith(".toml"):
        user_tables = _read(Path(name), option)
        rows = _tables(user_tables.get("devices", {}))
        if len(rows) != 1:
            raise ConfigError(
                Problem(
                    option,
                    name,
                    rule=f"has {len(rows)} tables [devices.NAME]",
                    fix="write exactly one table, as in docs/plan.md",
                )
            )
        ((device_name, row),) = rows.items()
        # A user's file may use the links of devices.toml, and replace or add links.
        user_links = _tables(user_tables.get("links", {}))
        return _device(device_name, row, {**links, **user_links}, name)
    known = devices.find(name)
    if known is None:
        near = difflib.get_close_matches(name.lower(), devices.names(), 1)
        fix = f"use one of {', '.join(devices.names())}, or your own file with a table [devices.NAME] (docs/plan.md)"
        if near:
            fix = f"did you mean {near[0]}? {fix}"
        raise ConfigError(Problem(option, name, "is not a known device", fix))
    return _device(known, devices.table()["devices"][known], links, "devices.toml")


def _tables(value: Any) -> dict[str, dict[str, Any]]:
    """Return the entries of a TOML table that are tables. Empty if the value is not a table."""
    if not isinstance(value, dict):
        return {}
    return {name: entry for name, entry in value.items() if isinstance(entry, dict)}


def _read(path: Path, option: str) -> dict[str, Any]:
    try:
        return parse_toml(bounded_reads.read_all(path, MAX_FILE_BYTES).decode("utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            Problem(
                option,
                str(path),
                rule=f"cannot be read: {error.strerror}",
                fix="use an existing file",
            )
        ) from error
    except ValueError as error:
        raise ConfigError(
            Problem(
                option,
                str(path),
                rule=f"is not TOML: {error}",
                fix="correct the file",
            )
        ) from error


def _device(name: str, row: Mapping[str, Any], links: Mapping[str, Any], where: str) -> Device:
    """Return a device from its row, with defaults.

    Raises:
        ConfigError: with the key of a missing, unknown or impossible value.
    """
    # Defaults of the values that a row may omit.
    row = {
        "power_watts": 0,
        "launch_seconds": 5e-6,
        "matmul_efficiency": 0.65,
        "attention_efficiency": 0.45,
        "memory_efficiency": 0.75,
        "devices_per_link": 0,
        "driver": "",
        "torch_device": "cuda",
        **row,
    }
    path = f"devices.{name}"
    required_keys = {field.name for field in fields(Device)} - {"name"}
    _check_keys(row, required_keys, path, where)

    # Peaks in FLOP/s, by dtype. A common mistake is to write TFLOP/s.
    flops = row["flops"]
    if not isinstance(flops, Mapping) or not flops:
        raise _wrong(
            f"{path}.flops",
            flops,
            "is not a table of peaks by dtype",
            "write bfloat16 = 989e12",
            where,
        )
    for dtype, value in flops.items():
        _check_number(f"{path}.flops.{dtype}", value, _LARGEST["flops"], where)
        if value < 1e6:
            rule = "is less than any device has"
            raise _wrong(f"{path}.flops.{dtype}", value, rule, "write FLOPs, not TFLOPs", where)

    # Numbers, shares and counts.
    may_be_zero = ("power_watts", "launch_seconds", "devices_per_link")
    for key in ("memory_gib", "memory_bytes_per_second", "devices_per_node", *may_be_zero):
        _check_number(f"{path}.{key}", row[key], _LARGEST[key], where, zero=key in may_be_zero)
    if not isinstance(row["source"], str):
        raise _wrong(
            f"{path}.source", row["source"], "is not text", "write the origin of the numbers", where
        )
    _check_shares(
        row, ("matmul_efficiency", "attention_efficiency", "memory_efficiency"), path, where
    )
    for key in ("devices_per_node", "devices_per_link"):
        if row[key] != int(row[key]):
            raise _wrong(f"{path}.{key}", row[key], "is not a whole number", "correct it", where)

    # The row names its links, whose numbers are in other tables.
    link = _link(row["link"], links, f"{path}.link", where)
    network = _link(row["network"], links, f"{path}.network", where)
    return Device(**{**row, "name": name, "link": link, "network": network})


def _link(name: Any, links: Mapping[str, Any], path: str, where: str) -> Link:
    if not isinstance(name, str) or name not in links:
        raise _wrong(
            path,
            name,
            "is not a known link",
            f"use one of {', '.join(sorted(links))}, or add it",
            where,
        )
    table = f"links.{name}"
    row = {"efficiency": 0.75, "peers": 0, **links[name]}
    required_keys = {field.name for field in fields(Link)} - {"name"}
    _check_keys(row, required_keys, table, where)
    for key in ("bytes_per_second", "latency_seconds"):
        may_be_zero = key == "latency_seconds"
        _check_number(f"{table}.{key}", row[key], _LARGEST[key], where, zero=may_be_zero)
    _check_shares(row, ("efficiency",), table, where)
    peers = row["peers"]
    _check_number(f"{table}.peers", peers, _LARGEST["devices_per_node"], where, zero=True)
    source = row["source"]
    if not isinstance(source, str):
        raise _wrong(
            f"{table}.source", source, "is not text", "write the origin of the numbers", where
        )
    if peers != int(peers):
        raise _wrong(f"{table}.peers", peers, "is not a whole number", "correct it", where)
    return Link(name, **row)


def _check_keys(row: Mapping[str, Any], wanted: set[str], path: str, where: str) -> None:
    for key in sorted(wanted - set(row)):
        raise _wrong(f"{path}.{key}", None, "is missing", "add it, as in docs/plan.md", where)
    for key in sorted(set(row) - wanted):
        raise _wrong(
            f"{path}.{key}",
            row[key],
            "is not a known key",
            f"use {', '.join(sorted(wanted))}",
            where,
        )


def _check_number(path: str, value: Any, largest: float, where: str, zero: bool = False) -> None:
    is_plausible = _is_number(value) and math.isfinite(value) and 0 <= value <= largest
    if not is_plausible or (value == 0 and not zero):
        rule = f"is not between 0 and {largest:g}"
        raise _wrong(path, value, rule, "write the number of a real device", where)


def _check_shares(row: Mapping[str, Any], keys: tuple[str, ...], path: str, where: str) -> None:
    for key in keys:
        share = row[key]
        if not _is_number(share) or not 0 < share <= 1:
            rule = "must be above 0 and at most 1"
            raise _wrong(f"{path}.{key}", share, rule, "correct it", where)


def _is_number(value: Any) -> bool:
    # TOML's true and false are ints in Python.
    return isinstance(value, int | float) and not isinstance(value, bool)


def _wrong(path: str, value: Any, rule: str, fix: str, where: str) -> ConfigError:
    return ConfigError(Problem(path, value, rule, fix, where))
