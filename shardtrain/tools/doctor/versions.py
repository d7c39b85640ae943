"""Versions: ranks with a different PyTorch, NCCL or driver may hang or compute different results."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Iterator

from shardtrain import __version__
from shardtrain.distributed import config_consistency
from shardtrain.tools.doctor.context import RankContext
from shardtrain.tools.doctor.outliers import equal
from shardtrain.tools.doctor.result import Facts, Finding, Reports, Verdict

AREA = "versions"

_SERIOUS = ("shardtrain", "torch", "python", "cuda", "nccl", "options")
_LIBRARIES = ("numpy", "safetensors", "tokenizers", "transformers", "triton")
_FIXES = {
    "options": "start every rank with the same file and command line",
    "driver": "install one driver on all hosts",
    "kernel": "boot the same kernel on all hosts, or ignore the difference if it is intended",
}


def collect(context: RankContext, facts: Facts) -> None:
    """Record software versions, and a digest of all options."""
    import torch

    facts["shardtrain"] = __version__
    facts["torch"] = torch.__version__
    facts["python"] = platform.python_version()
    facts["cuda"] = torch.version.cuda or torch.version.hip or ""
    facts["nccl"] = _nccl_version() if context.device == "cuda" else ""
    facts["kernel"] = platform.release()
    for name in _LIBRARIES:
        try:
            facts[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            facts[name] = ""
    # Twelve digits of the digest suffice to detect a difference.
    options = config_consistency.facts_of(context.loaded.config, context.size)["options"]
    facts["options"] = options[:12]


def _nccl_version() -> str:
    """Return the version of NCCL or RCCL, or "" in builds without it."""
    import torch

    try:
        version = torch.cuda.nccl.version()
    except (RuntimeError, AttributeError):
        return ""
    # Old builds return an int.
    if isinstance(version, tuple):
        return ".".join(map(str, version))
    return str(version)


def judge(reports: Reports) -> Iterator[Finding]:
    """Check that each version is equal on all ranks. Versions that no rank has are skipped."""
    by_rank = reports.of(AREA)
    names = next(iter(by_rank.values()), {})
    for name in names:
        values = {rank: str(facts.get(name, "")) for rank, facts in by_rank.items()}
        if not any(values.values()):
            continue
        verdict: Verdict = "fail" if name in _SERIOUS else "warn"
        fix = _FIXES.get(name, "start all ranks from one environment or one container image")
        yield equal(reports, AREA, name, values, verdict, fix)
