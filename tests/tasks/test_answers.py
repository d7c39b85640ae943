"""Tasks that learn from answers, except DPO (test_preference.py): meshes change no number, bad rows are reported."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from against import ours, pairs
from foreign import config_for as foreign
from ranks import run_ranks
from tiers import cases
from tiny import assert_same_numbers, run_tiny, tiny_config, train_whole

from shardtrain.config import Loaded
from shardtrain.config.rules import check
from shardtrain.config.schema import Config, Model, Task
from shardtrain.data.row_stream import RowBatch
from shardtrain.tasks.kto import KTO, _groups
from shardtrain.tasks.reward_model import RewardModel
from shardtrain.tools.data import show
from shardtrain.utils.errors import DataError

TASKS = {
    "simpo": {"beta": 2.0},
    "orpo": {"beta": 0.3},
    "kto": {"beta": 0.3, "group_size": 3, "undesirable_weight": 0.7},
    "reward_model": {},
}
SCORES = {"architecture": "GPT2ForSequenceClassification", "num_labels": 1}
MESHES: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "accumulation 2": (1, {}, {"local_batch_size": 1}),
    "dp_shard 2": (2, {"data_parallel_shard_degree": 2}, {"local_batch_size": 1}),
    "tp 2": (2, {"tensor_parallel_degree": 2, "disable_loss_parallel": True}, {}),
}
MIXTURE = {
    "vocab_size": 512, "dim": 32, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "moe_ffn_dim": 24,
    "num_experts": 4, "balance_loss_coeff": 0.1,
}  # fmt: skip
CASES = [(task, mesh) for task in TASKS for mesh in MESHES]
FIRST = [
    ("kto", "accumulation 2"),
    ("kto", "dp_shard 2"),
    ("orpo", "tp 2"),
    ("reward_model", "tp 2"),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("answers") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs()))
    return path


def config(file: Path, task: str, **sections: dict[str, Any]) -> Config:
    training = {
        "dataset": "jsonl", "dataset_path": str(file), "seq_len": 40, "on_data_end": "repeat",
        "local_batch_size": 2, "global_batch_size": 2, "steps": 4, **sections.pop("training", {}),
    }  # fmt: skip
    task_config = tiny_config(model={"overrides": {"num_layers": 2}}, training=training, **sections)
    return dataclasses.replace(task_config, task=Task(name=task, **TASKS.get(task, {})))


@pytest.mark.parametrize(
    ("task", "mesh"), cases(FIRST, nightly=[case for case in CASES if case not in FIRST])
)
def test_meshes_change_no_number(task: str, mesh: str, file: Path) -> None:
    ranks, parallelism, training = MESHES[mesh]
    one_process = run_tiny(1, config(file, task), 4)[0]
    assert one_process.losses[-1] != one_process.losses[0]

    on_mesh = config(file, task, parallelism=parallelism, training=training)
    for result in run_tiny(ranks, on_mesh, 4):
        assert_same_numbers(result, one_process)


@pytest.mark.parametrize("task", ["simpo", "kto"])
def test_padding_batch_adds_nothing_to_the_load_of_experts(task: str, tmp_path: Path) -> None:
    """In the last step, rank 0 has a batch and rank 1 only padding."""
    path = tmp_path / "rows.jsonl"
    num_rows = 9 if task == "kto" else 3
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs()[:num_rows]))

    def mixture(local_batch_size: int, ranks: int) -> Config:
        training = {"on_data_end": "stop", "local_batch_size": local_batch_size, "steps": 2}
        mesh = {"data_parallel_shard_degree": ranks}
        run_config = config(path, task, training=training, parallelism=mesh)
        return dataclasses.replace(run_config, model=Model(name="mixtral", overrides=MIXTURE))

    expected = run_tiny(1, mixture(2, ranks=1), 2)[0]

    accumulated = run_tiny(1, mixture(1, ranks=1), 2)
    on_two_ranks = run_tiny(2, mixture(1, ranks=2), 2)
    for result in (*accumulated, *on_two_ranks):
        assert_same_numbers(result, expected)


def test_padding_entry_of_a_group_adds_nothing_to_the_load_of_experts(tmp_path: Path) -> None:
    """If groups of 3 and 2 rows share a batch, the smaller group has a padding entry. Otherwise it has none."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in pairs()[:5]))

    def of(local: int) -> Config:
        run_config = config(path, "kto", training={"local_batch_size": local, "steps": 1})
        return dataclasses.replace(run_config, model=Model(name="mixtral", overrides=MIXTURE))

    together, apart = (run_tiny(1, of(local), 1)[0] for local in (2, 1))

    assert_same_numbers(apart, together)


