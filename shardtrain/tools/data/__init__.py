"""The verbs of ``shardtrain data``: one file each, with ``main(words)``, which gives the exit status.

``words`` are those after the verb. A verb may use everything of this package but the command line; nothing but the
command line uses a verb. It imports torch only where it needs it, inside functions.
"""

from __future__ import annotations

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
