"""Reference of the mesh comparisons: a run on one process, recorded before any test plants a fault."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardtrain import config
from shardtrain.tools import verify
from shardtrain.tools.verify import shrink
from shardtrain.tools.verify.meshes import changed
from shardtrain.tools.verify.verify_report import MeshResult
from shardtrain.tools.verify.verify_request import VerifyOptions
from shardtrain.train import trainer

MESHES = ("dp_replicate=2", "dp_shard=2", "tp=2", "pp=2", "cp=2", "dp_replicate=2,dp_shard=2")


class Bench:
    """A small model and its steps on one process. ``run`` compares one of the given meshes with them."""

    def __init__(
        self, folder: Path, meshes: tuple[str, ...], *overrides: str, steps: int = 2
    ) -> None:
        loaded = config.load(None, ["--activation_checkpoint.mode", "none", *overrides])
        self.task: shrink.VerifyTask = verify.plan(
            loaded, VerifyOptions(meshes=meshes, steps=steps)
        )
        self.folder = folder
        verify.reference(self.task, trainer, folder)

    def shake(self) -> None:
        """Record perturbed reference runs, before a fault is planted. Differing meshes are also compared with them."""
        verify.shaken(self.task, trainer, self.folder)

    def run(self, mesh: str, recompute: str = "none", **parallelism: Any) -> MeshResult:
        plan = next(plan for plan in self.task.plans if plan.name == mesh)
        sections = {"parallelism": parallelism, "activation_checkpoint": {"mode": recompute}}
        loaded = changed(plan.loaded, sections, set(), "")
        return verify.compare_plan(
            self.task, dataclasses.replace(plan, loaded=loaded), trainer, self.folder
        )


@pytest.fixture(scope="module")
def make_bench(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bench]:
    return lambda *arguments, **options: Bench(
        tmp_path_factory.mktemp("bench"), *arguments, **options
    )


@pytest.fixture(scope="module")
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """A Llama with two query heads per key-value head."""
    return make_bench(MESHES, "--model.overrides.num_kv_heads=8")
