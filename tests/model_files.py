"""Run the checks of ``shardtrain verify`` that need no mesh on many model files, with only two launches in total."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardtrain.tools import verify
from shardtrain.tools.verify import forked_workers, probes, promises, verify_request
from shardtrain.utils.errors import ConfigError


def ask(folder: Path, texts: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return the findings of verify by name of the model file: ``broken``, ``notes`` and ``impossible`` axes."""
    configs = {}
    peers = {}
    for number, (name, text) in enumerate(texts.items()):
        path = folder / f"model_{number}.py"
        path.write_text(text)
        options = verify_request.VerifyOptions(str(path), ("dp_shard=2",))
        configs[name] = verify.plan(verify.load(options), options).reference
        peers[name] = folder / f"peers_{number}"
        peers[name].mkdir()
    forked_workers.run(2, _with_peers, configs, peers, folder=folder, backend="gloo")
    (findings,) = forked_workers.run(1, _without_peers, configs, peers, folder=folder)
    return findings


def _with_peers(rank, num_ranks, configs, peers):
    for name, config in configs.items():
        try:
            probes.run_with_peers(rank, num_ranks, config, str(peers[name]))
        except Exception as error:
            (peers[name] / "error").write_text(str(error))


def _without_peers(rank, num_ranks, configs, peers):
    findings = {}
    for name, config in configs.items():
        try:
            findings[name] = promises.probe(rank, num_ranks, config, str(peers[name]))
        except ConfigError as error:
            findings[name] = {"broken": str(error).splitlines(), "notes": [], "impossible": {}}
    return findings
