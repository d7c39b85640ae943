"""A recording does not depend on how the parameters are sharded, and two recordings show which program is wrong."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from ports import free_port
from ranks import run_ranks
from tiers import cases
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from shardtrain.record import NUM_PROJECTIONS, Recorder, summary, trainer_callback
from shardtrain.tools.verify import compare_recordings, recorded_differences, recordings
from shardtrain.tools.verify.recorded_differences import Comparison
from shardtrain.utils.errors import ConfigError, DataError

VOCABULARY = 61
WIDTH = 24
STEPS = 3
LENGTHS = (3, 11, 27, 23)
"""Tokens of the samples of a step. Of two ranks, one has 14 of them and the other 50."""


class Network(nn.Module):
    """A small network with a tied head."""

    def __init__(self, is_tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.head(hidden + self.down(torch.tanh(self.up(hidden))))


def batch(step: int) -> list[Tensor]:
    """Return the samples of a step. They have different lengths."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(VOCABULARY, (length + 1,), generator=generator) for length in LENGTHS]


def train(
    folder: Path,
    rank: int,
    size: int,
    kind: str = "one process",
    fault: str = "",
    precision: str = "float32",
) -> None:
    """Train and record ``Network`` in one process or with DDP, FSDP2 or tensor parallelism.

    All kinds use the same samples. ``fault`` plants a fault by name.
    """
    torch.manual_seed(rank if fault == "a seed for each rank" else 0)
    network = Network()
    data_ranks = 1 if kind == "tp" else size
    model: nn.Module = network
    if kind == "ddp":
        model = DistributedDataParallel(network)
    elif kind == "fsdp":
        fully_shard(network.up)
        fully_shard(network)
        if fault != "no divide factor":
            # FSDP's setters do not apply to nested FSDP modules, so call them on each.
            for module in (network.up, network):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    elif kind == "tp":
        mesh = init_device_mesh("cpu", (size,))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if fault == "an untied head":
            plan["head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(network, mesh, plan)
    lr = 0.05 if fault == "another learning rate" and size > 1 else 0.01
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, eps=1e-3)
    recorder = Recorder(folder, model, precision, data_rank=0 if kind == "tp" else rank)

    for step in range(STEPS):
        samples = batch(step)
        chosen = range(len(samples))
        if data_ranks > 1:
            # The first rank has the two shortest and the second the two longest samples.
            chosen = range(0, 2) if fault == "the same samples" else range(2 * rank, 2 * rank + 2)
        samples_of_rank = [samples[number] for number in chosen]
        num_tokens = sum(len(sample) - 1 for sample in samples_of_rank)
        total = torch.tensor(float(num_tokens))
        if data_ranks > 1 and fault != "own tokens":
            dist.all_reduce(total)
        loss_sum = torch.zeros(())
        for sample in samples_of_rank:
            logits = model(sample[None, :-1])
            logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
            loss_sum = loss_sum + cross_entropy(logits[0], sample[1:], reduction="sum")
        # DDP averages over ranks, and all others sum.
        factor = size if kind == "ddp" and fault != "own tokens" else 1
        (loss_sum * factor / total).backward()
        if fault == "no reduction" and size > 1:
            for parameter in network.parameters():
                parameter.grad.mul_(1 + rank)
        recorder.write(
            step,
            loss=loss_sum.detach() / num_tokens,
            num_tokens=num_tokens,
            lr=0.01,
            samples=[*map(int, chosen)],
        )
        if fault == "a stronger update" and size > 1:
            optimizer.param_groups[0]["lr"] = 0.02
        optimizer.step()
        optimizer.zero_grad()


def ranks_of(rank: int, folder: Path, size: int, kind: str, fault: str) -> None:
    train(folder, rank, size, kind, fault)


def compared(folder: Path, kind: str, fault: str = "", size: int = 2) -> Comparison:
    """Compare a recording of one process with one of several ranks."""
    torch.set_num_threads(1)
    train(folder / "one", 0, 1)
    run_ranks(size, ranks_of, folder / "many", size, kind, fault)
    return recorded_differences.compare(
        recordings.read(folder / "one"), recordings.read(folder / "many")
    )


@pytest.mark.parametrize(
    ("kind", "size"), cases([("ddp", 2), ("fsdp", 2), ("tp", 2)], nightly=[("tp", 4)])
)
def test_a_correct_program_has_the_recording_of_one_process(
    tmp_path: Path, kind: str, size: int
) -> None:
    comparison = compared(tmp_path, kind, size=size)
    assert comparison.first is None, comparison
    assert comparison.missing == (), comparison
    assert comparison.num_steps == STEPS
    assert 0 < comparison.largest["gradients"] < 1e-5  # float32 sums in a different order


