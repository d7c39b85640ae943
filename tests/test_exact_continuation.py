"""Two runs of 10 steps equal one of 20: bitwise on the same mesh; on another mesh, losses agree to 1e-6.

``test_resume.py`` tests killed runs with FSDP, tensor and pipeline parallelism. These tests cover DDP with
accumulation, experts, loss scaling, Muon, and changes between 1, 2 and 4 ranks. They also change the state of every
random generator between the two halves.
"""

from __future__ import annotations

import dataclasses
import hashlib
import multiprocessing
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from histories import computed_metrics
from ranks import run_ranks
from tiers import cases, chosen
from tiny import Ended, assert_bitwise, shallow_config, train_whole

from shardtrain.config.schema import Config
from shardtrain.ops.dtensor import to_full
from shardtrain.train import resume, trainer

STEPS = 20
SAVED = 10
LOSS_RELATIVE = 1e-6
"""Eight times the float32 resolution of 1.2e-7: ten steps with sums in another order, at a large eps, stay below it."""

SMALL = {"num_layers": 2, "dim": 32, "ffn_dim": 64, "head_dim": 8}
EXPERTS = {
    "vocab_size": 512, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "moe_ffn_dim": 32, "num_experts": 4, "z_loss_coeff": 1e-2, "load_balance_coeff": 1e-2,
}  # fmt: skip
DDP = {"data_parallel_replicate_degree": 2}
TP = {"tensor_parallel_degree": 2}
PP = {"pipeline_parallel_degree": 2}

SAME: dict[str, dict[str, Any]] = {
    "fsdp": {},
    # a local batch of 1, so each step accumulates over four passes
    "ddp": {"parallelism": DDP, "training": {"local_batch_size": 1}},
    "ep": {"parallelism": {"expert_parallel_degree": 2}},
    "float16": {"training": {"mixed_precision_param": "float16", "loss_scale_growth_interval": 3}},
    "muon": {"optimizer": {"name": "Muon", "lr": 1e-3}},
}
"""Runs of two ranks that resume on two ranks."""

OTHER: dict[str, tuple[str, int, dict[str, Any]]] = {
    "2 to 1": ("fsdp", 1, {}),
    "1 to 2": ("one", 2, {}),
    "2 to 4": ("fsdp", 4, {}),
    "tp 2 to fsdp 2": ("tp", 2, {}),
    "pp 2 to fsdp 2": ("pp", 2, {}),
    "ep 2 to 1": ("ep", 1, {}),
}
"""Runs that resume on another mesh: the original run, the new number of ranks and the new options."""

START: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (2, sections) for name, sections in SAME.items()},
    "tp": (2, {"parallelism": TP}),
    "pp": (2, {"parallelism": PP}),
    "one": (1, {}),
}


def config(
    folder: Path, kind: str, sections: dict[str, Any], num_ranks: int, **checkpoint: Any
) -> Config:
    training = {
        "steps": STEPS,
        "seq_len": 32,
        "local_batch_size": 8 // num_ranks,
        **sections.get("training", {}),
    }
    if sections.get("parallelism") in (TP, PP):
        training["local_batch_size"] *= 2
    base = shallow_config(
        **{
            **sections,
            "job": {"dump_folder": str(folder)},
            "model": {"overrides": SMALL},
            "training": training,
            "checkpoint": {"enable": True, "interval": SAVED, **checkpoint},
        }
    )
    if kind == "ep":
        base = dataclasses.replace(
            base, model=dataclasses.replace(base.model, name="mixtral", overrides=EXPERTS)
        )
    return base


def generators() -> str:
    """Return a digest of the state of all random generators of this process."""
    digest = hashlib.sha256(repr(random.getstate()).encode())
    digest.update(np.random.get_state()[1].tobytes())  # type: ignore[union-attr, index]
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def run(rank: int, config: Config) -> tuple[Ended, list[str], dict[str, torch.Tensor]]:
    """Train as one rank.

    Return the run, digests of the random generators after each step, and the tensors loaded on resume.
    """
    states = []
    tensors = {}
    step = trainer.step

    def recorded_step(run: trainer.Run) -> Any:
        # Note the tensors that the resumed run has loaded, before its first step.
        if not states and run.state.step == SAVED:
            for name, tensor in {**resume.weights(run), **run.optimizer_state_dict()}.items():
                tensors[name] = to_full(tensor.detach()).clone()
        outcome = step(run)
        states.append(generators())
        return outcome

    trainer.step = recorded_step
    try:
        return train_whole(rank, config), states, tensors
    finally:
        trainer.step = step


def spoil_generators(rank: int) -> None:
    random.seed(rank + 1000)
    np.random.seed(rank + 1001)
    torch.manual_seed(rank + 1002)
    torch.rand(rank + 3)


