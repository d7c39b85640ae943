"""A real Slurm for the tests of this folder, started once by each process that runs them."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
import slurm_cluster


@pytest.fixture(scope="session")
def cluster_of_session(tmp_path_factory):
    """Variables with which Slurm's commands find the cluster; its second node does not see the folder ``UNSEEN``."""
    if slurm_cluster.missing():
        pytest.skip(slurm_cluster.missing())
    folder = tmp_path_factory.mktemp("slurm")
    for one in (folder, *folder.parents):  # munge's user must reach its socket
        if one == Path(tempfile.gettempdir()):
            break
        one.chmod(one.stat().st_mode | 0o055)
    unseen = folder / "unseen"
    unseen.mkdir()
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(slurm_cluster.cluster(folder / "cluster", unseen))
        except AssertionError as error:
            pytest.skip(f"Slurm is installed here, and its daemons do not start: {error}")
        yield names | {"UNSEEN": str(unseen)}


@pytest.fixture
def cluster(cluster_of_session):
    """The variables; what a test that failed has left running ends, for it would slow all tests that follow."""
    yield cluster_of_session
    slurm_cluster.cancel_all(cluster_of_session)
