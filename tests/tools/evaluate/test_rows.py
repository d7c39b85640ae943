"""Each row of a set is evaluated independently of the others, in the format detected from its columns."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_folders import build, save

from shardtrain import api, cli
from shardtrain.tools.evaluate import evaluate_request
from shardtrain.tools.generate.trained_model import OpenedModel, open_model
from shardtrain.utils.errors import ConfigError

pytest.importorskip("transformers")

SEQ_LEN = 24
BOS = 256
EOS = 257
TEXTS = ["mesh", "a rank", "é 東京", "the loss of seven", "x" * 20, "norm, " * 9, "shard and step"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)
ROWS: dict[str, dict[str, Any]] = {
    "text": {"text": "hi there"},
    "prompt_completion": {"prompt": "hi", "completion": " there"},
    "chat": {
        "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": " there"}]
    },
}
ROWS["sharegpt"] = {
    "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": " there"}]
}
FIRST_TARGET = {
    "text": 1,
    "prompt_completion": len("_hi"),
    "chat": len("uhi;a"),
    "sharegpt": len("uhi;a"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build("llama3"), tmp_path_factory.mktemp("hub") / "hf")


@pytest.fixture(scope="module")
def opened(folder: Path) -> OpenedModel:
    return open_model(folder, tokenizer_path="bytes")


def jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def loss_of(model: torch.nn.Module, tokens: list[int], first: int = 1) -> tuple[float, int]:
    """Return the float64 sum and the number of losses of ``tokens[first:]``, in windows of SEQ_LEN targets."""
    total = 0.0
    count = 0
    for start in range(0, len(tokens) - 1, SEQ_LEN):
        window = tokens[start : start + SEQ_LEN + 1]
        with torch.no_grad():
            logs = model(torch.tensor([window[:-1]])).logits[0].log_softmax(-1)
        targets = [i for i in range(1, len(window)) if start + i >= first]
        total -= sum(float(logs[i - 1, window[i]]) for i in targets)
        count += len(targets)
    return total, count


def test_the_loss_of_each_row_is_independent_of_others_and_of_their_order(
    opened: OpenedModel, tmp_path: Path
) -> None:
    reference_model = build("llama3").double()
    sums = [loss_of(reference_model, [BOS, *text.encode(), EOS]) for text in TEXTS]
    expected = sum(total for total, _ in sums) / sum(count for _, count in sums)
    rows = [{"text": text} for text in TEXTS]
    for number, order in enumerate((rows, rows[::-1], rows[3:] + rows[:3])):
        result = api.evaluate(
            opened, jsonl(tmp_path / f"{number}.jsonl", order), seq_len=SEQ_LEN, batch_size=3
        )
        # the evaluation computes in float32, the expected value in float64
        assert result["loss"] == pytest.approx(expected, rel=1e-6)
        assert result["tokens"] == sum(count for _, count in sums)
        assert result["bytes"] == sum(len(text.encode()) for text in TEXTS)

        lengths = [len(text.encode()) + 1 for text in TEXTS]
        assert (result["rows"], result["sequences"]) == (
            len(TEXTS),
            sum(-(-length // SEQ_LEN) for length in lengths),
        )


@pytest.mark.parametrize("packing", ["padded", "first_fit", "best_fit"])
def test_rows_without_a_target_are_ignored(
    opened: OpenedModel, tmp_path: Path, packing: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = jsonl(
        tmp_path / "rows.jsonl",
        [{"text": "a"}, {"text": "the cat"}, {"text": ""}, {"text": "x" * 60}],
    )
    options = {"data.add_bos": False, "data.add_eos": False, "data.packing": packing}
    result = api.evaluate(opened, path, seq_len=SEQ_LEN, options=options)

    assert (result["rows"], result["tokens"]) == (2, len("the cat") - 1 + 60 - 1)
    assert "1 of 3 documents have a single token, and so no target" in caplog.text


def test_packing_is_an_option_and_depends_on_the_order(opened: OpenedModel, tmp_path: Path) -> None:
    reference_model = build("llama3").double()
    losses = []
    for number, texts in enumerate((TEXTS, TEXTS[::-1])):
        path = jsonl(tmp_path / f"{number}.jsonl", [{"text": text} for text in texts])
        result = api.evaluate(opened, path, seq_len=SEQ_LEN, options={"data.packing": "concat"})

        tokens = []
        for text in texts:
            tokens += [BOS, *text.encode(), EOS]
        total, count = loss_of(reference_model, tokens)
        # the evaluation computes in float32, the expected value in float64
        assert result["loss"] == pytest.approx(total / count, rel=1e-6)
        assert result["tokens"] == count
        losses.append(result["loss"])

    # Documents of a sequence attend to each other, so their order matters.
    assert abs(losses[0] - losses[1]) > 1e-3


@pytest.mark.parametrize("form", ROWS)
def test_the_format_of_rows_is_detected_by_their_columns(
    form: str, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text(TEMPLATE)
    path = jsonl(tmp_path / "rows.jsonl", [ROWS[form]] * 2)
    arguments = ["evaluate", "--from", str(folder), "--tokenizer", "bytes", "--data", f"set={path}"]
    expected_tokens = [BOS, *b"hi there", EOS]
    if form in ("chat", "sharegpt"):
        arguments += ["--data.chat_template", str(template)]
        expected_tokens = [*b"uhi;a there;"]
    assert cli.main(arguments) == 0

    result = json.loads(capfd.readouterr().out)["sets"]["set"]
    total, count = loss_of(build("llama3").double(), expected_tokens, FIRST_TARGET[form])

    # the evaluation computes in float32, the expected value in float64
    assert result["loss"] == pytest.approx(total / count, rel=1e-6)
    assert result["tokens"] == 2 * count
    assert result["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-5)


def test_the_format_can_be_set_like_in_training(folder: Path, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"question": "hi", "reply": " there", "text": "other"}])
    arguments = [
        "--from",
        str(folder),
        "--data",
        f"set={path}",
        "--data.format",
        "prompt_completion",
    ]
    read = evaluate_request.read(
        [
            *arguments,
            "--data.prompt_field=question",
            "--data.completion_field=reply",
            "--add_bos",
            "false",
        ]
    )
    assert read is not None
    assert read.data_options == {
        "format": "prompt_completion", "prompt_field": "question", "completion_field": "reply", "add_bos": False,
    }  # fmt: skip

    opened = open_model(folder, tokenizer_path="bytes")
    options = {f"data.{name}": value for name, value in read.data_options.items()}
    assert (
        api.evaluate(opened, path, seq_len=SEQ_LEN, options=options)["tokens"] == len(" there") + 1
    )


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--data.format", "chatt"], "data.format"),
        (["--data.formatt", "chat"], "did you mean --data.format?"),
        (["--data.format", "chat"], "has no effect without --data"),
        (["--text_field", "body"], "has no effect without --data"),
    ],
)
def test_a_wrong_option_of_data_is_refused(arguments: list[str], rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        evaluate_request.read(["--from", "x", *arguments])
    assert rule in str(error.value)


def test_options_of_other_sections_are_refused(opened: OpenedModel, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "rows.jsonl", [{"text": "x"}])
    with pytest.raises(ConfigError, match="training.steps.* is not an option of"):
        api.evaluate(opened, path, options={"training.steps": 3})
