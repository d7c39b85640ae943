"""Correct model files in other styles cause no false alarm, and only impossible meshes are reported as impossible."""

from __future__ import annotations

import pytest
from model_files import ask
from other_styles import FILES, FOLDER, NEWER, NO_CHAIN, NOT_POSSIBLE
from tiers import cases

from shardtrain.tools import verify
from shardtrain.tools.verify import meshes, shrink, verify_request
from shardtrain.train import trainer
from shardtrain.utils.errors import ConfigError

MESHES = ("dp_shard=2", "tp=2", "pp=2", "cp=2")


LATER = [*NEWER, *NO_CHAIN]


@pytest.mark.parametrize(
    "names",
    cases(
        [pytest.param([name for name in FILES if name not in LATER], id="first")],
        nightly=[pytest.param(LATER, id="later")],
    ),
)
def test_a_correct_file_causes_no_alarm(names, tmp_path):
    """Check all files in one launch, because starting processes takes most of the time."""
    results = ask(tmp_path, {name: (FOLDER / f"{name}.py").read_text() for name in names})
    for name in names:
        assert results[name]["broken"] == [], name
        known = {mesh.partition("=")[0] for mesh in NOT_POSSIBLE.get(name, {})}
        assert set(results[name]["impossible"]) <= known, (name, results[name])


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        name if name == "dropout" else pytest.param(name, marks=pytest.mark.nightly)
        for name in FILES
    ],
)
@pytest.mark.nightly(
    "on every mesh",
    by="tests/tools/verify/test_others.py::test_a_correct_file_causes_no_alarm",
)
def test_a_correct_file_has_the_same_numbers_on_every_possible_mesh(name, tmp_path):
    loaded = verify.load(verify_request.VerifyOptions(str(FOLDER / f"{name}.py")))
    plans = []
    for mesh in MESHES:
        try:
            plans += meshes.requested(loaded, [mesh], ())
        except ConfigError as error:
            assert NOT_POSSIBLE[name][mesh] in str(error)

    task, _ = verify.probe(shrink.prepare(plans, loaded, 2, False), tmp_path)
    for row in verify.verify(task, trainer, tmp_path):
        reason = NOT_POSSIBLE.get(name, {}).get(row.mesh)
        if reason:
            assert row.verdict == "not possible", row
            assert reason in row.cause, row
        else:
            assert row.verdict == "same", row
