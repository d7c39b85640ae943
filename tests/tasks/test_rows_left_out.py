"""All tasks that learn answers learn the end of an empty answer, and skip rows with long prompts."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config

from shardtrain import tasks
from shardtrain.config.schema import Config
from shardtrain.utils.errors import DataError

EOS = 257
SEQ_LEN = 32
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
OF_PAIRS = ("preference", "simpo", "orpo", "reward_model")


def row_of(task: str, prompt: str, answer: str, chat: bool) -> dict[str, Any]:
    def turn(role: str, text: str) -> Any:
        return [{"role": role, "content": text}] if chat else text

    if task == "kto":
        return {
            "prompt": turn("user", prompt),
            "completion": turn("assistant", answer),
            "label": True,
        }
    sides = {"chosen": answer, "rejected": answer + "!"}
    return {
        "prompt": turn("user", prompt),
        **{name: turn("assistant", text) for name, text in sides.items()},
    }


def config(folder: Path, task: str, rows: list[dict[str, Any]], **data: Any) -> Config:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    training = {"dataset": "jsonl", "dataset_path": str(path), "seq_len": SEQ_LEN}
    validation = {"enable": True, "dataset": "jsonl", "dataset_path": str(path), "seq_len": SEQ_LEN}
    sections: dict[str, Any] = {
        "training": training,
        "validation": validation,
        "task": {"name": task, "group_size": 2},
    }
    return tiny_config(**sections, data={"chat_template": str(template), **data})


def learned(task: str, row: Any) -> list[int]:
    """Return the learned tokens of the first answer of a row."""
    side = row[0].side if task == "kto" else row.chosen
    return [int(token) for token in side.targets if token >= 0]


@pytest.mark.parametrize("chat", [False, True], ids=["text", "chat"])
@pytest.mark.parametrize("task", [*OF_PAIRS, "kto"])
def test_empty_answer_learns_its_end_and_long_prompt_is_skipped(
    task: str, chat: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [
        row_of(task, "q", "", chat),
        row_of(task, "q" * 2 * SEQ_LEN, "yes", chat),
        row_of(task, "q", "yes", chat),
    ]
    run_config = config(tmp_path, task, rows)
    for split in ("train", "validation"):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            rows_read = list(tasks.open_task(run_config).read_rows(split))
        if task == "kto":  # KTO reads groups of answers
            rows_read = [(answer,) for group in rows_read for answer in group]
        learned_tokens = [learned(task, row) for row in rows_read]

        # an answer ends with EOS, or with the end of a turn in the chat template
        end = [ord(";")] if chat else [EOS]
        assert sorted(learned_tokens) == sorted([end, [*b"yes", *end]])

        rule = "the prompt fills seq_len, so no token of the answer is left to learn"
        assert f"skipped 1 row: {rule}" in caplog.text
        assert f"{tmp_path / 'rows.jsonl'}:2" in caplog.text


def test_skipped_long_rows_have_a_separate_limit_except_in_a_test_set(tmp_path: Path) -> None:
    rows = [row_of("preference", prompt, "yes", False) for prompt in ("q", "q" * 64, "q" * 65)]
    with pytest.raises(
        DataError, match="more than data.long_rows_max_fraction=0.5 allows; .*_fraction=0.667"
    ):
        tasks.open_task(config(tmp_path, "preference", rows)).read_rows("train")

    allowed = config(tmp_path, "preference", rows, long_rows_max_fraction=0.667)
    assert len(tasks.open_task(allowed).read_rows("train")) == 1
