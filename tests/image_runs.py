"""Configurations of the task ``image_text`` with tiny models."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from hf_meshes import hf_tiny
from vision_folders import rows_with_images, vision_folder

from shardtrain.config.schema import Config

BATCH = 8


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
        sections.pop("output", tmp_path / "run"),
        **{"task": {"name": "image_text"}, "training": training, **sections},
    )
    model = dataclasses.replace(config.model, hf_assets_path=str(vision_folder(name)))
    return dataclasses.replace(config, model=model)


def open_processor(folder: Path) -> Any:
    """Return the processor of transformers. It has no part for videos, which would need torchvision."""
    import transformers

    try:
        return transformers.AutoProcessor.from_pretrained(folder)
    except Exception:
        from shardtrain.tasks.images.image_processor import ImageProcessor

        return ImageProcessor(str(folder))._processor
