"""20 steps are 10 and another 10: bitwise on the same mesh, tensors bitwise and losses to 1e-6 on any other.

``test_resume.py`` proves it for runs that were killed, on FSDP, tensor and pipeline parallelism. Here are the rest: DDP
with accumulation, experts, a loss scale, Muon, from and to 1, 2 and 4 ranks; and every random generator is spoilt
between the two halves.
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
from ranks import run_ranks
from tiers import cases, chosen
from tiny import Ended, assert_bitwise, shallow_config, train_whole

from shardtrain.config.schema import Config
from shardtrain.ops.dtensor import to_full
from shardtrain.train import resume, trainer
from shardtrain.utils.checked_json import record_of

STEPS, SAVED = 20, 10
LOSS_RELATIVE = 1e-6
"""float32 keeps 1.2e-7 of a loss; ten steps of sums in another order, at a large eps, stay within eight of those."""

SMALL = {"num_layers": 2, "dim": 32, "ffn_dim": 64, "head_dim": 8}
EXPERTS = {
    "vocab_size": 512, "dim": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "moe_ffn_dim": 32, "num_experts": 4, "z_loss_coeff": 1e-2, "load_balance_coeff": 1e-2,
}  # fmt: skip
DDP = {"data_parallel_replicate_degree": 2}
TP, PP = {"tensor_parallel_degree": 2}, {"pipeline_parallel_degree": 2}

SAME: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "ddp": {"parallelism": DDP, "training": {"local_batch_size": 1}},  # accumulates over four passes
    "ep": {"parallelism": {"expert_parallel_degree": 2}},
    "float16": {"training": {"mixed_precision_param": "float16", "loss_scale_growth_interval": 3}},
    "muon": {"optimizer": {"name": "Muon", "lr": 1e-3}},
}
"""Two ranks that continue as two."""

OTHER: dict[str, tuple[str, int, dict[str, Any]]] = {
    "2 to 1": ("fsdp", 1, {}),
    "1 to 2": ("one", 2, {}),
    "2 to 4": ("fsdp", 4, {}),
    "tp 2 to fsdp 2": ("tp", 2, {}),
    "pp 2 to fsdp 2": ("pp", 2, {}),
    "ep 2 to 1": ("ep", 1, {}),
}
"""Another mesh: from a run, to so many ranks."""

START: dict[str, tuple[int, dict[str, Any]]] = {
    **{name: (2, sections) for name, sections in SAME.items()},
    "tp": (2, {"parallelism": TP}),
    "pp": (2, {"parallelism": PP}),
    "one": (1, {}),
}


def config(folder: Path, kind: str, sections: dict[str, Any], num_ranks: int, **checkpoint: Any) -> Config:
    training = {"steps": STEPS, "seq_len": 32, "local_batch_size": 8 // num_ranks, **sections.get("training", {})}
    if sections.get("parallelism") in (TP, PP):
        training["local_batch_size"] *= 2
    one = shallow_config(
        **{
            **sections,
            "job": {"dump_folder": str(folder)},
            "model": {"overrides": SMALL},
            "training": training,
            "checkpoint": {"enable": True, "interval": SAVED, **checkpoint},
        }
    )
    if kind == "ep":
        one = dataclasses.replace(one, model=dataclasses.replace(one.model, name="mixtral", overrides=EXPERTS))
    return one


def generators() -> str:
    """All that the random generators of this process are going to give."""
    digest = hashlib.sha256(repr(random.getstate()).encode())
    digest.update(np.random.get_state()[1].tobytes())  # type: ignore[union-attr, index]
    digest.update(torch.get_rng_state().numpy().tobytes())
    return digest.hexdigest()


def run(rank: int, one: Config) -> tuple[Ended, list[str], dict[str, torch.Tensor]]:
    """A run, the state of the generators after each of its steps, and all tensors as a continued one begins."""
    states, tensors, step = [], {}, trainer.step

    def noted(run: trainer.Run) -> Any:
        if not states and run.state.step == SAVED:
            begun = {**resume.weights(run), **run.optimizer_state_dict()}
            tensors.update({name: to_full(tensor.detach()).clone() for name, tensor in begun.items()})
        outcome = step(run)
        states.append(generators())
        return outcome

    trainer.step = noted
    try:
        return train_whole(rank, one), states, tensors
    finally:
        trainer.step = step


def spoil_generators(rank: int) -> None:
    random.seed(rank + 1000)
    np.random.seed(rank + 1001)
    torch.manual_seed(rank + 1002)
    torch.rand(rank + 3)


def begin(rank: int, root: Path, kinds: set[str]) -> dict[str, Any]:
    """All 20 steps of what starts on this many ranks."""
    size = dist.get_world_size()
    return {
        kind: run(rank, config(root / kind, kind, sections, ranks))
        for kind, (ranks, sections) in START.items()
        if ranks == size and kind in kinds
    }


def check_cancelled(rank: int, root: Path, names: set[str]) -> dict[str, Any]:
    """The second half, in new processes: on the same mesh, and on others of this many ranks."""
    size, found = dist.get_world_size(), {}
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # else it has no workers
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
        if name == "fsdp":  # whoever prepares the batches, they are the same
            sections = {"training": {"dataloader": dataclasses.replace(Config().training.dataloader, num_workers=1)}}
        found[name] = run(rank, config(folder, kind, sections, ranks))
    return found


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exact")


@pytest.fixture(scope="module")
def names(request: pytest.FixtureRequest) -> set[str]:
    """The runs that continue in the tests that are going to run."""
    return chosen(request, "kind") | chosen(request, "change")


@pytest.fixture(scope="module")
def straight(root: Path, names: set[str]) -> dict[str, list[Any]]:
    """Per run, the ranks' views of 20 steps."""
    kinds = {OTHER[name][0] if name in OTHER else name for name in names}
    return joined(run_ranks(2, begin, root, kinds)) | joined(run_ranks(1, begin, root, kinds))


