"""Classifiers and reward models as Hugging Face folders: transformers scores rows as the run that trained them does."""

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
"""Of scores of about 1, between two float32 programs that add in another order; experts add more of them."""
TASKS = {
    "classification": Task(name="classification", label_field="1", labels=("0", "1", "none")),
    "reward_model": Task(name="reward_model"),
}
FIRST = [("llama3", "classification"), ("qwen2", "reward_model")]
REST = [(family, task) for family in FAMILIES for task in TASKS if not family.startswith("llama4")]


def config_of(base: Path, folder: Path, task: str, **sections: Any) -> Config:
    """Two steps from the weights of ``base``, which hold a language model."""
    found = recognise(base)
    training: dict[str, Any] = {"steps": 2, "local_batch_size": 4}
    if task == "reward_model":
        rows = folder.with_name("pairs.jsonl")
        rows.write_text(
            "".join(json.dumps({"prompt": "a", "chosen": "b" * i, "rejected": "c"}) + "\n" for i in (1, 2, 3, 4))
        )
        training |= {"dataset": "jsonl", "dataset_path": str(rows), "on_data_end": "repeat", "seq_len": LENGTH}
    loaded = {"enable": True, "initial_load_path": str(base), "initial_load_in_hf": True}
    one = reviews_config(
        model={"name": found.name, "flavor": found.flavor, "overrides": dict(found.overrides)},
        job={"dump_folder": str(folder)},
        training=training,
        validation={"enable": False},
        checkpoint={**loaded, **sections.pop("checkpoint", {})},
        **sections,
    )
    return dataclasses.replace(one, task=TASKS[task], data=type(one.data)() if task == "reward_model" else one.data)


def trained(one: Config) -> Path:
    """The last checkpoint of the run, with its files as a user finds them."""
    assert run_ranks(1, train_whole, one)[0].error is None
    write_resolved_config(Loaded(one), Path(one.job.dump_folder), 1)
    return Path(one.job.dump_folder) / "checkpoint" / "step-2"


def scores(rank: int, one: Config) -> tuple[list[Tensor], Tensor]:
    """Rows without their padding, and the scores of the newest checkpoint."""
    run, checkpoints = make_run(rank, one), Checkpoints(one)
    resume(run, checkpoints)
    checkpoints.close()
    run.dataloader.seek(0, None)
    batch = next(run.dataloader)
    with torch.no_grad():
        found = run.runner.task.forward(run.runner.parts[0].eval(), batch)  # type: ignore[attr-defined]
    tokens, lengths = (batch.tensors[name] for name in batch.tensors if name.startswith(("tokens", "lengths")))
    rows = tokens.flatten(0, -2)
    return [row[: int(size)] for row, size in zip(rows, lengths.flatten(), strict=True)], found.reshape(len(rows), -1)


def assert_scores(folder: Path, rows: list[Tensor], expected: Tensor) -> None:
    """``folder`` opens in transformers as a classifier without a new weight, and gives these scores."""
    model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    for row, score in zip(rows, expected, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(row[None]).logits[0], score, atol=TOLERANCE, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "task"),
    cases(FIRST, nightly=[case for case in REST if case not in FIRST]),
)
def test_an_exported_run_scores_as_it_did(family: str, task: str, tmp_path: Path, capsys: Any) -> None:
    base = save(build(family), tmp_path / "base")
    one = config_of(base, tmp_path / "run", task, checkpoint={"last_save_in_hf": True})
    step = trained(one)
    assert cli.main(["export", str(step), "--to", str(tmp_path / "hf")]) == 0
    assert "transformers returns the same logits" in capsys.readouterr().out
    rows, expected = run_ranks(1, scores, one)[0]
    for folder in (tmp_path / "hf", step.with_name("step-2-hf")):
        assert_scores(folder, rows, expected)
        found = json.loads((folder / "config.json").read_text())
        assert found["architectures"] == [f"{FAMILIES[family][0]}ForSequenceClassification"]
        assert list(found["id2label"].values()) == (["0", "1", "none"] if task == "classification" else ["LABEL_0"])


