"""What the model writes while it is trained: ``metrics.sample_prompt``, continued every ``metrics.sample_freq`` steps.

The text is drawn by the modules that train, without gradients and without a cache of keys and values, so every pass
reads all tokens again. Each sample uses the same random numbers: what differs is the model. Training does not notice
it: modules are in evaluation mode meanwhile, and the draws have a generator of their own.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardtrain import data
from shardtrain.config.rules.task import OF_TEXT
from shardtrain.config.schema import Config
from shardtrain.data.build_dataset import tokenizer_of
from shardtrain.data.tokenizers.ends import ends_of
from shardtrain.distributed import Mesh, Runner
from shardtrain.distributed.fsdp import free_gathered
from shardtrain.metrics.sinks.jsonl import JsonlFile
from shardtrain.ops.sampling import Draws, Sampling, choose
from shardtrain.utils import activity
from shardtrain.utils.best_effort import BestEffort
from shardtrain.utils.log import logger

FILE = "samples.jsonl"
"""In the run's folder: one object per sample with ``step``, ``prompt`` and ``text``."""
NEW_TOKENS = 64
SAMPLING = Sampling(temperature=0.7, top_p=0.9)
_MOST_CHARACTERS = 1000
"""Of a text in a record; see ``JsonlFile``."""
_WIDTH = 64
"""A pass reads a multiple of so many tokens, so that few shapes are compiled and tensor parallelism can cut them."""


class Samples:
    """Draws, logs and writes the samples of a run; idle unless ``metrics.sample_freq`` is set.

    Every rank makes one and calls ``run`` for the same steps. ``folder`` is ``job.dump_folder`` on the rank that
    writes, None elsewhere.
    """

    def __init__(self, config: Config, runner: Runner, mesh: Mesh, folder: Path | None, start_step: int) -> None:
        self._options = config.metrics
        self._runner = runner
        self._mesh = mesh
        self._seq_len = config.training.seq_len
        self._splits_vocabulary = mesh.size("tp") > 1 and not config.parallelism.disable_loss_parallel
        self.every_steps = 0
        """After how many steps one is drawn; 0 is never."""
        self._file: JsonlFile | None = None
        self._guard = BestEffort("the text of a sample")
        # pipeline stages and parts of a sequence do not give all logits here: config.notes tells that there are none
        if self._options.sample_freq and mesh.size("pp", "cp") == 1 and config.task.name in OF_TEXT:
            self.every_steps = self._options.sample_freq
            self._tokenizer = tokenizer_of(config)
            # The prompt begins like a document in training. Of a long one the end is kept, half a sequence.
            ends = ends_of(self._tokenizer, replace(config.data, add_eos=None, separator=None))
            ids = ends.begin(self._tokenizer.encode(config.metrics.sample_prompt).tolist())
            self._prompt = ids[-max(1, config.training.seq_len // 2) :]
            self._file = None if folder is None else JsonlFile(folder / FILE, start_step)

    def run(self, step: int) -> str:
        """Draw one after ``step``, and log and write it (a collective); gives the continuation of the prompt.

        Raises:
            NumericalError: when the logits are not finite.
        """
        assert self.every_steps, "no sample is asked for, or none can be drawn on this mesh"
        ids = self._draw(self._tokenizer)
        return self._guard.call(lambda: self._tell(step, ids), "")

    def _tell(self, step: int, ids: list[int]) -> str:
        text = self._tokenizer.decode(ids)[:_MOST_CHARACTERS]
        prompt = self._options.sample_prompt[:_MOST_CHARACTERS]
        if self._file is not None:
            self._file.write({"step": step, "prompt": prompt, "text": text})
        whole = prompt + text
        lines = "\n".join([f"sample after step {step}:", *(f"    {line}" for line in whole.rstrip().split("\n"))])
        logger.info(f"sample after step {step}: {json.dumps(whole)}", extra={"terminal": lines})
        return text

    @torch.no_grad()
    def _draw(self, tokenizer: data.Tokenizer) -> list[int]:
        """Ids that follow the prompt, as many as fit the trained length and at most NEW_TOKENS, up to eos."""
        (model,) = self._runner.parts
        # a generator of its own, from the same seed for each sample
        draws = Draws(1, [0])
        ids = list(self._prompt)
        was_training = model.training
        model.eval()
        try:
            # all ranks make the same number of passes, whatever they draw: with sharded weights each is a collective
            for _ in range(min(NEW_TOKENS, self._seq_len - len(ids))):
                logits_1V = self._logits(ids)[:, : tokenizer.vocab_size]
                ids += choose(logits_1V, SAMPLING, draws.next([0]))
                activity.tick()
        finally:
            model.train(was_training)
            free_gathered(model)
        new = ids[len(self._prompt) :]
        return new[: new.index(tokenizer.eos_id)] if tokenizer.eos_id in new else new

    def _logits(self, ids: list[int]) -> Tensor:
        """Logits (1, V) after the last id; what fills the pass up comes later, where causal attention cannot see it."""
        step = _WIDTH * self._mesh.size("tp")
        T = min(-(-len(ids) // step) * step, self._seq_len)
        tokens_1T = torch.zeros(1, T, dtype=torch.int64, device=self._mesh.device)
        tokens_1T[0, : len(ids)] = torch.tensor(ids)
        logits_1TV = self._runner.parts[0](tokens_1T, torch.arange(T, device=self._mesh.device)[None])
        # logits over all ids, where the loss of tensor-parallel ranks takes a part of the vocabulary on each
        logits_1v = logits_1TV[:, len(ids) - 1]
        if not self._splits_vocabulary:
            return logits_1v
        # every rank fills its columns into zeros, and the sum puts them together; the last one may have fewer
        num_own = torch.tensor(logits_1v.size(-1), device=self._mesh.device)
        columns = int(self._mesh.max(num_own, over=("tp",)))
        logits_1V = logits_1v.new_zeros(1, columns * self._mesh.size("tp"))
        first = columns * self._mesh.rank("tp")
        logits_1V[:, first : first + logits_1v.size(-1)] = logits_1v
        return self._mesh.sum(logits_1V, over=("tp",))
