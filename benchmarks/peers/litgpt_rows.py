"""Data module with the shared rows, for the ``pretrain`` command of LitGPT."""

from __future__ import annotations

from typing import Any

from litgpt.data import DataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from work import TOKENS, row


class _Rows(Dataset):
    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> Tensor:
        return row(index, TOKENS + 1)


class Rows(DataModule):
    """Yield the rows in order. LitGPT splits each into inputs and targets."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = 1

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = -1) -> None:
        self._rows = batch_size

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(_Rows(), batch_size=self._rows)

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(_Rows(), batch_size=self._rows)