@pytest.mark.parametrize(
    ("family", "task"),
    cases(
        [("llama3-tied", "classification"), ("llama3-tied", "reward_model")],
        nightly=[("llama3", "classification"), ("qwen3", "reward_model"), ("qwen3_moe", "classification")],
    ),
)
def test_adapters_of_a_classifier_export_and_merge(family: str, task: str, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = save(build(family), tmp_path / "base")
    one = config_of(base, tmp_path / "run", task, lora={"enable": True, "rank": 2, "alpha": 4.0})
    step = trained(one)
    rows, expected = run_ranks(1, scores, one)[0]
    # the adapters beside the base, by PEFT
    assert cli.main(["export", str(step), "--to", str(tmp_path / "peft"), "--adapter"]) == 0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=expected.shape[1], dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(theirs, tmp_path / "peft").eval()
    for row, score in zip(rows, expected, strict=True):
        with torch.no_grad():
            torch.testing.assert_close(model(input_ids=row[None]).logits[0], score, atol=TOLERANCE, rtol=1e-4)
    # they are a start of another run
    again = config_of(
        base,
        tmp_path / "again",
        task,
        lora={**dataclasses.asdict(one.lora), "initial_load_path": str(tmp_path / "peft")},
    )
    torch.testing.assert_close(run_ranks(1, scores, again)[0][1], expected, atol=1e-6, rtol=0)
    # and the sum of both is a folder
    assert cli.main(["merge", str(step), "--to", str(tmp_path / "merged")]) == 0
    assert cli.main(["export", str(tmp_path / "merged"), "--to", str(tmp_path / "hf")]) == 0
    assert_scores(tmp_path / "hf", rows, expected)


def test_a_classifier_folder_is_loaded_whole_and_trained_on(tmp_path: Path) -> None:
    """By ``model.name = "transformers"``; nothing says that its head is new, unless it is.

    The folder has the tokenizer's padding, by which transformers finds the last token of each row of a batch.
    """
    bpe_folder(tmp_path / "bpe", ("<s>", "</s>", "<pad>"), bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer = open_tokenizer(str(tmp_path / "bpe"))
    base = save(build("llama3", vocab_size=tokenizer.vocab_size), tmp_path / "base")
    one = config_of(base, tmp_path / "run", "classification")
    one = dataclasses.replace(one, model=dataclasses.replace(one.model, hf_assets_path=str(tmp_path / "bpe")))
    assert cli.main(["export", str(trained(one)), "--to", str(tmp_path / "hf")]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["pad_token_id"] == tokenizer.pad_id
    expected = run_ranks(1, scores, one)[0][1]
    fields = {"path": str(tmp_path / "hf")}
    model = dataclasses.replace(one.model, name="transformers", flavor="folder", overrides=fields)
    checkpoint = dataclasses.replace(one.checkpoint, initial_load_path=str(tmp_path / "hf"))
    for lora in (one.lora, dataclasses.replace(one.lora, enable=True, rank=2, target_modules=("q_proj",))):
        job = dataclasses.replace(one.job, dump_folder=str(tmp_path / f"opened-{lora.enable}"))
        opened = dataclasses.replace(one, model=model, checkpoint=checkpoint, job=job, lora=lora)
        torch.testing.assert_close(run_ranks(1, scores, opened)[0][1], expected, atol=TOLERANCE, rtol=1e-4)
        trained(opened)
        assert "is not in the folder" not in (Path(job.dump_folder) / "logs" / "rank-0.log").read_text()
    assert "is not in the folder" in (tmp_path / "run" / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("fields", "task", "message"),
    [
        ({"num_labels": 3, "pad_token_id": 0}, "reward_model", "num_labels=3 must be 1, the number of labels"),
        ({"num_labels": 2, "pad_token_id": 0}, "classification", "num_labels=2 must be 3, the number of labels"),
        (
            {"num_labels": 3},
            "classification",
            "without pad_token_id in config.json, which it needs to find the last token of a row",
        ),
    ],
)
def test_a_folder_that_does_not_fit_the_task_is_rejected(
    fields: dict[str, Any], task: str, message: str, tmp_path: Path
) -> None:
    """Three scores of a reward model would be added up: the loss was 3.609, and 1.043 of the first alone."""
    base = save(build("llama3"), tmp_path / "base")
    one = config_of(base, tmp_path / "run", task)
    config = transformers.LlamaConfig.from_pretrained(base, **fields)
    folder = save(transformers.LlamaForSequenceClassification(config), tmp_path / "classifier")
    model = dataclasses.replace(one.model, name="transformers", flavor="folder", overrides={"path": str(folder)})
    one = dataclasses.replace(one, model=model)
    assert message in str(run_ranks(1, train_whole, one)[0].error)
    assert message in str(meta_model.build(one)[0][0])  # as "config check" finds it
