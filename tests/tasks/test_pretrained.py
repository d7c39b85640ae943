"""Classification with a pretrained decoder: weights from the folder, a new head, and the scores of transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save
from ranks import run_ranks
from reviews import config
from tiny import make_run

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config.schema import Config
from shardtrain.hf.hub_model import recognise
from shardtrain.train.resume import resume

pytest.importorskip("transformers")


def scores(rank: int, run_config: Config) -> Any:
    run = make_run(rank, run_config)
    checkpoints = Checkpoints(run_config)
    resume(run, checkpoints)
    checkpoints.close()
    batch = next(run.dataloader)
    model = run.runner.parts[0]
    with torch.no_grad():
        outputs = run.runner.task.forward(model, batch)  # type: ignore[attr-defined]
    return batch.tensors, outputs, dict(model.named_parameters())["head.weight"].detach().clone()


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_scores_match_transformers_for_any_padding(tmp_path: Path, family: str) -> None:
    import transformers

    body = build(family)
    folder = save(body, tmp_path / "hub")
    description = recognise(folder)
    sizes = dataclasses.asdict(description.config)
    del sizes["norm_type"]
    run_config = config(
        model={"name": description.name, "flavor": description.flavor, "overrides": sizes},
        checkpoint={"enable": True, "initial_load_path": str(folder), "initial_load_in_hf": True},
        job={"dump_folder": str(tmp_path / "run")},
    )
    batch, outputs, head = run_ranks(1, scores, run_config)[0]

    assert head.shape == (2, 32)
    assert len(set(batch["lengths_B"].tolist())) > 1

    # A classifier of transformers with the same body and the head of our run.
    body.config.num_labels = 2
    name = type(body).__name__.replace("CausalLM", "SequenceClassification")
    reference = getattr(transformers, name)(body.config).eval()
    reference.model.load_state_dict(body.model.state_dict())
    reference.score.weight.data.copy_(head)

    for tokens, length, score in zip(batch["tokens_BT"], batch["lengths_B"], outputs, strict=True):
        unpadded = tokens[None, : int(length)]
        logits = reference(unpadded).logits[0]
        # two programs with float32 sums in a different order
        torch.testing.assert_close(score, logits, atol=1e-4, rtol=1e-4)
