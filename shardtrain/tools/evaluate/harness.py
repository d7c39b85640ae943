"""Adapter that exposes a trained model to lm-eval. Import it only if lm-eval is installed.

Shape suffixes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor, nn

from shardtrain.data.tokenizers.ends import ends_of
from shardtrain.ops.cpu import packed_linear
from shardtrain.ops.sampling import Sampling
from shardtrain.tools.generate.engine import Generator
from shardtrain.tools.generate.generated_text import Text
from shardtrain.tools.generate.trained_model import OpenedModel
from shardtrain.utils.errors import ConfigError, Problem

_NEW_TOKENS = 256
"""Default maximum of new tokens, as in lm-eval."""


class Engine(TemplateLM):
    """lm-eval model. Every rank computes every request, because each layer is split over all ranks."""

    def __init__(self, opened: OpenedModel, batch_size: int, is_first: bool = True) -> None:
        super().__init__()
        self._opened = opened
        self._batch_size = batch_size
        self._is_first = is_first
        self._device = next(opened.model.parameters()).device
        # Contexts only use the beginning of a document (``begin``), so options of its end do not matter.
        data = dataclasses.replace(opened.config.data, add_eos=None, separator=None)
        self._ends = ends_of(opened.tokenizer, data)
        self.max_length = opened.config.training.seq_len

    @property
    def eot_token_id(self) -> int:
        """EOS token, or BOS if the tokenizer has no EOS. Raises ConfigError without both."""
        tokenizer = self._opened.tokenizer
        for token_id in (tokenizer.eos_id, tokenizer.bos_id):
            if token_id is not None:
                return token_id
        raise ConfigError(
            Problem(
                "--tasks",
                None,
                rule="requires a token that ends documents, but the tokenizer has none",
                fix="use the model's own tokenizer",
            )
        )

    @property
    def prefix_token_id(self) -> int:
        """BOS token, or the end-of-document token if the tokenizer has no BOS.

        It is the prefix of texts without context.
        """
        bos_id = self._opened.tokenizer.bos_id
        if bos_id is None:
            return self.eot_token_id
        return bos_id

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Tokenize a text. Special tokens spelled in the text are recognized."""
        (encoded,) = self._opened.tokenizer.encode_spans([string])
        ids: list[int] = encoded[0].tolist()
        if add_special_tokens is False:
            return ids
        return self._ends.begin(ids)

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text.

        Every token counts once, in windows of at most ``max_length`` tokens.
        """
        windows: list[tuple[tuple[str, str], list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            overlapping = get_rolling_token_windows(
                ids,
                self.prefix_token_id,
                self.max_length,
                context_len=1,
            )
            for window in overlapping:
                context, continuation = make_disjoint_window(window)
                windows.append((("", ""), context, continuation))
                owners.append(number)

        # Add up the windows of each text.
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows)
        for number, (log_likelihood, _) in zip(owners, scores, strict=True):
            totals[number] += log_likelihood
        return totals

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and True if greedy decoding would produce it."""
        # The input is the text without its last token. The targets are the tokens of the continuation.
        inputs: list[list[int]] = []
        continuations: list[list[int]] = []
        for _texts, context, continuation in requests:
            # If the text is too long, keep its end.
            ids = context + continuation
            last_ids = ids[-(self.max_length + 1) :]
            inputs.append(last_ids[:-1])
            continuations.append(continuation[-self.max_length :])

        # Batch rows of similar length, because the longest row of a batch determines the cost of a pass.
        order = sorted(range(len(inputs)), key=lambda i: -len(inputs[i]))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(inputs)
        for start in range(0, len(order), self._batch_size):
            numbers = order[start : start + self._batch_size]
            rows = [inputs[i] for i in numbers]
            # Position of the earliest input token that predicts a token of a continuation.
            first = min(len(inputs[i]) - len(continuations[i]) for i in numbers)
            logits_BtV = self._logits(rows, first)
            for i, logits_tV in zip(numbers, logits_BtV, strict=True):
                # The logits of the continuation end at the last input token, before the padding.
                stop = len(inputs[i]) - first
                begin = stop - len(continuations[i])
                results[i] = self._score(logits_tV[begin:stop], continuations[i])
        return results

    def _score(self, logits_tV: Tensor, continuation: list[int]) -> tuple[float, bool]:
        """Return the log-likelihood of a continuation, and True if each token is the most likely one."""
        logs_tV = logits_tV.float().log_softmax(-1)
        targets_t = torch.tensor(continuation, dtype=torch.int64, device=self._device)
        log_likelihood = logs_tV.gather(-1, targets_t[:, None]).sum()
        is_greedy = (logs_tV.argmax(-1) == targets_t).all()
        return float(log_likelihood), bool(is_greedy)

    def _logits(self, rows: Sequence[Sequence[int]], first: int) -> Tensor:
        """Return logits (B, T - first, V) of right-padded rows. Causal attention cannot see the padding."""
        width = self._opened.width
        # Tensor-parallel ranks split the sequence evenly.
        T = math.ceil(max(map(len, rows)) / width) * width
        padded_rows = [[*row, *[0] * (T - len(row))] for row in rows]
        tokens_BT = torch.tensor(padded_rows, device=self._device)
        positions_BT = torch.arange(T, device=self._device).expand(len(rows), -1)

        # Skip the earlier logits, because a head with a large vocabulary costs as much as several layers.
        # Copy its input: for a view PyTorch may run a batched product, which copies the head's weight.
        def cut(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0][:, first:].clone(memory_format=torch.contiguous_format), *inputs[1:])

        model = self._opened.model
        with contextlib.ExitStack() as stack:
            # With several ranks, the head's input is only a part of the sequence.
            if width == 1 and first > 0:
                head = model.get_submodule(self._opened.layout.last[-1])
                stack.callback(head.register_forward_pre_hook(cut).remove)
            logits_BTV: Tensor = model(tokens_BT, positions_BT)
        # Without the hook, or with a head that is tied to the embedding, all tokens have logits.
        if logits_BTV.size(1) == T:
            logits_BTV = logits_BTV[:, first:]
        return logits_BTV

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context, up to a stop text of the task."""
        opened = self._opened
        num_tokens = 0
        for request in requests:
            _, _, max_new_tokens = _read_options(request.args[1])
            num_tokens += max_new_tokens
        num_passes = num_tokens // self._batch_size
        rows_per_pass = min(len(requests), self._batch_size)
        packed_linear.use_where_it_pays(opened.model, num_passes, rows_per_pass)

        # Group requests by their options.
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        texts = [""] * len(requests)
        for numbers in groups.values():
            options = requests[numbers[0]].args[1]
            contexts = [requests[number].args[0] for number in numbers]
            continuations = self._generate(numbers, contexts, options)
            for number, continuation in zip(numbers, continuations, strict=True):
                texts[number] = continuation
        return texts

    def _generate(
        self,
        numbers: Sequence[int],
        contexts: Sequence[str],
        options: dict[str, Any],
    ) -> list[str]:
        """Generate the continuations of requests with the same options.

        ``numbers`` determine random draws.
        """
        opened = self._opened
        sampling, stops, max_new_tokens = _read_options(options)
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                Problem(
                    "--tasks",
                    None,
                    rule=(
                        f"requests {max_new_tokens} new tokens, but the model was trained on "
                        f"sequences of {self.max_length}"
                    ),
                    fix="choose another task",
                )
            )
        generator = Generator(
            opened.model,
            opened.layout,
            opened.tokenizer.vocab_size,
            use_cache=opened.token_mixing is None,
            width=opened.width,
        )
        stop_ids = opened.end_ids or frozenset({self.eot_token_id})
        prompts = []
        texts = []
        for context in contexts:
            # If a context is too long, its end is more important than its beginning.
            prompt = self.tok_encode(context)[-room:]
            # The model needs at least one token to predict the next one.
            if not prompt:
                prompt = [self.prefix_token_id]
            prompts.append(prompt)
            texts.append(Text(opened.tokenizer, prompt, stop_ids, stops))

        # Batch prompts of similar length.
        order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        results = [""] * len(prompts)
        for start in range(0, len(order), self._batch_size):
            batch = order[start : start + self._batch_size]

            def watch(row: int, new: list[int], batch: list[int] = batch) -> bool:
                return texts[batch[row]].has_ended(new)

            new_tokens = generator.generate(
                [prompts[i] for i in batch],
                max_new_tokens,
                sampling,
                numbers=[numbers[i] for i in batch],
                stop_ids=stop_ids,
                watch=watch,
            )
            for i, new in zip(batch, new_tokens, strict=True):
                results[i] = texts[i].of(new)
        return results


def _read_options(options: dict[str, Any]) -> tuple[Sampling, list[str], int]:
    """Return the sampling, stop texts and maximum of new tokens from a task's generation options."""
    # Tasks use several names for the limit of new tokens. An option without effect would change results.
    names_of_limit = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    known = {"until", "do_sample", "temperature", "top_k", "top_p", *names_of_limit}
    unknown = set(options) - known
    if unknown:
        raise ConfigError(
            Problem(
                "--tasks",
                None,
                rule=f"has unsupported generation options: {', '.join(sorted(unknown))}",
                fix="choose another task",
            )
        )
    # The first of these names takes precedence.
    limit = _NEW_TOKENS
    for name in reversed(names_of_limit):
        if options.get(name) is not None:
            limit = int(options[name])
    until = options.get("until") or []
    if isinstance(until, str):
        until = [until]

    # As in transformers, options of sampling have no effect without ``do_sample``.
    temperature = 0.0
    if options.get("do_sample", bool(options.get("temperature"))):
        temperature = float(options.get("temperature", 1.0))
    top_k = int(options.get("top_k") or 0)
    top_p = float(options.get("top_p") or 1.0)
    return Sampling(1.0, temperature, top_k, top_p), list(until), limit
