"""Options for columns, templates and document ends are rejected exactly if they have no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_config

from shardtrain import tasks
from shardtrain.config import check, load
from shardtrain.config.schema import Config
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.utils.errors import ConfigError, DataError

pytest.importorskip("jinja2")

TEMPLATE = (
    "{{ tools | tojson }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
QUESTION = [{"role": "user", "content": "q"}]
ANSWER = [{"role": "assistant", "content": "a"}]
COMMON = {"text": "t", "label": 1, "messages": [*QUESTION, *ANSWER], "tools": [{"name": "f"}]}
ROWS = (
    {**COMMON, "prompt": "q", "completion": "a", "chosen": "a", "rejected": "b"},
    {**COMMON, "prompt": QUESTION, "completion": ANSWER, "chosen": ANSWER, "rejected": ANSWER},
)
CHANGES = {
    **dict.fromkeys(
        ("text_field", "prompt_field", "completion_field", "messages_field", "tools_field"),
        "absent",
    ),
    "chat_template": "other.jinja",
    "add_bos": False,
    "add_eos": False,
    "separator": "|",
}
FORMATS = ("text", "prompt_completion", "chat")
TASKS = (
    "preference",
    "simpo",
    "orpo",
    "reward_model",
    "kto",
    "classification",
    "sequence_to_sequence",
)


def documents(reader: str, folder: Path, data: dict[str, Any]) -> list[str]:
    """Describe the document of each row in ROWS, or its error."""
    descriptions = []
    for number, row in enumerate(ROWS):
        path = folder / f"{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        config = config_of(reader, path, data)
        try:
            if reader in FORMATS:
                rows: Any = open_encoder(open_tokenizer("bytes"), config.data).encode([row])
            else:
                rows = list(tasks.find(reader).Task(config).read_rows("train"))
            descriptions.append(repr(rows))
        except (ConfigError, DataError) as error:
            descriptions.append(str(error))
    return descriptions


def config_of(reader: str, path: Path, data: dict[str, Any]) -> Config:
    if reader in FORMATS:
        data = {**data, "format": reader}
    task = {"name": "language_model" if reader in FORMATS else reader}
    training = {"dataset": "jsonl", "dataset_path": str(path), "seq_len": 200}
    return tiny_config(training=training, data=data, task=task)


@pytest.mark.parametrize("reader", [*FORMATS, *TASKS])
def test_option_is_rejected_exactly_if_it_changes_no_document(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(TEMPLATE)
    Path("other.jinja").write_text(TEMPLATE.replace(";", "."))
    # tasks on rows read a chat template only if prompts are messages, like the format prompt_completion
    before = documents(reader, tmp_path, {"chat_template": "chat.jinja"})
    for option, value in CHANGES.items():
        after = documents(reader, tmp_path, {"chat_template": "chat.jinja", option: value})
        arguments = ["--data.format", reader] if reader in FORMATS else ["--task.name", reader]
        problems = check(load(None, [*arguments, f"--data.{option}", str(value).lower()]))
        options_with_problems = [getattr(problem, "option", "") for problem in problems]
        is_rejected = f"data.{option}" in options_with_problems
        assert is_rejected == (after == before), (option, problems, before, after)


@pytest.mark.parametrize("form", ["text", "prompt_completion", "chat"])
def test_text_column_of_a_source_is_rejected_if_its_format_has_none(form: str) -> None:
    arguments = ["--data.sources.web.dataset_path=x.jsonl", f"--data.sources.web.format={form}"]
    problems = [
        str(problem)
        for problem in check(load(None, [*arguments, "--data.sources.web.text_field=body"]))
    ]
    expected = f'data.sources.web.text_field="body" has no effect on the format {form}; remove it'

    assert (problems == []) if form == "text" else any(expected in problem for problem in problems)


def test_add_bos_of_sample_prompts_may_be_set_for_conversations() -> None:
    arguments = ["--data.format=chat", "--data.add_bos=true"]
    assert any("data.add_bos" in str(problem) for problem in check(load(None, arguments)))
    assert (
        check(load(None, [*arguments, "--metrics.sample_prompt=Once", "--metrics.sample_freq=5"]))
        == []
    )


def test_messages_prompt_is_trained_with_the_template_file(tmp_path: Path) -> None:
    """The fix suggested by the rules must lead to a run that trains."""
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROWS[1]) + "\n")
    (tmp_path / "chat.jinja").write_text(TEMPLATE)
    arguments = [
        "--training.dataset=jsonl", f"--training.dataset_path={tmp_path}/rows.jsonl",
        "--data.format=prompt_completion", f"--data.chat_template={tmp_path}/chat.jinja",
    ]  # fmt: skip
    loaded = load(None, arguments)

    assert check(loaded) == []

    (document,) = open_encoder(open_tokenizer("bytes"), loaded.config.data).encode([ROWS[1]])
    tokenizer = open_tokenizer("bytes")
    assert tokenizer.decode(document.tokens) == '[{"name": "f"}]user:q;assistant:a;'
    assert tokenizer.decode(document.tokens[document.learned]) == "a;"
