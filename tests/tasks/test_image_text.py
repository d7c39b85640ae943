"""Fine-tuning on images: logits, loss and gradients equal those of transformers and TRL, on every mesh."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from against import options
from hf_meshes import FirstStep, difference, first_step
from image_runs import BATCH, config_of, open_processor
from PIL import Image
from ranks import run_ranks
from tiers import cases
from tiny import assert_bitwise, make_run, train_whole
from torch import Tensor
from vision_folders import NAMES, rows_with_images, vision_folder

from shardtrain import models, tasks
from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import check, load
from shardtrain.config.schema import Config
from shardtrain.data.sources import BadRow
from shardtrain.tasks.image_text import ImageText
from shardtrain.tasks.images.image_processor import ImageProcessor
from shardtrain.train import validation
from shardtrain.train.resume import resume
from shardtrain.utils.errors import ConfigError, DataError

pytest.importorskip("transformers")

MESHES: dict[str, tuple[int, dict[str, int], dict[str, int]]] = {
    "one process, 2 micro-batches": (1, {}, {"local_batch_size": 4}),
    "one process, 8 micro-batches": (1, {}, {"local_batch_size": 1}),
    "fsdp": (2, {"data_parallel_shard_degree": 2}, {"local_batch_size": 4}),
    "fsdp, 4 ranks": (4, {"data_parallel_shard_degree": 4}, {"local_batch_size": 1}),
    "tp": (
        2,
        {
            "tensor_parallel_degree": 2,
            "data_parallel_shard_degree": 1,
            "disable_loss_parallel": True,
        },
        {"local_batch_size": 4},
    ),
    "fsdp x tp": (
        4,
        {
            "tensor_parallel_degree": 2,
            "data_parallel_shard_degree": 2,
            "disable_loss_parallel": True,
        },
        {"local_batch_size": 1},
    ),
    "ddp": (2, {"data_parallel_replicate_degree": 2}, {"local_batch_size": 2}),
    "hsdp": (
        4,
        {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2},
        {"local_batch_size": 2},
    ),
}
"""Number of ranks, degrees and batch sizes. Some ranks have micro-batches without images."""


def plain_step(name: str, rows: Path, remove: int = 0) -> tuple[float, dict[str, Tensor], int]:
    """Return the mean loss and the gradients of a plain loop over the rows, only with transformers."""
    import transformers

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
        for key, values in inputs.items():
            # Llama 4's processor returns pixels in bfloat16.
            inputs[key] = values.float() if values.is_floating_point() else values
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


@pytest.mark.parametrize("name", NAMES)
def test_loss_and_gradients_equal_a_plain_loop(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    step = run_ranks(1, first_step, config)[0]
    loss, gradients, _ = plain_step(name, tmp_path / "data" / "rows.jsonl")

    assert step.loss == pytest.approx(loss, rel=1e-5)  # float32 sums in a different order
    assert_same_gradients(step, gradients)


def assert_same_gradients(step: FirstStep, gradients: dict[str, Tensor]) -> None:
    """Compare gradients to 1e-5 of their norm. Tiny gradients are compared to 1e-7 of the largest norm."""
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for key, gradient in gradients.items():
        size = max(float(gradient.norm()), 1e-2 * largest)
        assert float((step.gradients[key] - gradient).norm()) <= 1e-5 * size, key
    # All other gradients must be zero, because the network does not use these parameters.
    for key in step.gradients.keys() - gradients.keys():
        assert not step.gradients[key].any()


def test_llama_4_equals_a_plain_loop(tmp_path: Path) -> None:
    """Llama 4 has experts and splits images into tiles. Its image processor requires torchvision."""
    if importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    expected: FirstStep = run_ranks(1, first_step, config_of("llama4", tmp_path))[0]
    loss, gradients, _ = plain_step("llama4", tmp_path / "data" / "rows.jsonl")

    assert expected.loss == pytest.approx(loss, rel=1e-5)
    assert_same_gradients(expected, gradients)

    mesh = {"data_parallel_shard_degree": 2}
    config = config_of("llama4", tmp_path, parallelism=mesh, training={"local_batch_size": 1})
    assert difference(run_ranks(2, first_step, config), expected) < 2e-5


def test_llama_4_without_torchvision_names_the_fix() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        pytest.skip("torchvision is installed")
    with pytest.raises(
        ConfigError, match="pip install torchvision, which Llama4Processor requires"
    ):
        ImageProcessor(str(vision_folder("llama4")))


@pytest.mark.parametrize(
    ("mesh", "name"),
    cases(
        [
            ("one process, 8 micro-batches", "llava"),
            ("fsdp", "qwen3_vl"),
            ("fsdp, 4 ranks", "smolvlm"),
            ("ddp", "gemma3"),
            ("tp", "gemma3"),
            ("fsdp x tp", "qwen2_5_vl"),
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

    # float32 sums in a different order
    assert difference(results, expected) < 2e-5


def packed_config(name: str, tmp_path: Path, **sections: Any) -> Config:
    config = config_of(name, tmp_path, **sections)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, packing="first_fit"))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "gemma3"])
def test_packed_rows_equal_a_plain_loop(name: str, tmp_path: Path) -> None:
    """Rows that are packed into a sequence neither attend to each other nor share positions."""
    config = packed_config(name, tmp_path)
    task = tasks.open_task(config)
    batch = task.collate(list(task.read_rows("train")))
    num_sequences, longest = batch["tokens_BT"].shape

    assert num_sequences < BATCH
    assert longest <= config.training.seq_len

    step = run_ranks(1, first_step, config)[0]
    loss, gradients, _ = plain_step(name, tmp_path / "data" / "rows.jsonl")

    assert step.loss == pytest.approx(loss, rel=1e-5)  # float32 sums in a different order
    assert_same_gradients(step, gradients)


def test_gemma_3_refuses_packing(tmp_path: Path) -> None:
    config = packed_config("gemma3", tmp_path)
    module, shape = models.configured(config.model)
    with pytest.raises(ConfigError, match=r'data.packing="first_fit" is not supported by Gemma3'):
        tasks.open_task(config).adapt(models.build(module, shape), module.LAYOUT)


def test_packing_on_a_mesh_changes_no_number(tmp_path: Path) -> None:
    """Train micro-batches of two rows, some without images, on tensor-parallel and FSDP ranks."""
    expected: FirstStep = run_ranks(1, first_step, config_of("qwen3_vl", tmp_path))[0]
    ranks, parallelism, _ = MESHES["fsdp x tp"]
    sizes = {"local_batch_size": 2}
    config = packed_config("qwen3_vl", tmp_path, parallelism=parallelism, training=sizes)
    assert difference(run_ranks(ranks, first_step, config), expected) < 2e-5


@pytest.mark.parametrize("name", cases(["qwen2_5_vl"], nightly=list(NAMES)))
@pytest.mark.parametrize("counts", [(1, 0) * 4, (0,) * 8], ids=["some rows", "no row"])
def test_ranks_without_images(name: str, counts: tuple[int, ...], tmp_path: Path) -> None:
    """Gradients equal those of a plain loop if one rank or all ranks have only text in a micro-batch."""
    rows = rows_with_images(tmp_path / "data", counts)
    loss, gradients, _ = plain_step(name, rows)
    mesh = {"data_parallel_shard_degree": 2}
    config = config_of(name, tmp_path, rows, parallelism=mesh, training={"local_batch_size": 1})

    for step in run_ranks(2, first_step, config):
        assert step.loss == pytest.approx(loss, rel=1e-5)
        assert_same_gradients(step, gradients)


def trl_step(rank: int, folder: Path, rows: Path, output: Path) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the first step of TRL's SFTTrainer, with loss on the completions."""
    import datasets
    import transformers
    import trl

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


