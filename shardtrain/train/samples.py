"""Sample text during training: continue ``metrics.sample_prompt`` every ``metrics.sample_freq`` steps.

The sharded model itself generates the text, without a KV cache, so every pass reads all tokens again. All
samples use the same random numbers. Two samples differ only because the model has changed. Sampling does not
affect training: it computes no gradients, the model is in evaluation mode, and sampling has its own random
generator.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardtrain import data
from shardtrain.config.rules.task_rules import OF_TEXT
from shardtrain.config.schema import Config
from shardtrain.data.build_dataset import tokenizer_of
from shardtrain.data.tokenizers.ends import ends_of
from shardtrain.distributed import Mesh, Runner
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.metrics.sinks.metrics_jsonl import JsonlFile
from shardtrain.ops.sampling import Draws, Sampling, choose
from shardtrain.utils import activity
from shardtrain.utils.best_effort import BestEffort
from shardtrain.utils.log import logger

FILE = "samples.jsonl"
"""File in the run's folder. It has one JSON object per sample, with ``step``, ``prompt`` and ``text``."""
NEW_TOKENS = 64
SAMPLING = Sampling(temperature=0.7, top_p=0.9)
_MAX_CHARACTERS = 1000
"""Maximum number of characters of prompt and text in a record, see ``JsonlFile``."""
_LENGTH_MULTIPLE = 64
"""Pad rows to a multiple of this length. Then few shapes are compiled, and tensor parallelism can split rows."""


class Samples:
    """Draws, logs and writes the samples of a run. Does nothing unless ``metrics.sample_freq`` is set.

    Every rank creates one, and all ranks call ``run`` after the same steps. On the rank that writes the file,
    ``folder`` is ``job.dump_folder``. On all others it is None.
    """

    def __init__(
        self, config: Config, runner: Runner, mesh: Mesh, folder: Path | None, start_step: int
    ) -> None:
        self._options = config.metrics
        self._runner = runner
        self._mesh = mesh
        self._seq_len = config.training.seq_len
        self._splits_vocabulary = (
            mesh.size("tp") > 1 and not config.parallelism.disable_loss_parallel
        )
        self.every_steps = 0
        """Interval in steps. 0 if samples are disabled."""
        self._file: JsonlFile | None = None
        self._best_effort = BestEffort("the text of a sample")
        # With pipeline or context parallelism, no rank computes all logits, so there are no samples.
        # config.notes warns the user.
        if (
            not self._options.sample_freq
            or mesh.size("pp", "cp") > 1
            or config.task.name not in OF_TEXT
        ):
            return
        self.every_steps = self._options.sample_freq
        self._tokenizer = tokenizer_of(config)
        # Begin the prompt like a training document, and keep at most the last seq_len / 2 tokens.
        ends = ends_of(self._tokenizer, replace(config.data, add_eos=None, separator=None))
        ids = ends.begin(self._tokenizer.encode(config.metrics.sample_prompt).tolist())
        self._prompt = ids[-max(1, config.training.seq_len // 2) :]
        if folder is not None:
            self._file = JsonlFile(folder / FILE, start_step)

    def run(self, step: int) -> str:
        """Draw, log and write one sample after ``step`` (a collective). Return the generated text.

        Raises:
            NumericalError: the logits are not finite.
        """
        assert self.every_steps, "samples are disabled, or not supported on this mesh"
        ids = self._draw(self._tokenizer)
        return self._best_effort.call(lambda: self._write(step, ids), "")

    def _write(self, step: int, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids)[:_MAX_CHARACTERS]
        prompt = self._options.sample_prompt[:_MAX_CHARACTERS]
        if self._file is not None:
            self._file.write({"step": step, "prompt": prompt, "text": text})
        sample = prompt + text
        # On a terminal, show the text with its line breaks. In a log file, write it as one JSON string.
        title = f"sample after step {step}:"
        indented = [f"    {line}" for line in sample.rstrip().split("\n")]
        on_terminal = "\n".join([title, *indented])
        logger.info(f"{title} {json.dumps(sample)}", extra={"terminal": on_terminal})
        return text

    @torch.no_grad()
    def _draw(self, tokenizer: data.Tokenizer) -> list[int]:
        """Draw the ids after the prompt, until EOS, NEW_TOKENS ids, or the trained sequence length."""
        (model,) = self._runner.parts
        # Use the same seed for each sample.
        draws = Draws(1, [0])
        ids = list(self._prompt)
        was_training = model.training
        model.eval()
        try:
            # Do not stop at EOS. Each pass is a collective, so all ranks must make the same number of passes,
            # and rounding could make only some ranks draw EOS.
            for _ in range(min(NEW_TOKENS, self._seq_len - len(ids))):
                logits_1V = self._logits(ids)[:, : tokenizer.vocab_size]
                ids += choose(logits_1V, SAMPLING, draws.next([0]))
                activity.tick()
        finally:
            model.train(was_training)
            free_gathered(model)
        new_ids = ids[len(self._prompt) :]
        if tokenizer.eos_id in new_ids:
            return new_ids[: new_ids.index(tokenizer.eos_id)]
        return new_ids

    def _logits(self, ids: list[int]) -> Tensor:
        """Return the logits (1, V) for the token after ``ids``."""
        # Padding comes after the ids, so causal attention does not see it.
        multiple = _LENGTH_MULTIPLE * self._mesh.size("tp")
        T = min(-(-len(ids) // multiple) * multiple, self._seq_len)
        tokens_1T = torch.zeros(1, T, dtype=torch.int64, device=self._mesh.device)
        tokens_1T[0, : len(ids)] = torch.tensor(ids)
        positions_1T = torch.arange(T, device=self._mesh.device)[None]
        logits_1TV = self._runner.parts[0](tokens_1T, positions_1T)
        logits_1v = logits_1TV[:, len(ids) - 1]
        if not self._splits_vocabulary:
            return logits_1v
        # With loss parallelism, each rank has only its columns of the vocabulary, and the last rank may have
        # fewer. Every rank writes its columns into zeros, and the sum over ranks is the full logits.
        local_columns = torch.tensor(logits_1v.size(-1), device=self._mesh.device)
        columns_per_rank = int(self._mesh.max(local_columns, over=("tp",)))
        logits_1V = logits_1v.new_zeros(1, columns_per_rank * self._mesh.size("tp"))
        first = columns_per_rank * self._mesh.rank("tp")
        logits_1V[:, first : first + logits_1v.size(-1)] = logits_1v
        return self._mesh.sum(logits_1V, over=("tp",))
