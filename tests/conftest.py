"""Set-up for the tests in tests/ and the doctests in shardtrain/: see tests/tiers.py."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from shardtrain.launch.stop_request import GRACEFUL
from shardtrain.utils import log

pytest_plugins = ("tiers", "readability")

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure: time is asserted nowhere
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _undo_what_a_command_sets() -> Iterator[None]:
    """Undo what a command that ran in this process has set of the log and of signals.

    Its lines would be output of the next test, and a child that the next test forks would ignore SIGTERM, as a command
    does after its run has ended.
    """
    handlers = {number: signal.getsignal(number) for number in GRACEFUL}
    yield
    log.reset()
    for number, handler in handlers.items():
        signal.signal(number, handler)
