"""``shardtrain data``: one module of this package per verb, each with ``main(words)``.

A verb imports torch only where it needs it, inside functions.
"""

from __future__ import annotations

import importlib

from shardtrain.utils.arguments import HELP_WORDS, take_verb
from shardtrain.utils.heartbeat import heartbeat

USAGE = """\
usage: shardtrain data VERB ...

  prepare  [CONFIG.toml] --output FOLDER ...   turn text into shards of tokens, on all cores; continues where it stopped
  check    [CONFIG.toml] ...                   count rows, tokens, steps; find bad rows, duplicates and leakage
  show     [CONFIG.toml] ...                   print decoded samples with what is learned, documents and positions
  probe    [CONFIG.toml] ...                   change one token and report which logits move: no leak between documents
  tokenizer train --input FILE ... ...         make a byte-level BPE tokenizer from files of yours
  download --repo_id NAME --local_dir FOLDER   fetch the tokenizer of a Hugging Face repository (HF_TOKEN is used)

The data are those of the configuration: [training] dataset and dataset_path or [data.sources.NAME], and [data].
Each verb explains itself with --help.

  shardtrain data show my_run.toml --rows 2
  shardtrain data prepare my_run.toml --output tokens
"""

VERBS = ("prepare", "check", "show", "probe", "tokenizer", "download")


def main(words: list[str]) -> int:
    """Run one verb; gives the exit status."""
    verb, rest = take_verb("shardtrain data", words, VERBS)
    if verb in HELP_WORDS:
        print(USAGE, end="")
        return 0
    tool = importlib.import_module(f"shardtrain.tools.data.{verb}")
    if verb in ("prepare", "download"):  # they tell what they have done so far, and prepare forks
        return int(tool.main(rest))
    with heartbeat(f"shardtrain data {verb}"):
        return int(tool.main(rest))
