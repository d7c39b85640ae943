"""Texts of ``shardtrain train --help``, ``config --help`` and ``completion --help``."""

from __future__ import annotations

import textwrap

from shardtrain.config import presets

_TRAIN = """\
usage: shardtrain train [CONFIG.toml | PRESET] [--nproc N] [--section.key VALUE ...]

Train on the devices of this machine, or as one of several nodes. The same command in the same job.dump_folder continues
from the newest checkpoint. Ctrl-C saves and stops.

  shardtrain train                                   the preset debug: minutes on a laptop, nothing is downloaded
  shardtrain train llama3_8b --training.dataset text --training.dataset_path "books/*.txt"
  shardtrain train my_run.toml --nproc 4 --parallelism.tensor_parallel_degree 2
  shardtrain train my_run.toml --training.steps 2000                     longer: continues where it ended

Options that most runs set ("shardtrain config help SECTION" explains a section, docs/options.md has all):
  --training.dataset, --training.dataset_path        what to read
  --model.name, --model.flavor                       architecture and size
  --model.hf_assets_path                             folder of a tokenizer, or "bytes"
  --training.steps                                   how long
  --training.local_batch_size, --training.seq_len    sequences per device and pass; their length
  --training.global_batch_size                       sequences per step, on all devices together
  --optimizer.lr                                     peak learning rate
  --parallelism.tensor_parallel_degree               devices that share each layer (also data_, pipeline_, context_,
                                                     expert_parallel_degree)
  --checkpoint.enable, --checkpoint.interval         save, and how often
  --job.dump_folder                                  where everything of the run is written (outputs)

Options of the command:
  --nproc N              processes here: one per GPU, two on a CPU, unless given
  --max_restarts N       restart from the newest checkpoint after a failure, up to N times
  --nnodes N --node_rank K --rdzv_endpoint HOST:PORT                     this machine is node K of N
"""


def train() -> str:
    """Return the text of ``train --help``, including the names of the presets."""
    names = textwrap.wrap(
        ", ".join(presets.names()), 116, initial_indent="  ", subsequent_indent="  "
    )
    return "\n".join([f"{_TRAIN}\nPresets:", *names]) + "\n"


CONFIG = """\
  shardtrain config check llama3_70b --for-machine h100 --nproc 64
  shardtrain config help training.global_batch_size
  shardtrain config schema > shardtrain.schema.json   for a TOML that begins with "#:schema ./shardtrain.schema.json"
"""

COMPLETION = """\
usage: shardtrain completion bash|zsh|fish

Print a script with which the shell completes verbs, options and their values.

  eval "$(shardtrain completion bash)"                in ~/.bashrc; zsh alike in ~/.zshrc
  shardtrain completion fish | source                 in ~/.config/fish/config.fish
"""
