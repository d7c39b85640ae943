"""Run the checks of ``verl_checks`` in an environment with verl, which ``verl_environment.sh`` creates."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import patience
import pytest

HERE = Path(__file__).parent
CHECKS = sorted(path.name for path in (HERE / "verl_checks").glob("check_*.py"))


@pytest.mark.nightly(
    "needs verl",
    by="tests/distributed/test_token_runner.py::test_losses_of_tokens_do_not_depend_on_the_mesh",
)
@pytest.mark.parametrize("checks", CHECKS)
def test_the_engine_passes_its_checks_in_verl(checks):
    environment = os.environ.get("SHARDTRAIN_VERL")
    if environment is None:
        pytest.skip("SHARDTRAIN_VERL names no environment of tests/compat/verl_environment.sh")
    command = [
        f"{environment}/bin/python",
        "-m",
        "pytest",
        "-q",
        "--noconftest",
        "-c",
        os.devnull,
        "-p",
        "no:cacheprovider",
    ]
    variables = {
        **os.environ,
        "PYTHONPATH": f"{HERE / 'verl_checks'}:{HERE.parent}",
        "OMP_NUM_THREADS": "1",
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    }
    done = subprocess.run(
        [*command, checks],
        cwd=HERE / "verl_checks",
        env=variables,
        capture_output=True,
        text=True,
        timeout=patience.seconds(380),
    )

    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