def test_a_frozen_vision_tower_on_a_mesh(tmp_path: Path) -> None:
    """Frozen weights have no gradient and do not change, and the others have the gradients of full training."""
    full: FirstStep = run_ranks(1, first_step, config_of("llava", tmp_path))[0]
    task = {"name": "image_text", "frozen_modules": ["vision_tower"]}
    sizes = {"local_batch_size": 2}
    recompute = {"mode": "full"}
    config = config_of(
        "llava",
        tmp_path,
        task=task,
        training=sizes,
        parallelism={"data_parallel_shard_degree": 2},
        activation_checkpoint=recompute,
    )
    for step in run_ranks(2, first_step, config):
        assert step.loss == pytest.approx(full.loss, rel=1e-5)
        trained = {key for key in full.gradients if "vision_tower" not in key}
        assert step.gradients.keys() == trained
        assert_same_gradients(step, {key: full.gradients[key] for key in trained})


def test_adapters_by_pattern(tmp_path: Path) -> None:
    """The patterns add adapters to the vision tower and to the text model."""
    lora = {
        "enable": True,
        "rank": 2,
        "target_modules": ["hf.model.vision_tower.encoder.layers.*.self_attn.q_proj", "v_proj"],
    }
    steps = []
    for ranks, parallelism in ((1, {}), (2, {"data_parallel_shard_degree": 2})):
        config = config_of(
            "llava", tmp_path, lora=lora, parallelism=parallelism, training={"local_batch_size": 2}
        )
        steps.append(run_ranks(ranks, first_step, config)[0])
    one, two = steps

    assert two.loss == pytest.approx(one.loss, rel=1e-5)
    assert any("vision_tower" in key and "q_proj" in key for key in one.gradients)
    assert all("lora_" in key for key in one.gradients)
    assert_same_gradients(two, one.gradients)


