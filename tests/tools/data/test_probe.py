"""The probe detects planted leaks and wrong targets, and has no false alarms."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardtrain import cli, models
from shardtrain.data.batch import IGNORE, Batch
from shardtrain.layout import Draw
from shardtrain.ops import init_weights
from shardtrain.tools.data.probe import EXPERTS_TOLERANCE, main, probe, verdicts
from shardtrain.utils.errors import ConfigError

T = 48
V = 64
STOPS = (7, 8, 30, T)
COMMON = {"vocab_size": V, "dim": 32, "num_layers": 2, "num_heads": 2}
GROUPED = {**COMMON, "num_kv_heads": 1, "head_dim": 16}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("debugmodel", {**GROUPED, "ffn_dim": 64}),
    "qwen3": ("debugmodel", {**GROUPED, "ffn_dim": 64}),
    "mixtral": ("debugmodel", {**GROUPED, "moe_ffn_dim": 32, "num_experts": 4}),
    "deepseek_v3": (
        "debugmodel",
        {
            **COMMON,
            "num_heads": 2,
            "kv_lora_rank": 16,
            "ffn_dim": 64,
            "moe_ffn_dim": 32,
            "num_experts": 4,
            "top_k": 2,
        },
    ),
}


def model_of(family: str) -> nn.Module:
    module = models.find(family)
    flavor, overrides = FAMILIES[family]
    model = models.build(module, models.shape_of(module, flavor, overrides, "rmsnorm")).to_empty(
        device="cpu"
    )
    for name, parameter in model.named_parameters():
        init_weights.draw_(
            parameter,
            name,
            Draw("normal", std=parameter.size(-1) ** -0.5 if parameter.ndim > 1 else 1.0),
            0,
        )
    for buffer in model.buffers():
        buffer.zero_()
    return model


def packed() -> Batch:
    """Return a row of several documents. The last token of each document has no target."""
    tokens = torch.randint(0, V, (1, T), generator=torch.Generator().manual_seed(2))
    targets = torch.full_like(tokens, IGNORE)
    positions = torch.empty_like(tokens)
    documents = torch.empty_like(tokens)
    for number, (start, stop) in enumerate(zip((0, *STOPS), STOPS, strict=False)):
        targets[0, start : stop - 1] = tokens[0, start + 1 : stop]
        positions[0, start:stop] = torch.arange(stop - start)
        documents[0, start:stop] = number
    return Batch(tokens, targets, positions, torch.zeros(1, dtype=torch.int64), documents)


def with_targets(change: dict[int, int]) -> Batch:
    batch = packed()
    for place, target in change.items():
        batch.targets_BT[0, place] = target
    return batch


class Deaf(nn.Module):
    """Faulty model that treats all documents of a row as one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        return self.inner(tokens_BT, positions_BT)


class Joining(Deaf):
    """Faulty model that treats documents 1 and 2 as one."""

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        return self.inner(tokens_BT, positions_BT, documents_BT.masked_fill(documents_BT == 2, 1))


class Blind(Deaf):
    """Faulty model whose output does not depend on the tokens."""

    def forward(self, tokens_BT: Tensor, positions_BT: Tensor, documents_BT: Tensor) -> Tensor:
        return self.inner(torch.zeros_like(tokens_BT), positions_BT, documents_BT)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_that_keeps_documents_apart_is_clean(family: str) -> None:
    tolerance = EXPERTS_TOLERANCE if family in ("mixtral", "deepseek_v3") else 0.0
    report = probe(model_of(family), packed(), tolerance=tolerance)
    assert report.clean, verdicts(report)
    assert [change.document for change in report.changes] == [0, 1, 2, 3]
    assert "no leak" in verdicts(report)[-1]


def test_a_planted_leak_is_found_with_its_positions() -> None:
    report = probe(Deaf(model_of("llama3")), packed())
    assert not report.clean
    assert report.changes[0].leaks == {1: [7], 2: list(range(8, 30)), 3: list(range(30, T))}

    text = "\n".join(verdicts(report))
    assert "LEAK from document 0 into document 2: 8-29" in text
    assert verdicts(report)[-1].startswith("verdict: 6 leaks")


def test_a_leak_between_only_two_documents_is_found() -> None:
    report = probe(Joining(model_of("llama3")), packed())
    assert [change.leaks for change in report.changes] == [{}, {2: list(range(8, 30))}, {}, {}]
    assert not report.clean


