"""Invalid Muon options, and Muon options of another optimizer, are one problem each, with a fix."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardtrain.config import check, load


def problems(tmp_path: Path, text: str) -> list[str]:
    file = tmp_path / "run.toml"
    file.write_text(text)
    return [str(problem) for problem in check(load(file, []))]


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ("muon_momentum = -0.1", ["optimizer.muon_momentum=-0.1", "at least 0 and below 1"]),
        ("muon_momentum = 1.0", ["optimizer.muon_momentum=1.0", "at least 0 and below 1"]),
        ("muon_steps = 0", ["optimizer.muon_steps=0", "at least 1"]),
        ("muon_update_rms = 0.0", ["optimizer.muon_update_rms=0.0", "above 0"]),
        ("qk_clip_threshold = -1.0", ["optimizer.qk_clip_threshold=-1.0", "must not be negative"]),
    ],
)
def test_a_wrong_value_is_one_problem(tmp_path: Path, line: str, fragments: list[str]) -> None:
    [problem] = problems(tmp_path, f'[optimizer]\nname = "Muon"\n{line}\n')
    assert all(fragment in problem for fragment in fragments)


@pytest.mark.parametrize(
    "line",
    [
        "muon_momentum = 0.9",
        "muon_nesterov = false",
        "muon_steps = 6",
        "muon_update_rms = 0.3",
        'muon_dtype = "float32"',
        'muon_adamw_patterns = ["embed*"]',
    ],
)
def test_an_option_of_muon_stops_a_run_with_another_optimizer(tmp_path: Path, line: str) -> None:
    [problem] = problems(tmp_path, f"[optimizer]\n{line}\n")
    assert "is only supported by Muon" in problem
    assert 'set optimizer.name = "Muon"' in problem
    assert not problems(tmp_path, f'[optimizer]\nname = "Muon"\n{line}\n')


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "is only supported by Muon"),
        (
            'name = "Muon"\n[model]\nname = "transformers"',
            "whose query and key weights are not known",
        ),
        ('name = "Muon"\n[lora]\nenable = true', "which lora.enable freezes"),
        ('name = "Muon"\n[task]\nname = "preference"', "whose padding depends on the mesh"),
    ],
)
def test_qk_clip_is_rejected_where_it_cannot_work(tmp_path: Path, text: str, rule: str) -> None:
    text = f"[optimizer]\nqk_clip_threshold = 100.0\n{text}\n"
    lines = [line for line in problems(tmp_path, text) if "qk_clip_threshold=100" in line]
    assert len(lines) == 1
    assert rule in lines[0]
    assert ", or remove " in lines[0]


def test_qk_clip_with_muon_has_no_problem(tmp_path: Path) -> None:
    assert not problems(tmp_path, '[optimizer]\nname = "Muon"\nqk_clip_threshold = 100.0\n')
