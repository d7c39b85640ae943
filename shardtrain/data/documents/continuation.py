"""Tokenize a prompt, and a completion that continues it.

Some tokenizers put a space before each text (SentencePiece models, Metaspace, a Prepend normalizer, ByteLevel
with ``add_prefix_space``). If a completion is encoded separately, they also put a space before the
completion. The model would then learn to begin answers with a space that is not in the data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardtrain.data.tokenizers.open_tokenizer import Ids, Tokenizer

_ANCHORS = ("\n", ".", "a", "0", "|", ">")
"""Texts to put before a completion to encode it. At least one of them should not share a token with it."""


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> list[tuple[Ids, Ids, bool]]:
    """Encode prompts with their completions.

    The prompt is encoded by itself, as in generation. If the tokens of the joined text begin with the
    prompt's tokens, the rest is the completion. Otherwise a token of the joined text contains characters of
    both prompt and completion. The completion is then encoded separately (``_continue``).

    Returns:
        For each pair: the ids of the prompt, the ids of the completion, and True if the joined text has a
        token with characters of both.
    """
    prompts = tokenizer.encode_batch([prompt for prompt, _ in pairs])
    joined = tokenizer.encode_batch([prompt + completion for prompt, completion in pairs])
    encoded = []
    for (_, completion), prompt_ids, joined_ids in zip(pairs, prompts, joined, strict=True):
        would_share_token = not starts_with(joined_ids, prompt_ids)
        completion_ids = joined_ids[len(prompt_ids) :]
        if would_share_token:
            completion_ids = _continue(tokenizer, prompt_ids, completion, joined_ids)
        encoded.append((prompt_ids, completion_ids, would_share_token))
    return encoded


def starts_with(ids: Ids, start: Ids) -> bool:
    """True if ``ids`` begin with ``start``."""
    return len(ids) >= len(start) and bool((ids[: len(start)] == start).all())


def _continue(tokenizer: Tokenizer, prompt_ids: Ids, completion: str, joined_ids: Ids) -> Ids:
    """Encode a completion so that ``prompt_ids`` and its tokens decode to the same text as ``joined_ids``."""
    wanted = tokenizer.decode(joined_ids, keep_special=True)
    by_itself = tokenizer.encode(completion)
    candidates = [by_itself]
    for anchor in _ANCHORS:
        anchor_ids = tokenizer.encode(anchor)
        anchored_ids = tokenizer.encode(anchor + completion)
        if starts_with(anchored_ids, anchor_ids):
            candidates.append(anchored_ids[len(anchor_ids) :])
    written = [
        tokenizer.decode(np.concatenate((prompt_ids, one)), keep_special=True) for one in candidates
    ]
    if wanted in written:
        return candidates[written.index(wanted)]
    # No candidate decodes to the joined text. The reason may be a normalizer that composes characters
    # across the boundary (NFC), or a special token that is recognized only if no letter follows it. So only
    # make sure that no space is inserted: use a candidate that begins with whitespace if and only if the
    # completion does. Such a candidate may not exist,
    # because some decoders insert a space between all tokens (WordPiece).
    seam = len(tokenizer.decode(prompt_ids, keep_special=True))
    for candidate, text in zip(candidates, written, strict=True):
        if text[seam : seam + 1].isspace() == completion[:1].isspace():
            return candidate
    return by_itself
