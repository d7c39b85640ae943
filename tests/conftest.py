"""Set-up for the tests in tests/ and the doctests in shardtrain/: see tests/tiers.py."""

import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from shardtrain.utils import log
from shardtrain.utils.stop_signals import GRACEFUL

pytest_plugins = ("tiers", "readability")

# no test asserts times, because the machine may be busy
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.fixture(autouse=True)
def _restore_log_and_signals() -> Iterator[None]:
    """Restore the log and signal handlers after a command that ran in this process.

    Otherwise its log lines would appear in the next test, and forks of the next test would ignore SIGTERM, as a command
    does after its run has ended.
    """
    handlers = {number: signal.getsignal(number) for number in GRACEFUL}
    yield
    log.reset()
    for number, handler in handlers.items():
        signal.signal(number, handler)