def test_groups_contain_every_row_once_and_at_least_two() -> None:
    for count in range(1, 12):
        groups = list(_groups(list(range(count)), 3))  # type: ignore[arg-type]
        assert list(itertools.chain.from_iterable(groups)) == list(range(count))
        if count > 1:
            assert all(len(group) in (2, 3, 4) for group in groups)


@pytest.mark.parametrize("task", ["kto", "reward_model"])
def test_validation_is_equal_on_any_number_of_ranks(task: str, file: Path, tmp_path: Path) -> None:
    """Each row counts once, although the last group is smaller."""
    results = []
    for ranks in (1, 2):
        validation = {
            "enable": True,
            "dataset": "jsonl",
            "dataset_path": str(file),
            "seq_len": 40,
            "freq": 1,
        }
        folder = tmp_path / str(ranks)
        run_config = config(
            file, task, job={"dump_folder": str(folder)}, validation={**validation, "local_batch_size": 2},
            training={"steps": 1, "local_batch_size": 2 // ranks}, parallelism={"data_parallel_shard_degree": ranks},
        )  # fmt: skip

        assert run_ranks(ranks, train_whole, run_config)[0].error is None

        (line,) = (folder / "validation.jsonl").read_text().splitlines()
        record = json.loads(line)
        names = [name for name in record if name.startswith(("loss", "reward"))]
        results.append({name: record[name] for name in names})

    assert results[0].keys() == results[1].keys()
    assert "reward_margin" in results[0]
    assert results[0] == pytest.approx(results[1], abs=1e-5)


def arguments_for(file: Path, task: str, *more: str) -> list[str]:
    return [
        f"--task.name={task}", "--training.dataset=jsonl", f"--training.dataset_path={file}",
        "--model.hf_assets_path=bytes", "--training.seq_len=64", "--rows=1", *more,
    ]  # fmt: skip


def test_chat_template_and_columns_of_answers_are_configurable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "plain.jinja"
    path = tmp_path / "pairs.jsonl"
    template.write_text(
        "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}!"
        "{% endgeneration %}{% else %}{{ message.content }}?{% endif %}{% endfor %}"
    )
    sides = {"chosen": "yes", "rejected": "no"}
    row = {name: [{"role": "assistant", "content": text}] for name, text in sides.items()}
    path.write_text(json.dumps({"asked": [{"role": "user", "content": "is it"}], **row}) + "\n")
    named = (f"--data.chat_template={template}", "--data.prompt_field=asked")
    assert show.main(arguments_for(path, "preference", *named)) == 0

    shown = capsys.readouterr().out
    assert "is it?«yes!»" in shown
    assert "is it?«no!»" in shown


def test_data_show_prints_both_answers_with_learned_parts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(json.dumps({"chosen": "2+2 is four", "rejected": "2+2 is five!"}) + "\n")

    # ORPO learns the chosen answer and its end. French quotation marks enclose what is learned.
    assert show.main(arguments_for(path, "orpo")) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [
        "== position 0: row 0 of jsonl",
        "-- chosen: 13 tokens, 6 in the loss",
        "<bos>2+2 is« four<eos>»",
        "-- rejected: 14 tokens, 7 in the loss",
        "<bos>2+2 is« five!<eos>»",
    ]

    # A reward model learns no token.
    assert show.main(arguments_for(path, "reward_model", "--json")) == 0
    shown = json.loads(capsys.readouterr().out)
    (chosen, chosen_pieces), (rejected, rejected_pieces) = shown["texts"]
    assert (chosen, rejected) == ("chosen", "rejected")
    assert [piece["learned"] for piece in chosen_pieces] == [False]
    assert [piece["learned"] for piece in rejected_pieces] == [False]

    path.write_text(json.dumps({"prompt": "a", "completion": "b", "label": False}) + "\n")
    assert show.main(arguments_for(path, "kto")) == 0
    assert capsys.readouterr().out.splitlines()[2:] == [
        "-- bad: 4 tokens, 2 in the loss",
        "<bos>a«b<eos>»",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "kto", "group_size": 1}, "task.group_size=1 must be at least 2"),
        ({"name": "kto", "desirable_weight": 0.0}, "task.desirable_weight=0.0 must be above 0"),
        ({"name": "kto", "gamma": 1.0}, 'task.gamma=1.0 is only read by task.name = "simpo"'),
        ({"name": "simpo", "gamma": -1.0}, "task.gamma=-1.0 must be 0 or above"),
        ({"name": "orpo", "rejected_field": "chosen"}, "name three columns"),
        (
            {"name": "reward_model", "beta": 0.3},
            'is only read by task.name = "preference" or "orpo" or "simpo" or "kto"',
        ),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, Any], message: str, file: Path) -> None:
    broken = dataclasses.replace(config(file, "kto"), task=Task(**options))
    loaded = Loaded(broken, {f"task.{name}": "command line" for name in options})
    lines = [str(problem) for problem in check(loaded)]
    assert any(message in line for line in lines), lines


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "completion": "b"}, "has no column 'label'"),
        (
            {"prompt": "a", "completion": "b", "label": "good"},
            "label 'good' in column 'label' is neither true",
        ),
        (
            {"prompt": "a", "completion": 3, "label": True},
            "column 'completion' holds a number, not a text",
        ),
    ],
)
def test_row_without_a_valid_label_is_named(
    row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=f"rows.jsonl:1: .*{message}"):
        KTO(config(path, "kto")).read_rows("train")


