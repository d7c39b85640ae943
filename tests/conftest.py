"""Set-up for the tests in tests/ and the doctests in shardtrain/: see tests/tiers.py."""

import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from shardtrain.utils import log
from shardtrain.utils.stop_signals import GRACEFUL

pytest_plugins = ("tiers", "readability")

# On a host without a GPU, fake tensors make a CUDA build of PyTorch report one device. A later backward pass would
# start a thread for it, and autograd would refuse to run in forked ranks of the tests that follow.
if not torch.cuda.is_available():
    torch._C._ensureCUDADeviceGuardSet = lambda: None  # type: ignore[attr-defined]

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
