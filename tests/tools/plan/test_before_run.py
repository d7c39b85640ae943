"""What cannot fit on the devices of a cluster is not submitted: one line says what is there, what is needed, a fix."""

from __future__ import annotations

import pytest

from shardtrain import cli

SLURM = ["launch", "slurm", "--dry-run", "--launch.nodes", "2", "--launch.devices_per_node", "8"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ["llama3_70b", "--launch.device", "a100-40gb"],
            'launch.device="a100-40gb" has 39.40 GiB, and a rank of 16 is planned to need',
        ),
        (["llama3_8b", "--launch.device", "h1000"], 'launch.device="h1000" is not a known device; did you mean h100'),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_submitted(words, told, capsys) -> None:
    assert cli.main([*SLURM[:2], words[0], *SLURM[2:], *words[1:]]) == 2
    printed = capsys.readouterr()
    assert told in printed.err and printed.out == "" and len(printed.err.strip().splitlines()) == 1


@pytest.mark.parametrize("device", [["--launch.device", "h100"], []])
def test_what_fits_or_is_not_asked_about_is_submitted(device, capsys) -> None:
    assert cli.main([*SLURM[:2], "llama3_8b", *SLURM[2:], *device]) == 0
    assert "#SBATCH" in capsys.readouterr().out