def test_a_model_that_ignores_its_tokens_is_not_clean() -> None:
    report = probe(Blind(model_of("llama3")), packed())
    assert all(change.blind and not change.leaks for change in report.changes)
    assert not report.clean
    assert any("BLIND" in line for line in verdicts(report))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({6: 3}, "loss across a boundary: place 6 of document 0"),
        ({10: -1}, "shifted target: place 10"),
    ],
)
def test_a_planted_target_is_found(change: dict[int, int], sentence: str) -> None:
    if -1 in change.values():  # the token itself instead of the next one
        change = {place: (int(packed().tokens_BT[0, place + 1]) + 1) % V for place in change}
    report = probe(model_of("llama3"), with_targets(change))
    assert not report.clean
    assert len(report.wrong) == 1
    assert report.wrong[0].startswith(sentence)


def test_shifted_targets_are_counted_but_only_some_printed() -> None:
    batch = packed()
    shifted = dataclasses.replace(batch, targets_BT=batch.targets_BT.roll(1, 1))
    report = probe(model_of("llama3"), shifted)

    assert len(report.wrong) > 20

    lines = verdicts(report)
    assert sum("shifted target" in line or "across" in line for line in lines) == 8
    assert f"... and {len(report.wrong) - 8} more" in lines


def test_loss_on_a_masked_token_is_found() -> None:
    learned = torch.ones(1, T, dtype=torch.bool)
    learned[0, 12] = False
    report = probe(model_of("llama3"), packed(), learned)
    assert [sentence.split(":")[0] for sentence in report.wrong] == ["loss on a masked token"]
    assert "place 11" in report.wrong[0]


def test_a_sequence_without_loss_is_found() -> None:
    report = probe(model_of("llama3"), with_targets(dict.fromkeys(range(T), IGNORE)))
    assert report.wrong == ["no target of the sequence has a loss"]


def test_positions_that_do_not_restart_are_found() -> None:
    batch = dataclasses.replace(packed(), positions_BT=torch.arange(T)[None])
    report = probe(model_of("llama3"), batch)
    assert report.wrong[0] == "wrong position: place 7 of document 1 has position 7, expected 0"


def test_batches_with_a_single_document_are_rejected() -> None:
    batch = packed()
    with pytest.raises(ValueError, match="without documents_BT"):
        probe(model_of("llama3"), dataclasses.replace(batch, documents_BT=None))
    with pytest.raises(ValueError, match="one document"):
        probe(
            model_of("llama3"),
            dataclasses.replace(batch, documents_BT=torch.zeros_like(batch.tokens_BT)),
        )


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    rows = [{"text": f"document {i} " + "word " * (i % 5 + 1)} for i in range(50)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {
        "model.overrides.num_layers": 2,
        "training.dataset": "jsonl",
        "training.dataset_path": file,
        "training.seq_len": 128,
        "training.local_batch_size": 2,
        "data.document_mask": "on",
    }
    command_line = []
    for name, value in options.items():
        command_line += [f"--{name}", str(value)]
    return command_line


def test_the_verb_prints_boundaries_and_the_verdict(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "targets have a loss" in out
    assert "boundary of documents" in out
    assert "no loss" in out
    assert out.rstrip().splitlines()[-1].startswith("verdict: no leak")


def test_the_verb_rejects_data_without_a_document_mask(arguments: list[str]) -> None:
    with pytest.raises(ConfigError, match="data.document_mask"):
        main([*arguments[:-1], "off"])


def test_the_verb_refuses_sequences_of_one_document(arguments: list[str]) -> None:
    message = 'data.packing="padded": .*; reason: it puts each document into its own sequence'
    with pytest.raises(ConfigError, match=message):
        main([*arguments, "--data.packing", "padded"])


def test_the_verb_refuses_a_model_too_large_to_run_here(arguments: list[str]) -> None:
    with pytest.raises(
        ConfigError, match='model.flavor="8B" has 8.0 billion parameters.*use a smaller flavor'
    ):
        main([*arguments[2:], "--model.flavor", "8B"])


def test_the_verb_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "probe", "--help"]) == 0
    assert "shardtrain data probe" in capsys.readouterr().out


@pytest.mark.parametrize("long_documents", ["split", "cut"])
def test_fitted_documents_end_in_a_target_that_is_no_input(
    arguments: list[str], capsys: pytest.CaptureFixture[str], long_documents: str
) -> None:
    arguments = ["256" if argument == "128" else argument for argument in arguments]
    assert (
        main([*arguments, "--data.packing", "first_fit", "--data.long_documents", long_documents])
        == 0
    )
    assert "verdict: no leak" in capsys.readouterr().out
