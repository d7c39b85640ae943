"""Fine-tuning on images: logits, loss and gradients equal those of transformers and TRL, on every mesh."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from against import options
from hf_meshes import FirstStep, difference, first_step, hf_tiny
from ranks import run_ranks
from tiers import cases
from torch import Tensor
from vision_folders import NAMES, rows_with_images, vision_folder

from shardtrain.config.schema import Config

pytest.importorskip("transformers")

BATCH = 8
MESHES: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    "one process, 2 micro-batches": (1, {}, {"local_batch_size": 4}),
    "one process, 8 micro-batches": (1, {}, {"local_batch_size": 1}),
    "fsdp": (2, {"data_parallel_shard_degree": 2}, {"local_batch_size": 4}),
    "fsdp, 4 ranks": (4, {"data_parallel_shard_degree": 4}, {"local_batch_size": 1}),
    "ddp": (2, {"data_parallel_replicate_degree": 2}, {"local_batch_size": 2}),
    "hsdp": (
        4,
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
        {"local_batch_size": 2},
    ),
}
"""Number of ranks, degrees and batch sizes. Some ranks have micro-batches without images."""


def config_of(name: str, tmp_path: Path, rows: Path | None = None, **sections: Any) -> Config:
    rows = rows or rows_with_images(tmp_path / "data")
    training = {
        "dataset": "jsonl",
        "dataset_path": str(rows),
        "seq_len": 128,
        "local_batch_size": BATCH,
        "global_batch_size": BATCH,
        **sections.pop("training", {}),
    }
    config = hf_tiny(
        vision_folder(name),
        tmp_path / "run",
        task={"name": "image_text"},
        training=training,
        **sections,
    )
    model = dataclasses.replace(config.model, hf_assets_path=str(vision_folder(name)))
    return dataclasses.replace(config, model=model)


def plain_step(name: str, rows: Path, remove: int = 0) -> tuple[float, dict[str, Tensor], int]:
    """Return the mean loss and the gradients of a plain loop over the rows, with transformers alone."""
    import transformers
    from PIL import Image

    folder = vision_folder(name)
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    processor = open_processor(folder)
    tokenizer = processor.tokenizer
    total = torch.zeros(())
    count = 0
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        images = [Image.open(rows.parent / image) for image in row["images"]]
        template = tokenizer.chat_template

        def rendered(messages: list[Any], prompt: bool, template: str = template) -> str:
            return tokenizer.apply_chat_template(  # type: ignore[no-any-return]
                messages, chat_template=template, tokenize=False, add_generation_prompt=prompt
            )

        def inputs_of(text: str, images: list[Any] = images) -> Any:
            more = {"images": [images]} if images else {}
            return processor(text=[text], return_tensors="pt", add_special_tokens=False, **more)

        inputs = inputs_of(rendered(row["messages"], prompt=False))
        prompt = inputs_of(rendered(row["messages"][:1], prompt=True))
        labels = inputs["input_ids"].clone()
        labels[:, : prompt["input_ids"].shape[1]] = -100
        logits = model(**inputs).logits.float()
        total = total + torch.nn.functional.cross_entropy(
            logits[0, :-1], labels[0, 1:], reduction="sum"
        )
        count += int((labels[0, 1:] != -100).sum())
    (total / count).backward()
    gradients = {
        f"hf.{key}": parameter.grad
        for key, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return total.item() / count, gradients, count


def open_processor(folder: Path) -> Any:
    """Return the processor of transformers. Those with a part for videos need torchvision, so it is left out."""
    import transformers

    try:
        return transformers.AutoProcessor.from_pretrained(folder)
    except Exception:
        from shardtrain.tasks.images.image_processor import ImageProcessor

        return ImageProcessor(str(folder))._processor


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_equal_a_plain_loop(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    step = run_ranks(1, first_step, config)[0]
    loss, gradients, _ = plain_step(name, tmp_path / "data" / "rows.jsonl")
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(step, gradients)


def assert_same_gradients(step: FirstStep, gradients: dict[str, Tensor]) -> None:
    """Each gradient differs by at most 1e-5 of its norm, or of a hundredth of the largest norm."""
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        size = max(float(gradient.norm()), 1e-2 * largest)
        assert float((step.gradients[key] - gradient).norm()) <= 1e-5 * size, key
    # Others are parameters that the network does not use, or gradients of zero.
    for key in step.gradients.keys() - gradients.keys():
        assert not step.gradients[key].any()


@pytest.mark.parametrize(
    ("mesh", "name"),
    cases(
        [
            ("one process, 8 micro-batches", "llava"),
            ("fsdp", "qwen3_vl"),
            ("fsdp, 4 ranks", "smolvlm"),
            ("ddp", "gemma3"),
            ("hsdp", "qwen2_5_vl"),
        ],
        nightly=[(mesh, name) for mesh in MESHES for name in NAMES],
    ),
)
def test_the_mesh_changes_no_number(mesh: str, name: str, tmp_path: Path) -> None:
    """Micro-batches have one, several or no images, and some ranks have only text."""
    expected: FirstStep = run_ranks(1, first_step, config_of(name, tmp_path))[0]
    ranks, parallelism, sizes = MESHES[mesh]
    config = config_of(name, tmp_path, parallelism=parallelism, training=sizes)
    results = run_ranks(ranks, first_step, config)
    assert difference(results, expected) < 2e-5


def trl_step(rank: int, folder: Path, rows: Path, output: Path) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the first step of TRL's SFTTrainer, with loss on the completions."""
    import datasets
    import transformers
    import trl
    from PIL import Image

    torch.distributed.destroy_process_group()  # TRL would treat this process as a rank
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    examples = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        question, answer = row["messages"]
        text = question["content"][-1]["text"]
        examples.append(
            {
                "prompt": [{"role": "user", "content": text}],
                "completion": [answer],
                "images": [Image.open(rows.parent / image) for image in row["images"]],
            }
        )
    processor = transformers.AutoProcessor.from_pretrained(folder)
    processor.chat_template = processor.tokenizer.chat_template
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    size = len(examples)
    args = options(
        trl.SFTConfig,
        output_dir=str(output),
        max_length=None,
        max_steps=1,
        max_grad_norm=1e9,
        per_device_train_batch_size=size,
        completion_only_loss=True,
        dataset_kwargs={"skip_prepare_dataset": True},
        remove_unused_columns=False,
    )
    trainer = trl.SFTTrainer(
        model,
        args=args,
        train_dataset=datasets.Dataset.from_list(examples),
        processing_class=processor,
    )
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    step = trainer.training_step

    def recorded_step(*arguments: Any, **named: Any) -> Any:
        loss = step(*arguments, **named)
        losses.append(float(loss))
        for key, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradients[f"hf.{key}"] = parameter.grad.clone()
        return loss

    trainer.training_step = recorded_step
    trainer.train()
    return losses[0], gradients


@pytest.mark.parametrize("name", cases(["llava"], nightly=["gemma3"]))
def test_loss_and_gradients_equal_trl(name: str, tmp_path: Path) -> None:
    """TRL puts images before the text of the first message, as the rows have them."""
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    config = config_of(name, tmp_path)
    rows = tmp_path / "data" / "rows.jsonl"
    step = run_ranks(1, first_step, config)[0]
    loss, gradients = run_ranks(1, trl_step, vision_folder(name), rows, tmp_path / "trl")[0]
    assert step.loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(step, gradients)
