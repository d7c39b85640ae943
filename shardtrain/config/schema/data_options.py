"""Options of data. The docstring of the package explains the conventions for options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RowFormat = Literal["text", "prompt_completion", "chat"]
ROLES = ("system", "user", "assistant")
"""Turns of a conversation."""
END_OPTIONS = ("add_bos", "add_eos", "separator")
"""Options for the tokens at the beginning and end of a document."""


@dataclass(frozen=True)
class DataLoaderOptions:
    """Processes that prepare batches for the trainer."""

    num_workers: int = 0
    """Number of processes that prepare batches; 0: the trainer's process prepares them."""
    persistent_workers: bool = False
    """Keep the workers between epochs."""
    pin_memory: bool = False
    """Put batches into pinned host memory, for faster copies to a GPU."""
    prefetch_factor: int | None = None
    """Batches that each worker prepares in advance."""


@dataclass(frozen=True)
class DataSource:
    """One dataset of a mixture. NAME in [data.sources.NAME] is of your choice."""

    # The dataset and its weight in the mixture.
    dataset: str = "jsonl"
    """A file of shardtrain/data/sources, without ".py" (shardtrain)."""
    dataset_path: str | None = None
    """File or folder that the dataset reads (shardtrain)."""
    weight: float = 1.0
    """Share of the training tokens, relative to the other sources' weights (shardtrain)."""
    epochs: int | None = None
    """Passes over this source, after which the data end; unset: the source is repeated as
    often as its weight requires (shardtrain).
    """
    # Differences from the options of [data].
    format: RowFormat | None = None
    """data.format of this source (shardtrain)."""
    text_field: str | None = None
    """data.text_field of this source (shardtrain)."""
    template: dict[str, str] = field(default_factory=dict)
    """data.template of this source (shardtrain)."""
    split: str | None = None
    """data.split of this source (shardtrain)."""
    subset: str | None = None
    """data.subset of this source (shardtrain)."""


