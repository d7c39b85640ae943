"""``data.template`` converts any table to the columns of a format, and reports rows it cannot render."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardtrain import data
from shardtrain.config import Loaded, check, load
from shardtrain.config.schema import Data, DataSource
from shardtrain.data.documents.encode import open_encoder
from shardtrain.data.sources import BadRow, alpaca
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.tasks.classification import Classification
from shardtrain.utils.errors import ConfigError

BYTES = open_tokenizer("bytes")
QUESTION = {"question": "2+2?", "answer": {"text": "4"}, "year": 1999, "hint": None, "tags": ["a"]}


def encode(row: dict[str, Any], source: DataSource | None = None, **options: Any) -> Any:
    (result,) = open_encoder(BYTES, Data(**options), source).encode([row])
    return result


def halves(document: Any) -> tuple[str, str]:
    """Return the prompt text (not learned) and the learned text of a document."""
    assert not isinstance(document, BadRow), document
    learned = document.learned
    return BYTES.decode(document.tokens[~learned]), BYTES.decode(document.tokens[learned])


def test_any_table_becomes_a_text_a_pair_or_a_conversation_by_template(tmp_path: Path) -> None:
    question = "Q: {{ question }} ({{ year }})\nA: {{ answer.text }}\n"
    text = encode(QUESTION, template={"text": question})
    assert BYTES.decode(text.tokens) == "Q: 2+2? (1999)\nA: 4\n"

    pair_template = {"prompt": "Q: {{ question }}\nA:", "completion": " {{ answer.text }}"}
    pair = encode(QUESTION, format="prompt_completion", template=pair_template)
    assert halves(pair) == ("Q: 2+2?\nA:", " 4")

    chat_template = tmp_path / "chat.jinja"
    chat_template.write_text(
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    turns = {
        "system": "{% if hint %}{{ hint }}{% endif %}",
        "user": "{{ question }}",
        "assistant": "{{ answer.text }}",
    }
    options = {"format": "chat", "chat_template": str(chat_template), "template": turns}

    # An empty system message is dropped.
    assert halves(encode(QUESTION, **options)) == ("[user]2+2?[assistant]", "4")
    with_hint = {**QUESTION, "hint": "Add."}
    assert halves(encode(with_hint, **options)) == ("[system]Add.[user]2+2?[assistant]", "4")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{{ query }}",
            "does not exist: 'query' is undefined; the columns are question, answer, year, hint",
        ),
        ("{{ answer.body }}", "uses a column that does not exist"),
        ("{{ hint }}", "a template writes null"),
        ("{{ tags }}", "a template writes a list"),
        ("{% for i in range(10**9) %}x{% endfor %}", "the template of 'text' fails"),
        ("{{ ''.__class__ }}", "the template of 'text'"),
    ],
)
def test_row_that_cannot_be_rendered_is_a_bad_row(template: str, reason: str) -> None:
    result = encode(QUESTION, template={"text": template})
    assert isinstance(result, BadRow)
    assert reason in result.reason


def test_source_template_takes_precedence_and_changes_the_fingerprint() -> None:
    source = DataSource(template={"text": "{{ year }}"})
    document = encode(QUESTION, source, template={"text": "{{ question }}"})
    assert BYTES.decode(document.tokens) == "1999"

    fingerprints = set()
    for template in ({}, {"text": "a"}, {"text": "b"}):
        fingerprints.add(open_encoder(BYTES, Data(template=template)).fingerprint)
    assert len(fingerprints) == 3


def test_alpaca_reads_instruction_input_and_output() -> None:
    row = {"instruction": "Add.", "input": "2+2", "output": "4"}
    source = DataSource(dataset="alpaca")
    prompt, completion = halves(encode(row, source, format="prompt_completion"))

    assert completion == "4"
    assert prompt.endswith("### Instruction:\nAdd.\n\n### Input:\n2+2\n\n### Response:\n")

    prompt, _ = halves(encode({**row, "input": ""}, source, format="prompt_completion"))
    assert prompt.startswith("Below is an instruction that describes a task. Write")
    assert "Input" not in prompt

    text = encode(row, source)
    assert BYTES.decode(text.tokens).endswith("2+2\n\n### Response:\n4")
    assert BYTES.decode(encode({**row, "text": "verbatim"}, source).tokens) == "verbatim"
    assert alpaca.TEMPLATES.keys() == {"text", "prompt_completion", "chat"}

    without = {key: value for key, value in row.items() if key != "input"}
    pair = encode(without, source, format="prompt_completion")
    assert "Input" not in halves(pair)[0]


def config_of(tmp_path: Path, rows: list[Any], text: str) -> Loaded:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "run.toml").write_text(
        f'[training]\ndataset = "jsonl"\ndataset_path = "{tmp_path / "rows.jsonl"}"\nseq_len = 16\n{text}'
    )
    return load(tmp_path / "run.toml")


def test_template_is_tried_on_the_first_rows_before_training(tmp_path: Path) -> None:
    text = '[data]\nbad_rows = "skip"\nbad_rows_max_fraction = 1.0\n[data.template]\ntext = "{{ quest }}"\n'
    loaded = config_of(tmp_path, [QUESTION] * 20, text)
    assert list(check(loaded)) == []
    with pytest.raises(
        ConfigError,
        match="data.template: .*returns no document for the first 8 rows .*'quest' is undefined",
    ):
        data.open_dataloader(loaded.config, batch_rank=0, num_batch_ranks=1, accumulation=1)


PROMPT = '[data.template]\nprompt = "{{ a }}"'
HUMAN = '[data]\nformat = "chat"\n[data.template]\nhuman = "{{ a }}"'
ONLY_USER = '[data]\nformat = "chat"\n[data.template]\nuser = "{{ a }}"'
INVALID = '[data.template]\ntext = "{% if %}"'
MANY_DIGITS = f'[data.template]\ntext = "{{{{ {"1" * 5000} }}}}"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (PROMPT, "data.template creates prompt, and data.format text reads text"),
        (HUMAN, "has the entry 'human', which is not a role"),
        (ONLY_USER, "must have both user and assistant"),
        (INVALID, 'data.template.text="{% if %}" is not a Jinja template'),
        (MANY_DIGITS, "is not a Jinja template (it contains a number with too many digits)"),
    ],
    ids=["prompt", "human", "only user", "invalid", "many digits"],
)
def test_template_with_unread_columns_is_rejected(text: str, message: str, tmp_path: Path) -> None:
    (problem,) = check(config_of(tmp_path, [QUESTION], text))
    assert message in str(problem)
    assert "run.toml:" in str(problem)


def test_invalid_template_is_rejected() -> None:
    with pytest.raises(
        ConfigError, match=r"data.template.text=.* is not a Jinja template .*write columns like"
    ):
        open_encoder(BYTES, Data(template={"text": "{% if %}"}))


def test_template_creates_the_rows_of_a_task(tmp_path: Path) -> None:
    rows = [{"title": "a", "body": "b", "label": 1}, {"title": "c", "body": "d", "label": 0}]
    text = '[task]\nname = "classification"\n[data.template]\ntext = "{{ title }}: {{ body }}"\n'
    loaded = config_of(tmp_path, rows, text)

    assert list(check(loaded)) == []

    documents = Classification(loaded.config).read_rows("train")
    assert [BYTES.decode(document.tokens) for document in documents] == ["a: b", "c: d"]


def rows_of(tmp_path: Path, options: str) -> list[tuple[str, str]]:
    """Return the text and the learned text of each sequence of an epoch."""
    long_row = {"prompt": "Sea?", "completion": "blue and deep and wide"}
    rows = [long_row, {"prompt": "a", "completion": "b"}]
    (tmp_path / "a").mkdir(exist_ok=True)
    text = f'[data]\nformat = "prompt_completion"\n{options}'
    loaded = config_of(tmp_path / "a", rows, text)
    assert list(check(loaded)) == []

    stream = data.open_dataloader(
        loaded.config, batch_rank=0, num_batch_ranks=1, accumulation=1, shuffle=False, loop=False
    )
    sequences = []
    for batch in stream:
        for tokens, targets in zip(batch.tokens_BT, batch.targets_BT, strict=True):
            all_text = BYTES.decode(tokens[tokens < 256])
            learned_text = BYTES.decode(targets[targets >= 0])
            if all_text or learned_text:
                sequences.append((all_text, learned_text))
    return sequences


def test_long_answers_are_split_from_their_questions_only_on_request(tmp_path: Path) -> None:
    cut = rows_of(tmp_path, "")
    assert ("Sea?blue and de", "blue and dee") in cut
    assert all(not read.startswith("e") for read, _ in cut)

    dropped = rows_of(tmp_path, 'long_documents = "drop"\n')
    assert [learned for _, learned in dropped] == ["b"]

    split = rows_of(tmp_path, 'long_documents = "split"\n')
    assert any("p and wide" in learned for _, learned in split)
