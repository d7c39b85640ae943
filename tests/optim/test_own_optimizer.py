"""Optimizers in a Python file of the user: runs resume exactly, and optimizers that could not resume are rejected."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from tiny import Ended, assert_bitwise, tiny_config, train_whole

from shardtrain import optim
from shardtrain.config.schema import Config, Optimizer
from shardtrain.utils.errors import ConfigError

LION = """
import torch

class Lion(torch.optim.Optimizer):
    def __init__(self, groups, options):
        super().__init__(groups, {"lr": options.lr})
        self.betas = options.beta1, options.beta2

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p]["mean"]
                self.state[p]["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(mean.lerp(p.grad, 1 - self.betas[0])))
                mean.lerp_(p.grad, 1 - self.betas[1])

def build(param_groups, options):
    return Lion(param_groups, options)

def initial_state(parameter):
    return {"mean": torch.zeros_like(parameter), "step": torch.zeros(())}
"""

STEPS = 4
KILLED = 3
MESHES = {"fsdp": {}, "tp": {"tensor_parallel_degree": 2}}


def written(folder: Path, text: str = LION) -> str:
    path = folder / "my_optimizer.py"
    path.write_text(text)
    return str(path)


def config(folder: Path, path: str, mesh: str):
    return tiny_config(
        job={"dump_folder": str(folder)},
        parallelism=MESHES[mesh],
        training={"steps": STEPS, "local_batch_size": 8 if mesh == "tp" else 4},
        optimizer={"name": path, "lr": 1e-3},
        checkpoint={"enable": True, "interval": 2},
    )


def straight_and_resumed(rank: int, root: Path, path: str, mesh: str):
    straight = train_whole(rank, config(root / "straight", path, "fsdp"))
    killed = train_whole(rank, config(root / "killed", path, "fsdp"), stop_after=KILLED)
    return straight, killed, train_whole(rank, config(root / "killed", path, mesh))


@pytest.mark.parametrize("mesh", ["fsdp", "tp"])
@pytest.mark.nightly(
    "with an optimizer from a file",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_run_with_an_optimizer_from_a_file_resumes_on_any_mesh(tmp_path: Path, mesh: str) -> None:
    for straight, killed, resumed in run_ranks(
        2, straight_and_resumed, tmp_path, written(tmp_path), mesh
    ):
        assert straight.error is None
        assert killed.error is None
        assert resumed.error is None
        assert {name.rpartition(".")[2] for name in straight.optimizer} == {"mean", "step"}
        assert len(resumed.losses) == STEPS - 2
        assert resumed.lrs == straight.lrs[2:]
        if mesh == "fsdp":
            assert resumed.losses == straight.losses[2:]
            assert_bitwise(resumed.weights, straight.weights)
            assert_bitwise(resumed.optimizer, straight.optimizer)
        for resumed_loss, expected_loss in zip(resumed.losses, straight.losses[2:], strict=True):
            # rounding may flip the sign of a tiny gradient, which changes a weight by twice the rate
            assert abs(resumed_loss - expected_loss) <= 1e-3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"step": torch.zeros(())', '"step": 0', "stores 'step' of a parameter as int"),
        (
            '"step": torch.zeros(())',
            '"step": torch.zeros(3)',
            r"stores step as a plain tensor with shape \[3\]",
        ),
        (
            'self.state[p]["step"] += 1',
            'self.state[p]["again"] = p.clone()',
            r"has different state after a step .*\(again\)",
        ),
        (
            "1 - self.betas[1]",
            "self.__dict__.setdefault('t', [1.0]) and self.t.append(1) or 1 / len(self.t)",
            "resume",
        ),
        (
            "return Lion(param_groups, options)",
            "return Lion(param_groups[:1], options)",
            "has 2 of the 3 parameters",
        ),
        ("return Lion(param_groups, options)", "return 7", "builds a int"),
    ],
)
def test_optimizer_whose_state_cannot_be_saved_is_rejected(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in LION
    options = dataclasses.replace(Optimizer(), name=written(tmp_path, LION.replace(old, new)))
    with pytest.raises(ConfigError, match=rf"optimizer\.name=.*{message}"):
        optim.check_own(options)


MOMENTUM = """
import torch

def build(param_groups, options):
    return torch.optim.SGD(param_groups, lr=options.lr, momentum=0.9)

def initial_state(parameter):
    return {"momentum_buffer": torch.zeros_like(parameter)}
"""


def test_pytorch_optimizers_work_unchanged(tmp_path: Path) -> None:
    optim.check_own(dataclasses.replace(Optimizer(), name=written(tmp_path, MOMENTUM)))


ELSEWHERE = {
    "zero1": {"parallelism": {"data_parallel_replicate_degree": 2, "shard_optimizer_states": True}},
    "offload": {"training": {"enable_cpu_offload": True}},
    "pp": {"parallelism": {"pipeline_parallel_degree": 2}, "training": {"local_batch_size": 8}},
    "float16": {"training": {"mixed_precision_param": "float16"}},
}


def runs_of_kind(rank: int, root: Path, path: str, kind: str) -> tuple[Ended, Ended, Ended]:
    def one(name: str, part: dict[str, Any]) -> Config:
        training = {"steps": STEPS, "local_batch_size": 4, **part.get("training", {})}
        return tiny_config(
            job={"dump_folder": str(root / name)},
            parallelism=part.get("parallelism", {}),
            training=training,
            optimizer={"name": path, "lr": 1e-2},
            checkpoint={"enable": True, "interval": 2},
        )

    plain = train_whole(rank, one("plain", {}))
    straight = train_whole(rank, one("straight", ELSEWHERE[kind]))
    train_whole(rank, one("killed", ELSEWHERE[kind]), stop_after=KILLED)
    return plain, straight, train_whole(rank, one("killed", ELSEWHERE[kind]))


@pytest.mark.parametrize("kind", list(ELSEWHERE))
@pytest.mark.nightly(
    "with an optimizer from a file",
    by="tests/train/test_resume.py::test_resumed_run_is_bitwise_equal_to_an_uninterrupted_one",
)
def test_optimizer_from_a_file_works_in_every_mode(tmp_path: Path, kind: str) -> None:
    """Numbers match FSDP up to rounding (1e-3 in float16), and a resumed run matches an uninterrupted one."""
    for plain, straight, resumed in run_ranks(
        2, runs_of_kind, tmp_path, written(tmp_path, MOMENTUM), kind
    ):
        assert plain.error is None
        assert straight.error is None
        assert resumed.error is None
        assert straight.losses == pytest.approx(
            plain.losses, rel=2e-3 if kind == "float16" else 1e-6
        )
        assert resumed.losses == straight.losses[2:]
        assert_bitwise(resumed.weights, straight.weights)
        assert_bitwise(resumed.optimizer, straight.optimizer)
        assert {name.rpartition(".")[2] for name in straight.optimizer} == {"momentum_buffer"}