def begin(rank: int, root: Path, kinds: set[str]) -> dict[str, Any]:
    """Run all 20 steps of the runs that start on this number of ranks."""
    results = {}
    for kind, (ranks, sections) in START.items():
        if ranks == dist.get_world_size() and kind in kinds:
            results[kind] = run(rank, config(root / kind, kind, sections, ranks))
    return results


def continue_half(rank: int, root: Path, names: set[str]) -> dict[str, Any]:
    """Run the second half, in new processes, of the runs that resume on this number of ranks."""
    size = dist.get_world_size()
    results = {}
    # Daemon processes such as this rank cannot start data workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    halves = {kind: (kind, 2, sections) for kind, sections in SAME.items()}
    for name, (kind, ranks, sections) in {**halves, **OTHER}.items():
        if ranks != size or name not in names:
            continue
        folder = root / f"{name} resumed"
        if rank == 0:
            shutil.copytree(root / kind, folder)
            shutil.rmtree(folder / f"checkpoint/step-{STEPS}")
        dist.barrier()
        spoil_generators(rank)
        if name == "fsdp":  # A data worker must yield the same batches.
            dataloader = dataclasses.replace(Config().training.dataloader, num_workers=1)
            sections = {"training": {"dataloader": dataloader}}
        results[name] = run(rank, config(folder, kind, sections, ranks))
    return results


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exact")


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> set[str]:
    """Names of the runs that the selected tests need."""
    return chosen(request, "kind") | chosen(request, "change")


@pytest.fixture(scope="module")
def straight(root: Path, names: set[str]) -> dict[str, list[Any]]:
    """Results of the uninterrupted runs, one per rank."""
    kinds = {OTHER[name][0] if name in OTHER else name for name in names}
    return joined(run_ranks(2, begin, root, kinds)) | joined(run_ranks(1, begin, root, kinds))


@pytest.fixture(scope="module")
def resumed(root: Path, straight: Any, names: set[str]) -> dict[str, list[Any]]:
    results = {}
    for num_ranks in (2, 1, 4):
        results |= joined(run_ranks(num_ranks, continue_half, root, names))
    return results


def joined(ranks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return, for each run, the results of all ranks."""
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("kind", cases(["ddp", "float16"], ["fsdp", "ep", "muon"]))
@pytest.mark.nightly(
    "other precisions and meshes",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_two_halves_equal_one_run(straight: Any, resumed: Any, kind: str) -> None:
    for (full, *_), (half, *_) in zip(straight[kind], resumed[kind], strict=True):
        assert full.error is None
        assert half.error is None
        for field in ("losses", "grad_norms", "lrs", "sample_ids"):
            assert len(getattr(full, field)) == STEPS
            assert getattr(half, field) == getattr(full, field)[SAVED:], field
        assert half.state == full.state
        assert half.scaler == full.scaler
        assert_bitwise(half.weights, full.weights)
        assert_bitwise(half.optimizer, full.optimizer)

    if kind == "float16":
        assert straight[kind][0][0].scaler["scale"] != 65536


@pytest.mark.parametrize("kind", cases(["ddp", "float16"], ["fsdp", "ep", "muon"]))
@pytest.mark.nightly(
    "other precisions and meshes",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_random_state_does_not_outlive_a_step(straight: Any, resumed: Any, kind: str) -> None:
    """The second half starts with other generator states, but has the same states after each step."""
    for (_, states, _), (_, later_states, _) in zip(straight[kind], resumed[kind], strict=True):
        assert len(states) == STEPS
        assert later_states == states[SAVED:]


@pytest.mark.parametrize("kind", cases(["ddp", "float16"], ["fsdp", "ep", "muon"]))
def test_written_history_equals_one_run(root: Path, resumed: Any, kind: str) -> None:
    history = computed_metrics(root / kind)
    assert history == computed_metrics(root / f"{kind} resumed")
    assert [record["step"] for record in history] == list(range(1, STEPS + 1))


def saved_tensors(root: Path, kind: str) -> dict[str, torch.Tensor]:
    """Return every tensor of the middle checkpoint, unsharded by the plain reader."""
    from shardtrain.checkpoint import manifest, tensors

    path = root / kind / f"checkpoint/step-{SAVED}"
    stored = manifest.read(path)
    return {name: tensors.read_whole(stored, path, name) for name in stored.tensors}


@pytest.mark.parametrize("change", cases(["1 to 2"], [name for name in OTHER if name != "1 to 2"]))
def test_another_mesh_loads_the_same_bits_and_continues_like_the_original_run(
    root: Path, straight: Any, resumed: Any, change: str
) -> None:
    kind = OTHER[change][0]
    original = straight[kind][0][0]
    stored = saved_tensors(root, kind)

    for after, _, loaded in resumed[change]:
        assert_bitwise(loaded, stored)
        assert after.error is None
        assert after.lrs == original.lrs[SAVED:]
        assert after.state == original.state, "the data or their order differ"
        for loss, expected in zip(after.losses, original.losses[SAVED:], strict=True):
            assert abs(loss - expected) <= LOSS_RELATIVE * expected
