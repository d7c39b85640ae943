"""What the facts of storage mean: see ``storage``, which collects them."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from shardtrain.checkpoint.storage import SPARE
from shardtrain.tools.doctor.outliers import equal, odd, slow
from shardtrain.tools.doctor.result import Facts, Finding, Judged, Reports, each
from shardtrain.tools.doctor.storage import AREA
from shardtrain.utils.units import GIB, MIB, format_bytes, format_seconds

LITTLE_BYTES = GIB
FEW_INODES = 10_000
SLOW_BYTES_PER_SECOND = 20 * MIB
"""Of one host: below it, a checkpoint of a small model already takes minutes."""


def judge(reports: Reports) -> Iterator[Finding]:
    """Each folder: written, shared where it has to be, fast as on other hosts, with room; data alike everywhere."""
    by_rank = reports.of(AREA)
    options = list(dict.fromkeys(option for facts in by_rank.values() for option in facts["folders"]))
    for option in options:
        yield from each(reports, AREA, option, functools.partial(_written, option))
        yield from _shared(reports, option)
        yield from _rate(reports, option)
    needs = reports.facts.get(0, {}).get("config", {}).get("checkpoint_bytes", 0)
    if needs and any("checkpoint.folder" in facts["folders"] for facts in by_rank.values()):
        yield from each(reports, AREA, "room for a checkpoint", lambda facts: _room(facts, needs))
    for option in dict.fromkeys(option for facts in by_rank.values() for option in facts["data"]):
        texts = {rank: str(facts["data"].get(option, "")) for rank, facts in by_rank.items()}
        fix = "copy or mount the same files on every host"
        bad = [rank for rank, text in texts.items() if text.startswith(("cannot", "matches"))]
        found = equal(reports, AREA, option, texts, "fail", fix)
        if len(bad) == len(texts):
            found = Finding(AREA, option, "fail", texts[bad[0]], "readable", "correct the path, or its permissions")
        yield found


def _written(option: str, facts: Facts) -> Judged | None:
    if option not in facts["folders"]:
        return None
    found = facts["folders"][option]
    place = found["place"]
    expected = "writable"
    if found["error"]:
        return "fail", f"{place}: {found['error']}", expected, f"make it writable, or choose another {option}"
    if "free" not in found:
        return "pass", place, expected, ""
    text = f"{place} ({found['filesystem'] or 'unknown'}), {format_bytes(found['free'])} free"
    fix = "free space: a full disk ends a run in the middle of a save"
    if found["free"] < LITTLE_BYTES:
        return "warn", text, f"writable, {format_bytes(LITTLE_BYTES)} free", fix
    if 0 <= found["inodes"] < FEW_INODES:
        return (
            "warn",
            f"{text}, {found['inodes']} files more",
            f"writable, {FEW_INODES} files more",
            "remove small files",
        )
    return "pass", text, expected, ""


def _shared(reports: Reports, option: str) -> Iterator[Finding]:
    by_rank = {rank: facts["folders"][option] for rank, facts in reports.of(AREA).items() if option in facts["folders"]}
    by_rank = {rank: one for rank, one in by_rank.items() if not one["error"] and "signers" in one}
    if len(by_rank) < 2 or option == "temporary folder":
        return
    subject = f"{option} shared"
    expected = "one folder for all ranks"
    if all(one["seen"] == one["signers"] for one in by_rank.values()):
        yield Finding(AREA, subject, "pass", "every rank sees the files of every other", expected)
        return
    alone = odd({rank: tuple(one["seen"]) for rank, one in by_rank.items()})
    text = (
        f"{reports.who(alone)} does not see what others write"
        if len(alone) < len(by_rank)
        else "ranks see their own files"
    )
    if any(one["must_share"] for one in by_rank.values()):
        fix = 'mount one filesystem on all hosts, or set checkpoint.storage = "first_node"'
        if any(one["filesystem"] == "object store" for one in by_rank.values()):
            fix = "use a store that all hosts reach"
        yield Finding(AREA, subject, "fail", text, expected, fix, tuple(alone))
    else:
        yield Finding(AREA, subject, "pass", f"{text}: each host keeps its own", "either", "", ())


def _rate(reports: Reports, option: str) -> Iterator[Finding]:
    """Written by all ranks at once, so what a host can do is the sum over its ranks."""
    by_rank = {rank: facts["folders"].get(option, {}) for rank, facts in reports.of(AREA).items()}
    hosts = {
        host: [by_rank[rank]["rate"] for rank in ranks if by_rank.get(rank, {}).get("rate")]
        for host, ranks in reports.hosts().items()
    }
    first = {ranks[0]: host for host, ranks in reports.hosts().items()}
    rates = {rank: sum(hosts[host]) for rank, host in first.items() if hosts[host]}
    if not rates or option == "temporary folder":
        return
    least = min(rates, key=lambda rank: (rates[rank], rank))
    text = f"{rates[least] / MIB:.0f} MiB/s" + (f" on {first[least]}, the slowest host" if len(rates) > 1 else "")
    needs = reports.facts.get(0, {}).get("config", {}).get("checkpoint_bytes", 0)
    if needs and option == "checkpoint.folder":
        text += f"; a checkpoint of {format_bytes(needs)} takes {format_seconds(needs / sum(rates.values()))} or more"
    behind = slow(rates)
    expected = f"{SLOW_BYTES_PER_SECOND / MIB:.0f} MiB/s or more on each host"
    if behind:
        ranks = [rank for host_rank in behind for rank in reports.hosts()[first[host_rank]]]
        fix = "look at its mount options, its network and other users of its disk"
        yield Finding(AREA, f"{option} rate", "warn", text, "as on other hosts", fix, tuple(ranks))
    elif rates[least] < SLOW_BYTES_PER_SECOND:
        fix = "choose a faster filesystem, or save less often with checkpoint.interval"
        yield Finding(AREA, f"{option} rate", "warn", text, expected, fix)
    else:
        yield Finding(AREA, f"{option} rate", "pass", text, expected)


def _room(facts: Facts, needs: int) -> Judged | None:
    free = facts["folders"].get("checkpoint.folder", {}).get("free")
    if free is None:
        return None
    expected = f"{format_bytes(SPARE * needs)} for each"
    fix = "free space, or keep fewer checkpoints with checkpoint.keep_latest_k"
    count = int(free / (SPARE * needs))
    if count < 1:
        return "fail", f"{format_bytes(free)} free, none", expected, fix
    return ("warn" if count < 2 else "pass"), f"for {count}", expected, fix if count < 2 else ""
