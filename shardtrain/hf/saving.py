"""Export of saved checkpoints to Hugging Face folders ``step-N-hf`` during a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from shardtrain import models
from shardtrain.checkpoint import files
from shardtrain.config.assets import tokenizer_folder
from shardtrain.config.schema import Config
from shardtrain.data.build_dataset import tokenizer_of
from shardtrain.hf import origin
from shardtrain.hf.generation_config import trained_tokens
from shardtrain.hf.hf_export import SHARD_BYTES, Export, Writer, config_fields
from shardtrain.hf.hub_model import translation_of
from shardtrain.utils.errors import StorageError
from shardtrain.utils.log import logger


class HubSaves:
    """Writer of a run's checkpoints in Hugging Face format: an ``Exporter`` of ``checkpoint/exports.py``."""

    def __init__(self, config: Config, labels: Sequence[str] = ()) -> None:
        """Check before the first step that the model has a Hugging Face format.

        Args:
            labels: Labels of a classification head.

        Raises:
            ConfigError: the model has no such format.
            CheckpointError: the format cannot represent a tensor of the model.
        """
        model = config.model
        self._options = config.checkpoint
        self._logged_notice = False
        module, shape = models.configured(model)
        # "auto" keeps the dtypes of the source.
        dtype: str = config.checkpoint.export_dtype
        if dtype == "auto":
            dtype = ""
        assets = tokenizer_folder(model.tokenizer_path or model.hf_assets_path)
        self._wanted = Export(
            Path(),
            Path(),
            module,
            shape,
            dtype=dtype,
            source=origin.of_run(config, module, shape),
            tokenizer=assets if assets.is_dir() else None,
            shard_bytes=SHARD_BYTES,
            max_tokens=config.training.seq_len,
            tokens=trained_tokens(tokenizer_of(config), config),
            labels=labels,
        )
        translation_of(module, shape, f"model.name={model.name}", len(self._wanted.labels))
        config_fields(self._wanted)
        if not any(one.has_tokenizer for one in self._wanted.sources()):
            logger.warning(
                f"the Hugging Face folders will have no tokenizer: {str(assets)!r} is not a folder with tokenizer files"
            )

    def is_due(self, step: int, last: bool) -> bool:
        if step == 0:
            return False
        if last and self._options.last_save_in_hf:
            return True
        interval = self._options.hf_interval
        return interval > 0 and step % interval == 0

    def write_share(
        self,
        checkpoint: Path,
        draft: Path,
        rank: int,
        size: int,
        check_cancelled: Callable[[], None],
    ) -> None:
        """Write this rank's share of the weights files, and verify its share of the checkpoint's files."""
        writer = self._writer(checkpoint)
        writer.check_source(rank, size)
        wait = files.SEEN_SECONDS if dist.get_world_size() > 1 else 0.0
        for name in list(writer.files)[rank::size]:
            written = writer.write_weights(draft, name, check_cancelled, wait)
            if damage := files.find_damage(draft, written):
                raise StorageError(
                    f"cannot write {draft}: {damage}; check the disk, then start again"
                )

    def write_rest(self, checkpoint: Path, draft: Path) -> None:
        writer = self._writer(checkpoint)
        if writer.notice and not self._logged_notice:
            logger.info(f"{draft.parent}: {writer.notice}")
            self._logged_notice = True
        writer.write_rest(draft)

    def _writer(self, checkpoint: Path) -> Writer:
        return Writer(dataclasses.replace(self._wanted, checkpoint=checkpoint))
