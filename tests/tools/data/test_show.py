"""``data show`` prints the tokens exactly as the model receives them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import tokenizers_of_kinds

from shardtrain import cli
from shardtrain.config.toml_writer import RESOLVED_CONFIG
from shardtrain.data.tokenizers.open_tokenizer import ByteTokenizer
from shardtrain.tools.data import show
from shardtrain.utils.errors import ConfigError


@pytest.fixture
def pairs(tmp_path):
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "Capital?", "completion": "Paris"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        "--training.dataset=jsonl",
        f"--training.dataset_path={tmp_path / 'a.jsonl'}",
        "--data.format=prompt_completion",
        "--model.hf_assets_path=bytes",
    ]


def test_documents_positions_and_targets_are_shown(pairs, capsys):
    assert show.main([*pairs, "--data.packing=first_fit", "--training.seq_len=24"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "learned text is between « and »",
        "== position 0: sample 0 of jsonl, 8 targets, 2 documents",
        "-- document 0: positions 0..6",
        "<bos>2+2=«4<eos>»",
        "-- document 1: positions 0..14",
        "<bos>Capital?«Paris<eos>»",
        "-- 4 filler tokens",
        "padding: 16.7 % of these sequences, 16.7 % of all of jsonl",
    ]


def test_split_documents_continue_in_the_next_sequence(pairs, capsys):
    arguments = [*pairs, "--data.packing=concat", "--training.seq_len=10", "--rows", "9", "--json"]
    assert show.main([*arguments, "--training.local_batch_size=1"]) == 0
    sequences = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(sequences) == 1, "a step must have one sequence"
    assert show.main([*arguments, "--training.local_batch_size=3"]) == 0

    sequences = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["position"] for row in sequences] == [0, 1, 2]

    num_targets = sum(row["num_targets"] for row in sequences)
    num_learned = 0
    for row in sequences:
        for part in row["parts"]:
            for piece in part["pieces"]:
                if piece["learned"]:
                    num_learned += len(piece["tokens"])
    # both completions, each with its end token
    assert num_targets == num_learned == len("4") + 1 + len("Paris") + 1


def test_colors_mark_targets_and_text_cannot_control_the_terminal():
    pieces = [show.TokenRun(False, [256, 65]), show.TokenRun(True, [66, 27, 257])]
    text = show.render(
        show.ShownSequence(0, "x", 3, 2, [show.DocumentPart(0, 0, pieces)], 0),
        ByteTokenizer(),
        color=True,
    )

    assert "\033[90m<bos>A\033[0m\033[32mB\\x1b<eos>\033[0m" in text


def test_pieces_are_cut_from_the_text_of_the_entire_document():
    """A Metaspace tokenizer drops the leading space of a piece that is decoded separately."""
    tokenizer = tokenizers_of_kinds.open_kind("metaspace_first")
    ids = tokenizer.encode("Q: what?\nA: two words").tolist()
    tail = tokenizer.encode("x two words").tolist()[1:]
    pieces = [show.TokenRun(False, ids[: -len(tail)]), show.TokenRun(True, tail)]
    text = show.render(
        show.ShownSequence(0, "x", 3, 2, [show.DocumentPart(0, 0, pieces)], 0),
        tokenizer,
        color=False,
    )

    assert text.splitlines()[2:] == ["Q: what?", "A:« two words»"]

    # é is two bytes
    half_characters = [
        show.TokenRun(False, [0xC3]),
        show.TokenRun(True, [0xA9, 0x21]),
    ]
    text = show.render(
        show.ShownSequence(0, "x", 3, 2, [show.DocumentPart(0, 0, half_characters)], 0),
        ByteTokenizer(),
        color=False,
    )

    assert text.splitlines()[-1] == "«é!»"


def test_nproc_is_world_size(pairs, capsys):
    for option in ("--world_size", "--nproc"):
        assert (
            show.main(
                [*pairs, option, "2", "--training.local_batch_size=1", "--training.seq_len=10"]
            )
            == 0
        )
        assert capsys.readouterr().out.count("== position") == 2


def test_the_steps_of_a_finished_run_are_shown_from_its_folder(pairs, tmp_path, capsys):
    folder = tmp_path / "run"
    folder.mkdir()
    command = [
        sys.executable,
        "-m",
        "shardtrain",
        "config",
        "show",
        *pairs,
        "--training.local_batch_size=1",
        "--training.on_data_end=repeat",
    ]
    resolved = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (folder / RESOLVED_CONFIG).write_text(
        "# shardtrain 0, torch 2, Python 3, 4 ranks, started from the defaults\n" + resolved
    )
    assert show.main([str(folder), "--step", "3", "--rows", "9"]) == 0

    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("==")]
    assert [head.split(":")[0] for head in heads] == [f"== position {p}" for p in (8, 9, 10, 11)]


def test_a_folder_that_is_not_a_run_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"has no config.resolved.toml; name the job.dump_folder of a run"
    ):
        show.main([str(tmp_path)])
    with pytest.raises(ConfigError, match='--step=0 must be|--step="0" must be'):
        show.main(["--step", "0"])


def test_help_explains_the_marks(capsys):
    assert cli.main(["data", "show", "--help"]) == 0
    assert "learned text is between « and »" in capsys.readouterr().out


def test_a_step_beyond_the_end_of_the_data_is_an_error(pairs):
    with pytest.raises(ConfigError, match="--step=1000 is beyond the end of the data"):
        show.main([*pairs, "--training.seq_len=24", "--step", "1000"])
