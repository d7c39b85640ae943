"""Expected bandwidth of a host's links, from hardware information and the rates of standards.

Rates are bytes per second in one direction, without protocol overhead.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shardtrain.tools.doctor.result import Facts, Reports, kernel_text
from shardtrain.utils.units import GIGA

PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s per lane by PCIe generation. PCI-SIG, PCI Express Base Specification: 2.5, 5, 8, 16, 32 and 64 GT/s
with 8b/10b, 128b/130b (3 to 5) and 242B/256B (6) coding."""
GOOD_SHARE = 0.4
"""Minimum fraction of the expected rate, which only nccl-tests with buffers of many GiB approach."""
BAD_SHARE = 0.2
"""Fraction of the expected rate below which the check fails. A wrong path (sockets instead of InfiniBand,
memory instead of NVLink) costs a factor of five or more. The comparison with other groups finds smaller
losses."""


def network_cards(root: Path = Path("/sys/class")) -> list[Facts]:
    """Return InfiniBand and RoCE ports, and active Ethernet interfaces, with name, kind and bytes per second.

    The rate of a port is the negotiated one, such as "400 Gb/sec (4X NDR)". An Ethernet card that is also a
    RoCE port is counted once, as a port.
    """
    cards: list[Facts] = []
    interfaces_of_ports: set[str] = set()
    for port in sorted(root.glob("infiniband/*/ports/*")):
        card = port.parents[1]
        interfaces_of_ports.update(path.name for path in card.glob("device/net/*"))
        speed = re.match(r"([\d.]+) Gb", kernel_text(port / "rate"))
        gigabits = float(speed[1]) if speed else 0.0
        is_up = "ACTIVE" in kernel_text(port / "state")
        cards.append(_card(f"{card.name}:{port.name}", "infiniband", is_up, gigabits * GIGA))

    for interface in sorted(root.glob("net/*")):
        # Software interfaces such as bridges and loopback have no device.
        if interface.name in interfaces_of_ports or not (interface / "device").exists():
            continue
        # The speed of an interface that is down is missing or -1.
        speed = re.match(r"\d+$", kernel_text(interface / "speed"))
        megabits = float(speed[0]) if speed else 0.0
        is_up = kernel_text(interface / "operstate") == "up"
        cards.append(_card(interface.name, "ethernet", is_up, megabits * 1e6))
    return cards


def _card(name: str, kind: str, is_up: bool, bits_per_second: float) -> Facts:
    bytes_per_second = bits_per_second / 8 if is_up else 0.0
    return {"name": name, "kind": kind, "up": is_up, "rate": bytes_per_second}


def device_rate(facts: Facts) -> tuple[float, str]:
    """Return the bandwidth between a device and others on its host, and its source.

    Return 0 if it is unknown.
    """
    health = facts.get("health", {})
    nvlink = sum(health.get("nvlink", []))
    if nvlink:
        return nvlink * GIGA, f"{nvlink:.0f} GB/s of NVLink"

    # Without NVLink, devices of a host communicate over PCIe.
    try:
        generation = int(health["pcie.link.gen.max"])
        width = int(health["pcie.link.width.max"])
    except (KeyError, ValueError):
        return 0.0, ""
    rate = PCIE_LANE.get(generation, 0.0) * width
    return rate * GIGA, f"{rate:.0f} GB/s of PCIe {generation} x{width}"


def expected(reports: Reports, group: Sequence[int], groups_at_once: int) -> tuple[float, str]:
    """Return the expected bus bandwidth of a group of ranks, and its source. Return 0 if it is unknown.

    Within a host, the device's links are the limit. Between hosts, ``groups_at_once`` groups share the
    network cards of a host. A ring that crosses a host once uses all of its cards, but at most the bandwidth
    of one device.
    """
    # The slowest device limits a ring within a host. Without the facts of all devices, it is unknown.
    device_rates = []
    for rank, facts in reports.of("devices").items():
        if rank in group and facts["type"] == "cuda":
            device_rates.append(device_rate(facts))
    if len(device_rates) < len(group):
        return 0.0, ""
    inside, source = min(device_rates, key=lambda rate_and_source: rate_and_source[0])
    hosts = {reports.host(rank) for rank in group}
    if len(hosts) == 1:
        return inside, source

    card_rates = []
    for rank, facts in reports.of("network").items():
        if rank in group:
            card_rates.append(_cards_rate(facts["cards"]))
    between = min(card_rates, default=0.0) / max(1, groups_at_once)
    # The rate of virtual network cards is often unknown.
    if not between:
        return 0.0, ""
    if inside and inside < between:
        return inside, source
    return between, f"{between / GIGA:.0f} GB/s of the network cards"


def _cards_rate(cards: Sequence[Facts]) -> float:
    """Return the total rate of InfiniBand ports, which NCCL prefers, or that of the fastest Ethernet card."""
    total_of_ports = 0.0
    fastest_ethernet = 0.0
    for card in cards:
        if card["kind"] == "infiniband":
            total_of_ports += card["rate"]
        else:
            fastest_ethernet = max(fastest_ethernet, card["rate"])
    return total_of_ports or fastest_ethernet
