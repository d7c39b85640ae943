"""Process lists of rows, some of which are bad.

Bad rows keep their position in the list. All good rows are processed in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from shardtrain.data.documents.columns import Unusable
from shardtrain.data.sources import BadRow, Row

T = TypeVar("T")
Result = TypeVar("Result")


def attempt(read: Callable[[Mapping[str, Any]], T | BadRow], row: Row) -> T | BadRow:
    """Return the result of ``read`` for a row. Return a BadRow if the row is bad already, or ``read`` rejects it."""
    if isinstance(row, BadRow):
        return row
    try:
        return read(row)
    except Unusable as error:
        return BadRow(error.reason, error.harmless)


def around_bad_rows(
    items: Sequence[T | BadRow], handle: Callable[[list[T]], Iterable[Result | BadRow]]
) -> Iterator[Result | BadRow]:
    """Yield the result for each item, and bad rows unchanged.

    ``handle`` is called once with all good items, and returns their results in order.
    """
    good_items = [item for item in items if not isinstance(item, BadRow)]
    results = iter(handle(good_items))
    for item in items:
        yield item if isinstance(item, BadRow) else next(results)
