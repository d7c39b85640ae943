"""Adapters of a classifier: its new head is fully trained and saved, like PEFT does for SEQ_CLS."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import folder as foreign_folder
from hub_folders import build, save
from ranks import run_ranks
from reviews import config as reviews_config
from tiny import Ended, make_run, train_whole

from shardtrain import cli, distributed
from shardtrain.checkpoint import manifest
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import Loaded
from shardtrain.config.schema import Config
from shardtrain.distributed.process_group import World
from shardtrain.hf.hub_model import recognise
from shardtrain.lora.linear import is_adapter
from shardtrain.tools.held_out_eval import held_out_eval_rank
from shardtrain.train.resume import resume
from shardtrain.train.run_folder import write_resolved_config
from shardtrain.train.task_model import build_model

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft", reason="PEFT is the reference of adapters")
TOLERANCE = 1e-5


def config_of(base: Path, output: Path, architecture: str = "", **lora: Any) -> Config:
    """Return a run of four steps from a folder, with the native model or the given class of transformers."""
    if architecture:
        model: dict[str, Any] = {"name": "transformers", "flavor": "folder"}
        model["overrides"] = {"path": str(base), "architecture": architecture, "num_labels": 2}
    else:
        recognised = recognise(base)
        sizes = dataclasses.asdict(recognised.config)
        del sizes["norm_type"]
        model = {"name": recognised.name, "flavor": recognised.flavor, "overrides": sizes}
    return reviews_config(
        model=model,
        job={"dump_folder": str(output)},
        training={"steps": 4, "local_batch_size": 4},
        optimizer={"lr": 3e-2, "eps": 1e-3, "weight_decay": 0.0},
        lora={"enable": True, "rank": 4, "alpha": 8.0, **lora},
        checkpoint={
            "enable": True,
            "interval": 2,
            "initial_load_path": str(base),
            "initial_load_in_hf": True,
        },
    )


def train(ranks: int, run_config: Config) -> Ended:
    ended = run_ranks(ranks, train_whole, run_config)[0]
    assert ended.error is None
    write_resolved_config(Loaded(run_config), Path(run_config.job.dump_folder), ranks)
    return ended


def scores(rank: int, run_config: Config) -> Any:
    """Return the first batch and its scores by the newest checkpoint."""
    run = make_run(rank, run_config)
    checkpoints = Checkpoints(run_config)
    resume(run, checkpoints)
    checkpoints.close()
    run.dataloader.seek(0, None)
    batch = next(run.dataloader)
    with torch.no_grad():
        return batch.tensors, run.runner.task.forward(run.runner.parts[0].eval(), batch)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("family", "lora"),
    [
        ("llama3", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
        ("gpt2", {}),
        pytest.param("qwen3_moe", {"target_parameters": ["experts.*"]}, marks=pytest.mark.nightly),
    ],
)
def test_peft_opens_adapters_and_head_with_the_same_scores(
    family: str, lora: dict[str, Any], tmp_path: Path
) -> None:
    foreign = "GPT2ForSequenceClassification" if family == "gpt2" else ""
    base = foreign_folder(family) if foreign else save(build(family), tmp_path / "base")
    run_config = config_of(base, tmp_path / "run", foreign, **lora)
    ended = train(1, run_config)
    stored = manifest.read(tmp_path / "run" / "checkpoint" / "step-4")
    saved_names = {
        name.removeprefix("model.") for name in stored.tensors if name.startswith("model.")
    }
    head = {"hf.score.weight"} if foreign else {"head.weight"}

    assert {name for name in saved_names if not is_adapter(name)} == head

    batch, expected = run_ranks(1, scores, run_config)[0]
    arguments = [
        "export",
        str(tmp_path / "run" / "checkpoint" / "step-4"),
        "--to",
        str(tmp_path / "peft"),
        "--adapter",
    ]
    assert cli.main(arguments) == 0

    fields = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert fields["task_type"] == "SEQ_CLS"
    assert fields["modules_to_save"] == ["score"]

    torch.manual_seed(0)
    base_model = transformers.AutoModelForSequenceClassification.from_pretrained(
        base, num_labels=2, dtype=torch.float32
    )
    model = peft.PeftModel.from_pretrained(base_model, tmp_path / "peft").eval()
    for tokens, length, score in zip(batch["tokens_BT"], batch["lengths_B"], expected, strict=True):
        with torch.no_grad():
            logits = model(input_ids=tokens[None, : int(length)]).logits[0]
        torch.testing.assert_close(
            score, logits, atol=1e-4 if family == "qwen3_moe" else TOLERANCE, rtol=1e-5
        )
    # A run can start from the folder that PEFT writes.
    model.save_pretrained(tmp_path / "theirs")
    again = config_of(
        base, tmp_path / "again", foreign, **lora, initial_load_path=str(tmp_path / "theirs")
    )

    torch.testing.assert_close(run_ranks(1, scores, again)[0][1], expected, atol=TOLERANCE, rtol=0)

    # Two ranks compute the same result.
    split = train(2, config_of(base, tmp_path / "split", foreign, **lora))
    assert split.losses == pytest.approx(ended.losses, abs=1e-5)
    for name, weight in ended.weights.items():
        torch.testing.assert_close(split.weights[name], weight, atol=TOLERANCE, rtol=0, msg=name)


def measured(rank: int, run_config: Config, wanted: str | None) -> dict[str, float]:
    mesh = distributed.build(
        run_config, World(rank, torch.distributed.get_world_size(), rank, torch.device("cpu"))
    )
    built = build_model(run_config, mesh)
    held_out_eval_rank.load(built, run_config, wanted)
    result, _ = held_out_eval_rank.measure(built, run_config, mesh, "validation")
    return {"loss": result.loss, **result.values}


def test_the_test_verb_reads_adapters_head_and_frozen_weights(tmp_path: Path) -> None:
    base = save(build("llama3"), tmp_path / "base")
    run_config = config_of(base, tmp_path / "run")
    train(1, run_config)
    logged = [
        json.loads(line)
        for line in (tmp_path / "run" / "validation.jsonl").read_text().splitlines()
    ]
    result = run_ranks(2, measured, run_config, None)[0]

    assert result["accuracy"] == pytest.approx(logged[-1]["accuracy"])

    # The merged folder is a complete classifier.
    step = str(tmp_path / "run" / "checkpoint" / "step-4")
    assert cli.main(["merge", step, "--to", str(tmp_path / "merged")]) == 0
    merged_config = dataclasses.replace(
        run_config, lora=dataclasses.replace(run_config.lora, enable=False)
    )
    summed = run_ranks(1, measured, merged_config, str(tmp_path / "merged"))[0]
    assert summed["accuracy"] == result["accuracy"]
    assert summed["loss"] == pytest.approx(result["loss"], abs=1e-5)
