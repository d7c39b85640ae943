"""Exported classifiers and reward models: transformers computes the same scores as the run that trained them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import FAMILIES, build, save
from ranks import run_ranks
from reviews import LENGTH
from reviews import config as reviews_config
from tiers import cases
from tiny import make_run, train_whole
from tiny_tokenizers import bpe_folder
from torch import Tensor

from shardtrain import cli
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import Loaded
from shardtrain.config.schema import Config, Task
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.hf.hub_model import recognise
from shardtrain.train.preflight import meta_model
from shardtrain.train.resume import resume
from shardtrain.train.run_folder import write_resolved_config

transformers = pytest.importorskip("transformers")
TOLERANCE = 1e-4
"""Tolerance for scores of about 1 with a different float32 summation order; larger for experts."""
TASKS = {
    "classification": Task(name="classification", label_field="1", labels=("0", "1", "none")),
    "reward_model": Task(name="reward_model"),
}
FIRST = [("llama3", "classification"), ("qwen2", "reward_model")]
REST = [(family, task) for family in FAMILIES for task in TASKS if not family.startswith("llama4")]


def config_of(base: Path, folder: Path, task: str, **sections: Any) -> Config:
    """Return a run of two steps from the weights of ``base``, a language model."""
    recognised = recognise(base)
    training: dict[str, Any] = {"steps": 2, "local_batch_size": 4}
    if task == "reward_model":
        rows = folder.with_name("pairs.jsonl")
        rows.write_text(
            "".join(
                json.dumps({"prompt": "a", "chosen": "b" * i, "rejected": "c"}) + "\n"
                for i in (1, 2, 3, 4)
            )
        )
        training |= {
            "dataset": "jsonl",
            "dataset_path": str(rows),
            "on_data_end": "repeat",
            "seq_len": LENGTH,
        }
    loaded = {"enable": True, "initial_load_path": str(base), "initial_load_in_hf": True}
    run_config = reviews_config(
        model={
            "name": recognised.name,
            "flavor": recognised.flavor,
            "overrides": dict(recognised.overrides),
        },
        job={"dump_folder": str(folder)},
        training=training,
        validation={"enable": False},
        checkpoint={**loaded, **sections.pop("checkpoint", {})},
        **sections,
    )
    return dataclasses.replace(
        run_config,
        task=TASKS[task],
        data=type(run_config.data)() if task == "reward_model" else run_config.data,
    )


def trained(run_config: Config) -> Path:
    """Train, write the files of a run, and return its last checkpoint."""
    assert run_ranks(1, train_whole, run_config)[0].error is None
    write_resolved_config(Loaded(run_config), Path(run_config.job.dump_folder), 1)
    return Path(run_config.job.dump_folder) / "checkpoint" / "step-2"


def scores(rank: int, run_config: Config) -> tuple[list[Tensor], Tensor]:
    """Return rows without padding, and their scores by the newest checkpoint."""
    run = make_run(rank, run_config)
    checkpoints = Checkpoints(run_config)
    resume(run, checkpoints)
    checkpoints.close()
    run.dataloader.seek(0, None)
    batch = next(run.dataloader)
    with torch.no_grad():
        output = run.runner.task.forward(run.runner.parts[0].eval(), batch)  # type: ignore[attr-defined]
    tokens, lengths = (
        batch.tensors[name] for name in batch.tensors if name.startswith(("tokens", "lengths"))
    )
    padded_rows = tokens.flatten(0, -2)
    rows = []
    for row, length in zip(padded_rows, lengths.flatten().tolist(), strict=True):
        rows.append(row[:length])
    return rows, output.reshape(len(rows), -1)


def assert_scores(folder: Path, rows: list[Tensor], expected: Tensor) -> None:
    """Check that transformers opens ``folder`` as a classifier without new weights, and computes these scores."""
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    for row, score in zip(rows, expected, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(
                model.eval()(row[None]).logits[0], score, atol=TOLERANCE, rtol=1e-4
            )


@pytest.mark.parametrize(
    ("family", "task"),
    cases(FIRST, nightly=[case for case in REST if case not in FIRST]),
)
def test_an_exported_run_has_the_same_scores(
    family: str, task: str, tmp_path: Path, capsys: Any
) -> None:
    base = save(build(family), tmp_path / "base")
    run_config = config_of(base, tmp_path / "run", task, checkpoint={"last_save_in_hf": True})
    step = trained(run_config)

    assert cli.main(["export", str(step), "--to", str(tmp_path / "hf")]) == 0
    assert "transformers returns the same logits" in capsys.readouterr().out

    # The folder of the command and that of the last save have the same scores.
    rows, expected = run_ranks(1, scores, run_config)[0]
    labels = ["0", "1", "none"] if task == "classification" else ["LABEL_0"]
    for folder in (tmp_path / "hf", step.with_name("step-2-hf")):
        assert_scores(folder, rows, expected)
        fields = json.loads((folder / "config.json").read_text())
        assert fields["architectures"] == [f"{FAMILIES[family][0]}ForSequenceClassification"]
        assert list(fields["id2label"].values()) == labels


@pytest.mark.parametrize(
    ("family", "task"),
    cases(
        [("llama3-tied", "classification"), ("llama3-tied", "reward_model")],
        nightly=[
            ("llama3", "classification"),
            ("qwen3", "reward_model"),
            ("qwen3_moe", "classification"),
        ],
    ),
)
def test_adapters_of_a_classifier_export_and_merge(family: str, task: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save(build(family), tmp_path / "base")
    lora = {"enable": True, "rank": 2, "alpha": 4.0}
    run_config = config_of(base, tmp_path / "run", task, lora=lora)
    step = trained(run_config)
    rows, expected = run_ranks(1, scores, run_config)[0]

    # PEFT with the base model and the adapters.
    assert cli.main(["export", str(step), "--to", str(tmp_path / "peft"), "--adapter"]) == 0
    base_model = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=expected.shape[1], dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(base_model, tmp_path / "peft").eval()
    for row, score in zip(rows, expected, strict=True):
        with torch.no_grad():
            actual = model(input_ids=row[None]).logits[0]
        torch.testing.assert_close(actual, score, atol=TOLERANCE, rtol=1e-4)

    # Another run can start from the adapters. Its scores differ by float32 rounding.
    lora = dataclasses.asdict(run_config.lora) | {"initial_load_path": str(tmp_path / "peft")}
    second_config = config_of(base, tmp_path / "again", task, lora=lora)
    _, second_scores = run_ranks(1, scores, second_config)[0]
    torch.testing.assert_close(second_scores, expected, atol=1e-6, rtol=0)
    # The merged weights are a complete folder.
    assert cli.main(["merge", str(step), "--to", str(tmp_path / "merged")]) == 0
    assert cli.main(["export", str(tmp_path / "merged"), "--to", str(tmp_path / "hf")]) == 0
    assert_scores(tmp_path / "hf", rows, expected)


def test_a_classifier_folder_loads_completely_and_trains_further(tmp_path: Path) -> None:
    """Use ``model.name = "transformers"``. The log must report a head as new only if the folder has none.

    The folder has the tokenizer's padding token, which transformers needs to find the last token of each row.
    """
    bpe_folder(
        tmp_path / "bpe",
        ("<s>", "</s>", "<pad>"),
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
    )
    tokenizer = open_tokenizer(str(tmp_path / "bpe"))
    base = save(build("llama3", vocab_size=tokenizer.vocab_size), tmp_path / "base")
    run_config = config_of(base, tmp_path / "run", "classification")
    run_config = dataclasses.replace(
        run_config,
        model=dataclasses.replace(run_config.model, hf_assets_path=str(tmp_path / "bpe")),
    )

    assert cli.main(["export", str(trained(run_config)), "--to", str(tmp_path / "hf")]) == 0
    exported_fields = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert exported_fields["pad_token_id"] == tokenizer.pad_id

    expected = run_ranks(1, scores, run_config)[0][1]
    fields = {"path": str(tmp_path / "hf")}
    model = dataclasses.replace(
        run_config.model, name="transformers", flavor="folder", overrides=fields
    )
    checkpoint = dataclasses.replace(run_config.checkpoint, initial_load_path=str(tmp_path / "hf"))
    adapters = dataclasses.replace(run_config.lora, enable=True, rank=2, target_modules=("q_proj",))
    for lora in (run_config.lora, adapters):
        job = dataclasses.replace(
            run_config.job, dump_folder=str(tmp_path / f"opened-{lora.enable}")
        )
        opened = dataclasses.replace(
            run_config, model=model, checkpoint=checkpoint, job=job, lora=lora
        )
        opened_scores = run_ranks(1, scores, opened)[0][1]
        torch.testing.assert_close(opened_scores, expected, atol=TOLERANCE, rtol=1e-4)

        trained(opened)
        log = (Path(job.dump_folder) / "logs" / "rank-0.log").read_text()
        assert "does not contain the head" not in log

    # The first run started from a folder without a head, so its log reports the new head.
    first_log = (tmp_path / "run" / "logs" / "rank-0.log").read_text()
    assert "does not contain the head" in first_log


ONE_LABEL = "num_labels=3 must be 1, the number of labels"
THREE_LABELS = "num_labels=2 must be 3, the number of labels"
NO_PADDING = "without pad_token_id in config.json, which it needs to find the last token of a row"


@pytest.mark.parametrize(
    ("fields", "task", "message"),
    [
        ({"num_labels": 3, "pad_token_id": 0}, "reward_model", ONE_LABEL),
        ({"num_labels": 2, "pad_token_id": 0}, "classification", THREE_LABELS),
        ({"num_labels": 3}, "classification", NO_PADDING),
    ],
    ids=["three scores of a reward model", "two labels of three", "no padding"],
)  # fmt: skip
def test_a_folder_that_does_not_fit_the_task_is_rejected(
    fields: dict[str, Any], task: str, message: str, tmp_path: Path
) -> None:
    """Without the rejection, a reward model with three scores would train on their sum."""
    base = save(build("llama3"), tmp_path / "base")
    run_config = config_of(base, tmp_path / "run", task)
    config = transformers.LlamaConfig.from_pretrained(base, **fields)
    folder = save(transformers.LlamaForSequenceClassification(config), tmp_path / "classifier")
    model = dataclasses.replace(
        run_config.model, name="transformers", flavor="folder", overrides={"path": str(folder)}
    )
    run_config = dataclasses.replace(run_config, model=model)

    assert message in str(run_ranks(1, train_whole, run_config)[0].error)
    # "config check" builds the model on the meta device, and reports the same problem.
    assert message in str(meta_model.build(run_config)[0][0])