# fault -> program, what differs first, and a part of the cause
FAULTS = {
    "no divide factor": (
        "fsdp",
        "gradients",
        "all gradients are 0.5 times as large = 1 / 2, by the numbers of ranks",
    ),
    "own tokens": ("ddp", "gradients", "mean of means: ranks of .* have 14, 50 tokens"),
    "the same samples": ("ddp", "samples", "the second run has samples more than once"),
    "no reduction": (
        "ddp",
        "gradients",
        "missing reduction: ranks of .* hold different gradients of embed.weight",
    ),
    "a seed for each rank": ("fsdp", "weights", "the initial weights differ"),
    "a stronger update": ("ddp", "weights", "the gradients of step 0 agree, .* times as large"),
    "another learning rate": ("ddp", "weights", "the gradients of step 0 agree, .* times as large"),
}


@pytest.mark.parametrize(
    "fault", cases(["no divide factor", "own tokens", "no reduction"], nightly=[*FAULTS][2:])
)
def test_a_fault_is_named_with_its_first_step_and_tensor(tmp_path: Path, fault: str) -> None:
    kind, what, cause = FAULTS[fault]
    first = compared(tmp_path, kind, fault).first
    assert first is not None, first
    assert first.what == what, first
    assert first.step == (1 if fault in ("a stronger update", "another learning rate") else 0)
    assert re.search(cause, first.cause), first.cause


def test_a_head_that_sharding_untied_is_named(tmp_path: Path) -> None:
    comparison = compared(tmp_path, "tp", "an untied head")
    about_the_head = [text for text in comparison.missing if "has a parameter head.weight" in text]
    assert any("tied to embed.weight" in text for text in about_the_head)
    assert comparison.first is not None
    assert comparison.first.what == "gradients"
    assert comparison.first.names[0] == "embed.weight"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.integers(1, 4), st.data())
