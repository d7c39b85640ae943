"""Distillation: language modeling with an additional loss against a teacher, a frozen model on the same
mesh.

The loss is a mix of the cross-entropy and the divergence between the distributions of teacher and model at
each target token. It is summed over tokens and divided once by the tokens of the step
(``distillation_loss.py`` has the formulas). The teacher reads the training rows and generates no text (GKD
with ``lmbda`` 0, Agarwal et al. 2023). It needs memory for its logits and for its weights, which are
sharded like the model's (``train/reference_models.py``).
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from shardtrain import data, models
from shardtrain.config.frozen_models import TEACHER, frozen_config
from shardtrain.config.schema import Config
from shardtrain.data.digest import digest
from shardtrain.hf import initial_weights
from shardtrain.ops.distillation_loss import Mix
from shardtrain.tasks.language_model import LanguageModel
from shardtrain.utils.errors import ConfigError, Problem
from shardtrain.utils.log import logger

METRICS = {"loss": "min", "perplexity": "min"}
DEGREES = ("tensor_parallel_degree", "context_parallel_degree")


class Distillation(LanguageModel):
    """The task ``distillation``."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        task = config.task
        self.mix = Mix(task.kd_ratio, task.temperature, task.divergence, task.jsd_beta)

    def teacher(self) -> Config:
        """Return the configuration of the teacher. Raises ConfigError if its folder contains no model."""
        teacher = frozen_config(self.config, TEACHER)
        if isinstance(teacher, Problem):
            raise ConfigError(teacher)
        return teacher

    def open_dataloader(self, **options: Any) -> data.DataLoader:
        """Open the data. Their fingerprint covers the teacher, so a run resumes only with the same teacher."""
        stream = super().open_dataloader(**options)
        # The teacher's weights are an input of the loss, like the data.
        teacher = initial_weights.of_folder(Path(self.config.task.teacher_path))
        files = dict(stream.files.items())
        files["teacher"] = teacher
        stream.files = files
        stream.fingerprint = digest(stream.fingerprint, teacher)
        return stream

    def check(self, stream: data.DataLoader, module: ModuleType, shape: Any) -> None:
        """Raise ConfigError if data, model and teacher do not fit together."""
        super().check(stream, module, shape)
        teacher = self.teacher().model
        path = self.config.task.teacher_path
        teacher_module, teacher_shape = models.configured(teacher)
        if stream.masks_documents:
            try:
                models.check_documents(teacher_module, teacher.name)
            except ConfigError as error:
                raise ConfigError(
                    Problem(
                        TEACHER,
                        path,
                        rule="contains a model that cannot keep packed documents apart",
                        fix='set data.packing = "padded", or data.document_mask = "off"',
                    )
                ) from error

        # The vocabularies may be padded to different sizes, but both must contain the tokenizer's ids. A
        # model of unknown size (0) is not compared.
        model_ids = int(getattr(shape, "vocab_size", 0) or 0)
        teacher_ids = int(getattr(teacher_shape, "vocab_size", 0) or 0)
        if 0 < teacher_ids < stream.vocab:
            raise ConfigError(
                Problem(
                    TEACHER,
                    path,
                    rule=f"has rows for {teacher_ids} ids, but the tokenizer has {stream.vocab} ids",
                    fix="use a teacher with the model's own tokenizer",
                )
            )
        if model_ids and teacher_ids and model_ids != teacher_ids:
            logger.info(
                f"the teacher has a vocabulary of {teacher_ids} ids, and the model one of {model_ids} ids; the loss "
                f"compares the first {min(model_ids, teacher_ids)}, which include the tokenizer's {stream.vocab} ids"
            )


Task = Distillation
