"""A real Slurm cluster for the tests in this folder, started once per pytest process."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

import pytest
import slurm_cluster


@pytest.fixture(scope="session")
def cluster_of_session(tmp_path_factory):
    """Environment that points Slurm's commands to the cluster. Its second node cannot see ``UNSEEN``."""
    if slurm_cluster.missing():
        pytest.skip(slurm_cluster.missing())
    folder = tmp_path_factory.mktemp("slurm")
    for parent in (folder, *folder.parents):  # munge's user must reach its socket
        if parent == Path(tempfile.gettempdir()):
            break
        parent.chmod(parent.stat().st_mode | 0o055)
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
    """Variables of the cluster. Jobs that a failed test left running are cancelled, because they slow later tests."""
    yield cluster_of_session
    slurm_cluster.cancel_all(cluster_of_session)
