"""Options of tasks: rows, labels, losses and metrics. The docstring of the package explains the conventions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

OF_NEXT_TOKENS = ("language_model", "distillation")
"""Tasks whose rows are documents, as [data] makes them; those of all others are read by the task."""
OF_PAIRS = ("preference", "orpo", "simpo", "reward_model")
"""Tasks whose rows are a prompt and two answers."""


@dataclass(frozen=True)
class Task:
    """The task to train: format of rows, loss, metrics and predictions."""

    name: str = "language_model"
    """A file of shardtrain/tasks without ".py", or the path of a task file of
    yours (``my_task.py``) (shardtrain).
    """
    labels: list[str] = field(default_factory=list)
    """Names of the labels in the rows, in the order of the model's outputs; unset: the
    integers 0 to num_labels - 1 (shardtrain).
    """
    num_labels: int = 2
    """Number of labels, if labels is not set (shardtrain)."""
    label_field: str = "label"
    """Column of the label (true or false with kto); in a TSV file without a header, a number such as "1"
    (shardtrain)."""
    pair_field: str = ""
    """Column of a second text that follows the first; empty: none (shardtrain)."""
    beta: float = 0.1
    """With preference and kto: strength of the penalty on deviations from the reference. With
    simpo: scale of the rewards (2 to 10 in the paper). With orpo: weight of the odds ratio relative
    to the loss of the answers (shardtrain).
    """
    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "sigmoid_norm"] = "sigmoid"
    """With preference, the loss of a pair, with TRL's names: DPO (sigmoid), SLiC's hinge, IPO, robust DPO, or
    DPO with mean log-probabilities instead of sums (sigmoid_norm) (shardtrain).
    """
    label_smoothing: float = 0.0
    """With preference and loss_type sigmoid (conservative DPO) or robust: the share of pairs, below 0.5,
    whose answers are assumed to be exchanged (shardtrain).
    """
    reference_free: bool = False
    """With preference, use log-probabilities of 0 in place of a reference model (shardtrain)."""
    reference_path: str = ""
    """With preference and kto, a Hugging Face folder with the reference model, which has the model's
    architecture and sizes; empty: the initial weights of the run (shardtrain).
    """
    nll_weight: float = 0.0
    """With preference and simpo, weight of an additional loss: the mean negative log-probability of the tokens
    of the chosen answer, as in CPO and RPO (shardtrain).
    """
    gamma: float = 0.5
    """With simpo, the margin by which the chosen answer's reward should exceed the other's (shardtrain)."""
    desirable_weight: float = 1.0
    """With kto, weight of good answers (shardtrain)."""
    undesirable_weight: float = 1.0
    """With kto, weight of bad answers (shardtrain)."""
    group_size: int = 8
    """With kto, rows among which completions are exchanged to estimate KL; a batch is made of such groups
    (shardtrain)."""
    chosen_field: str = "chosen"
    """Column of the preferred answer. data.prompt_field is the column of its prompt (shardtrain)."""
    rejected_field: str = "rejected"
    """Column of the rejected answer (shardtrain)."""
    teacher_path: str = ""
    """With distillation, the teacher: a Hugging Face folder with the model's vocabulary (shardtrain)."""
    kd_ratio: float = 0.5
    """With distillation, the teacher's share of the loss, above 0 and up to 1; the rest is
    cross-entropy with the data (torchtune's option of this name) (shardtrain).
    """
    temperature: float = 1.0
    """With distillation, divides the logits of both models; the divergence is
    multiplied by its square (shardtrain).
    """
    divergence: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    """With distillation: KL(teacher || student), KL(student || teacher), or the generalised
    Jensen-Shannon divergence (shardtrain).
    """
    jsd_beta: float = 0.5
    """With jsd, the teacher's weight in the mixture of both distributions: beta of GKD (shardtrain)."""
    frozen_modules: list[str] = field(default_factory=list)
    """With image_text, modules whose weights are not trained, by the end of their name or a pattern:
    ["vision_tower"], or ["visual.blocks.*"] (shardtrain).
    """
    planned_images: list[str] = field(default_factory=lambda: ["1024x1024"])
    """With image_text, width and height of each image of a row, as plans and dry runs assume, because they read
    no data: ["1024x768", "512x512"]; [] assumes rows without images (shardtrain).
    """
    test_dataset_path: str | None = None
    """File or folder of the test set, of the kind validation.dataset (shardtrain)."""
    test_split: str = "test"
    """Split of a Hugging Face dataset that is the test set (shardtrain)."""
    options: dict[str, int | float | bool | str] = field(default_factory=dict)
    """Options for your own task file (shardtrain)."""
