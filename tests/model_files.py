"""Many model files are asked in two launches what ``shardtrain verify`` would ask each alone: without any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.tools import verify
from shardtrain.tools.verify import forked_workers, probes, promises, verify_request
from shardtrain.utils.errors import ConfigError


def ask(folder: Path, texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """For each model file by name what verify finds: ``broken``, ``notes`` and ``impossible``, axis -> reason."""
    configs, peers = {}, {}
    for number, (name, text) in enumerate(texts.items()):
        path = folder / f"model_{number}.py"
        path.write_text(text)
        asked = verify_request.VerifyOptions(str(path), ("dp_shard=2",))
        configs[name] = verify.plan(verify.load(asked), asked).reference
        peers[name] = folder / f"peers_{number}"
        peers[name].mkdir()
    forked_workers.run(2, _with_peers, configs, peers, folder=folder, backend="gloo")
    (found,) = forked_workers.run(1, _alone, configs, peers, folder=folder)
    return found


def _with_peers(rank, num_ranks, configs, peers):
    for name, config in configs.items():
        try:
            probes.run_with_peers(rank, num_ranks, config, str(peers[name]))
        except Exception as error:
            (peers[name] / "error").write_text(str(error))


def _alone(rank, num_ranks, configs, peers):
    found = {}
    for name, config in configs.items():
        try:
            found[name] = promises.probe(rank, num_ranks, config, str(peers[name]))
        except ConfigError as error:
            found[name] = {"broken": str(error).splitlines(), "notes": [], "impossible": {}}
    return found