def evaluated(rank: int, config: Config) -> dict[str, float]:
    run = make_run(rank, config)
    checkpoints = Checkpoints(config)
    resume(run, checkpoints)
    checkpoints.close()
    stream = validation.open_dataloader(config, run.mesh)
    return validation.evaluate(run.runner, stream, run.mesh, -1).values


def test_validation_counts_the_tokens_of_answers(tmp_path: Path) -> None:
    rows = str(rows_with_images(tmp_path / "data"))
    section = {
        "enable": True,
        "dataset": "jsonl",
        "dataset_path": rows,
        "seq_len": 128,
        "steps": -1,
    }
    values = []
    # All rows in one batch, one row per rank, and packed rows.
    for ranks, size, new_config in ((1, 8, config_of), (2, 1, config_of), (1, 4, packed_config)):
        config = new_config(
            "llava",
            tmp_path,
            validation={**section, "local_batch_size": size},
            parallelism={"data_parallel_shard_degree": ranks},
            training={"local_batch_size": 1},
        )
        values.append(run_ranks(ranks, evaluated, config)[0])
    loss, _, num_tokens = plain_step("llava", Path(rows))

    # float32 sums in a different order
    for evaluation in values:
        assert evaluation["loss"] == pytest.approx(loss, rel=1e-5)
        assert 0 <= evaluation["accuracy"] <= 1
    assert len({evaluation["accuracy"] for evaluation in values}) == 1
    assert num_tokens


