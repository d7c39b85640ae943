"""Tasks with a token loss are verified like language models. Other tasks are refused before anything runs."""

from __future__ import annotations

from pathlib import Path

from shardtrain.tools import verify
from shardtrain.tools.verify import verify_request
from shardtrain.train import trainer

TEXT = Path(__file__).parents[3] / "README.md"
HIDDEN = [
    *(
        "--model.name",
        "encoder",
        "--task.name",
        "masked_language_model",
        "--task.options.mask_token_id",
        "3",
    ),
    *("--training.dataset", "text", "--training.dataset_path", str(TEXT), "--steps", "1"),
]


def test_a_masked_language_model_is_verified(tmp_path: Path) -> None:
    options = verify_request.read([*HIDDEN, "--mesh", "dp_shard=2"])
    task = verify.plan(verify.load(options), options)
    assert any(
        note.startswith("task: masked_language_model as language_model") for note in task.notes
    )

    (row,) = verify.verify(task, trainer, tmp_path)  # type: ignore[arg-type]
    assert row.verdict == "same"
    assert row.gradient is not None
    assert row.gradient < 1e-5