def test_parts_add_up_to_the_projections_of_the_full_tensor(
    shape: list[int], ranks: int, data: Any
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    _, squared, projections = summary("layer.weight", tensor, 0)
    # Split like a 1D mesh: each rank holds one chunk, and the last chunks may be empty.
    parts = []
    for part in range(ranks):
        chunk = -(-shape[dim] // ranks)
        start = min(part * chunk, shape[dim])
        stop = min((part + 1) * chunk, shape[dim])
        parts.append(part_of(tensor, dim, start, stop))

    assert sum(part[1] for part in parts) == pytest.approx(squared)
    np.testing.assert_allclose(
        sum(np.array(part[2]) for part in parts), projections, rtol=1e-12, atol=1e-12
    )


def part_of(tensor: Tensor, dim: int, start: int, stop: int) -> list[Any]:
    """Summarize a part like a rank that holds it."""
    slices = [slice(0, size) for size in tensor.shape]
    slices[dim] = slice(start, stop)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardtrain.record.local_slices", lambda _: tuple(slices))
        patch.setattr("shardtrain.record.local_tensor", lambda full: full[tuple(slices)])
        return summary("layer.weight", tensor, 0)


def test_the_distance_of_two_tensors_follows_from_their_projections() -> None:
    generator = torch.Generator().manual_seed(1)
    ratios = []
    for number in range(200):
        one, other = torch.randn(2, 300, generator=generator)
        projections = [summary(f"weight {number}", tensor, 0)[2] for tensor in (one, other)]
        ratios.append(
            recordings.distance(*projections) ** 2 / float((one - other).double().square().sum())
        )

    # A mean of 8 squares has a standard deviation of about half its mean; that of 200 such means is 0.035.
    assert np.mean(ratios) == pytest.approx(1, abs=0.12)
    assert np.std(ratios) == pytest.approx(0.5, abs=0.12)


def test_numbers_of_any_device_dtype_and_size_are_recorded(tmp_path: Path) -> None:
    model = nn.Module()
    model.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    model.scalar = nn.Parameter(torch.tensor(2.0))
    model.empty = nn.Parameter(torch.zeros(0, 4))
    model.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    recorder = Recorder(tmp_path, model)
    model.low.grad = torch.tensor([1.0, float("nan"), 0.0], dtype=torch.bfloat16)
    recorder.write(0, loss=float("inf"))
    (step,) = recordings.read(tmp_path).steps

    assert step.losses is None
    assert step.weights["scalar"].norm == 2.0
    assert step.weights["empty"].norm == 0.0
    assert np.isnan(step.gradients["low"].norm)
    assert list(step.gradients) == ["low"]

    same = recorded_differences.errors_of(step.gradients, step.gradients)
    assert same == {"low": float("inf")}, "NaN differs from everything"


def test_names_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module._orig_mod = model
    Recorder(tmp_path, wrapped).write(0)

    assert set(recordings.read(tmp_path).shapes) == {"0.weight", "0.bias"}


def test_a_submodule_with_the_name_of_a_wrapper_keeps_its_parameters(tmp_path: Path) -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 3)
    model.bias = nn.Parameter(torch.ones(5))
    for name, recorded in (("plain", model), ("wrapped", nn.ModuleDict({"module": model}))):
        Recorder(tmp_path / name, recorded).write(0)
        assert recordings.read(tmp_path / name).shapes == {
            "bias": (5,),
            "module.weight": (3, 2),
            "module.bias": (3,),
        }


DAMAGES = {
    "no folder": (lambda folder: (folder / "rank-0.jsonl").unlink(), "has no recording"),
    "a rank is missing": (
        lambda folder: edit(folder, num_ranks=3),
        "has no rank-1.jsonl, but its program had 3 ranks",
    ),
    "another format": (lambda folder: edit(folder, format=9), "has format 9"),
    "no description": (
        lambda folder: (folder / "rank-0.jsonl").write_text("{}\n"),
        "does not start with",
    ),
    "not JSON": (lambda folder: append(folder, "not json\n"), "is damaged"),
    "no object": (lambda folder: append(folder, "[1]\n"), "is damaged"),
    "no step": (lambda folder: append(folder, '{"loss": 1}\n'), "without the number of a step"),
    "a step without gradients": (
        lambda folder: append(folder, '{"step": 7}\n'),
        "step 7 is damaged",
    ),
    "deep": (lambda folder: append(folder, "[" * 100_000 + "\n"), "is damaged"),
    "another file": (
        lambda folder: (folder / "rank-x.jsonl").touch(),
        "is not a file of a recording",
    ),
}


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "rank-0.jsonl"
    header, rest = path.read_text().split("\n", 1)
    path.write_text(json.dumps({**json.loads(header), **changes}) + "\n" + rest)


def append(folder: Path, line: str) -> None:
    with open(folder / "rank-0.jsonl", "a") as file:
        file.write(line)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_recording_is_refused_in_one_line(tmp_path: Path, damage: str) -> None:
    Recorder(tmp_path, nn.Linear(2, 2)).write(0)
    spoil, message = DAMAGES[damage]
    spoil(tmp_path)

    with pytest.raises(DataError, match=message) as caught:
        recordings.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_recordings_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for name, seed, step in (("a", 0, 0), ("b", 1, 0), ("c", 0, 1)):
        Recorder(tmp_path / name, model, seed=seed).write(step)
    a, b, c = (recordings.read(tmp_path / name) for name in "abc")

    with pytest.raises(ConfigError, match="projections of seed 1"):
        recorded_differences.compare(a, b)
    with pytest.raises(ConfigError, match="has no step in common"):
        recorded_differences.compare(a, c)
    with pytest.raises(ConfigError, match='precision="half" must be one of float64'):
        Recorder(tmp_path, model, precision="half")
    assert len(a.steps[0].weights["weight"].projections) == NUM_PROJECTIONS


def test_steps_that_only_one_recording_has_are_named(tmp_path: Path) -> None:
    """Steps that one recording lacks are reported: a killed run has fewer, and may truncate its last line."""
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    for name in "ab":
        recorder = Recorder(tmp_path / name, model)
        for step in range(3):
            recorder.write(step)
    path = tmp_path / "b" / "rank-0.jsonl"
    path.write_text(path.read_text()[:-20])
    a, b = (recordings.read(tmp_path / name) for name in "ab")
    texts = compare_recordings.lines(a, b, recorded_differences.compare(a, b))

    assert "2 common steps" in texts[0]

    expected = f"not compared: 1 step that only {tmp_path / 'a'} has, from step 2 on"
    assert texts[1] == expected
    for text in compare_recordings.lines(a, a, recorded_differences.compare(a, a)):
        assert "not compared" not in text


def test_a_third_recording_sets_the_tolerance(tmp_path: Path) -> None:
    """A difference of 1e-3 passes as bfloat16 rounding, unless a third recording shows that rounding is smaller."""
    model = nn.Linear(20, 20)
    for name, change in (("a", 0.0), ("b", 1e-3), ("c", 1e-5)):
        recorder = Recorder(tmp_path / name, model, "bfloat16")
        model.weight.grad = torch.ones(20, 20) + change * torch.arange(400).reshape(20, 20) / 400
        recorder.write(0)
    a, b, c = (recordings.read(tmp_path / name) for name in "abc")

    assert recorded_differences.compare(a, b).first is None

    first = recorded_differences.compare(a, b, rounding=c).first
    assert first is not None
    assert first.names == ("weight",)


def record(
    folder: Path, gradients: Sequence[dict[str, Tensor | None]], steps: Sequence[int] = (0,)
) -> Any:
    """Record two weights whose gradients are given for each step, and read the recording."""
    model = nn.Module()
    model.large = nn.Parameter(torch.ones(40))
    model.small = nn.Parameter(torch.ones(40))
    recorder = Recorder(folder, model)
    for step, by_name in zip(steps, gradients, strict=True):
        for name, gradient in by_name.items():
            getattr(model, name).grad = gradient
        recorder.write(step)
        with torch.no_grad():
            for parameter in model.parameters():
                # The first update of Adam has the sign of the gradient.
                if parameter.grad is not None:
                    parameter.sub_(0.01 * parameter.grad.sign())
    return recordings.read(folder)


GRADIENT = torch.linspace(1, 2, 40)
NOISE = 1e-9 * torch.cos(torch.arange(40.0))


def first_of(
    folder: Path,
    one: Sequence[dict[str, Any]],
    other: Sequence[dict[str, Any]],
    steps: Sequence[int] = (0,),
) -> Any:
    return recorded_differences.compare(
        record(folder / "a", one, steps), record(folder / "b", other, steps)
    ).first


def test_the_update_of_a_gradient_of_rounding_errors_is_not_compared(tmp_path: Path) -> None:
    """Adam turns rounding errors into updates with random signs.

    The bias of attention's keys is an example: its exact gradient is 0.
    """
    one = {"large": GRADIENT, "small": NOISE}
    assert (
        first_of(tmp_path / "noise", [one] * 3, [{**one, "small": NOISE.flip(0)}] * 3, range(3))
        is None
    )

    # Weights with a larger gradient are still compared.
    first = first_of(tmp_path / "larger", [one] * 3, [{**one, "large": -GRADIENT}] * 3, range(3))
    assert first is not None
    assert first.names == ("large",)


@pytest.mark.parametrize("missing", ["a", "b"])
def test_a_gradient_that_one_program_lacks_is_named(tmp_path: Path, missing: str) -> None:
    full = {"large": GRADIENT, "small": GRADIENT}
    gradients = {"a": full, "b": full, missing: {"large": GRADIENT}}
    first = first_of(tmp_path, [gradients["a"]], [gradients["b"]])
    assert first is not None
    assert first.what == "gradients"
    assert first.names == ("small",)
    assert f"the gradient of small is zero or None in {tmp_path / missing}" in first.cause


def test_zeros_and_no_gradient_are_the_same(tmp_path: Path) -> None:
    assert (
        first_of(tmp_path, [{"large": GRADIENT}], [{"large": GRADIENT, "small": torch.zeros(40)}])
        is None
    )


def test_a_factor_of_all_gradients_is_not_hidden_by_zeros(tmp_path: Path) -> None:
    """A LoRA adapter starts at zero, so half of its gradients are zero in the first step."""
    zeros = torch.zeros(40)
    first = first_of(
        tmp_path, [{"large": GRADIENT, "small": zeros}], [{"large": 2 * GRADIENT, "small": zeros}]
    )
    assert first is not None
    assert first.cause == "all gradients are 2 times as large"


def test_a_difference_between_recorded_steps_is_not_called_an_update(tmp_path: Path) -> None:
    for name, factor in (("a", 1.0), ("b", 3.0)):
        model = nn.Module()
        model.large = nn.Parameter(torch.ones(40))
        recorder = Recorder(tmp_path / name, model)
        for step in (0, 10):
            model.large.grad = GRADIENT
            recorder.write(step)
            with torch.no_grad():
                model.large.sub_(factor * GRADIENT)
    first = recorded_differences.compare(
        recordings.read(tmp_path / "a"), recordings.read(tmp_path / "b")
    ).first
    assert first is not None
    assert "training differs in step 0 to 9: record every step" in first.cause


def test_recordings_of_more_than_a_thousand_steps_are_compared(tmp_path: Path) -> None:
    gradients = [{"large": GRADIENT}] * 2
    assert first_of(tmp_path, gradients, gradients, (0, 5000)) is None


def test_numbers_that_are_not_finite_are_the_cause(tmp_path: Path) -> None:
    first = first_of(tmp_path, [{"large": GRADIENT}], [{"large": GRADIENT * math.inf}])
    assert first is not None
    assert "large has NaN or infinite gradients in" in first.cause


def test_recordings_without_effect_are_refused(tmp_path: Path) -> None:
    a = record(tmp_path / "a", [{"large": GRADIENT}])
    c = record(tmp_path / "c", [{"large": GRADIENT}], (7,))
    with pytest.raises(ConfigError, match=r"--rounding=.* has no step in common"):
        recorded_differences.compare(a, a, rounding=c)

    empty = record(tmp_path / "empty", [{}])
    with pytest.raises(ConfigError, match="has no gradient in common"):
        recorded_differences.compare(empty, empty)


def test_ranks_with_the_same_samples_count_once(tmp_path: Path) -> None:
    """Only the last pipeline stage has a loss, and a gradient may be None on some ranks."""
    for rank in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("RANK", str(rank))
            patch.setenv("WORLD_SIZE", "2")
            model = nn.Linear(2, 2)
            recorder = Recorder(tmp_path, model, data_rank=0)
            if rank == 0:
                model.weight.grad = torch.ones(2, 2)
            numbers = {
                "loss": torch.tensor(2.0),
                "num_tokens": torch.tensor(8),
                "lr": torch.tensor(0.5),
            }
            recorder.write(0, **(numbers if rank else {}), samples=torch.arange(2))
    (step,) = recordings.read(tmp_path).steps

    assert step.losses == (2.0,)
    assert step.num_tokens == (8,)
    assert step.samples == ("0", "1")
    assert step.gradients["weight"].replicas_differ
    assert "bias" not in step.gradients


def test_a_line_that_is_too_long_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Recorder(tmp_path, nn.Linear(2, 2)).write(0)
    monkeypatch.setattr(recordings, "MAX_LINE_BYTES", 300)
    with pytest.raises(DataError, match="a line has 300 bytes or more"):
        recordings.read(tmp_path)


def test_shards_of_a_mesh_are_placed_in_the_full_tensor(tmp_path: Path) -> None:
    run_ranks(2, record_sharded, tmp_path)
    full = torch.arange(15.0).reshape(5, 3)
    (step,) = recordings.read(tmp_path).steps

    for name in ("rows", "columns", "replicas"):
        assert step.weights[name].projections == pytest.approx(summary(name, full, 0)[2]), name
        assert not step.weights[name].replicas_differ


def record_sharded(rank: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Module()
    for name, placement in (("rows", Shard(0)), ("columns", Shard(1)), ("replicas", Replicate())):
        tensor = distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [placement])
        setattr(model, name, nn.Parameter(tensor))
    Recorder(folder, model).write(0)


def train_with_transformers(
    rank: int, folder: Path, size: int, averages_tokens: bool, port: int
) -> None:
    """Train and record with the Trainer of transformers.

    Its loss is the mean over all ranks only with ``averages_tokens``.
    """
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    import transformers

    torch.set_num_threads(1)
    transformers.set_seed(0)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    generator = torch.Generator().manual_seed(1)
    rows = []
    for number in range(32):
        tokens = torch.randint(64, (24,), generator=generator)
        labels = tokens.clone()
        labels[: 3 + 7 * number % 17] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=4 // size, max_steps=3, learning_rate=1e-3,
        adam_epsilon=1e-3, use_cpu=True, report_to=[], max_grad_norm=0, disable_tqdm=True, ddp_backend="gloo",
        average_tokens_across_devices=averages_tokens, logging_strategy="no", save_strategy="no",
        dataloader_pin_memory=False,
    )  # fmt: skip
    callbacks = [trainer_callback(folder)]
    transformers.Trainer(
        model=model, args=arguments, train_dataset=rows, callbacks=callbacks
    ).train()


@pytest.mark.nightly(
    "a Trainer of transformers on two ranks",
    by="tests/test_record.py::test_a_fault_is_named_with_its_first_step_and_tensor",
)
def test_the_mean_of_means_of_another_trainer_is_named(tmp_path: Path) -> None:
    run_ranks(1, train_with_transformers, tmp_path / "one", 1, True, free_port())
    one = recordings.read(tmp_path / "one")
    for averages_tokens in (True, False):
        folder = tmp_path / f"two-{averages_tokens}"
        run_ranks(2, train_with_transformers, folder, 2, averages_tokens, free_port())
        first = recorded_differences.compare(one, recordings.read(folder)).first
        if averages_tokens:
            assert first is None
            continue
        assert first is not None
        assert first.what == "gradients"
        assert first.step == 0
        assert re.search(r"mean of means: ranks of .* have \d+, \d+ tokens", first.cause), (
            first.cause
        )