@pytest.mark.parametrize("name", cases(["qwen3_vl"], nightly=list(NAMES)))
def test_a_resumed_run_and_its_export(name: str, tmp_path: Path) -> None:
    """A run that was killed continues bitwise, also on other ranks, and transformers opens its export."""
    checkpoint = {"interval": 2, "last_save_in_hf": True}

    def config(output: Path, **parallelism: int) -> Config:
        return config_of(
            name,
            tmp_path,
            output=output,
            training={
                "steps": 4,
                "local_batch_size": 2,
                "global_batch_size": 4,
                "on_data_end": "repeat",
            },
            parallelism=parallelism,
            checkpoint=checkpoint,
        )

    complete = run_ranks(1, train_whole, config(tmp_path / "complete"))[0]

    assert complete.error is None

    resumed = config(tmp_path / "resumed")
    run_ranks(1, train_whole, resumed, 3)
    ended = run_ranks(1, train_whole, resumed)[0]

    assert ended.error is None
    assert ended.losses == complete.losses[2:]
    assert_bitwise(ended.weights, complete.weights)

    # Two ranks, from the same step.
    other = config(tmp_path / "other", data_parallel_shard_degree=2)
    run_ranks(2, train_whole, other, 3)
    on_two = run_ranks(2, train_whole, other)[0]

    assert on_two.losses == pytest.approx(complete.losses[2:], abs=1e-5)

    import transformers

    folder = tmp_path / "complete/checkpoint/step-4-hf"
    names = {path.name for path in folder.iterdir()}

    assert {"preprocessor_config.json", "tokenizer.json", "config.json"} <= names

    exported = transformers.AutoModelForImageTextToText.from_pretrained(folder).eval()
    original = transformers.AutoModelForImageTextToText.from_pretrained(vision_folder(name)).eval()
    with torch.no_grad():
        for key, parameter in original.named_parameters():
            parameter.copy_(complete.weights[f"hf.{key}"])
    row = json.loads((tmp_path / "data" / "rows.jsonl").read_text().splitlines()[2])
    images = [Image.open(tmp_path / "data" / image) for image in row["images"]]
    processor = open_processor(folder)
    text = processor.tokenizer.apply_chat_template(row["messages"], tokenize=False)
    inputs = processor(text=[text], images=[images], return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        torch.testing.assert_close(exported(**inputs).logits, original(**inputs).logits)


PROBLEMS: dict[str, tuple[dict[str, Any], str]] = {
    "missing file": (
        {"images": ["none.png"]},
        "rows.jsonl:1: has an image that does not exist (",
    ),
    "URL": (
        {"images": ["https://example.com/cat.png"]},
        "rows.jsonl:1: names an image by URL, and images are never downloaded; download it",
    ),
    "no image for a place": (
        {"images": []},
        "rows.jsonl:1: must have as many images in its column as image parts in the conversation (0 images, 1 parts)",
    ),
    "two images for a place": (
        {"images": ["0.png", "1.png"]},
        "rows.jsonl:1: must have as many images in its column as image parts in the conversation (2 images, 1 parts)",
    ),
    "placeholder in a text": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": "<image>?"}],
                },
                {"role": "assistant", "content": "Yes."},
            ]
        },
        "rows.jsonl:1: the rendered conversation must have one <image> for each image; remove <image> from the "
        "texts, or use the chat template of the model (1 images, 2 placeholders)",
    ),
    "not an image": (
        {"images": ["rows.jsonl"]},
        "rows.jsonl:1: has an image that cannot be decoded (",
    ),
    "no answer": (
        {"messages": [{"role": "user", "content": "Hello"}], "images": []},
        "rows.jsonl:1: the conversation has no turn of the assistant",
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_bad_rows_are_named(name: str, tmp_path: Path) -> None:
    change, reason = PROBLEMS[name]
    path = rows_with_images(tmp_path / "data")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0] |= change
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = tasks.open_task(config_of("llava", tmp_path, path))

    with pytest.raises(DataError) as refused:
        task.read_rows("train")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_damaged_image_is_found_by_data_check_and_stops_a_run(tmp_path: Path) -> None:
    """Training reads only the size of an image before its first step."""
    path = rows_with_images(tmp_path / "data")
    image = tmp_path / "data" / "2.png"
    image.write_bytes(image.read_bytes()[:-100])
    task = tasks.open_task(config_of("llava", tmp_path, path))

    assert isinstance(task, ImageText)

    rows = [json.loads(line) for line in path.read_text().splitlines()]
    bad = [str(row) for row in task.encode(rows, "train") if isinstance(row, BadRow)]
    assert len(bad) == 1
    assert "has an image that cannot be decoded (" in bad[0]
    with pytest.raises(DataError, match=r"image .*/2\.png cannot be decoded .*data check"):
        task.collate(list(task.read_rows("train")))


