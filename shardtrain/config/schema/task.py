"""The options of what is learned: part of ``schema.py``, whose rules hold here too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OF_NEXT_TOKENS = ("language_model", "distillation")
"""Tasks whose rows are documents, as [data] makes them; those of all others are read by the task."""


@dataclass(frozen=True)
class Task:
    """What a batch means: its rows, loss, metrics and predictions."""

    name: str = "language_model"
    """A file of shardtrain/tasks without its ending, or the path of a task file of yours (``my_task.py``)
    (shardtrain)."""
    labels: list[str] = field(default_factory=list)
    """Names of the labels as the rows spell them; their order is that of the model's outputs. Unset, labels are the
    whole numbers 0 to num_labels - 1 (shardtrain)."""
    num_labels: int = 2
    """Number of labels, where labels does not name them (shardtrain)."""
    label_field: str = "label"
    """Column of the label, with kto true or false; a number, as "1", in a TSV file without a first line of names
    (shardtrain)."""
    pair_field: str = ""
    """Column of a second text of the row, which follows the first; empty for none (shardtrain)."""
    beta: float = 0.1
    """Of preferences: with preference and kto how far the model may go from the reference (less is farther), with simpo
    the scale of rewards (the paper has 2 to 10), with orpo the weight of the odds beside the answers' loss
    (shardtrain)."""
    gamma: float = 0.5
    """With simpo, by how much the chosen answer's reward shall be above the other's (shardtrain)."""
    desirable_weight: float = 1.0
    """With kto, weight of good answers (shardtrain)."""
    undesirable_weight: float = 1.0
    """With kto, weight of bad ones (shardtrain)."""
    group_size: int = 8
    """With kto, rows among which completions are exchanged to estimate KL; a batch is made of such groups
    (shardtrain)."""
    chosen_field: str = "chosen"
    """Column of the answer that was preferred, beside data.prompt_field (shardtrain)."""
    rejected_field: str = "rejected"
    """Column of the other one (shardtrain)."""
    teacher_path: str = ""
    """With distillation, the teacher: a Hugging Face folder whose vocabulary is the model's (shardtrain)."""
    kd_ratio: float = 0.5
    """With distillation, the teacher's share of the loss, above 0 and up to 1; the rest is cross-entropy with the data,
    as torchtune's option of this name (shardtrain)."""
    temperature: float = 1.0
    """With distillation, what logits of both are divided by for the divergence, whose share of the loss is multiplied
    by its square (shardtrain)."""
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """With distillation: KL of the student from the teacher, of the teacher from the student, or the generalised
    Jensen-Shannon divergence (shardtrain)."""
    jsd_beta: float = 0.5
    """With distillation and jsd, the teacher's weight in the mixture that both are compared with: beta of GKD
    (shardtrain)."""
    test_dataset_path: str | None = None
    """File or folder of the test set, read as validation.dataset (shardtrain)."""
    test_split: str = "test"
    """Split of a Hugging Face dataset that is the test set (shardtrain)."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options of a task file of yours, under names of yours (shardtrain)."""
