"""Set-up for the tests in tests/ and the doctests in shardtrain/: see tests/tiers.py."""

from collections.abc import Iterator

import pytest
from hypothesis import settings

from shardtrain.utils import log

pytest_plugins = ("tiers",)

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure: time is asserted nowhere
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _log_of_one_test() -> Iterator[None]:
    """Undo what a command that ran in this process has set of the log: its lines would be output of the next test."""
    yield
    log.reset()
