"""NEFTune (Jain et al. 2023): uniform noise on the output of the token embedding, in training only.

The noise of a token has D numbers from -m to m with m = alpha / sqrt(L D), where L is the number of tokens of
its document in the row. Without documents, L is the number of tokens of the row without padding.

A random number is a function of the seed, the step, the sample, the position in the row and the feature, so
the mesh does not change it. The tokens of a row are divided into blocks. A generator that is seeded by the
block draws its numbers, and a rank draws the blocks of its tokens.

Shape suffixes: B rows, T tokens of a row, t tokens of this rank, D features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardtrain.config.schema import Config
from shardtrain.distributed.context_parallel import cores as context_parallel
from shardtrain.distributed.context_parallel.masks import sequence_part
from shardtrain.distributed.mesh import Mesh
from shardtrain.layout import Layout
from shardtrain.ops.accelerator import to_device
from shardtrain.ops.seeding import seed_of
from shardtrain.utils.errors import ConfigError, Problem

BLOCK_TOKENS = 256
"""Tokens per generator. It must never change, because it determines the noise."""
_STREAM = -1
"""Distinguishes the seeds of the noise from those of dropout, which are not negative."""


class HostBatch(Protocol):
    """The parts of a batch in host memory (``data.Batch``) that determine the noise."""

    @property
    def tokens_BT(self) -> Tensor: ...
    @property
    def sample_ids_B(self) -> Tensor: ...
    @property
    def documents_BT(self) -> Tensor | None: ...
    @property
    def lengths_B(self) -> Tensor | None: ...


def check(model: Any, layout: Layout) -> None:
    """Check that an unsplit model starts with a token embedding, to which noise can be added.

    Raises:
        ConfigError: the model starts with another module.
    """
    embedding = _first_module(model, layout)
    if isinstance(embedding, nn.Embedding):
        return
    reason = f"and LAYOUT.first names {', '.join(layout.first) or 'no module'}"
    if hasattr(model, "hf"):
        reason = f"and {model.config_name} starts with a {type(embedding).__name__}"
    rule = f"requires a model that starts with a single nn.Embedding, {reason}"
    raise ConfigError(Problem("training.neftune_noise_alpha", None, rule, "remove it"))


def of_stage(stage: Any, layout: Layout, mesh: Mesh, config: Config) -> EmbeddingNoise | None:
    """Add noise to the embedding of a pipeline stage or of an unsplit model, and return the noise.

    Return None for a stage without an embedding.
    """
    embedding = _first_module(stage, layout)
    if not isinstance(embedding, nn.Embedding):
        return None
    return EmbeddingNoise(embedding, mesh, config)


def _first_module(model: Any, layout: Layout) -> Any:
    """Return the module that receives the tokens. None if several modules do."""
    if hasattr(model, "hf"):
        return model.hf.get_input_embeddings()
    if len(layout.first) == 1:
        return getattr(model, layout.first[0])
    return None


class EmbeddingNoise:
    """Adds noise to the output of an embedding between ``begin_step`` and ``end_step``."""

    def __init__(self, embedding: nn.Embedding, mesh: Mesh, config: Config) -> None:
        """Add a hook to the embedding, which may be sharded."""
        alpha = config.training.neftune_noise_alpha
        assert alpha is not None
        self._alpha = alpha
        self._mesh = mesh
        self._config = config
        self._step = 0
        # rows of the step in the order of micro-batches
        self._samples: list[int] = []
        self._lengths_BT = torch.empty(0)
        # rows of the current forward pass
        self._rows: range | None = None
        self._generator = torch.Generator(mesh.device)
        embedding.register_forward_hook(self._add)

    def begin_step(self, step: int, batches: Sequence[HostBatch]) -> None:
        """Set the rows of a step: all micro-batches of this rank, in host memory."""
        self._step = step
        self._samples = []
        lengths = []
        for batch in batches:
            self._samples += batch.sample_ids_B.tolist()
            lengths.append(_document_lengths(batch))
        self._lengths_BT = torch.cat(lengths)

    def use_rows(self, first: int, count: int) -> None:
        """Select the rows of the next forward pass. No noise is added outside of a step."""
        self._rows = range(first, first + count) if self._samples else None

    def end_step(self) -> None:
        """Add no more noise until the next ``begin_step``."""
        self._samples = []
        self._rows = None

    def _add(self, _: nn.Module, _inputs: Any, output_BtD: Tensor) -> Tensor:
        """Return the output of the embedding with noise."""
        if self._rows is None:
            return output_BtD
        return output_BtD + self._noise(output_BtD)

    @torch.no_grad()
    def _noise(self, like_BtD: Tensor) -> Tensor:
        columns_t = self._columns(like_BtD.size(1))
        features = like_BtD.size(2)
        rows = self._rows
        assert rows is not None and len(rows) == like_BtD.size(0)
        # NEFTune's magnitude is alpha / sqrt(L * D), with the length L of the token's document.
        lengths_Bt = self._lengths_BT[rows.start : rows.stop, columns_t]
        magnitudes_Bt = self._alpha / (lengths_Bt * features).sqrt()
        magnitudes_Bt1 = to_device(magnitudes_Bt.unsqueeze(2), like_BtD.device)

        noise_BtD = torch.empty(like_BtD.shape, dtype=like_BtD.dtype, device=like_BtD.device)
        for index, row in enumerate(rows):
            for block, block_columns, own_columns in _blocks(columns_t):
                uniform = self._uniform(self._samples[row], block, features)[block_columns]
                scaled = uniform.mul_(magnitudes_Bt1[index, own_columns])
                noise_BtD[index, own_columns] = scaled.to(noise_BtD.dtype)
        return noise_BtD

    def _columns(self, num_tokens: int) -> Tensor:
        """Return the columns of the row that this rank's tokens have, in their order."""
        mesh = self._mesh
        columns_T = torch.arange(self._lengths_BT.size(1))
        columns_t = columns_T
        if mesh.size("cp") > 1:
            balanced = context_parallel.is_balanced(self._config)
            columns_t = sequence_part(columns_T[None], mesh.rank("cp"), mesh.size("cp"), balanced)[
                0
            ]
        # tensor parallelism may split the output along the sequence
        if num_tokens != len(columns_t):
            columns_t = columns_t.chunk(mesh.size("tp"))[mesh.rank("tp")]
        assert num_tokens == len(columns_t)
        return columns_t

    def _uniform(self, sample: int, block: int, features: int) -> Tensor:
        """Return numbers from -1 to 1 for the tokens of a block, (BLOCK_TOKENS, D)."""
        seed = self._config.debug.seed
        self._generator.manual_seed(seed_of(seed, _STREAM, self._step, sample, block))
        shape = (BLOCK_TOKENS, features)
        device = self._mesh.device
        uniform = torch.rand(shape, generator=self._generator, device=device, dtype=torch.float32)
        return uniform.mul_(2).sub_(1)


