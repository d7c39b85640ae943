"""``data tokenizer train`` is lossless and reproducible, and overwrites nothing without --force."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import patience
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardtrain import cli
from shardtrain.data.tokenizers.open_tokenizer import open_tokenizer
from shardtrain.tools.data import tokenizer as tool
from shardtrain.utils.errors import ConfigError, DataError

pytest.importorskip("tokenizers")

SENTENCE = "the cat sat on a mat while 12345 dogs ran past the café in 東京 and did not stop"
WORDS = SENTENCE.split()


def lines(count: int = 400) -> list[str]:
    texts = []
    for i in range(count):
        indexes = [(i * j + j) % len(WORDS) for j in range(3, 15)]
        texts.append(" ".join(WORDS[index] for index in indexes))
    return texts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    file.write_text(
        "".join(json.dumps({"text": line, "body": {"x": line}}) + "\n" for line in lines())
    )
    return file


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "tokenizer"
    assert run(corpus, folder, "--special", "<|im_start|>", "<|im_end|>") == 0
    return folder


def run(source, folder, *arguments: str) -> int:
    return tool.main(
        [
            "train",
            "--input",
            str(source),
            "--vocab_size",
            "300",
            "--output",
            str(folder),
            *arguments,
        ]
    )


def test_the_folder_is_a_tokenizer_with_its_ends(trained):
    tokenizer = open_tokenizer(str(trained))
    assert tokenizer.vocab_size == 300
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert sorted(file.name for file in trained.iterdir()) == [
        "tokenizer.json",
        "tokenizer_config.json",
    ]


@settings(max_examples=60, derandomize=True)
@given(text=st.text(max_size=60))
def test_every_text_survives_a_round_trip(trained, text):
    tokenizer = _open(str(trained))
    assert tokenizer.decode(tokenizer.encode(text), keep_special=True) == text


_opened: dict[str, object] = {}


def _open(path):
    return _opened.setdefault(path, open_tokenizer(path))


def test_transformers_reads_the_tokenizer_equally(trained):
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(str(trained))
    text = "the café 12345 in 東京<|im_end|>"

    assert (
        reference.encode(text, add_special_tokens=False)
        == open_tokenizer(str(trained)).encode(text).tolist()
    )
    assert (reference.bos_token_id, reference.eos_token_id, reference.pad_token_id) == (0, 1, 2)
    assert reference.encode(text)[:1] == [0] == list(open_tokenizer(str(trained)).prefix_ids), (
        "both must begin with BOS"
    )


def test_two_processes_train_the_same_bytes(corpus, trained, tmp_path):
    code = (
        "import sys; from shardtrain.tools.data.tokenizer import main; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [
        "train",
        "--input",
        str(corpus),
        "--vocab_size",
        "300",
        "--output",
        str(tmp_path / "again"),
    ]
    arguments += ["--special", "<|im_start|>", "<|im_end|>"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=patience.seconds(120),
    )

    assert result.returncode == 0, result.stderr
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (trained / name).read_bytes()


def test_compression_is_measured_on_held_out_text(corpus, tmp_path, capsys):
    assert run(corpus, tmp_path / "x") == 0
    printed = capsys.readouterr().out
    assert "bytes per token on held-out text" in printed
    assert "8 of 8 parts are unchanged" in printed

    texts = tool.TrainingTexts([str(corpus)], None, "text", False)
    assert len(list(texts)) == 392
    assert len(texts.held_out) == 8
    assert texts.documents == 400


def test_too_little_text_for_a_held_out_part_is_reported(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("the cat sat on the mat")
    assert run(tmp_path / "a.txt", tmp_path / "x") == 0
    printed = capsys.readouterr().out
    assert "too little to hold some out" in printed
    assert "instead of 300: the text has no more pairs" in printed


def test_files_are_read_by_their_endings_and_columns(corpus, tmp_path):
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(corpus.read_bytes()))
    assert run(packed, tmp_path / "compressed") == 0
    assert run(corpus, tmp_path / "column", "--text_field", "body.x") == 0
    assert run(corpus.parent, tmp_path / "folder") == 0

    expected = (tmp_path / "compressed" / "tokenizer.json").read_bytes()
    for name in ("column", "folder"):
        assert (tmp_path / name / "tokenizer.json").read_bytes() == expected


def test_a_tokenizer_is_only_overwritten_with_force(trained, corpus, tmp_path):
    before = (trained / "tokenizer.json").read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"--output=.* already contains tokenizer.json and tokenizer_config.json; .*--force",
    ):
        run(corpus, trained)
    assert (trained / "tokenizer.json").read_bytes() == before
    assert run(corpus, tmp_path) == 0 == run(corpus, tmp_path, "--force")


WRONG = {
    "small": (["--vocab_size", "100"], "--vocab_size=100 must be between 259"),
    "no number": (["--vocab_size", "many"], "--vocab_size"),
    "twice": (["--special", "<a>", "<a>"], "--special"),
    "end": (["--special", "<|pad|>"], "--special"),
    "unknown": (["--frobnicate", "1"], "--frobnicate is not an option"),
    "dataset": (["--dataset", "jsonlx"], 'did you mean "jsonl"'),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_reported_in_one_line(corpus, tmp_path, name):
    arguments, message = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        run(corpus, tmp_path / "x", *arguments)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x").exists()


def test_unknown_endings_and_missing_files_are_reported(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="--dataset text"):
        run(tmp_path / "a.bin", tmp_path / "x")
    with pytest.raises(ConfigError, match="absent"):
        run(tmp_path / "absent.jsonl", tmp_path / "x")
    with pytest.raises(ConfigError, match=r"requires an action|use train"):
        tool.main([])


def test_a_bad_row_stops_with_its_location_unless_skipping_is_enabled(tmp_path, capsys):
    file = tmp_path / "a.jsonl"
    rows = [json.dumps({"text": line}) for line in lines(20)]
    file.write_text("\n".join([*rows, '{"body": 1}', '{"text": ""}', "{"]) + "\n")

    with pytest.raises(
        DataError,
        match=r"a\.jsonl:21: has no column 'text'; its columns are body; .*--skip_bad_rows",
    ):
        run(file, tmp_path / "x")
    assert run(file, tmp_path / "x", "--skip_bad_rows") == 0
    assert "2 bad rows skipped" in capsys.readouterr().out

    file.write_text('{"body": "x"}\n')
    with pytest.raises(DataError, match="--text_field"):
        run(file, tmp_path / "y", "--skip_bad_rows")
    assert not (tmp_path / "y").exists()


def test_help_names_every_option(capsys):
    for arguments in (["--help"], ["train", "--help"]):
        assert cli.main(["data", "tokenizer", *arguments]) == 0
    printed = capsys.readouterr().out
    for text in ("--input", "--vocab_size", "--output", "--special", "--force"):
        assert text in printed


def test_a_dataset_file_needs_no_input(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "from shardtrain.data.sources.jsonl import open_source as read\n"
        "from dataclasses import replace\n"
        f"def open_source(request): return read(replace(request, path={str(tmp_path / 'a.jsonl')!r}))\n"
    )
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": line}) + "\n" for line in lines(50))
    )
    arguments = ["train", "--vocab_size", "300", "--output", str(tmp_path / "out")]
    assert tool.main([*arguments, "--dataset", str(tmp_path / "own.py")]) == 0
    assert open_tokenizer(str(tmp_path / "out")).vocab_size == 300


@pytest.mark.parametrize("name", ["a.py", "a.py.gz", "A.PY.xz", "a.txt.bz2", "a.TXT"])
def test_text_and_python_files_are_read_with_any_compression(tmp_path, name):
    (tmp_path / name).touch()
    assert tool._guess(str(tmp_path / name)) == "text"


def test_unreadable_inputs_have_distinct_messages(tmp_path):
    arguments = ["train", "--vocab_size", "300", "--output", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="--input is not given"):
        tool.main(arguments)
    with pytest.raises(ConfigError, match="--input=.*absent.* does not exist"):
        tool.main([*arguments, "--input", str(tmp_path / "absent")])
    with pytest.raises(ConfigError, match='--dataset="tokens" contains tokens and no text'):
        tool.main([*arguments, "--input", str(tmp_path), "--dataset", "tokens"])


def test_a_table_without_a_header_has_numbered_columns(tmp_path):
    file = tmp_path / "rows"
    file.write_text("".join(f"{line}\t{i % 2}\n" for i, line in enumerate(lines())))
    folder = tmp_path / "tokenizer"
    assert run(file, folder, "--dataset", "tsv", "--text_field", "0") == 0
    # more than 256 ids prove that column 0 was used: the labels have no pairs to merge
    assert open_tokenizer(str(folder)).vocab_size == 300
