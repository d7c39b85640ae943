"""Process lists in which some items are bad rows.

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
    """Read a row. A bad row is returned as it is, and a row that ``read`` cannot use becomes one."""
    if isinstance(row, BadRow):
        return row
    try:
        return read(row)
    except Unusable as error:
        return BadRow(error.reason, error.harmless)


def around_bad_rows(
    items: Sequence[T | BadRow], handle: Callable[[list[T]], Iterable[Result | BadRow]]
) -> Iterator[Result | BadRow]:
    """Yield the result of each item, and bad rows as they are.

    ``handle`` takes all good items at once, in order.
    """
    good_items = [item for item in items if not isinstance(item, BadRow)]
    results = iter(handle(good_items))
    for item in items:
        yield item if isinstance(item, BadRow) else next(results)
