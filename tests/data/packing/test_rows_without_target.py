"""Rows whose prompt fills ``seq_len`` have no target: they are skipped and counted, up to a limit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import cases
from tiny_tokenizers import bpe_folder

from shardtrain.config import Config, load
from shardtrain.data import open_dataloader
from shardtrain.data.documents.encoded import Document
from shardtrain.data.packing.fitted import pack
from shardtrain.data.packing.packed_rows import PackedSequences, Packing
from shardtrain.data.packing.token_buffer import MemoryTokenBuffer
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.ops.targets import IGNORE
from shardtrain.tools.data import check, prepare
from shardtrain.utils.errors import DataError

SEQ_LEN = 16
DEFAULT_CASES = [
    ("prompt_completion", "memory", "padded"), ("chat", "stream", "padded"), ("chat", "prepared", "padded"),
]  # fmt: skip
TEMPLATE = (
    "{% for m in messages %}{{ '<' if m.role == 'user' else '>' }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def row_of(form: str, prompt_tokens: int, answer: str = "yes") -> dict[str, Any]:
    """Return a row with ``prompt_tokens`` tokens before its first target, for the "bytes" tokenizer."""
    if form == "prompt_completion":
        return {"prompt": "p" * (prompt_tokens - 1), "completion": answer}  # after BOS
    turns = (("user", "p" * (prompt_tokens - 3)), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def arguments_for(folder: Path, form: str, prompts: list[int], *more: str) -> list[str]:
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row_of(form, size)) + "\n" for size in prompts))
    arguments = [
        "--training.dataset=jsonl",
        f"--training.dataset_path={path}",
        f"--training.seq_len={SEQ_LEN}",
        "--training.local_batch_size=1",
        "--model.hf_assets_path=bytes",
        f"--data.format={form}",
        *more,
    ]
    if form == "chat":
        arguments.append(f"--data.chat_template={template}")
    return arguments


def targets_of(config: Config, count: int) -> list[int]:
    """Return the number of targets of each of the first ``count`` training rows."""
    stream = open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1, shuffle=False)
    return [next(stream).num_targets for _ in range(count)]


@pytest.mark.parametrize(
    ("form", "mode", "packing"),
    cases(
        DEFAULT_CASES,
        nightly=[
            (form, mode, packing)
            for form in ("prompt_completion", "chat")
            for mode in ("memory", "stream", "prepared")
            for packing in ("padded", "first_fit", "best_fit")
            if (form, mode, packing) not in DEFAULT_CASES
        ],
    ),
)
def test_row_is_skipped_if_its_prompt_fills_seq_len(
    tmp_path: Path, form: str, mode: str, packing: str
) -> None:
    # 16 inputs have targets 1 to 16: a row whose first target is at 16 still has one
    prompts = [SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 3, 2 * SEQ_LEN]
    arguments = arguments_for(
        tmp_path, form, prompts, f"--data.packing={packing}", "--data.long_documents=cut"
    )
    if mode == "prepared":
        assert prepare.main([*arguments, "--output", str(tmp_path / "shards")]) == 0
        arguments = [
            f"--training.dataset_path={tmp_path / 'shards'}",
            "--training.dataset=tokens",
            *arguments[2:],
        ]
    else:
        arguments += (
            [f"--data.mode={mode}", "--data.readers=1"]
            if mode == "stream"
            else [f"--data.mode={mode}"]
        )
    targets = targets_of(load(None, [*arguments, "--training.on_data_end=repeat"]).config, 6)

    assert sorted(targets[:3]) == [1, 2, 4] and sorted(targets[3:]) == [1, 2, 4], (
        "two of five rows must be skipped"
    )


@pytest.mark.parametrize("packing", ["padded", "first_fit", "best_fit"])
@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_conversation_as_long_as_a_sequence_keeps_all_targets(
    tmp_path: Path, extra: int, packing: str
) -> None:
    """A sequence has targets 1 to seq_len, so a document of seq_len + 1 tokens is not cut."""
    arguments = arguments_for(
        tmp_path, "chat", [SEQ_LEN + extra - len("yes;")], f"--data.packing={packing}"
    )
    stream = open_dataloader(
        load(None, arguments).config, batch_rank=0, num_batch_ranks=1, accumulation=1
    )
    targets = next(stream).targets_BT.flatten().tolist()
    learned = b"yes;" if extra < 2 else b"yes"

    assert [target for target in targets if target != IGNORE] == list(learned)


PADDING = {"a separate token": "<pad>", "the end token": "</s>"}


@pytest.mark.parametrize("packing", ["padded", "first_fit", "best_fit"])
@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
def test_end_token_that_is_also_the_padding_token_is_learned(
    tmp_path: Path, form: str, packing: str
) -> None:
    """Padding is masked by position and not by token id."""
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    targets_of_padding = {}
    for name, pad in PADDING.items():
        folder = tmp_path / name
        bpe_folder(
            folder,
            ("<s>", "</s>", "<pad>"),
            eos_token="</s>",
            pad_token=pad,
            chat_template=template,
        )
        replaced = ("--data.chat_template", "--model.hf")
        arguments = []
        for argument in arguments_for(folder, form, [8, 9], f"--data.packing={packing}"):
            if not argument.startswith(replaced):
                arguments.append(argument)
        arguments.append(f"--model.hf_assets_path={folder}")
        config = load(None, arguments).config
        stream = open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)
        targets = next(stream).targets_BT.flatten().tolist()
        targets_of_padding[name] = [target for target in targets if target != IGNORE]
    end = open_tokenizer(str(tmp_path / "the end token")).eos_id

    assert targets_of_padding["a separate token"] == targets_of_padding["the end token"]
    assert targets_of_padding["the end token"][-1] == end


@pytest.mark.parametrize("kind", ["padded", "first_fit", "best_fit"])
def test_cut_row_is_skipped_only_if_it_has_no_learned_token(kind: str) -> None:
    rng = np.random.default_rng(0)
    documents = []
    for size in rng.integers(2, 40, 60):
        learned = rng.random(size) < rng.choice([0.02, 0.5])
        learned[rng.integers(1, size)] = True
        documents.append(Document(np.arange(size, dtype=np.int32), learned))
    packing = Packing(SEQ_LEN, kind, masked=True, long_documents="cut")  # type: ignore[arg-type]
    packed = pack(MemoryTokenBuffer(documents, 256), packing)
    out = PackedSequences(packed.num_rows, packing)
    for row in rng.permutation(packed.num_rows).tolist():
        packed.write(row, out, row)

    # Documents are cut to SEQ_LEN + 1 tokens, of which the first is never a target.
    num_targets = 0
    num_long = 0
    num_without_target = 0
    for document in documents:
        assert document.learned is not None
        targets_of_document = int(document.learned[1 : SEQ_LEN + 1].sum())
        num_targets += targets_of_document
        num_long += len(document.tokens) > SEQ_LEN + 1
        num_without_target += targets_of_document == 0
    assert packed.dropped == num_without_target > 0
    assert packed.cut == num_long - num_without_target
    assert int((out.targets_BT != IGNORE).sum()) == num_targets

    if kind == "padded":
        assert (out.targets_BT != IGNORE).any(axis=1).all(), "every row must have a target"


def test_limit_on_skipped_rows_suggests_a_value_that_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    arguments = arguments_for(tmp_path, "prompt_completion", [3, 40, 41])
    advice = r"has 2 of 3 rows without a target within seq_len, .*; "
    advice += r"raise seq_len, or set data.long_rows_max_fraction=0.667"

    with pytest.raises(DataError, match=advice):
        targets_of(load(None, arguments).config, 1)
    assert check.main(arguments) == 3
    assert "data.long_rows_max_fraction=0.667" in capsys.readouterr().out

    # Both the run and the check accept the value that the message suggests.
    arguments.append("--data.long_rows_max_fraction=0.667")
    with caplog.at_level(logging.WARNING):
        assert targets_of(load(None, arguments).config, 1) == [4]

    assert (
        "dataset jsonl: 2 of 3 documents have no target in their first 17 tokens and are skipped"
        in caplog.text
    )
    assert check.main(arguments) == 0
    assert (
        "2 of 3 documents have no target in their first 17 tokens and are skipped"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("packing", "mask", "lost"),
    [("padded", "auto", 5), ("first_fit", "auto", 5), ("concat", "on", 5), ("concat", "off", 0)],
)
def test_single_token_documents_without_target_are_counted(
    tmp_path: Path, packing: str, mask: str, lost: int, prepared: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    texts = [*"abcde", "the cat", "a dog lay by"]
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    arguments = ["--training.dataset=jsonl", f"--training.dataset_path={tmp_path / 'rows.jsonl'}"]
    arguments += [
        f"--training.seq_len={SEQ_LEN}",
        "--model.hf_assets_path=bytes",
        "--data.add_eos=false",
    ]
    arguments += [
        "--data.add_bos=false",
        f"--data.packing={packing}",
        f"--data.document_mask={mask}",
    ]
    arguments += ["--training.local_batch_size=1"]
    if prepared:
        # prepare then writes a table with the count
        monkeypatch.setattr(prepare, "FIT_DOCUMENTS", 1)
        assert prepare.main([*arguments, "--output", str(tmp_path / "shards")]) == 0
        arguments = [
            "--training.dataset=tokens",
            f"--training.dataset_path={tmp_path / 'shards'}",
            *arguments[2:],
        ]
    count = sum(map(len, texts)) - (len(texts) if mask == "auto" or lost else 1)
    with caplog.at_level(logging.WARNING):
        stream = open_dataloader(
            load(None, arguments).config,
            batch_rank=0,
            num_batch_ranks=1,
            accumulation=1,
            shuffle=False,
            loop=False,
        )

    assert sum(batch.num_targets for batch in stream) == count

    line = "5 of 7 documents have a single token, and so no target"
    assert (line in caplog.text) == bool(lost)

    capsys.readouterr()
    assert check.main(arguments) == 0
    assert (line in capsys.readouterr().out) == bool(lost)
