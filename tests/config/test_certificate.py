"""Certificate files: written atomically, checked without torch, and rejected in one line if they are not sound."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardtrain import config
from shardtrain.config import certificate
from shardtrain.utils.errors import ConfigError


def write(path: Path, *options: str, **changes: object) -> Path:
    """Write a certificate of the default configuration."""
    loaded = config.load(None, list(options))
    document = {
        "format": certificate.FORMAT,
        "date": "2026-11-28T12:00:00+00:00",
        "holds": True,
        **certificate.facts_of(loaded),
        "compared_axes": ["dp_shard", "tp"],
        "dimensions": [],
        **changes,
    }
    certificate.write(str(path), document)
    return path


def state(path: Path, *options: str) -> certificate.CertificateState:
    return certificate.check(str(path), config.load(None, list(options)), "--check")


def test_an_unchanged_configuration_keeps_its_certificate(tmp_path):
    path = write(tmp_path / "c.json")
    assert state(path).applies
    assert str(state(path)).startswith(f"{path} (sha256 ")
    assert str(state(path)).endswith(") applies")


@pytest.mark.parametrize(
    "option",
    [
        ("--job.dump_folder", "elsewhere"),
        ("--metrics.log_freq", "1"),
        ("--training.steps", "7"),
        ("--parallelism.tensor_parallel_degree", "4"),
        ("--parallelism.data_parallel_shard_degree", "64"),
    ],
)
def test_output_length_and_number_of_ranks_may_change(tmp_path, option):
    assert state(write(tmp_path / "c.json"), *option).applies


@pytest.mark.parametrize(
    ("option", "change"),
    [
        (("--optimizer.lr", "1"), "optimizer.lr: 0.0008 -> 1.0"),
        (("--training.seq_len", "64"), "training.seq_len: 2048 -> 64"),
        (("--training.local_batch_size", "2"), "training.local_batch_size: 8 -> 2"),
        (("--parallelism.pipeline_parallel_degree", "2"), "the axis pp was not compared"),
        (("--activation_checkpoint.mode", "full"), 'activation_checkpoint.mode: "selective" -> "full"'),
        (("--compile.enable", "true"), "compile.enable: "),
    ],
)  # fmt: skip
def test_a_change_that_was_not_compared_is_named(tmp_path, option, change):
    (line,) = state(write(tmp_path / "c.json"), *option).changes
    assert change in line


def test_changed_files_versions_and_code_are_named(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "one"}\n')
    options = ("--training.dataset", "jsonl", "--training.dataset_path", str(rows))
    path = write(tmp_path / "c.json", *options, code_sha256="0", versions={"torch": "1.0"})
    rows.write_text('{"text": "two"}\n')
    changes = "\n".join(state(path, *options).changes)

    assert "training.dataset_path: the file or folder has other contents" in changes
    assert 'version of torch: "1.0" -> ' in changes
    assert "the code of shardtrain has changed" in changes


def test_a_certificate_that_does_not_hold_does_not_apply(tmp_path):
    certificate_state = state(write(tmp_path / "c.json", holds=False))
    assert not certificate_state.applies
    assert "a number differs or was not checked" in str(certificate_state)


def damaged(path: Path) -> None:
    path.write_text(path.read_text().replace('"holds": true', '"holds": false'))


def foreign(path: Path) -> None:
    path.write_text('{"format": "another"}')


def huge(path: Path) -> None:
    path.write_bytes(b" " * (certificate.MAX_BYTES + 1))


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def nested(path: Path) -> None:
    path.write_text("[" * 100_000)


def other_types(path: Path) -> None:
    write(path, versions=[1])


def missing(path: Path) -> None:
    path.unlink()


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (damaged, "is damaged or was edited"),
        (foreign, "is not a certificate"),
        (huge, "is larger than"),
        (pipe, "cannot be read"),
        (nested, "is not JSON"),
        (other_types, "has one of another type"),
        (missing, "No such file"),
        (folder, "cannot be read"),
    ],
)
def test_a_file_that_is_no_certificate_is_one_line(tmp_path, change, rule):
    path = write(tmp_path / "c.json")
    change(path)
    with pytest.raises(ConfigError) as error:
        state(path)
    assert rule in str(error.value)
    assert "\n" not in str(error.value)


def test_a_check_does_not_import_torch(tmp_path):
    path = write(tmp_path / "c.json")
    code = f"""
import sys
from shardtrain import cli
print(cli.main(["verify", "--check", {str(path)!r}]))
print("torch" in sys.modules)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )

    assert result.stdout.splitlines()[1:] == ["0", "False"], result


def test_exit_status_and_json_of_a_check(tmp_path, capsys):
    from shardtrain import cli

    path = str(write(tmp_path / "c.json"))
    assert cli.main(["verify", "--check", path, "--optimizer.lr", "1"]) == 4
    assert "optimizer.lr: 0.0008 -> 1.0" in capsys.readouterr().out
    assert cli.main(["verify", "--check", path, "--json", "--optimizer.lr", "1"]) == 4

    answer = json.loads(capsys.readouterr().out)
    assert answer["changes"] == ["optimizer.lr: 0.0008 -> 1.0"]
    assert answer["exit_code"] == 4
    assert cli.main(["verify", "--check", str(tmp_path / "none.json")]) == 2


def test_a_certificate_that_cannot_be_written_is_refused_at_once(tmp_path):
    with pytest.raises(ConfigError, match="is a folder"):
        certificate.require_writable(str(tmp_path), "--certificate")

    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is not a folder that you can write to"):
        certificate.require_writable(str(tmp_path / "file" / "c.json"), "--certificate")

    certificate.require_writable(str(tmp_path / "new" / "c.json"), "--certificate")
    assert not (tmp_path / "new").exists()


def test_data_below_folders_and_of_patterns_are_part_of_the_certificate(tmp_path):
    rows = tmp_path / "rows/more/a.jsonl"
    rows.parent.mkdir(parents=True)
    for path in (tmp_path / "rows", tmp_path / "rows/*/*.jsonl"):
        rows.write_text("first")
        options = ("--training.dataset", "jsonl", "--training.dataset_path", str(path))
        certified = write(tmp_path / "c.json", *options)
        assert state(certified, *options).applies
        rows.write_text("other")
        assert list(state(certified, *options).changes) == [
            "training.dataset_path: the file or folder has other contents"
        ]


def test_a_dataset_file_and_a_reference_model_are_part_of_the_certificate(tmp_path):
    for option in ("training.dataset", "task.reference_path"):
        file = tmp_path / "file.py"
        file.write_text("first = 1")
        options = (f"--{option}", str(file))
        certified = write(tmp_path / "c.json", *options)
        assert state(certified, *options).applies
        file.write_text("other = 1")
        assert list(state(certified, *options).changes) == [
            f"{option}: the file or folder has other contents"
        ]


def test_a_dimension_that_the_configuration_did_not_have_is_a_change(tmp_path):
    certified = write(tmp_path / "c.json")
    (change,) = state(certified, "--validation.enable", "true").changes
    assert change.startswith("validation.enable: ")