@pytest.fixture(scope="module")
def resumed(root: Path, straight: Any, names: set[str]) -> dict[str, list[Any]]:
    started = (run_ranks(num_ranks, check_cancelled, root, names) for num_ranks in (2, 1, 4))
    return {name: views for ranks in started for name, views in joined(ranks).items()}


def joined(ranks: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {name: [rank[name] for rank in ranks] for name in ranks[0]}


@pytest.mark.parametrize("kind", cases(["ddp", "float16"], ["fsdp", "ep", "muon"]))
@pytest.mark.nightly(
    "of each precision and mesh",
    by="tests/train/test_resume.py::test_a_resumed_run_has_the_bits_of_the_run_that_never_ended",
)
def test_ten_steps_and_another_ten_are_twenty(straight: Any, resumed: Any, kind: str) -> None:
    for (whole, *_), (half, *_) in zip(straight[kind], resumed[kind], strict=True):
        assert whole.error is None and half.error is None
        for field in ("losses", "grad_norms", "lrs", "sample_ids"):
            assert len(getattr(whole, field)) == STEPS
            assert getattr(half, field) == getattr(whole, field)[SAVED:], field
        assert half.state == whole.state and half.scaler == whole.scaler
        assert_bitwise(half.weights, whole.weights)
        assert_bitwise(half.optimizer, whole.optimizer)
    if kind == "float16":
        assert straight[kind][0][0].scaler["scale"] != 65536


@pytest.mark.parametrize("kind", cases(["ddp", "float16"], ["fsdp", "ep", "muon"]))
@pytest.mark.nightly(
    "of each precision and mesh",
    by="tests/train/test_resume.py::test_a_resumed_run_has_the_bits_of_the_run_that_never_ended",
)
def test_nothing_random_outlives_a_step(straight: Any, resumed: Any, kind: str) -> None:
    """Python's, NumPy's and PyTorch's generators, spoilt before the second half, are after each step what they were."""
    for (_, whole, _), (_, half, _) in zip(straight[kind], resumed[kind], strict=True):
        assert len(whole) == STEPS and half == whole[SAVED:]


@pytest.mark.parametrize("kind", cases(["ddp", "float16"], ["fsdp", "ep", "muon"]))
def test_the_written_history_is_that_of_one_run(root: Path, resumed: Any, kind: str) -> None:
    def history(name: str) -> list[dict[str, Any]]:
        timed = {
            "tps",
            "tokens_per_second",
            "targets_per_second",
            "tflops",
            "memory_gib",
            "step_seconds",
            "data_seconds",
        }
        records = [record_of(line) for line in (root / name / "metrics.jsonl").read_bytes().splitlines()]
        return [
            {key: v for key, v in record.items() if key not in timed and not key.startswith("goodput")}
            for record in records
        ]

    assert history(f"{kind} resumed") == history(kind)
    assert [record["step"] for record in history(kind)] == list(range(1, STEPS + 1))


def saved_tensors(root: Path, kind: str) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint in the middle, put together by the plain reader."""
    from shardtrain.checkpoint import manifest, tensors

    path = root / kind / f"checkpoint/step-{SAVED}"
    stored = manifest.read(path)
    return {name: tensors.read_whole(stored, path, name) for name in stored.tensors}


@pytest.mark.parametrize("change", cases(["1 to 2"], [name for name in OTHER if name != "1 to 2"]))
def test_another_mesh_has_the_same_bits_and_continues_as_the_run_would_have(
    root: Path, straight: Any, resumed: Any, change: str
) -> None:
    kind = OTHER[change][0]
    whole = straight[kind][0][0]
    stored = saved_tensors(root, kind)
    for after, _, loaded in resumed[change]:
        assert_bitwise(loaded, stored)
        assert after.error is None and after.lrs == whole.lrs[SAVED:]
        assert after.state == whole.state, "the same data, in the same order"
        for mine, theirs in zip(after.losses, whole.losses[SAVED:], strict=True):
            assert abs(mine - theirs) <= LOSS_RELATIVE * theirs