def test_rows_that_exceed_seq_len(tmp_path: Path) -> None:
    """Truncation cuts only text after the images. A row is skipped if its images or all its targets do not fit."""
    path = rows_with_images(tmp_path / "data", counts=(1, 2, 0))

    def lengths(seq_len: int) -> list[int]:
        config = config_of("llava", tmp_path, path, training={"seq_len": seq_len})
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, long_rows_max_fraction=1.0)
        )
        rows = tasks.open_task(config).read_rows("train")
        if any(row.images for row in rows):
            batch = tasks.open_task(config).collate(list(rows))
            longest = max(len(row.tokens) for row in rows)
            assert batch["tokens_BT"].shape == (len(rows), longest)
        return [len(row.tokens) for row in rows]

    complete = lengths(128)

    assert len(complete) == 3

    # Each image has 16 tokens, and the second row has two images.
    first, second, third = complete
    assert lengths(second - 3) == [first, second - 3, third]
    assert len(lengths(32)) == 1


def test_options_that_do_not_fit(tmp_path: Path) -> None:
    """All problems of a configuration are reported together."""
    path = rows_with_images(tmp_path / "data")
    text = f"""
[model]
name = "llama3"
flavor = "debugmodel"
[task]
name = "image_text"
frozen_modules = ["vision_tower"]
[data]
format = "chat"
packing = "concat"
image_folder = "nowhere"
max_image_pixels = 0
add_eos = true
[training]
dataset = "jsonl"
dataset_path = "{path}"
[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
context_parallel_degree = 2
[lora]
enable = true
"""
    (tmp_path / "run.toml").write_text(text)
    problems = "\n".join(map(str, check(load(str(tmp_path / "run.toml")))))

    for part in (
        'model.name="llama3" does not read images',
        "data.format=",
        "data.packing=",
        "data.add_eos=true has no effect",
        'data.image_folder="nowhere" is not a folder',
        "data.max_image_pixels=0 must be at least 1",
        "task.frozen_modules=",
        "parallelism.disable_loss_parallel=false leaves each rank a part of the outputs",
        "parallelism.pipeline_parallel_degree=2",
        "parallelism.context_parallel_degree=2",
    ):
        assert part in problems


def test_other_tasks_do_not_ignore_options_of_images(tmp_path: Path) -> None:
    problems = check(
        load(None, ["--data.image_folder", str(tmp_path), "--task.frozen_modules", "x"])
    )
    text = "\n".join(map(str, problems))
    assert "data.image_folder=" in text
    assert 'is only read by task.name = "image_text"' in text
    assert "task.frozen_modules=" in text


def test_a_frozen_module_that_does_not_exist(tmp_path: Path) -> None:
    config = config_of("llava", tmp_path, task={"name": "image_text", "frozen_modules": ["visual"]})
    module, shape = models.configured(config.model)
    with pytest.raises(
        ConfigError,
        match=r'task.frozen_modules="visual" matches no module .* use names like vision_tower',
    ):
        tasks.open_task(config).adapt(models.build(module, shape), module.LAYOUT)


def test_a_folder_without_a_processor(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(vision_folder("llava"), folder)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (folder / name).unlink()

    with pytest.raises(ConfigError, match="has neither preprocessor_config.json nor"):
        ImageProcessor(str(folder))


def test_code_of_a_folder_is_never_run(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(vision_folder("llava"), folder)
    file = folder / "processor_config.json"
    content = json.loads(file.read_text()) | {"auto_map": {"AutoProcessor": "code.Processor"}}
    file.write_text(json.dumps(content))
    (folder / "code.py").write_text("open('canary', 'w').close()\n")

    with pytest.raises(ConfigError, match="names its own code"):
        ImageProcessor(str(folder))


def test_a_chat_template_in_a_file_of_the_processor(tmp_path: Path) -> None:
    """Older folders have the template in chat_template.json instead of the tokenizer's files."""
    folder = tmp_path / "folder"
    shutil.copytree(vision_folder("llava"), folder)
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text())
    template = content.pop("chat_template")
    file.write_text(json.dumps(content))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    config = config_of("llava", tmp_path)
    model = dataclasses.replace(
        config.model, hf_assets_path=str(folder), overrides={"path": str(folder)}
    )
    config = dataclasses.replace(config, model=model)
    expected = tasks.open_task(config_of("llava", tmp_path)).read_rows("train")
    rows = tasks.open_task(config).read_rows("train")

    assert [row.text for row in rows] == [row.text for row in expected]
