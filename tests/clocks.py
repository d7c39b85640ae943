"""Set a wrong wall clock in one process, as on a node without NTP."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable

from torch.distributed.elastic.rendezvous import dynamic_rendezvous as pytorch

from shardtrain.launch import meeting


def set_clock(patch: Callable[..., None], ahead_seconds: float) -> None:
    """Shift the wall clock of this process for PyTorch's rendezvous and that of this package."""
    true_time = time.time

    class Shifted(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return datetime.datetime.now(tz) + datetime.timedelta(seconds=ahead_seconds)

    for module in (pytorch, meeting):
        patch(module, "datetime", Shifted)
    patch(time, "time", lambda: true_time() + ahead_seconds)
