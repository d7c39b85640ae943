"""Ranks for the doctor to examine, and invented facts of healthy ranks, which tests change in one place."""

from __future__ import annotations

import copy
from pathlib import Path

import torch.distributed as dist
from ranks import run_ranks
from tiny import tiny_config

from shardtrain.config import Loaded
from shardtrain.tools.doctor import network, storage_checks
from shardtrain.tools.doctor import rank as doctor
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.result import Reports
from shardtrain.tools.doctor.store_channel import StoreChannel

END_SECONDS = 60.0
ABSENT = "absent"
"""Result of ``spoil`` for a rank that must not take part."""


def loaded(folder: Path | str, **sections) -> Loaded:
    return Loaded(tiny_config(job={"dump_folder": str(folder)}, **sections))


def areas(*names):
    return tuple(area for area in doctor.AREAS if area.name in names)


def examined(size, tmp_path, names, spoil=None, loaded_of=None, limit_seconds=20.0):
    """Run the doctor on forked ranks, and return its reports on the areas ``names``.

    Each rank calls ``spoil(rank)`` first, to create a problem.
    """
    same = loaded(tmp_path)
    loaded_of = loaded_of or (lambda _: same)
    return run_ranks(
        size, _examine, size, str(tmp_path), areas(*names), spoil, loaded_of, limit_seconds
    )[0]


def _examine(rank, size, folder, chosen, spoil, loaded_of, limit_seconds):
    dist.barrier()  # a peer may still be joining the group
    dist.destroy_process_group()  # the doctor creates its own group
    # Keep the measurements short: these tests are not about speed.
    storage_checks.MOST_BYTES = storage_checks.PIECE_BYTES
    network.BYTES = network.PAIR_BYTES = {"cpu": 2**18}
    store = dist.FileStore(f"{folder}/doctor-store", size)
    line = StoreChannel(store, rank, size, limit_seconds)
    context = RankContext(
        loaded_of(rank), rank, size, rank, size, "cpu", limit_seconds, store, line
    )
    if spoil and spoil(rank) == ABSENT:
        line.receive("end", END_SECONDS)
        return None
    facts = doctor.examine(context, chosen)
    if rank:
        line.receive("end", END_SECONDS)
        return None
    reports = doctor.gather(context, facts, chosen)
    line.send("end", True)
    return reports


def judged(reports, *names):
    return doctor.judge(reports, areas(*names))


def rows(reports, *names):
    """Return the doctor's findings about the reports, by subject."""
    return {finding.subject: finding for finding in judged(reports, *names)}


HEALTHY = {
    "versions": {
        "shardtrain": "0.1.0",
        "torch": "2.13.0",
        "python": "3.11.7",
        "cuda": "13.0",
        "options": "abc",
    },
    "hosts": {
        "architecture": "x86_64",
        "local_size": 2,
        "port_range": [32768, 60999],
        "in_job": True,
        "port": 29500,
        "port_busy": False,
    },
    "environment": {
        "variables": {"OMP_NUM_THREADS": "8", "NCCL_SOCKET_IFNAME": "eth"},
        "interfaces": ["lo", "eth0"],
        "unseen": "",
        "infiniband": True,
        "cores": 64,
        "local_size": 2,
    },
    "config": {"problems": [], "notes": [], "path": "run.toml"},
    "limits": {
        "open_files": 65536,
        "locked_bytes": -1,
        "core_bytes": 0,
        "processes": -1,
        "address_bytes": -1,
        "cores": 64,
        "quota": 0.0,
        "load": 1.0,
        "governor": "performance",
        "huge_pages": "madvise",
        "core_pattern": "core",
        "infiniband": True,
        "steal": 0.0,
    },
    "size": {
        "num_ranks": 4,
        "local_size": 2,
        "open_files": 65536,
        "system_files": 2**40,
        "backlog": 4096,
        "tracked": 262144,
        "tracked_now": 100,
        "neighbours": 1024,
        "ports": 28231,
    },
    "memory": {
        "local_size": 2,
        "total": 2**40,
        "available": 2**39,
        "limit": 0,
        "used": 0,
        "kills": 0,
        "shared": 2**39,
        "device_free": 79 * 2**30,
        "device_total": 80 * 2**30,
    },
    "clock": {"source": "tsc", "synchronized": True},
    "storage": {"folders": {}, "data": {"training.dataset_path": "1 file, 17 bytes"}},
    "numbers": {
        "numbers": 2**26,
        "norm_error": 1e-8,
        "tokens": 512,
        "vocabulary": 128256,
        "loss_error": 1e-8,
    },
    "devices": {
        "type": "cuda",
        "name": "NVIDIA H100 80GB HBM3",
        "dtype": "bfloat16",
        "exact": True,
        "rate": 700e12,
        "peak": 989e12,
        "health": {
            "pcie.link.gen.current": "5",
            "pcie.link.gen.max": "5",
            "pcie.link.width.current": "16",
            "pcie.link.width.max": "16",
            "clocks_event_reasons.active": "0x0000000000000004",
            "ecc.errors.uncorrected.volatile.total": "0",
            "mig.mode.current": "Disabled",
            "nvlink": [26.562] * 18,
        },
    },
    "network": {
        "cards": [{"name": "mlx5_0:1", "kind": "infiniband", "up": True, "rate": 50e9}] * 2,
        "pairs": [],
    },
}
"""Facts of one rank of a host with two H100 devices and two cards of 400 Gb/s."""


def healthy(num_hosts=2, ranks_per_host=2) -> Reports:
    """Return the reports of ranks without problems."""
    size = num_hosts * ranks_per_host
    facts = {}
    for rank in range(size):
        host = rank // ranks_per_host
        facts_of_rank = copy.deepcopy(HEALTHY)
        facts_of_rank["hosts"] |= {"hostname": f"host-{host}", "addresses": [f"10.0.0.{host + 1}"]}
        facts_of_rank["devices"] |= {"uuid": f"GPU-{rank}"}
        facts_of_rank["clock"]["moments"] = [1000.0 + number for number in range(4)]
        facts_of_rank["storage"]["folders"] = {"checkpoint.folder": folder()}
        facts_of_rank["network"]["collectives"] = [
            collective("all ranks", "all_reduce", 0, range(size), 80e9, latency=2e-5),
            collective("one host", "all_gather", host, range(host * 2, host * 2 + 2), 400e9),
        ]
        facts[rank] = facts_of_rank
    return Reports(size, facts)


def folder(**changes):
    return {
        "place": "/scratch/run",
        "error": "",
        "rate": 500e6,
        "unseen": [],
        "signed": True,
        "free": 2**42,
        "inodes": -1,
        "filesystem": "lustre",
        "must_share": True,
    } | changes


def collective(axis, name, group, ranks, rate, **more):
    return {
        "axis": axis,
        "name": name,
        "group": group,
        "size": len(ranks),
        "right": True,
        "rate": rate,
    } | more
