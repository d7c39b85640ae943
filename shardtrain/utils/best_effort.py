"""Run optional work, such as metrics and plots, so that its failure is a warning and training continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardtrain.utils.log import logger

T = TypeVar("T")


class BestEffort:
    """Calls that may fail. The first failure logs one warning. Later calls still run, and their failures are silent.

    The calls must not contain a collective, because the other ranks would wait for a rank on which it failed.
    ``name`` names the work in the warning.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._warned = False

    def call(self, action: Callable[[], T], otherwise: T) -> T:
        """Return the result of ``action``, or ``otherwise`` if it raises."""
        try:
            return action()
        except Exception as error:
            self.warn(error)
            return otherwise

    def warn(self, error: Exception) -> None:
        """Log the first error."""
        if not self._warned:
            self._warned = True
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            logger.warning(f"{self._name} failed: {reason}; training continues without it")
