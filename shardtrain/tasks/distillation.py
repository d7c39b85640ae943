"""The next token of each token, learned from data and from a teacher: a frozen, usually larger model on the same mesh.

The loss is a mix of cross-entropy and of the divergence of the teacher's distribution and the model's, at each target
token, summed over tokens and divided once by those of the whole step (``distillation_loss.py`` has the formulas). The
teacher reads the rows as they are: it writes none of its own (GKD with ``lmbda`` 0, Agarwal et al. 2023). It costs the
memory of its weights, sharded as the model is (``train/reference_models.py``), and of its logits.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from shardtrain import data, models
from shardtrain.config.schema import Config
from shardtrain.config.teacher import OPTION, teacher_config
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
        """The configuration of the teacher's model; raises ConfigError where its folder holds none."""
        teacher = teacher_config(self.config)
        if isinstance(teacher, Problem):
            raise ConfigError(teacher)
        return teacher

    def open_dataloader(self, **options: Any) -> data.DataLoader:
        """A run continues with no other teacher than its own."""
        stream = super().open_dataloader(**options)
        known = initial_weights.of_folder(Path(self.config.task.teacher_path))
        stream.files = {**dict(stream.files.items()), "teacher": known}
        stream.fingerprint = digest(stream.fingerprint, known)
        return stream

    def check(self, stream: data.DataLoader, module: ModuleType, shape: Any) -> None:
        """Refuse data, a model and a teacher that do not fit together; raises ConfigError."""
        super().check(stream, module, shape)
        teacher = self.teacher().model
        path = self.config.task.teacher_path
        teacher_module, teacher_shape = models.configured(teacher)
        if stream.masks_documents:
            try:
                models.check_documents(teacher_module, teacher.name)
            except ConfigError as error:
                rule = "holds a model that cannot keep packed documents apart"
                fix = 'set data.packing = "padded", or data.document_mask = "off"'
                raise ConfigError(Problem(OPTION, path, rule, fix)) from error

        # Vocabularies may be filled up to other multiples, but both must hold the tokenizer's ids. A model that does
        # not say its size (0) is not compared.
        own_ids = int(getattr(shape, "vocab_size", 0) or 0)
        teacher_ids = int(getattr(teacher_shape, "vocab_size", 0) or 0)
        if 0 < teacher_ids < stream.vocab:
            rule = f"has rows for {teacher_ids} ids, and the tokenizer {stream.vocab}"
            raise ConfigError(Problem(OPTION, path, rule, "use a teacher with the model's own tokenizer"))
        if own_ids and teacher_ids and own_ids != teacher_ids:
            logger.info(
                f"teacher: {teacher_ids} rows of vocabulary, and the model {own_ids}: compared over the first "
                f"{min(own_ids, teacher_ids)}, among which are the tokenizer's {stream.vocab} ids"
            )


Task = Distillation