@pytest.mark.parametrize(
    ("label", "is_good"),
    [(True, True), (1, True), (1.0, True), (0.0, False), ("false", False), (0.5, None)],
)
def test_kto_label_may_be_a_number(tmp_path: Path, label: Any, is_good: bool | None) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "a", "completion": "b", "label": label}) + "\n")
    if is_good is not None:
        ((answer,),) = KTO(config(path, "kto")).read_rows("train")
        assert answer.is_good == is_good
        return

    with pytest.raises(DataError, match="label '0.5' in column 'label' is neither true nor false"):
        KTO(config(path, "kto")).read_rows("train")


def test_chat_preferences_are_read_in_every_layout() -> None:
    """Files with one row in each layout yield the same pair."""
    ask = {"role": "user", "content": "the cat"}
    good = {"role": "assistant", "content": "Hello"}
    bad = {"role": "assistant", "content": "well"}
    rows: list[dict[str, Any]] = [
        {"prompt": [ask], "chosen": [good], "rejected": [bad]},
        {"prompt": "the cat", "chosen": [ask, good], "rejected": [ask, bad]},
        {"chosen": [ask, good], "rejected": [ask, bad]},
    ]
    sizes = {"steps": 2, "local_batch_size": 1, "global_batch_size": 1}
    runs = [ours([row], task={"name": "preference"}, training=sizes) for row in rows]

    assert all(run.error is None for run in runs)
    assert runs[0].losses == runs[1].losses == runs[2].losses
    assert runs[0].losses[1] < runs[0].losses[0]


@pytest.mark.parametrize(("task", "overrides"), [("preference", {}), ("reward_model", SCORES)])
def test_transformers_models_learn_from_answers(
    task: str, overrides: dict[str, Any], file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    training = {
        "dataset": "jsonl",
        "dataset_path": str(file),
        "on_data_end": "repeat",
        "seq_len": 48,
    }
    run_config = dataclasses.replace(
        foreign("gpt2", tmp_path, overrides=overrides, training=training), task=Task(name=task)
    )

    assert list(check(Loaded(run_config))) == []

    ended = run_ranks(1, train_whole, run_config)[0]
    assert ended.error is None
    assert ended.losses[-1] < ended.losses[0]


MARGINS = {
    "absent": (None, 0.0),
    "null": ("null", 0.0),
    "a number": ("0.5", 0.5),
    "negative": ("-2", -2.0),
}


@pytest.mark.parametrize(("value", "margin"), MARGINS.values(), ids=MARGINS.keys())
def test_margin_of_a_row_is_subtracted_from_the_difference_of_scores(
    value: str | None, margin: float, tmp_path: Path
) -> None:
    column = "" if value is None else f', "margin": {value}'
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "q", "chosen": "a", "rejected": "b"{column}}}\n')
    task = RewardModel(config(path, "reward_model"))
    rows = task.read_rows("train")
    batch = RowBatch(task.collate(list(rows)), torch.tensor([0]), 1, 1)
    loss = task.loss_sum(torch.tensor([[1.25, 0.5]]), batch, torch.tensor(1.0))

    # -log(sigmoid(difference - margin)) in float32
    difference = 1.25 - 0.5
    assert float(loss) == pytest.approx(math.log1p(math.exp(margin - difference)), abs=1e-6)

    # A margin changes the fingerprint of the rows, so a resumed run notices it.
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "q", "chosen": "a", "rejected": "b"}\n')
    plain_rows = RewardModel(config(plain, "reward_model")).read_rows("train")
    assert (plain_rows.fingerprint == rows.fingerprint) == (margin == 0.0)


@pytest.mark.parametrize("value", ["true", '"1"', "1e999", "[1]"])
def test_margins_other_than_finite_numbers_are_bad_rows(value: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "q", "chosen": "a", "rejected": "b", "margin": {value}}}\n')
    with pytest.raises(DataError, match="rows.jsonl:1: margin .* is not a finite number"):
        RewardModel(config(path, "reward_model")).read_rows("train")
