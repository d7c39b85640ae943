"""Images in plans, dry runs and the FLOPs of a run with ``task.name = "image_text"``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from image_runs import config_of
from tiers import cases
from torch.utils.flop_counter import FlopCounterMode
from vision_folders import NAMES, vision_folder

from shardtrain import models, tasks
from shardtrain.config import check, load
from shardtrain.config.schema import Config
from shardtrain.distributed import fake_backend
from shardtrain.tasks.image_text import ImageText
from shardtrain.tools.plan import hardware, planning
from shardtrain.train import dry_run
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")


def with_images(config: Config, *sizes: str) -> Config:
    return dataclasses.replace(
        config, task=dataclasses.replace(config.task, planned_images=list(sizes))
    )


def counted_flops(folder: Path, inputs: dict[str, Any]) -> int:
    """Return the FLOPs of a forward pass of transformers, as PyTorch counts them."""
    import transformers

    network = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager"
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        network(**inputs)
    return counter.get_total_flops()


@pytest.mark.parametrize("name", cases(["llava", "qwen2_5_vl"], nightly=list(NAMES)))
def test_flops_of_images_equal_those_that_pytorch_counts(name: str, tmp_path: Path) -> None:
    """The closed form counts biases and norms, and PyTorch does not. In tiny models they are up to 10 %."""
    config = with_images(config_of(name, tmp_path), "64x64")
    task = tasks.open_task(config)
    assert isinstance(task, ImageText)

    module, shape = models.configured(config.model)
    model = task.adapt(models.build(module, shape), module.LAYOUT)
    batch = dict(task.planned_batch(1).tensors)
    del batch["targets_BT"]
    tokens = batch.pop("tokens_BT")
    with_image = counted_flops(vision_folder(name), {"input_ids": tokens, **batch})
    text = {"input_ids": torch.full_like(tokens, 60)}
    if "token_type_ids" in batch:
        text["token_type_ids"] = torch.zeros_like(tokens)
    without_image = counted_flops(vision_folder(name), text)
    # Forward and backward are three times the forward pass.
    flops = task.planned_flops_per_row(model) / 3

    assert flops == pytest.approx(with_image - without_image, rel=0.1)


@pytest.mark.parametrize("name", cases(["llava", "qwen3_vl"], nightly=list(NAMES)))
def test_plans_and_dry_runs_count_images(name: str, tmp_path: Path) -> None:
    """More images need more activations, and the same weights."""
    config = config_of(name, tmp_path, training={"local_batch_size": 2})
    images = ("64x64",) * 4
    plans = []
    runs = []
    for changed in (with_images(config, *images[:1]), with_images(config, *images)):
        plans.append(planning.make(changed, 8, hardware.find("h100")))
        with fake_backend.join(0, 2) as world:
            runs.append(dry_run.build(changed, world))

    for run in runs:
        assert not run.traced.not_traced
    assert runs[1].traced.activations_bytes > runs[0].traced.activations_bytes
    assert runs[1].parameter_bytes == runs[0].parameter_bytes
    assert runs[1].flops_per_token > runs[0].flops_per_token
    assert plans[1].fullest.activations > plans[0].fullest.activations
    assert plans[1].flops_per_token == pytest.approx(runs[1].flops_per_token)

    # The vision tower is counted too.
    model = models.build(*models.configured(config.model))
    num_params = sum(weight.numel() for weight in model.parameters())
    assert plans[0].num_params == runs[0].num_params == num_params


def test_a_run_counts_the_flops_of_its_images(tmp_path: Path) -> None:
    """The cost of a row of the data equals that of a planned row with images of its sizes."""
    config = with_images(config_of("llava", tmp_path), "64x40")
    task = tasks.open_task(config)
    assert isinstance(task, ImageText)

    module, shape = models.configured(config.model)
    model = task.adapt(models.build(module, shape), module.LAYOUT)
    per_row = task.flops_per_row(model)
    assert per_row is not None
    rows = task.read_rows("train")

    assert rows[0].sizes == ((64, 40),)
    assert per_row(rows[0]) == task.planned_flops_per_row(model) > 0
    assert per_row(rows[1]) == 0  # a row without images
    assert per_row(rows[2]) == 2 * per_row(rows[0])


def test_images_that_do_not_fit(tmp_path: Path) -> None:
    config = with_images(config_of("llava", tmp_path), *["64x64"] * 8)
    message = "takes 128 tokens, which do not fit into training.seq_len=128; set it to the sizes"
    with pytest.raises(ConfigError, match=message):
        planning.make(config, 8, hardware.find("h100"))


@pytest.mark.parametrize("size", ["1024", "0x10", "99999x99999", "axb"])
def test_sizes_of_images_are_checked(size: str) -> None:
    options = ["--task.name", "image_text", "--task.planned_images", f'["{size}"]']
    problems = "\n".join(map(str, check(load(None, options))))
    assert "task.planned_images" in problems
    assert f"and '{size}' is not one; use width x height" in problems