@dataclass(frozen=True)
class DataStage:
    """Weights of the sources up to a number of training tokens. Each stage is a table [[data.stages]]."""

    until_tokens: int = 0
    """Training tokens, counted from the start of the run, at which the stage ends; 0, for the last
    stage only, is the end of training (shardtrain).
    """
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each source, by name; a source without a weight is not read (shardtrain)."""


@dataclass(frozen=True)
class Data:
    """Conversion of rows to sequences of tokens: format of a row, packing, mixture and masking of documents."""

    # Reading.
    mode: Literal["auto", "memory", "stream"] = "auto"
    """When text is tokenized: all of it at start (memory), or while training runs (stream). auto is
    memory up to 64 MiB of input. Prepared shards (dataset "tokens") need neither (shardtrain).
    """
    cache_tokens: bool = True
    """With mode memory, cache the tokens in the user's cache folder for the next start, up
    to 2 GiB for all datasets (shardtrain).
    """
    readers: int = 256
    """Virtual readers that divide the documents of a stream, independent of the number of ranks.
    Another number is another data order (shardtrain).
    """
    # Columns of a row.
    format: RowFormat = "text"
    """Content of a row: a text; a prompt and its completion, with loss on the completion; or a
    conversation, with loss on the assistant's turns (shardtrain).
    """
    template: dict[str, str] = field(default_factory=dict)
    """Jinja templates that create the columns of the format from the columns of a row: {prompt =
    "{{ question }}"}. With chat the entries are system, user and assistant (shardtrain).
    """
    text_field: str = "text"
    """Column of the text; dots reach into nested objects (shardtrain)."""
    prompt_field: str = "prompt"
    """Column of the prompt (shardtrain)."""
    completion_field: str = "completion"
    """Column of the completion (shardtrain)."""
    messages_field: str = "messages"
    """Column of the conversation: a list of {role, content} objects (shardtrain)."""
    tools_field: str = "tools"
    """Column of the tools that a conversation may call, if the row has it (shardtrain)."""
    # Images.
    images_field: str = ""
    """Column of the image or the list of images of a conversation; empty: "images" or "image" (shardtrain)."""
    image_folder: str = ""
    """Folder of the images that rows name by path; empty: the folder of the dataset (shardtrain)."""
    max_image_pixels: int = 67108864
    """Maximum width x height of an image. A larger one is a bad row (shardtrain)."""
    max_image_bytes: int = 33554432
    """Maximum size of an image file. A larger one is a bad row (shardtrain)."""
    # Ends of documents, and chat templates.
    add_bos: bool | None = None
    """Begin each text with bos, in training, generate and evaluate; unset: as the tokenizer's files specify
    (shardtrain)."""
    add_eos: bool | None = None
    """End each training document with eos; unset: true if the tokenizer has an eos (shardtrain)."""
    separator: str | None = None
    """Text that follows each document, after eos if both are used; special tokens are allowed (shardtrain)."""
    chat_template: str | None = None
    """File of a Jinja chat template; the tokenizer's own by default (shardtrain)."""
    learn_turn_separator: bool = False
    """Also compute the loss of the newline after the token that ends an assistant's turn, as TRL
    does with ChatML. A template with {% generation %} marks ignores this option (shardtrain).
    """
    turn_end: str | None = None
    """Special token that ends the assistant's last turn, for chat templates without one (GLM-4-MoE). Its loss
    is also computed after earlier turns, if the template writes it there (shardtrain).
    """
    # Packing.
    packing: Literal["auto", "concat", "first_fit", "best_fit", "padded"] = "auto"
    """concat: concatenate all documents, then cut them into sequences; first_fit and best_fit: several
    complete documents per sequence, each in the first sequence with room or in the fullest one; padded: one
    document per sequence; auto: concat if all rows are texts, first_fit if some are prompts or
    conversations (shardtrain).
    """
    long_documents: Literal["auto", "split", "cut", "drop"] = "auto"
    """With first_fit, best_fit and padded, a document longer than seq_len continues in another sequence
    (split), is truncated (cut), or is skipped (drop). The log counts truncated and skipped
    documents. auto: split for texts, cut for prompts and conversations (shardtrain).
    """
    document_mask: Literal["auto", "on", "off"] = "auto"
    """Mask attention between the documents of a sequence, and restart positions in each document.
    auto: on for prompt_completion, chat, first_fit, best_fit and padded (shardtrain).
    """
    # Datasets of the Hugging Face Hub.
    split: str = "train"
    """Split of a Hugging Face dataset (shardtrain)."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset (shardtrain)."""
    streaming: bool | None = None
    """Stream a Hugging Face dataset instead of downloading it; presets have their own default (shardtrain)."""
    # Limits for rows that cannot be used.
    bad_rows: Literal["stop", "skip"] = "stop"
    """If a row cannot be read: stop with its file and line, or skip and count it (shardtrain)."""
    bad_rows_max_fraction: float = 0.001
    """With bad_rows skip, fraction of bad rows above which the run stops, 0..1 (shardtrain)."""
    long_rows_max_fraction: float = 0.5
    """Rows whose prompt fills seq_len have no target token and are skipped. Fraction of such rows
    above which the run stops, 0..1 (shardtrain).
    """
    max_row_bytes: int = 16777216
    """Maximum size of a row. A larger one is a bad row (shardtrain)."""
    # Limits for opening untrusted files.
    artefact_memory_bytes: int = 1073741824
    """Memory limit of the process that first opens a tokenizer, an Arrow or a
    suspicious Parquet file (shardtrain).
    """
    artefact_seconds: int = 30
    """CPU time limit of that process, and of decompression until the first row (shardtrain)."""
    # Mixtures.
    sources: dict[str, DataSource] = field(default_factory=dict)
    """A mixture of datasets, instead of training.dataset (shardtrain)."""
    stages: list[DataStage] = field(default_factory=list)
    """Weights that change during training; by default the sources' own weights (shardtrain)."""
