"""Pipeline stages: models are split without renaming, and every schedule has the numbers of one process."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import deep_config, make_run, reference, run_tiny, train_steps
from torch import nn

from shardtrain import models
from shardtrain.config import stages
from shardtrain.distributed import LOSS_AXES, pipeline_parallel
from shardtrain.ops.dtensor import local_tensor
from shardtrain.train import trainer
from shardtrain.utils.errors import ConfigError

EVEN = {
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}


def piped(degree: int = 2, schedule: str = "1F1B", **more: Any) -> dict[str, Any]:
    return {
        "pipeline_parallel_degree": degree,
        "pipeline_parallel_schedule": schedule,
        **EVEN,
        **more,
    }


class FakeMesh:
    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self, axis: str) -> int:
        return self._size

    def rank(self, axis: str) -> int:
        return self._rank


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_stages_divide_the_model_and_keep_its_names(schedule: str) -> None:
    config = deep_config(parallelism=piped(schedule=schedule))
    module = models.find("llama3")
    shape = models.shape_of(module, "debugmodel", config.model.overrides, "rmsnorm")
    full_model = models.build(module, shape)
    ends = ("embed", "norm", "head")
    names: list[str] = []
    for rank in range(2):
        for part in pipeline_parallel.cut(full_model, module.LAYOUT, FakeMesh(2, rank), config):  # type: ignore[arg-type]
            names += [name for name, _ in part.named_parameters()]
            # Each of embed, norm and head is an identity here, or has parameters in this or an
            # earlier part.
            num_identities = sum(isinstance(getattr(part, name), nn.Identity) for name in ends)
            num_of_ends = sum(name.split(".")[0] in ends for name in names)
            assert num_identities + num_of_ends >= 3

    assert sorted(names) == sorted(name for name, _ in full_model.named_parameters())


FIRST = ("Interleaved1F1B", "DualPipeV")  # test_grid.py covers all schedules
SCHEDULES = [name for name in stages.SCHEDULES if name not in stages.FROM_CSV]


@pytest.mark.parametrize(
    "schedule", cases(FIRST, nightly=[name for name in SCHEDULES if name not in FIRST])
)
def test_every_schedule_changes_no_number(schedule: str) -> None:
    for result in run_tiny(2, deep_config(parallelism=piped(schedule=schedule)), steps=5):
        assert_same_losses(result)


def assert_same_losses(result: Any) -> None:
    """Compare losses and norms on a rank that has a part of the weights."""
    expected = reference(5, 4)
    for name, weight in result.initial.items():
        assert torch.equal(weight, expected.initial[name])
    for name, weight in result.final.items():
        torch.testing.assert_close(weight, expected.final[name], atol=2e-6, rtol=0, msg=name)
    for actual, expected_value in zip(result.losses, expected.losses, strict=True):
        assert abs(actual - expected_value) <= 1e-5
    for actual, expected_value in zip(result.grad_norms, expected.grad_norms, strict=True):
        assert abs(actual - expected_value) <= 1e-4


# Zero-bubble schedules compute gradients of inputs and weights separately, after FSDP has freed the gathered weights.
# With recomputation they are computed together.
APART: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "resharded": ({"fsdp_reshard_after_forward": "always"}, {"mode": "none"}),
    "recomputed by operation": ({}, {"mode": "selective", "selective_ac_option": "op"}),
    "resharded, recomputed by operation": (
        {"fsdp_reshard_after_forward": "always"},
        {"mode": "selective", "selective_ac_option": "op"},
    ),
    "resharded, fully recomputed": ({"fsdp_reshard_after_forward": "always"}, {"mode": "full"}),
}


def split_backward(schedule: str, case: str, **more: Any) -> Any:
    keys, recompute = APART[case]
    training = {"local_batch_size": 4, "global_batch_size": 4, "seq_len": 16}
    sections: dict[str, Any] = {"training": training, "activation_checkpoint": recompute, **more}
    return deep_config(parallelism=piped(schedule=schedule, **keys), **sections)


def run_apart(rank: int, schedule: str) -> dict[str, Any]:
    return {case: train_steps(rank, split_backward(schedule, case), 2) for case in APART}


@functools.cache
def one_process_apart() -> Any:
    return run_tiny(
        1, deep_config(training={"local_batch_size": 4, "global_batch_size": 4, "seq_len": 16}), 2
    )[0]


@pytest.mark.parametrize("schedule", stages.SPLIT_BACKWARD)
def test_separate_gradients_of_inputs_and_weights_match_one_process(schedule: str) -> None:
    expected = one_process_apart()
    for results in run_ranks(2, run_apart, schedule):
        for case, result in results.items():
            assert result.losses == pytest.approx(expected.losses, abs=1e-5), case
            # float32 sums in a different order differ by 1e-7 of their size
            assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6), case
            assert result.gradients.keys() == result.initial.keys(), case
            for name, gradient in result.gradients.items():
                error = (gradient - expected.gradients[name]).norm() / expected.gradients[
                    name
                ].norm()
                assert error <= 1e-5, f"{case}: {name}"


def layer_runs(rank: int, schedule: str, case: str) -> list[int]:
    """Return how often each layer of this rank runs per micro-batch."""
    run = make_run(rank, split_backward(schedule, case))
    runs = Counter[str]()
    for part in run.runner.parts:
        for name, layer in part.layers.items():  # type: ignore[union-attr, operator]
            layer.attn.core.register_forward_hook(lambda *_, name=name: runs.update([name]))
    trainer.step(run)
    return [count // 4 for count in runs.values()]


@pytest.mark.parametrize(
    ("schedule", "case"),
    cases(
        [("ZBVZeroBubble", "resharded, fully recomputed")],
        nightly=[
            (schedule, case)
            for schedule in stages.SPLIT_BACKWARD
            for case in ("resharded, fully recomputed", "recomputed by operation")
            if (schedule, case) != ("ZBVZeroBubble", "resharded, fully recomputed")
        ],
    ),
)
def test_layer_is_recomputed_once_in_every_schedule(schedule: str, case: str) -> None:
    """Recomputing for each separately requested group of weights would cost more than it saves."""
    for runs in run_ranks(2, layer_runs, schedule, case):
        assert runs
        assert set(runs) == {2}


def test_uneven_stages_change_no_number() -> None:
    parts = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "layers.3", "norm", "output"]]
    for result in run_tiny(
        2, deep_config(parallelism=piped(module_fqns_per_model_part=parts)), steps=5
    ):
        assert_same_losses(result)


def test_larger_micro_batches_change_no_number() -> None:
    config = deep_config(parallelism=piped(pipeline_parallel_microbatch_size=2))
    for result in run_tiny(2, config, steps=5):
        assert_same_losses(result)


def test_schedule_from_a_file_changes_no_number(tmp_path: Path) -> None:
    # GPipe as a CSV schedule: two ranks with one stage each, and eight micro-batches
    file = tmp_path / "gpipe.csv"
    file.write_text(
        "0F0,0F1,0F2,0F3,0F4,0F5,0F6,0F7,,,0B0,0B1,0B2,0B3,0B4,0B5,0B6,0B7\n"
        ",1F0,1F1,1F2,1F3,1F4,1F5,1F6,1F7,1B0,1B1,1B2,1B3,1B4,1B5,1B6,1B7,\n"
    )
    parallelism = piped(schedule="PipelineScheduleMulti", pipeline_parallel_schedule_csv=str(file))
    parallelism["pipeline_parallel_layers_per_stage"] = 2

    for result in run_tiny(2, deep_config(parallelism=parallelism), steps=5):
        assert_same_losses(result)


def test_schedule_file_with_split_backward_changes_no_number(tmp_path: Path) -> None:
    # "I" is the backward for inputs, and "W" the backward for weights
    file = tmp_path / "split.csv"
    file.write_text(
        "0F0,0F1,0F2,0F3,0I0,0W0,0I1,0W1,0I2,0W2,0I3,0W3\n"
        "1F0,1I0,1F1,1I1,1F2,1I2,1F3,1I3,1W0,1W1,1W2,1W3\n"
    )
    by_file = {"pipeline_parallel_schedule_csv": str(file), "pipeline_parallel_layers_per_stage": 2}
    config = split_backward("PipelineScheduleMulti", "resharded, recomputed by operation")
    parallelism = dataclasses.replace(config.parallelism, **by_file)
    config = dataclasses.replace(config, parallelism=parallelism)
    expected = one_process_apart()

    for result in run_tiny(2, config, 2):
        assert result.losses == pytest.approx(expected.losses, abs=1e-5)
        assert result.grad_norms == pytest.approx(expected.grad_norms, rel=1e-6)


OTHERS = Path(__file__).parent.parent / "models" / "others"
# file, changes in it, fragments of the error
NO_CHAIN = {
    "a scale after the embedding": (
        "gpt2",
        [("x = self.embed(tokens, positions)", "x = 2.0 * self.embed(tokens, positions)")],
        ["the input of h.0 is not the output of embed unchanged", "move the code before h.0 into h.0"],
    ),
    "a scale of the logits": (
        "gpt2",
        [("return self.lm_head(self.ln_f(x))", "return self.lm_head(self.ln_f(x)) / 8")],
        ["does not return the output of lm_head unchanged", "move the code after lm_head into lm_head"],
    ),
    "two tables of the model": (
        "opt",
        [
            ('first=("embeddings",)', 'first=("tokens", "positions")'),
            ('"embeddings.tokens"', '"tokens"'),
            ('"embeddings.positions"', '"positions"'),
            ("self.embeddings = Embeddings(c)", "self.tokens = nn.Embedding(c.vocab_size, c.dim)\n"
             "        self.positions = nn.Embedding(c.max_positions + OFFSET, c.dim)"),
            ("self.embeddings(tokens_BT, positions_BT)", "self.tokens(tokens_BT) + self.positions(positions_BT)"),
            ('"embeddings.*.weight"', '"*.weight"'),
        ],
        ["the input of positions is not the output of tokens unchanged", "let one module do both"],
    ),
    "another path around layers": (
        "gpt2",
        [
            ("x = block(x)", "x = block(x, first)"),
            ("x = self.embed(tokens, positions)", "x = first = self.embed(tokens, positions)"),
            ("def forward(self, x):\n        x = x + self.attn", "def forward(self, x, y):\n        x = y + self.attn"),
        ],
        ["h.0 receives outputs of other modules in addition to x"],
    ),
    "a layer that is left out": (
        "gpt2",
        [("for block in self.h.values():", "for block in list(self.h.values())[:-1]:")],
        ["ln_f is called, but h.3 must be called next"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CHAIN)
def test_code_that_every_stage_would_repeat_is_rejected(name: str, tmp_path: Path) -> None:
    file, changes, fragments = NO_CHAIN[name]
    text = (OTHERS / f"{file}.py").read_text()
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new)
    path = tmp_path / "my_model.py"
    path.write_text(text)
    module = models.find(str(path))
    full_model = models.build(module, models.shape_of(module, "tiny", {}, "rmsnorm"))
    config = deep_config(parallelism=piped())

    with pytest.raises(ConfigError) as error:
        pipeline_parallel.cut(full_model, module.LAYOUT, FakeMesh(2, 0), config)  # type: ignore[arg-type]
    message = str(error.value)
    assert "parallelism.pipeline_parallel_degree=2" in message
    for fragment in fragments:
        assert fragment in message
    # the model is unchanged
    assert not any("forward" in vars(module) for module in full_model.modules())


def test_split_names_that_do_not_cover_the_model_are_rejected() -> None:
    config = deep_config(
        parallelism=piped(module_fqns_per_model_part=[["embed", "layers.0"], ["layers.1", "norm"]])
    )
    module = models.find("llama3")
    full_model = models.build(
        module, models.shape_of(module, "debugmodel", config.model.overrides, "rmsnorm")
    )

    with pytest.raises(ConfigError, match="does not cover the model.*head.*layers.2"):
        pipeline_parallel.cut(full_model, module.LAYOUT, FakeMesh(2, 0), config)  # type: ignore[arg-type]


def evaluated(rank: int, config: Any) -> tuple[float, float, bool]:
    run = make_run(rank, config)
    batch = next(run.dataloader)
    before = {name: local_tensor(p.detach()).clone() for name, p in run.runner.parameters().items()}
    loss = run.mesh.sum(run.runner.evaluate(batch), over=("pp", *LOSS_AXES)).item()

    # Evaluation leaves weights and gradients unchanged.
    is_unchanged = True
    for name, parameter in run.runner.parameters().items():
        is_unchanged &= torch.equal(before[name], local_tensor(parameter))
        is_unchanged &= parameter.grad is None
    return loss, batch.num_targets, is_unchanged


@pytest.mark.parametrize(
    "schedule", cases(["1F1B", "ZBVZeroBubble"], nightly=["Interleaved1F1B", "DualPipeV"])
)
def test_evaluation_has_the_loss_of_one_process_and_changes_nothing(schedule: str) -> None:
    training = {"local_batch_size": 8}
    expected = run_ranks(1, evaluated, deep_config(training=training))[0]
    for result in run_ranks(
        2, evaluated, deep_config(training=training, parallelism=piped(schedule=schedule))
    ):
        assert result[0] == pytest.approx(expected[0], rel=1e-6)
        assert result[1:] == expected[1:] == (8 * 64, True)
