"""Check before training that all ranks have the same versions, number of ranks and options.

Each rank writes these facts to the store, and rank 0 compares them and reports which ranks differ. The
check uses only the store, so it also works when different facts would make a process group fail.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import socket
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardtrain import __version__
from shardtrain.config.schema import Config
from shardtrain.utils import majority
from shardtrain.utils.errors import ConfigError, PeerError

OWN_TO_A_NODE = ("job.dump_folder",)
"""Options that nodes without a shared filesystem may set differently."""
_POLL_SECONDS = 0.05
_RANKS_PER_POLL = 32
_HEARD_SECONDS = 5.0
"""Maximum time that rank 0 waits for the other ranks to read its error message before it raises."""
_OPTIONS = "options"

RankReport = tuple[dict[str, str], dict[str, Any], str]
"""A rank's facts, its options that differ from rank 0's options, and its host."""


def facts_of(config: Config, world_size: int) -> dict[str, str]:
    """Return the facts that must be equal on all ranks, by name. One of them is a hash of all options."""
    options = json.dumps(_flat(config)).encode()
    return {
        "number of ranks": str(world_size),
        "shardtrain": __version__,
        # a plain string, because comparing objects of torch's class parses both versions each time
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        _OPTIONS: hashlib.sha256(options).hexdigest(),
    }


def check(config: Config, store: Any, rank: int, world_size: int) -> None:
    """Raise unless all ranks have equal facts.

    Every rank calls it with the store of the rendezvous, before other uses.

    Raises:
        ConfigError: ranks differ. All ranks raise the same message, which names the difference, and first a rank
            that differs from most others.
        PeerError: on rank 0, other ranks have not arrived within comm.init_timeout_seconds.
    """
    # Keys need no number of the restart, because this store belongs to one attempt
    # (rendezvous/attempt_store.py). A number would not work: each agent counts restarts separately.
    store = dist.PrefixStore("agreement", store)
    facts = facts_of(config, world_size)
    options = _flat(config)
    if rank == 0:
        store.set("facts-0", json.dumps([facts, options]))
        store.set("agreed", _compare(store, config, facts, world_size))
    else:
        # Send only the options that differ from rank 0's, because rank 0 reads the reports of all ranks.
        _, first_options = json.loads(store.get("facts-0"))
        differing = {}
        for name in {*options, *first_options}:
            if options.get(name) != first_options.get(name):
                differing[name] = options.get(name)
        store.set(f"facts-{rank}", json.dumps([facts, differing, socket.gethostname()]))
    refusal = store.get("agreed").decode()
    if not refusal:
        return
    if rank == 0:
        # The store's server may run in this process and would end with it. So wait until the other ranks
        # have read the message.
        deadline = time.monotonic() + _HEARD_SECONDS
        keys = [f"heard-{peer}" for peer in range(1, world_size)]
        while time.monotonic() < deadline and not store.check(keys):
            time.sleep(_POLL_SECONDS)
    else:
        store.set(f"heard-{rank}", "")
    raise ConfigError(refusal)


def _compare(store: Any, config: Config, facts: Mapping[str, str], world_size: int) -> str:
    """Wait for the facts of all ranks. Return a description of the differences, or an empty string.

    If a rank differs, wait for the others only ``_HEARD_SECONDS``. They decide which rank is named.
    """
    deadline = time.monotonic() + config.comm.init_timeout_seconds
    reports: dict[int, RankReport] = {0: (dict(facts), {}, socket.gethostname())}
    missing = list(range(1, world_size))
    differs = False
    while missing:
        # Poll a limited number of ranks at a time, to limit the load on the store. Ranks that have not
        # arrived go to the end of the queue.
        polled = missing[:_RANKS_PER_POLL]
        missing = missing[_RANKS_PER_POLL:]
        arrived = [rank for rank in polled if store.check([f"facts-{rank}"])]
        for rank in arrived:
            reports[rank] = tuple(json.loads(store.get(f"facts-{rank}")))
            if reports[rank][0] != facts and not differs:
                differs = True
                deadline = min(deadline, time.monotonic() + _HEARD_SECONDS)
        missing += [rank for rank in polled if rank not in reports]
        if differs and time.monotonic() >= deadline:
            break
        if missing and time.monotonic() > deadline:
            missing.sort()
            limit = f"comm.init_timeout_seconds={config.comm.init_timeout_seconds}"
            ranks = _short(missing, 8)
            raise PeerError(
                f"rank {ranks} has not arrived within {limit}; look at its log, or raise the limit"
            )
        time.sleep(0 if arrived else _POLL_SECONDS)
    if not differs:
        return ""
    # The exit report names the rank at the start of the message.
    facts_by_rank = {rank: json.dumps(report[0]) for rank, report in reports.items()}
    rank, other = majority.named(facts_by_rank)
    sentences = "; ".join(_differences(reports, rank, other, _flat(config)))
    return f"rank {rank} on {reports[rank][2]}: {sentences}"


def _differences(
    reports: Mapping[int, RankReport], rank: int, other: int, first_options: Mapping[str, Any]
) -> Iterator[str]:
    """Yield a sentence for each fact that differs, and one for the first option in which two ranks differ.

    Args:
        first_options: Options of rank 0.
    """
    for name in reports[0][0]:
        # The hash of all options does not help a reader. The options themselves follow below.
        if name == _OPTIONS:
            continue
        value_of_rank = {number: report[0].get(name, "none") for number, report in reports.items()}
        by_size = majority.groups(value_of_rank)
        if len(by_size) == 1:
            continue
        values = [f"{value} on rank {_short(ranks, 4)}" for value, ranks in by_size]
        yield (
            f"ranks differ in {name}: {', '.join(values)}; "
            "start all of them from one environment with one command"
        )
    # Options are many, so name only the first option of the two ranks. One of them is rank 0.
    differing = reports[rank][1] | reports[other][1]
    if not differing:
        return
    name = min(differing)
    more = ""
    if len(differing) > 1:
        more = f" (and {len(differing) - 1} more)"
    values_by_rank = []
    for number in (other, rank):
        value = reports[number][1].get(name, first_options.get(name))
        values_by_rank.append(f"{json.dumps(value)} on rank {number}")
    yield (
        f"ranks differ in options: {name}={' and '.join(values_by_rank)}{more}; "
        "give every rank the same file and command line"
    )


def _short(ranks: list[int], limit: int) -> str:
    """List at most ``limit`` ranks, and count the rest."""
    text = ", ".join(map(str, ranks[:limit]))
    if len(ranks) > limit:
        text += f" and {len(ranks) - limit} more"
    return text


def _flat(config: Config) -> dict[str, Any]:
    """Return options by name. Values that JSON does not support become text."""
    sections = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    options = {}
    for section, values in sorted(sections.items()):
        items = values.items() if isinstance(values, dict) else [("", values)]
        for key, value in items:
            name = f"{section}.{key}"
            if name not in OWN_TO_A_NODE:
                options[name] = value
    return options
