"""What the links of a host should carry: from what the hardware itself says, and rates of its standards.

Rates are bytes per second in one direction, before the overhead of protocols.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from shardtrain.tools.doctor.result import Facts, Reports, kernel_text

GIGA = 1e9

PCIE_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""GB/s of one lane by generation. PCI-SIG, PCI Express Base Specification: 2.5, 5, 8, 16, 32 and 64 GT/s with 8b/10b,
128b/130b (3 to 5) and 242B/256B (6) coding."""
GOOD_SHARE = 0.4
"""Of the expected rate, which nccl-tests come near with buffers of many GiB; those of the doctor are smaller."""
BAD_SHARE = 0.2
"""Of the same: below it is a failure. What is to be found is the wrong path (sockets instead of InfiniBand, memory
instead of NVLink), which costs a factor of five or more; smaller losses show beside other groups."""


def network_cards(root: Path = Path("/sys/class")) -> list[Facts]:
    """InfiniBand and RoCE ports, and Ethernet interfaces that are up: name, kind, bytes per second.

    A port's rate is what it negotiated: the kernel writes "400 Gb/sec (4X NDR)". An Ethernet card that is also a RoCE
    port is counted once, as the port.
    """
    found: list[Facts] = []
    behind: set[str] = set()
    for port in sorted(root.glob("infiniband/*/ports/*")):
        state = kernel_text(port / "state")
        speed = re.match(r"([\d.]+) Gb", kernel_text(port / "rate"))
        card = port.parents[1]
        behind.update(path.name for path in card.glob("device/net/*"))
        up = "ACTIVE" in state
        rate = float(speed[1]) * GIGA / 8 if speed and up else 0.0
        found.append({"name": f"{card.name}:{port.name}", "kind": "infiniband", "up": up, "rate": rate})
    for card in sorted(root.glob("net/*")):
        speed = re.match(r"\d+$", kernel_text(card / "speed"))
        # bridges, loopback and other interfaces of software have no device behind them
        if card.name in behind or not (card / "device").exists():
            continue
        up = kernel_text(card / "operstate") == "up"
        rate = float(speed[0]) * 1e6 / 8 if speed and up else 0.0
        found.append({"name": card.name, "kind": "ethernet", "up": up, "rate": rate})
    return found


def device_rate(facts: Facts) -> tuple[float, str]:
    """What one device can send to others of its host, and through what; 0 where nobody knows."""
    health = facts.get("health", {})
    nvlink = sum(health.get("nvlink", []))
    if nvlink:
        return nvlink * GIGA, f"{nvlink:.0f} GB/s of NVLink"
    try:
        generation = int(health["pcie.link.gen.max"])
        width = int(health["pcie.link.width.max"])
    except (KeyError, ValueError):
        return 0.0, ""
    rate = PCIE_LANE.get(generation, 0.0) * width
    return rate * GIGA, f"{rate:.0f} GB/s of PCIe {generation} x{width}"


def expected(reports: Reports, group: Sequence[int], groups_at_once: int) -> tuple[float, str]:
    """Bus bandwidth that a group of ranks should reach while ``groups_at_once`` like it are busy, and why; 0: unknown.

    Within a host it is the device's own links. Between hosts it is the cards of a host, which the groups that cross
    them at once divide, but no more than a device can send: a ring that crosses a host once uses all of its cards.
    """
    devices = {rank: facts for rank, facts in reports.of("devices").items() if rank in group}
    if len(devices) < len(group) or any(facts["type"] != "cuda" for facts in devices.values()):
        return 0.0, ""
    inside, why = min((device_rate(facts) for facts in devices.values()), key=lambda found: found[0])
    if len({reports.host(rank) for rank in group}) == 1:
        return inside, why
    cards = [_cards_rate(facts["cards"]) for rank, facts in reports.of("network").items() if rank in group]
    between = min(cards, default=0.0) / max(1, groups_at_once)
    if not between:
        return 0.0, ""
    if inside and inside < between:
        return inside, why
    return between, f"{between / GIGA:.0f} GB/s of the network cards"


def _cards_rate(cards: Sequence[Facts]) -> float:
    """Of InfiniBand where there is any, which NCCL prefers; else of the fastest Ethernet card alone."""
    fast = sum(card["rate"] for card in cards if card["kind"] == "infiniband")
    return fast or max((card["rate"] for card in cards if card["kind"] == "ethernet"), default=0.0)
