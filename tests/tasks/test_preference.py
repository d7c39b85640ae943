"""Direct preference optimization: the formula in float64, one loss on every mesh, and a frozen reference."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiers import cases
from tiny import Ended, assert_bitwise, assert_same_numbers, run_tiny, tiny_config, train_whole

from shardtrain import models
from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Config, Parallelism, Task
from shardtrain.tasks.preference import Preference
from shardtrain.utils.errors import CheckpointError, ConfigError, DataError

BETA = 0.3
SEQ_LEN = 48
LOSS_OF_EQUAL_MODELS = pytest.approx(math.log(2), abs=1e-6)
"""The loss of a policy that equals its reference, in float32."""
PAIRS = 16
WORDS = ["mesh", "shard", "rank", "norm", "step", "loss", "é"]


def rows() -> list[dict[str, str]]:
    rng = random.Random(0)
    return [
        {
            "prompt": " ".join(rng.choices(WORDS, k=rng.randint(1, 3))),
            "chosen": " yes " + " ".join(rng.choices(WORDS, k=rng.randint(1, 3))),
            "rejected": " no " + " ".join(rng.choices(WORDS, k=rng.randint(1, 4))),
        }
        for _ in range(PAIRS)
    ]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    return path


def config(file: Path, folder: Path | None = None, **sections: dict[str, Any]) -> Config:
    training = {
        "dataset": "jsonl", "dataset_path": str(file), "seq_len": SEQ_LEN, "on_data_end": "repeat",
        "local_batch_size": 4, "global_batch_size": 8, "steps": 4, **sections.pop("training", {}),
    }  # fmt: skip
    run_config = tiny_config(
        **({"job": {"dump_folder": str(folder)}} if folder is not None else {}),
        model={"overrides": {"num_layers": 2}},
        training=training,
        **sections,
    )
    return dataclasses.replace(run_config, task=Task(name="preference", beta=BETA))


def log_probability(model: torch.nn.Module, prompt: str, answer: str) -> torch.Tensor:
    """Return the float64 log-probability of answer and EOS after a prompt. Tokens are bytes, BOS 256 and EOS 257."""
    before = [256, *prompt.encode()]
    tokens = [*before, *answer.encode(), 257][: SEQ_LEN + 1]
    inputs = torch.tensor([tokens[:-1]])
    positions = torch.arange(len(tokens) - 1)[None]
    logs = model(inputs, positions)[0].log_softmax(-1)
    # Position i predicts token i + 1. The last token of the prompt predicts the first of the answer.
    return sum(logs[i, tokens[i + 1]] for i in range(len(before) - 1, len(tokens) - 1))


def model_of(config: Config, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    module = models.find(config.model.name)
    model = module.Model(
        models.shape_of(module, config.model.flavor, config.model.overrides, "rmsnorm")
    ).double()
    model.load_state_dict({name: tensor.double() for name, tensor in weights.items()})
    return model


@torch.no_grad()
def closed_form(
    config: Config, first: dict[str, torch.Tensor], now: dict[str, torch.Tensor], ids: list[int]
) -> float:
    """Return the loss by equation 7 of the paper."""
    reference = model_of(config, first)
    policy = model_of(config, now)
    losses = []
    for row in (rows()[i] for i in ids):
        margin = 0.0
        for sign, side in ((1, "chosen"), (-1, "rejected")):
            ratio = log_probability(policy, row["prompt"], row[side]) - log_probability(
                reference, row["prompt"], row[side]
            )
            margin += sign * BETA * float(ratio)
        losses.append(
            -torch.nn.functional.logsigmoid(torch.tensor(margin, dtype=torch.float64)).item()
        )
    return sum(losses) / len(losses)


def test_loss_matches_the_paper_in_float64(file: Path) -> None:
    run_config = config(file)
    before = run_tiny(1, run_config, 2)[0]
    after = run_tiny(1, run_config, 3)[0]

    assert before.losses[0] == pytest.approx(0.6931471805599453, abs=1e-6), (
        "the loss must be log 2 before learning"
    )

    third = after.sample_ids[2]
    assert len(third) == 8
    expected = closed_form(run_config, before.initial, before.final, third)
    assert abs(expected - 0.6931) > 1e-3
    # log-probabilities are near 100, in float32
    assert after.losses[2] == pytest.approx(expected, abs=2e-6)


MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "dp_shard 2": (2, {"data_parallel_shard_degree": 2}, {"local_batch_size": 2}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "disable_loss_parallel": True}, {}),
}


LOSSES: dict[str, dict[str, Any]] = {
    "dpo": {},
    "cpo": {"reference_free": True, "nll_weight": 0.5},
    "ipo": {"loss_type": "ipo"},
    "hinge": {"loss_type": "hinge"},
    "robust": {"loss_type": "robust", "label_smoothing": 0.2},
    "sigmoid_norm": {"loss_type": "sigmoid_norm", "nll_weight": 0.5},
}
MESHES_OF_LOSSES = [(mesh, loss) for loss in LOSSES for mesh in MESHES]


@pytest.mark.parametrize(
    ("mesh", "loss"), cases(MESHES_OF_LOSSES[:3], nightly=MESHES_OF_LOSSES[3:])
)
def test_meshes_change_no_number(mesh: str, loss: str, file: Path) -> None:
    ranks, parallelism, training = MESHES[mesh]
    task = Task(name="preference", beta=BETA, **LOSSES[loss])
    one_process = run_tiny(1, dataclasses.replace(config(file), task=task), 4)[0]
    on_mesh = config(file, parallelism=parallelism, training=training)
    on_mesh = dataclasses.replace(on_mesh, task=task)

    for result in run_tiny(ranks, on_mesh, 4):
        assert_same_numbers(result, one_process)


def train(config: Config, ranks: int = 1, stop_after: int | None = None) -> Ended:
    ended: Ended = run_ranks(ranks, train_whole, config, stop_after)[0]
    return ended


def test_resumed_run_requires_its_original_reference(file: Path, tmp_path: Path) -> None:
    start = tmp_path / "start"
    seed = config(file, start, checkpoint={"enable": True, "interval": 1}, training={"steps": 2})
    train(seed)
    checkpoint = {
        "enable": True,
        "interval": 2,
        "initial_load_path": str(start / "checkpoint/step-2"),
    }
    uninterrupted = train(config(file, tmp_path / "uninterrupted", checkpoint=checkpoint))

    assert uninterrupted.losses[0] == LOSS_OF_EQUAL_MODELS, "the reference is the initial weights"

    interrupted = config(file, tmp_path / "interrupted", checkpoint=checkpoint)
    train(interrupted, stop_after=2)
    resumed = train(interrupted)

    assert resumed.losses == uninterrupted.losses[2:]
    assert_bitwise(resumed.weights, uninterrupted.weights)

    # A reference from another step is rejected.
    changed = {**checkpoint, "initial_load_path": str(start / "checkpoint/step-1"), "interval": 1}
    longer = config(file, tmp_path / "interrupted", checkpoint=changed, training={"steps": 6})
    error = train(longer).error
    assert isinstance(error, ConfigError)
    assert "reference weights differ" in str(error)


def test_reference_of_adapters_is_the_base_model(file: Path, tmp_path: Path) -> None:
    seed = config(file, tmp_path / "start", checkpoint={"enable": True}, training={"steps": 2})
    train(seed)
    run_config = config(
        file,
        tmp_path / "adapters",
        checkpoint={"enable": True, "initial_load_path": str(tmp_path / "start/checkpoint/step-2")},
        lora={"enable": True, "rank": 4},
    )
    losses = train(run_config).losses

    assert losses[0] == LOSS_OF_EQUAL_MODELS, "initial adapters must not change the model"
    assert losses[-1] != losses[0]


def test_preferences_are_learned_and_rewards_measured(file: Path, tmp_path: Path) -> None:
    validation = {
        "enable": True,
        "freq": 10,
        "dataset": "jsonl",
        "dataset_path": str(file),
        "seq_len": SEQ_LEN,
    }
    run_config = config(
        file, tmp_path, training={"steps": 10}, validation={**validation, "local_batch_size": 3}
    )

    assert train(run_config, ranks=2).error is None

    logged = json.loads((tmp_path / "validation.jsonl").read_text().splitlines()[-1])
    assert logged["reward_accuracy"] == 1.0
    assert logged["reward_margin"] > 0.5
    assert logged["loss"] < 0.5


def test_conversations_are_supported(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    say = [{"role": "user", "content": "hi"}]
    row = {
        "prompt": say,
        **{key: [{"role": "assistant", "content": key}] for key in ("chosen", "rejected")},
    }
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    run_config = config(path, data={"chat_template": str(template)})
    pair = Preference(run_config).read_rows("train")[0]

    assert bytes(pair.chosen[1][pair.chosen[1] >= 0].tolist()) == b"chosen;"
    assert bytes(pair.rejected[1][pair.rejected[1] >= 0].tolist()) == b"rejected;"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "chosen": "b"}, "has no column 'rejected'"),
        (
            {"prompt": "a" * 60, "chosen": "b", "rejected": "c"},
            "has 0 usable of 1 rows: 1 row: the prompt fills seq_len.*; raise seq_len",
        ),
    ],
)
def test_row_that_is_not_a_pair_is_named(row: dict[str, str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=message):
        Preference(config(path, data={"bad_rows": "stop"})).read_rows("train")


def test_invalid_preference_options_are_rejected(file: Path) -> None:
    pipeline = Parallelism(pipeline_parallel_degree=2)
    split_sequences = Parallelism(context_parallel_degree=2)
    no_beta = Task(name="preference", beta=0.0)
    one_column = Task(name="preference", rejected_field="chosen")
    for sections, message in (
        ({"parallelism": pipeline}, "splits the model"),
        ({"parallelism": split_sequences}, "splits each sequence"),
        ({"task": no_beta}, "task.beta=0.0 must be above 0"),
        ({"task": one_column}, "name three columns"),
    ):
        invalid = dataclasses.replace(config(file), **sections)
        lines = [str(problem) for problem in check(Loaded(invalid))]
        assert any(message in line for line in lines), (message, lines)


def test_damaged_reference_is_rejected(file: Path, tmp_path: Path) -> None:
    train(
        config(
            file,
            tmp_path / "start",
            checkpoint={"enable": True, "interval": 1},
            training={"steps": 1},
        )
    )
    start = tmp_path / "start/checkpoint/step-1"
    victim = next(start.glob("*.bin"))
    data = bytearray(victim.read_bytes())
    data[100] ^= 1
    victim.write_bytes(bytes(data))
    ended = train(
        config(file, tmp_path / "run", checkpoint={"enable": True, "initial_load_path": str(start)})
    )

    assert isinstance(ended.error, CheckpointError)
    assert "is damaged" in str(ended.error)


def test_logged_rewards_are_those_of_all_pairs_of_the_step(file: Path, tmp_path: Path) -> None:
    """One process and two ranks with accumulation log the same means. Before learning they are 0."""
    on_ranks = {
        "parallelism": {"data_parallel_shard_degree": 2},
        "training": {"local_batch_size": 2},
    }

    def logged(ranks: int, **sections: Any) -> list[dict[str, float]]:
        folder = tmp_path / str(ranks)
        train(config(file, folder, metrics={"log_freq": 1}, **sections), ranks)
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    one_process = logged(1)
    two_ranks = logged(2, **on_ranks)
    names = ("reward_chosen", "reward_rejected", "reward_margin", "reward_accuracy")

    first = one_process[0]
    assert [first[name] for name in names] == [0, 0, 0, 0]

    last = one_process[-1]
    margin = last["reward_chosen"] - last["reward_rejected"]
    assert last["reward_margin"] == pytest.approx(margin, abs=1e-9)
    assert last["reward_margin"] != 0

    # float32 sums in a different order
    for name in names:
        assert two_ranks[-1][name] == pytest.approx(last[name], abs=1e-5), name


ADAPTED: dict[str, dict[str, Any]] = {
    "nf4": {"base_dtype": "nf4"},
    "int8": {"base_dtype": "int8"},
    "loaded adapters": {},
    "nf4 and loaded adapters": {"base_dtype": "nf4"},
}


@pytest.mark.parametrize(
    "name", cases(["nf4", "loaded adapters"], nightly=["int8", "nf4 and loaded adapters"])
)
@pytest.mark.parametrize("task", ["preference", "kto"])
def test_reference_of_an_adapted_run_is_its_initial_model(
    name: str, task: str, file: Path, tmp_path: Path
) -> None:
    """The reference has the quantized weights and the loaded adapters, so the first loss is that of equal models."""
    seed = config(file, tmp_path / "start", checkpoint={"enable": True}, training={"steps": 2})
    train(seed)
    base = {
        "enable": True,
        "interval": 2,
        "initial_load_path": str(tmp_path / "start/checkpoint/step-2"),
    }
    lora = {"enable": True, "rank": 4, **ADAPTED[name]}
    if "adapters" in name:
        # Train the adapters of an earlier run, from which this run starts.
        first = config(file, tmp_path / "first", checkpoint=base, lora=lora, optimizer={"lr": 0.05})
        train(first)
        lora["initial_load_path"] = str(tmp_path / "first/checkpoint/step-4")
        base["initial_load_model_only"] = True

    data = file
    if task == "kto":  # KTO reads labeled completions instead of pairs
        data = tmp_path / "kto.jsonl"
        lines = []
        for number, row in enumerate(rows()):
            labeled = {"prompt": row["prompt"], "completion": row["chosen"]}
            lines.append(json.dumps({**labeled, "label": number % 2 == 0}) + "\n")
        data.write_text("".join(lines))

    on_meshes = {
        1: {},
        2: {"parallelism": {"data_parallel_shard_degree": 2}, "training": {"local_batch_size": 2}},
    }
    results = []
    for ranks, mesh in on_meshes.items():
        run_config = config(data, tmp_path / f"run-{ranks}", checkpoint=base, lora=lora, **mesh)
        run_config = dataclasses.replace(run_config, task=Task(name=task, beta=BETA, group_size=2))
        results.append(train(run_config, ranks))
    one_process, two_ranks = results

    assert one_process.error is None, one_process.error

    # At first, the model equals its reference. Later it does not.
    loss_of_equal_models = math.log(2) if task == "preference" else 0.5
    assert one_process.losses[0] == pytest.approx(loss_of_equal_models, abs=1e-6)
    assert abs(one_process.losses[-1] - loss_of_equal_models) > 1e-6

    # float32 sums in a different order
    assert two_ranks.losses == pytest.approx(one_process.losses, abs=1e-5)
