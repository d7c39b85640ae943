"""The options of data: part of ``schema.py``, whose rules hold here too."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
    """A file of shardtrain/data/sources without its ending (shardtrain)."""
    dataset_path: str | None = None
    """File or folder that the dataset reads (shardtrain)."""
    weight: float = 1.0
    """Share of the training tokens, relative to the other sources' weights (shardtrain)."""
    epochs: int | None = None
    """Passes over this source after which the data end; unset repeats it as often as its weight asks (shardtrain)."""
    format: Literal["text", "prompt_completion", "chat"] | None = None
    """As data.format, for this source alone (shardtrain)."""
    text_field: str | None = None
    """As data.text_field, for this source alone (shardtrain)."""
    template: dict[str, str] = field(default_factory=dict)
    """As data.template, for this source alone (shardtrain)."""
    split: str | None = None
    """As data.split, for this source alone (shardtrain)."""
    subset: str | None = None
    """As data.subset, for this source alone (shardtrain)."""


@dataclass(frozen=True)
class DataStage:
    """Weights of the sources up to a number of training tokens: one [[data.stages]]."""

    until_tokens: int = 0
    """Tokens of the whole run at which the stage ends; 0 is the end of training, for the last stage (shardtrain)."""
    weights: dict[str, float] = field(default_factory=dict)
    """Weight of each source by its name; a source that is not named has none (shardtrain)."""


@dataclass(frozen=True)
class Data:
    """From rows of a dataset to sequences of tokens: what a row means, how documents are packed, mixed and masked."""

    mode: Literal["auto", "memory", "stream"] = "auto"
    """memory reads and tokenizes the dataset at start, stream as training goes on; auto takes memory up to 64 MiB of
    input. Prepared shards (dataset "tokens") need neither (shardtrain)."""
    readers: int = 256
    """Virtual readers among which the documents of a stream are dealt, whatever the number of ranks; part of the order
    of the data (shardtrain)."""
    format: Literal["text", "prompt_completion", "chat"] = "text"
    """What a row is: one text; a prompt and its completion, of which the completion alone has loss; or a conversation,
    of which the assistant's turns have loss (shardtrain)."""
    template: dict[str, str] = field(default_factory=dict)
    """Columns that the format reads, as Jinja templates over those that the rows have: {prompt = "{{ question }}"}.
    With chat the entries are system, user and assistant (shardtrain)."""
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
    """Begin each text with bos, in training, generate and evaluate alike; unset, as the tokenizer's own files say
    (shardtrain)."""
    add_eos: bool | None = None
    """End each document that is trained on with eos; unset does so where the tokenizer has one (shardtrain)."""
    separator: str | None = None
    """A text that follows each document, after eos if there is one; special tokens may be spelled out (shardtrain)."""
    chat_template: str | None = None
    """File of a Jinja chat template; the tokenizer's own unless set (shardtrain)."""
    packing: Literal["auto", "concat", "first_fit", "padded"] = "auto"
    """concat lays all documents end to end and cuts; first_fit puts whole documents into sequences where they fit;
    padded gives each document a sequence; auto is concat where all rows are texts, and first_fit where some are prompts
    or conversations, so that no answer is without its question (shardtrain)."""
    long_documents: Literal["auto", "split", "cut", "drop"] = "auto"
    """With first_fit and padded, what happens to a document longer than seq_len: go on in another sequence (split),
    lose its end (cut), or be left out (drop); the last two are counted in the log. auto splits texts, and cuts prompts
    and conversations (shardtrain)."""
    document_mask: Literal["auto", "on", "off"] = "auto"
    """Let no document attend to another in its sequence, and restart positions in each; auto does so for
    prompt_completion, chat, first_fit and padded (shardtrain)."""
    split: str = "train"
    """Split of a Hugging Face dataset (shardtrain)."""
    subset: str | None = None
    """Configuration name of a Hugging Face dataset (shardtrain)."""
    streaming: bool | None = None
    """Stream a Hugging Face dataset instead of downloading it; the presets know their own (shardtrain)."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """A row that cannot be read: stop naming file and line, or leave it out and count it (shardtrain)."""
    bad_rows_max_fraction: float = 0.001
    """Share of bad rows above which skip stops too, 0..1 (shardtrain)."""
    max_row_bytes: int = 16777216
    """Bytes above which a row is bad; bounds memory (shardtrain)."""
    artefact_memory_bytes: int = 1073741824
    """Memory of the process that tries a tokenizer or a suspicious Parquet file before it is opened (shardtrain)."""
    artefact_seconds: int = 30
    """CPU time of that process (shardtrain)."""
    sources: dict[str, DataSource] = field(default_factory=dict)
    """A mixture of datasets in place of training.dataset (shardtrain)."""
    stages: list[DataStage] = field(default_factory=list)
    """Weights that change over training; the sources' own weights unless set (shardtrain)."""
