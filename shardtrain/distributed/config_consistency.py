"""Before ranks work together they compare what they are: versions, number of ranks, options. Who differs is named.

Through the store alone, so that it works where a process group could not be made; the first rank reads what all say.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardtrain import __version__
from shardtrain.config.schema import Config
from shardtrain.utils.errors import ConfigError, PeerError

OWN_TO_A_NODE = ("job.dump_folder",)
"""Options that nodes without a shared filesystem may set differently."""
_POLL_SECONDS = 0.05
_ASKED_AT_A_TIME = 32
_HEARD_SECONDS = 5.0
"""How long the first rank waits, after a difference, for the others to read of it."""
_OPTIONS = "options"


def facts_of(config: Config, world_size: int) -> dict[str, str]:
    """What must be equal on all ranks, by its name; the options as one digest."""
    return {
        "number of ranks": str(world_size),
        "shardtrain": __version__,
        "torch": str(torch.__version__),  # its own type parses both versions in each comparison
        "python": platform.python_version(),
        _OPTIONS: hashlib.sha256(json.dumps(_flat(config)).encode()).hexdigest(),
    }


def check(config: Config, store: Any, rank: int, world_size: int) -> None:
    """Stop unless all ranks are alike; each rank calls it with the store where they met, before anything else.

    Raises:
        ConfigError: on all ranks the same: names what differs, and the ranks on each side.
        PeerError: on the first rank, when others have not come within comm.init_timeout_seconds.
    """
    # Of this attempt only (rendezvous/attempt_store.py). It has no number, because each agent counts restarts itself
    store = dist.PrefixStore("agreement", store)
    own = facts_of(config, world_size)
    if rank == 0:
        store.set("facts-0", json.dumps([own, _flat(config)]))
        store.set("agreed", _compare(store, config, own, world_size))
    else:
        _, options = json.loads(store.get("facts-0"))
        ours = _flat(config)
        differing = {n: ours.get(n) for n in {*ours, *options} if ours.get(n) != options.get(n)}
        store.set(f"facts-{rank}", json.dumps([own, differing]))
    refusal = store.get("agreed").decode()
    if refusal:
        if rank == 0:
            # wait a moment for the others to read the answer: the store may live in this process, and ends with it
            deadline = time.monotonic() + _HEARD_SECONDS
            names = [f"heard-{rank}" for rank in range(1, world_size)]
            while time.monotonic() < deadline and not store.check(names):
                time.sleep(_POLL_SECONDS)
        else:
            store.set(f"heard-{rank}", "")
        raise ConfigError(refusal)


def _compare(store: Any, config: Config, own: Mapping[str, str], world_size: int) -> str:
    """What differs between ranks, as a sentence; empty when nothing does."""
    deadline = time.monotonic() + config.comm.init_timeout_seconds
    found: dict[int, tuple[dict[str, str], dict[str, Any]]] = {0: (dict(own), {})}
    missing = list(range(1, world_size))
    differs = False
    while missing and not differs:
        # some at a time, and those that have not come again after all others: what the store is asked while ranks are
        # awaited does not grow with their number
        asked = missing[:_ASKED_AT_A_TIME]
        missing = missing[_ASKED_AT_A_TIME:]
        arrived = [rank for rank in asked if store.check([f"facts-{rank}"])]
        for rank in arrived:
            facts, differing = json.loads(store.get(f"facts-{rank}"))
            found[rank] = facts, differing
            differs |= facts != own
        missing += [rank for rank in asked if rank not in found]
        if missing and time.monotonic() > deadline:
            missing.sort()
            ranks = ", ".join(map(str, missing[:8])) + ("" if len(missing) < 9 else f" and {len(missing) - 8} more")
            limit = f"comm.init_timeout_seconds={config.comm.init_timeout_seconds}"
            raise PeerError(f"rank {ranks} has not come within {limit}; look at its log, or raise the limit")
        time.sleep(0 if arrived else _POLL_SECONDS)
    return "; ".join(_differences(own, found, _flat(config)))


def _differences(
    own: Mapping[str, str], found: Mapping[int, tuple[dict[str, str], dict[str, Any]]], options: Mapping[str, Any]
) -> Iterator[str]:
    for name in own:
        if name == _OPTIONS:
            continue
        groups: dict[str, list[int]] = {}
        for rank, (facts, _) in sorted(found.items()):
            groups.setdefault(facts.get(name, "none"), []).append(rank)
        if len(groups) > 1:
            values = ", ".join(f"{value} on rank {_short(ranks)}" for value, ranks in groups.items())
            yield f"ranks differ in {name}: {values}; start all of them from one environment with one command"
    for rank, (_, differing) in sorted(found.items()):
        if differing:
            name = min(differing)
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            yield (
                f"ranks differ in options: {name}={_text(options.get(name))} on rank 0 and {_text(differing[name])} on "
                f"rank {rank}{more}; give every rank the same file and command line"
            )
            return


def _short(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks[:4])) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")


def _text(value: Any) -> str:
    return json.dumps(value)


def _flat(config: Config) -> dict[str, Any]:
    """Options by name; what JSON cannot write is written as text."""
    plain = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return {
        f"{section}.{name}": value
        for section, values in sorted(plain.items())
        for name, value in (values.items() if isinstance(values, dict) else [("", values)])
        if f"{section}.{name}" not in OWN_TO_A_NODE
    }
