"""Rows whose prompt fills seq_len have nothing to learn: they are left out, counted, and have a limit."""

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
    """A row with so many tokens before its first target; the tokenizer is "bytes"."""
    if form == "prompt_completion":
        return {"prompt": "p" * (prompt_tokens - 1), "completion": answer}  # after BOS
    turns = (("user", "p" * (prompt_tokens - 3)), ("assistant", answer))
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def words_for(folder: Path, form: str, prompts: list[int], *more: str) -> list[str]:
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row_of(form, size)) + "\n" for size in prompts))
    words = ["--training.dataset=jsonl", f"--training.dataset_path={path}", f"--training.seq_len={SEQ_LEN}"]
    words += ["--model.hf_assets_path=bytes", f"--data.format={form}", "--training.local_batch_size=1", *more]
    return words + ([f"--data.chat_template={template}"] if form == "chat" else [])


def targets_of(config: Config, count: int) -> list[int]:
    """Targets of the first rows of the order of training."""
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
            for packing in ("padded", "first_fit")
            if (form, mode, packing) not in DEFAULT_CASES
        ],
    ),
)
def test_a_row_is_left_out_if_its_prompt_fills_seq_len(tmp_path: Path, form: str, mode: str, packing: str) -> None:
    # 16 inputs have the targets 1..16: a first target at 16 is the last one that is seen
    prompts = [SEQ_LEN - 1, SEQ_LEN, SEQ_LEN + 1, 3, 2 * SEQ_LEN]
    words = words_for(tmp_path, form, prompts, f"--data.packing={packing}", "--data.long_documents=cut")
    if mode == "prepared":
        assert prepare.main([*words, "--output", str(tmp_path / "shards")]) == 0
        words = [f"--training.dataset_path={tmp_path / 'shards'}", "--training.dataset=tokens", *words[2:]]
    else:
        words += [f"--data.mode={mode}", "--data.readers=1"] if mode == "stream" else [f"--data.mode={mode}"]
    targets = targets_of(load(None, [*words, "--training.on_data_end=repeat"]).config, 6)
    assert sorted(targets[:3]) == [1, 2, 4] and sorted(targets[3:]) == [1, 2, 4], "two rows of five are left out"


@pytest.mark.parametrize("packing", ["padded", "first_fit"])
@pytest.mark.parametrize("extra", [-1, 0, 1, 2])
def test_a_conversation_about_as_long_as_a_sequence_loses_no_target_within_it(
    tmp_path: Path, extra: int, packing: str
) -> None:
    """A sequence has the targets 1..seq_len, so a document of seq_len + 1 tokens is not cut."""
    words = words_for(tmp_path, "chat", [SEQ_LEN + extra - len("yes;")], f"--data.packing={packing}")
    stream = open_dataloader(load(None, words).config, batch_rank=0, num_batch_ranks=1, accumulation=1)
    targets = next(stream).targets_BT.flatten().tolist()
    learned = b"yes;" if extra < 2 else b"yes"
    assert [target for target in targets if target != IGNORE] == list(learned)


PADDING = {"a token of its own": "<pad>", "the end token": "</s>"}


@pytest.mark.parametrize("packing", ["padded", "first_fit"])
@pytest.mark.parametrize("form", ["chat", "prompt_completion"])
def test_an_end_token_that_is_also_the_padding_is_learned(tmp_path: Path, form: str, packing: str) -> None:
    """Targets are left out by their place and not by their id."""
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    found = {}
    for name, pad in PADDING.items():
        folder = tmp_path / name
        bpe_folder(folder, ("<s>", "</s>", "<pad>"), eos_token="</s>", pad_token=pad, chat_template=template)
        words = words_for(folder, form, [8, 9], f"--data.packing={packing}")
        words = [word for word in words if not word.startswith(("--data.chat_template", "--model.hf"))]
        words.append(f"--model.hf_assets_path={folder}")
        stream = open_dataloader(load(None, words).config, batch_rank=0, num_batch_ranks=1, accumulation=1)
        targets = next(stream).targets_BT.flatten().tolist()
        found[name] = [target for target in targets if target != IGNORE]
    end = open_tokenizer(str(tmp_path / "the end token")).eos_id
    assert found["a token of its own"] == found["the end token"]
    assert found["the end token"][-1] == end


@pytest.mark.parametrize("kind", ["padded", "first_fit"])
def test_a_cut_row_is_left_out_exactly_if_no_learned_token_is_in_it(kind: str) -> None:
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

    kept = [document.learned[1 : SEQ_LEN + 1] for document in documents if document.learned is not None]
    long = [len(document.tokens) > SEQ_LEN + 1 for document in documents]
    empty = [not learned.any() for learned in kept]
    assert 0 < packed.dropped == sum(empty) and packed.cut == sum(long) - sum(empty)
    assert int((out.targets_BT != IGNORE).sum()) == sum(int(learned.sum()) for learned in kept)
    if kind == "padded":
        assert (out.targets_BT != IGNORE).any(axis=1).all(), "every row has a target"


def test_the_share_of_rows_left_out_has_a_limit_whose_advice_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = words_for(tmp_path, "prompt_completion", [3, 40, 41])
    advice = (
        r"has 2 of 3 rows without a target within seq_len, .*; raise seq_len, or set data.long_rows_max_fraction=0.667"
    )
    with pytest.raises(DataError, match=advice):
        targets_of(load(None, words).config, 1)
    assert check.main(words) == 3 and "data.long_rows_max_fraction=0.667" in capsys.readouterr().out
    words.append("--data.long_rows_max_fraction=0.667")
    with caplog.at_level(logging.WARNING):
        assert targets_of(load(None, words).config, 1) == [4]
    assert "dataset jsonl: 2 of 3 documents have no target in their first 17 tokens and are skipped" in caplog.text
    assert check.main(words) == 0
    assert "2 of 3 documents have no target in their first 17 tokens and are skipped" in capsys.readouterr().out


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize(
    ("packing", "mask", "lost"),
    [("padded", "auto", 5), ("first_fit", "auto", 5), ("concat", "on", 5), ("concat", "off", 0)],
)
def test_documents_of_a_single_token_are_counted_where_they_have_no_target(
    tmp_path: Path, packing: str, mask: str, lost: int, prepared: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    texts = [*"abcde", "the cat", "a dog lay by"]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = ["--training.dataset=jsonl", f"--training.dataset_path={tmp_path / 'rows.jsonl'}"]
    words += [f"--training.seq_len={SEQ_LEN}", "--model.hf_assets_path=bytes", "--data.add_eos=false"]
    words += ["--data.add_bos=false", f"--data.packing={packing}", f"--data.document_mask={mask}"]
    words += ["--training.local_batch_size=1"]
    if prepared:
        monkeypatch.setattr(prepare, "FIT_DOCUMENTS", 1)  # so that a table holds the count
        assert prepare.main([*words, "--output", str(tmp_path / "shards")]) == 0
        words = ["--training.dataset=tokens", f"--training.dataset_path={tmp_path / 'shards'}", *words[2:]]
    count = sum(map(len, texts)) - (len(texts) if mask == "auto" or lost else 1)
    with caplog.at_level(logging.WARNING):
        stream = open_dataloader(
            load(None, words).config, batch_rank=0, num_batch_ranks=1, accumulation=1, shuffle=False, loop=False
        )
    assert sum(batch.num_targets for batch in stream) == count
    line = "5 of 7 documents have a single token, and so no target"
    assert (line in caplog.text) == bool(lost)
    capsys.readouterr()
    assert check.main(words) == 0
    assert (line in capsys.readouterr().out) == bool(lost)
