"""Adapter that exposes a trained model to lm-eval. Import it only if lm-eval is installed.

Shape suffixes: B rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
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
        data = dataclasses.replace(opened.config.data, add_eos=None, separator=None)
        self._ends = ends_of(opened.tokenizer, data)
        self.max_length = opened.config.training.seq_len

    @property
    def eot_token_id(self) -> int:
        """EOS token, or BOS if the tokenizer has no EOS. Raises ConfigError without both."""
        tokenizer = self._opened.tokenizer
        found = tokenizer.eos_id if tokenizer.eos_id is not None else tokenizer.bos_id
        if found is None:
            raise ConfigError(
                Problem(
                    "--tasks",
                    None,
                    rule="requires a token that ends documents, but the tokenizer has none",
                    fix="use the model's own tokenizer",
                )
            )
        return found

    @property
    def prefix_token_id(self) -> int:
        """BOS token, or the end-of-document token if the tokenizer has no BOS.

        It is the prefix of texts without context.
        """
        bos = self._opened.tokenizer.bos_id
        return self.eot_token_id if bos is None else bos

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Tokenize a text. Special tokens spelled in the text are recognized."""
        ids: list[int] = self._opened.tokenizer.encode_spans([string])[0][0].tolist()
        return ids if add_special_tokens is False else self._ends.begin(ids)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text.

        Every token counts once, in windows of at most ``max_length`` tokens.
        """
        windows: list[tuple[tuple[str, str], list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1):
                context, continuation = make_disjoint_window(window)
                windows.append((("", ""), context, continuation))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += value
        return totals

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and True if greedy decoding would produce it."""
        # The input is the text without its last token. The targets are the tokens of the continuation.
        rows = []
        for _texts, context, continuation in requests:
            whole = [*context, *continuation][-(self.max_length + 1) :]
            rows.append((whole[:-1], continuation[-self.max_length :]))
        found: list[tuple[float, bool]] = [(0.0, True)] * len(rows)
        # Batch rows of similar length, because the longest row of a batch determines the cost of a pass.
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i][0]))
        for start in range(0, len(order), self._batch_size):
            numbers = order[start : start + self._batch_size]
            # Position of the earliest input token that predicts a token of a continuation.
            first = min(len(rows[i][0]) - len(rows[i][1]) for i in numbers)
            logits_BtV = self._logits([rows[i][0] for i in numbers], first)
            for i, logits_tV in zip(numbers, logits_BtV, strict=True):
                length = len(rows[i][0]) - first
                continuation = rows[i][1]
                logs_tV = logits_tV[length - len(continuation) : length].float().log_softmax(-1)
                targets_t = torch.tensor(continuation, dtype=torch.int64, device=self._device)
                value = logs_tV.gather(-1, targets_t[:, None]).sum()
                found[i] = (float(value), bool((logs_tV.argmax(-1) == targets_t).all()))
        return found

    def _logits(self, rows: Sequence[Sequence[int]], first: int) -> Tensor:
        """Return logits (B, T - first, V) of right-padded rows. Causal attention cannot see the padding."""
        width = self._opened.width
        size = max(map(len, rows))
        T = -(-size // width) * width
        tokens_BT = torch.tensor([[*row, *[0] * (T - len(row))] for row in rows], device=self._device)
        positions_BT = torch.arange(T, device=self._device).expand(len(rows), -1)

        # Skip the earlier logits, because a head with a large vocabulary costs as much as several layers.
        # Copy its input: for a view PyTorch may run a batched product, which copies the head's weight.
        def cut(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (inputs[0][:, first:].clone(memory_format=torch.contiguous_format), *inputs[1:])

        model = self._opened.model
        is_complete = width == 1 and first > 0
        hooks = (
            [model.get_submodule(self._opened.layout.last[-1]).register_forward_pre_hook(cut)] if is_complete else []
        )
        try:
            logits_BTV: Tensor = model(tokens_BT, positions_BT)
        finally:
            for hook in hooks:
                hook.remove()
        return logits_BTV[:, first:] if logits_BTV.size(1) == T else logits_BTV

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate a continuation of each context, up to a stop text of the task."""
        opened = self._opened
        found = [""] * len(requests)
        passes = sum(_asked(request.args[1])[2] for request in requests) // self._batch_size
        packed_linear.use_where_it_pays(opened.model, passes, min(len(requests), self._batch_size))
        generator = Generator(
            opened.model,
            opened.layout,
            opened.tokenizer.vocab_size,
            use_cache=opened.token_mixing is None,
            width=opened.width,
        )

        # Group requests by their options. Batch prompts of similar length within a group.
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        stop_ids = opened.end_ids or frozenset({self.eot_token_id})
        for members in groups.values():
            sampling, stops, new_tokens = _asked(requests[members[0]].args[1])
            room = self.max_length - new_tokens
            if room < 1:
                raise ConfigError(
                    Problem(
                        "--tasks",
                        None,
                        rule=(
                            f"requests {new_tokens} new tokens, but the model was trained on "
                            f"sequences of {self.max_length}"
                        ),
                        fix="choose another task",
                    )
                )
            prompts = {i: self.tok_encode(requests[i].args[0])[-room:] or [self.prefix_token_id] for i in members}
            members.sort(key=lambda i: -len(prompts[i]))
            for start in range(0, len(members), self._batch_size):
                numbers = members[start : start + self._batch_size]
                texts = [Text(opened.tokenizer, prompts[i], stop_ids, stops) for i in numbers]
                new = generator.generate(
                    [prompts[i] for i in numbers],
                    new_tokens,
                    sampling,
                    numbers=numbers,
                    stop_ids=stop_ids,
                    watch=lambda row, ids, texts=texts: texts[row].has_ended(ids),  # type: ignore[misc]
                )
                for i, text, ids in zip(numbers, texts, new, strict=True):
                    found[i] = text.of(ids)
        return found


def _asked(options: dict[str, Any]) -> tuple[Sampling, list[str], int]:
    """Return the sampling, stop texts and maximum of new tokens from a task's generation options."""
    until = options.get("until") or []
    names = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
    limit = next((int(options[name]) for name in names if options.get(name) is not None), _NEW_TOKENS)
    unknown = sorted(set(options) - {"until", "do_sample", "temperature", "top_k", "top_p", *names})
    if unknown:
        raise ConfigError(
            Problem(
                "--tasks",
                None,
                rule=f"has unsupported generation options: {', '.join(unknown)}",
                fix="choose another task",
            )
        )
    draws = options.get("do_sample", bool(options.get("temperature")))
    temperature = float(options.get("temperature", 1.0)) if draws else 0.0
    sampling = Sampling(1.0, temperature, int(options.get("top_k") or 0), float(options.get("top_p") or 1.0))
    return sampling, [until] if isinstance(until, str) else list(until), limit
