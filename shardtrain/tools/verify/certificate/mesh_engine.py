"""Functions of ``verify`` that a certificate uses. They are arguments, because ``verify`` imports this package."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardtrain.config import Loaded
from shardtrain.tools.verify.shrink import VerifyTask
from shardtrain.tools.verify.verify_report import MeshResult


@dataclass(frozen=True)
class MeshEngine:
    """The steps of a mesh comparison with synthetic data, and the search for a small version of a model file."""

    comparable: Callable[[Loaded], Loaded]
    plan: Callable[..., VerifyTask]
    probe: Callable[..., tuple[VerifyTask, list[str]]]
    verify: Callable[[VerifyTask, Any, Path], list[MeshResult]]
    small_copy: Callable[..., dict[str, Any] | None]