def _document_lengths(batch: HostBatch) -> Tensor:
    """Return the number of tokens of each token's document, (B, T) float32."""
    num_rows, num_tokens = batch.tokens_BT.shape
    is_text_BT = torch.ones(num_rows, num_tokens)
    if batch.lengths_B is not None:
        is_text_BT = (torch.arange(num_tokens) < batch.lengths_B[:, None]).float()
    documents_BT = torch.zeros(num_rows, num_tokens, dtype=torch.int64)
    if batch.documents_BT is not None:
        # Padding may have a document number that is larger than the row is long.
        documents_BT = batch.documents_BT.clamp(0, num_tokens - 1)
    counts_BT = torch.zeros(num_rows, num_tokens).scatter_add_(1, documents_BT, is_text_BT)
    # the noise of padding has no effect, but must be finite
    return counts_BT.gather(1, documents_BT).clamp_min_(1)


def _blocks(columns_t: Tensor) -> list[tuple[int, slice, slice]]:
    """Divide ascending runs of columns into blocks: (block, columns within the block, this rank's columns)."""
    columns = columns_t.tolist()
    pieces = []
    start = 0
    for end in range(1, len(columns) + 1):
        # A piece ends with the columns, with a gap in them, or at the start of the next block.
        if end < len(columns):
            follows = columns[end] == columns[end - 1] + 1
            if follows and columns[end] % BLOCK_TOKENS != 0:
                continue
        block, first = divmod(columns[start], BLOCK_TOKENS)
        in_block = slice(first, first + end - start)
        pieces.append((block, in_block, slice(start, end)))
        start = end
    return pieces
