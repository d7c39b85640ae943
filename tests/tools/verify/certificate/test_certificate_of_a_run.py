"""A run logs the state of its certificate, stores its hash with checkpoints, and the report shows it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from shardtrain import cli, config
from shardtrain.config import certificate
from shardtrain.config.problems import problems_of
from shardtrain.config.toml_writer import RESOLVED_CONFIG

TINY = [
    *(
        "--model.overrides.num_layers",
        "1",
        "--model.overrides.dim",
        "32",
        "--training.seq_len",
        "32",
    ),
    *("--training.local_batch_size", "1", "--training.steps", "2", "--checkpoint.enable", "true"),
    *(
        "--activation_checkpoint.mode",
        "none",
        "--training.device",
        "cpu",
        "--training.mixed_precision_param",
        "float32",
    ),
]


def write(path: Path, *options: str) -> Path:
    document = {
        "format": certificate.FORMAT,
        "date": "2026-11-28T12:00:00+00:00",
        "holds": True,
        **certificate.facts_of(config.load("defaults", list(options))),
        "compared_axes": ["dp_shard"],
        "dimensions": [],
    }
    certificate.write(str(path), document)
    return path


def test_a_run_records_its_certificate(tmp_path, capsys):
    path = write(tmp_path / "certificate.json", *TINY)
    run = tmp_path / "run"
    arguments = [*TINY, "--job.dump_folder", str(run), "--job.certificate", str(path)]
    assert cli.main(["train", "defaults", "--nproc", "1", *arguments]) == 0, capsys.readouterr()

    log = next(run.rglob("*.log")).read_text()
    assert f"certificate: {path} (sha256 " in log
    assert ") applies" in log

    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    manifest = next((run / "checkpoint" / "step-2").glob("*.json")).read_text()
    assert json.dumps(sha256) in manifest
    assert f"# certificate: {path}" in (run / RESOLVED_CONFIG).read_text()
    assert cli.main(["report", str(run), "-o", str(tmp_path / "report.html")]) == 0
    assert "applies</td>" in (tmp_path / "report.html").read_text()

    # The certificate does not depend on the number of steps, but on the learning rate.
    changed = ["3" if argument == "2" else argument for argument in arguments]
    changed += ["--optimizer.lr", "0.1", "--checkpoint.accept_changes", "all"]
    assert cli.main(["train", "defaults", "--nproc", "1", *changed]) == 0, capsys.readouterr()

    log = next(run.rglob("*.log")).read_text()
    assert "does not apply: optimizer.lr: 0.0008 -> 0.1" in log
    assert "global_batch_size" not in log.split("does not")[1]


@pytest.mark.parametrize(
    ("text", "rule"), [(None, "cannot be read"), ("{}", "is not a certificate")]
)
def test_a_certificate_that_cannot_be_read_is_refused_before_ranks_start(tmp_path, text, rule):
    path = tmp_path / "certificate.json"
    if text is not None:
        path.write_text(text)
    problems = problems_of(config.load(None, ["--job.certificate", str(path)]))
    assert any(problem.option == "job.certificate" and rule in problem.rule for problem in problems)
