"""Documents that occur in two ranges of a row are found with their positions in both."""

from __future__ import annotations

import pytest
import torch

from shardtrain.ops import shared_documents

DOCUMENTS_BT = torch.tensor([[0] * 4 + [1] * 6 + [2] * 14, [0] * 6 + [1] * 18])


def test_shared_documents_are_those_in_both_ranges() -> None:
    shared = shared_documents.shared(DOCUMENTS_BT[:, 8:], DOCUMENTS_BT[:, :8])
    assert shared == [
        (slice(0, 1), slice(0, 2), slice(4, 8)),
        (slice(1, 2), slice(0, 16), slice(6, 8)),
    ]
    assert shared_documents.shared(DOCUMENTS_BT[:, 12:], DOCUMENTS_BT[:, :4]) == []


@pytest.mark.parametrize("bad", [[0, 0, 1, 0], [2, 1, 1, 1]])
def test_document_ids_that_do_not_ascend_are_rejected_in_ranges(bad: list[int]) -> None:
    row = torch.tensor([bad])
    with pytest.raises(ValueError, match="documents_BT must ascend"):
        shared_documents.shared(row, row)


def test_positions_are_relative_to_the_beginning_of_their_range() -> None:
    assert shared_documents.shifted(slice(2, 5), 10) == slice(12, 15)
