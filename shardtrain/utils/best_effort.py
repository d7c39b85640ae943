"""What is counted, drawn and noted beside the training: where it fails, that is one warning, and training continues."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardtrain.utils.log import logger

T = TypeVar("T")


class BestEffort:
    """Calls that a run can do without; the first that fails is one warning, later ones are tried in silence.

    Nothing in them may be a collective: the other ranks would wait for this one.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._warned = False

    def call(self, action: Callable[[], T], otherwise: T) -> T:
        """The result of ``action``, or ``otherwise`` where it raises."""
        try:
            return action()
        except Exception as error:
            self.warn(error)
            return otherwise

    def warn(self, error: Exception) -> None:
        """Tell of the first error."""
        if not self._warned:
            self._warned = True
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            logger.warning(f"{self._what} failed: {reason}; training continues without it")
