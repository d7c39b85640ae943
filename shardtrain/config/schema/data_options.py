"""The options of data. The package's docstring has the rules for options."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RowFormat = Literal["text", "prompt_completion", "chat"]
ROLES = ("system", "user", "assistant")
"""Turns of a conversation."""
END_OPTIONS = ("add_bos", "add_eos", "separator")
"""Options that say how a document begins and ends."""


@dataclass(frozen=True)
class DataLoaderOptions:
    """How batches reach the trainer."""

    num_workers: int = 0
    """Processes that prepare batches; 0 prepares them in the trainer."""
    persistent_workers: bool = False
    """Keep the workers between epochs."""
    pin_memory: bool = False
    """Put batches into pinned host memory, for faster copies to a GPU."""
    prefetch_factor: int | None = None
    """Batches prepared ahead by each worker."""


@dataclass(frozen=True)
class DataSource:
    """One dataset of a mixture, under a name of yours: [data.sources.NAME]."""

    dataset: str = "jsonl"
    """A file of shardtrain/data/sources, without ".py" (shardtrain)."""
    dataset_path: str | None = None
    """File or folder that the dataset reads (shardtrain)."""
    weight: float = 1.0
    """Share of the training tokens, relative to the other sources' weights (shardtrain)."""
    epochs: int | None = None
    """Passes over this source, after which the data end; unset: repeated as often as its weight needs (shardtrain)."""
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
    """Weights of the sources up to a number of training tokens: one [[data.stages]]."""

    until_tokens: int = 0
    """Tokens of the whole run at which the stage ends; 0 for the last stage: the end of training (shardtrain)."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each source, by name; a source without a weight is not read (shardtrain)."""


@dataclass(frozen=True)
class Data:
    """From rows of a dataset to sequences of tokens: what a row means, how documents are packed, mixed and masked."""

    mode: Literal["auto", "memory", "stream"] = "auto"
    """When text is tokenized: all of it at start (memory), or while training runs (stream). auto is memory up to 64 MiB
    of input. Prepared shards (dataset "tokens") need neither (shardtrain)."""
    cache_tokens: bool = True
    """Keep the tokens of files that are read whole at start in the user's cache folder, for the next start; at most
    2 GiB of all datasets (shardtrain)."""
    readers: int = 256
    """Virtual readers of a stream, whatever the number of ranks. They share its documents; their number is part of the
    data order (shardtrain)."""
    format: RowFormat = "text"
    """What a row is: a text; a prompt and its completion, with loss on the completion; or a conversation, with loss on
    the assistant's turns (shardtrain)."""
    template: dict[str, str] = field(default_factory=dict)
    """Jinja templates over the columns of a row, which make the columns that the format reads: {prompt = "{{ question
    }}"}. With chat the entries are system, user and assistant (shardtrain)."""
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
    add_bos: bool | None = None
    """Begin each text with bos, in training, generate and evaluate; unset: as in the tokenizer's own files
    (shardtrain)."""
    add_eos: bool | None = None
    """End each training document with eos; unset: if the tokenizer has one (shardtrain)."""
    separator: str | None = None
    """A text after each document, after eos if there is one; special tokens are allowed (shardtrain)."""
    chat_template: str | None = None
    """File of a Jinja chat template; the tokenizer's own by default (shardtrain)."""
    learn_turn_separator: bool = False
    """Also learn the line end after the token that ends a turn of the assistant, as TRL does with ChatML. A template
    with {% generation %} marks decides itself (shardtrain)."""
    turn_end: str | None = None
    """A special token that ends the assistant's last turn, for chat templates that write none (GLM-4-MoE). It is also
    learned after earlier turns, if the template writes it there (shardtrain)."""
    packing: Literal["auto", "concat", "first_fit", "padded"] = "auto"
    """concat: all documents concatenated, then cut; first_fit: whole documents, several per sequence; padded: one
    document per sequence; auto: concat if all rows are texts, first_fit if some are prompts or conversations
    (shardtrain)."""
    long_documents: Literal["auto", "split", "cut", "drop"] = "auto"
    """With first_fit and padded, what happens to a document longer than seq_len: it continues in another sequence
    (split), loses its end (cut), or is left out (drop); the log counts the last two. auto splits texts, and cuts
    prompts and conversations (shardtrain)."""
    document_mask: Literal["auto", "on", "off"] = "auto"
    """No document attends to another in its sequence, and positions restart in each; auto: on for prompt_completion,
    chat, first_fit and padded (shardtrain)."""
    split: str = "train"
    """Split of a Hugging Face dataset (shardtrain)."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset (shardtrain)."""
    streaming: bool | None = None
    """Stream a Hugging Face dataset instead of downloading it; presets have their own default (shardtrain)."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """A row that cannot be read: stop and name file and line, or leave it out and count it (shardtrain)."""
    bad_rows_max_fraction: float = 0.001
    """With skip, share of bad rows above which the run stops, 0..1 (shardtrain)."""
    long_rows_max_fraction: float = 0.5
    """Rows whose prompt fills seq_len have no token to learn and are left out. Share of them above which the run
    stops, 0..1 (shardtrain)."""
    max_row_bytes: int = 16777216
    """A larger row is a bad row; limits memory (shardtrain)."""
    artefact_memory_bytes: int = 1073741824
    """Memory limit of the process that first opens a tokenizer, an Arrow or a suspicious Parquet file (shardtrain)."""
    artefact_seconds: int = 30
    """CPU time limit of that process, and of compressed data until they give a row (shardtrain)."""
    sources: dict[str, DataSource] = field(default_factory=dict)
    """A mixture of datasets, instead of training.dataset (shardtrain)."""
    stages: list[DataStage] = field(default_factory=list)
    """Weights that change during training; by default the sources' own weights (shardtrain)."""
