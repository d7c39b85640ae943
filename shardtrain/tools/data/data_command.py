"""``shardtrain data``: one module of this package per verb, each with ``main(words)``.

A verb imports torch only in the functions that need it.
"""

from __future__ import annotations

from shardtrain.utils.verbs import Command, CommandVerb

VERBS = {
    # prepare and download report their own progress, and prepare forks
    "prepare": CommandVerb(
        "tools.data.prepare",
        (("prepare  [CONFIG.toml] --output FOLDER ...",
          "tokenize text into shards on all cores; continues where it stopped"),),
        needs_torch=True,
    ),
    "check": CommandVerb(
        "tools.data.check",
        (("check    [CONFIG.toml] ...", "count rows, tokens, steps; find bad rows, duplicates and leakage"),),
        needs_torch=True,
        is_long=True,
    ),
    "show": CommandVerb(
        "tools.data.show",
        (("show     [CONFIG.toml] ...", "print decoded samples, with documents, positions and learned tokens"),),
        needs_torch=True,
        is_long=True,
    ),
    "probe": CommandVerb(
        "tools.data.probe",
        (("probe    [CONFIG.toml] ...", "change one token and report changed logits: finds leaks between documents"),),
        needs_torch=True,
        is_long=True,
    ),
    "tokenizer": CommandVerb(
        "tools.data.tokenizer",
        (("tokenizer train --input FILE ... ...", "train a byte-level BPE tokenizer on your files"),),
        is_long=True,
    ),
    "download": CommandVerb(
        "tools.data.download",
        (("download --repo_id NAME --local_dir FOLDER",
          "download the tokenizer of a Hugging Face repository (HF_TOKEN is used)"),),
    ),
}  # fmt: skip
_NOTES = """\
The verbs read the data of the configuration: [training] dataset and dataset_path or [data.sources.NAME], and [data].
Use --help with a verb for its options.

  shardtrain data show my_run.toml --rows 2
  shardtrain data prepare my_run.toml --output tokens
"""


def main(arguments: list[str]) -> int:
    """Run one verb and return its exit status."""
    return Command("shardtrain data", VERBS, column=47, notes=_NOTES).run(arguments)
