"""``shardtrain data probe``: change one token of a packed document and report which logits move.

It finds leaks between documents and wrong targets of this model and these data before training starts.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtrain.config.command_line import take
from shardtrain.utils.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardtrain.data import Batch, Tokenizer

USAGE = """usage: shardtrain data probe [CONFIG.toml] [--section.key VALUE ...]

Take a packed sequence of the configured data and change one token of one document at a time, with the configured model
in float32 on the CPU. Logits of other documents must not move, and those after the changed token must. Every target
with a loss must be the next token of its own document.

Exit status: 0 no leak; 1 a leak or a wrong target; 2 the configuration must be corrected.
"""
MAX_PARAMETERS = 2 * 10**9
"""Largest model. In float32 it needs 8 GB and minutes on a CPU. A smaller flavor finds the same leaks."""
MAX_BATCHES = 64
"""Micro-batches to search for a sequence with two documents."""
MAX_CHANGES = 4
"""Number of documents to change, one at a time, from the first of the sequence to the last."""
EXPERTS_TOLERANCE = 1e-5
"""Largest change of a logit by rounding in a model with experts, relative to the largest logit.

Without experts, the sums of other documents do not change, so their logits must be bitwise equal. With
experts, the changed token may select other experts. Tokens of other documents then move to other rows of
an expert's batch, where a matrix product may round differently. That is about 1e-7 per layer.
"""


@dataclass(frozen=True)
class TokenChange:
    """Effect of one changed token.

    Attributes:
        document: Number of the changed document.
        place: Index of the changed token in the sequence.
        stop: Index after the document's last token.
        leaks: Indices whose logits moved in other documents, by document.
        blind: The logits of the changed token or of the next one did not move. Then the other logits
            prove nothing.
    """

    document: int
    place: int
    stop: int
    leaks: dict[int, list[int]]
    blind: bool


@dataclass(frozen=True)
class ProbeReport:
    """The changes in one sequence, and a message for each wrong target or position."""

    changes: list[TokenChange]
    wrong: list[str]

    @property
    def clean(self) -> bool:
        """True if there is no leak, no blind change, and no wrong target or position."""
        has_fault = any(change.leaks or change.blind for change in self.changes)
        return not self.wrong and not has_fault


def main(arguments: list[str]) -> int:
    """Run the verb and return its exit status.

    Raises:
        ConfigError: the configuration is wrong, its documents are not kept apart, or its model is too large.
        DataError: no sequence of the data has two documents.
    """
    taken = take(arguments, {}, usage=USAGE)
    from shardtrain import config as configs

    loaded = configs.load(*taken.configuration())
    problems = list(configs.check(loaded))
    if problems:
        raise ConfigError(problems)
    model, has_experts = _model(loaded.config)
    batch, tokenizer = _row(loaded.config)
    tolerance = 0.0
    if has_experts:
        tolerance = EXPERTS_TOLERANCE
    ends_are_inputs = _kind(loaded) == "concat"
    report = probe(model, batch, tolerance=tolerance, ends_are_inputs=ends_are_inputs)
    lines = [*show_boundaries(batch, tokenizer), "", *verdicts(report)]
    print("\n".join(lines))
    return 0 if report.clean else 1


def probe(
    model: nn.Module,
    batch: Batch,
    learned_BT: Tensor | None = None,
    tolerance: float = 0.0,
    ends_are_inputs: bool = True,
) -> ProbeReport:
    """Change one token of some documents in the first row of a batch, one at a time, and compare the row's logits.

    Args:
        model: The model. It is not changed.
        batch: The batch, with ``documents_BT``.
        learned_BT: True for tokens that may be targets with a loss. None for all.
        tolerance: Largest change of a logit by rounding, relative to the largest logit.
        ends_are_inputs: The last token of a document is in the row, as with "concat" packing. Otherwise it is
            only a target, and cannot be compared with the row.

    Raises:
        ValueError: the batch has no ``documents_BT``, or its first row has fewer than two documents.
    """
    import torch

    if batch.documents_BT is None:
        raise ValueError("a batch without documents_BT has no documents to separate")
    documents_T = batch.documents_BT[0]
    numbers, lengths = documents_T.unique_consecutive(return_counts=True)
    if len(numbers) < 2:
        raise ValueError("the first row has one document, but a leak requires two")
    stops = lengths.cumsum(0).tolist()

    # Change the first token of some documents, spread over the sequence. All later tokens of its document may
    # attend to a first token, so a change shows there.
    distance = (len(stops) - 1) / (MAX_CHANGES - 1)
    picked = {round(number * distance) for number in range(MAX_CHANGES)}
    tokens_BT = batch.tokens_BT[:1]
    positions_BT = batch.positions_BT[:1]
    documents_BT = batch.documents_BT[:1]
    changes = []
    with torch.no_grad():
        logits_TV = model(tokens_BT, positions_BT, documents_BT)[0]
        limit = tolerance * logits_TV.abs().max()
        vocab_size = logits_TV.size(-1)
        for index in sorted(picked):
            start = stops[index] - int(lengths[index])
            changed_BT = tokens_BT.clone()
            changed_BT[0, start] = (changed_BT[0, start] + 1) % vocab_size
            changed_logits_TV = model(changed_BT, positions_BT, documents_BT)[0]
            differences_TV = (changed_logits_TV - logits_TV).abs()
            # Negated, so NaN counts as moved.
            moved_T = ~(differences_TV.amax(-1) <= limit)
            document = int(numbers[index])
            changes.append(_change(document, start, stops[index], moved_T, documents_T))
    wrong = _wrong_targets(batch, learned_BT, ends_are_inputs) + _wrong_positions(batch)
    return ProbeReport(changes, wrong)


def _change(
    document: int, place: int, stop: int, moved_T: Tensor, documents_T: Tensor
) -> TokenChange:
    """Describe a change by the tokens whose logits moved."""
    leaks: dict[int, list[int]] = {}
    moved_places = moved_T.nonzero().flatten().tolist()
    for moved in moved_places:
        other = int(documents_T[moved])
        if other != document:
            leaks.setdefault(other, []).append(moved)
    # The next token attends to the changed one, unless the document has only one token.
    stop_of_next = min(place + 2, stop)
    has_effect = bool(moved_T[place:stop_of_next].all())
    return TokenChange(document, place, stop, leaks, blind=not has_effect)


def _wrong_targets(batch: Batch, learned_BT: Tensor | None, ends_are_inputs: bool) -> list[str]:
    """Return a message for each wrong target of the first row.

    A target must be the next token of its own document, and must not be masked from the loss.
    """
    from shardtrain.data import IGNORE

    assert batch.documents_BT is not None  # checked by probe
    tokens = batch.tokens_BT[0].tolist()
    targets = batch.targets_BT[0].tolist()
    documents = batch.documents_BT[0].tolist()
    wrong = []
    for t, target in enumerate(targets[:-1]):  # the token after the last is not in the row
        if target == IGNORE:
            continue
        is_last = documents[t] != documents[t + 1]
        # If the last token of a document is only a target, it is not in the row to compare with.
        if is_last and not ends_are_inputs:
            continue
        if is_last:
            wrong.append(
                f"loss across a boundary: place {t} of document {documents[t]} is last but has a target",
            )
        elif target != tokens[t + 1]:
            wrong.append(
                f"shifted target: place {t} has the target {target}, but the next token is {tokens[t + 1]}",
            )
        elif learned_BT is not None and not learned_BT[0, t + 1]:
            wrong.append(
                f"loss on a masked token: place {t} has the target {target}, which must not be learned",
            )
    if all(target == IGNORE for target in targets):
        wrong.append("no target of the sequence has a loss")
    return wrong


def _wrong_positions(batch: Batch) -> list[str]:
    """Return a message for each position of the first row that does not count from 0 in its document.

    The first document may continue from another row.
    """
    assert batch.documents_BT is not None  # checked by probe
    positions = batch.positions_BT[0].tolist()
    documents = batch.documents_BT[0].tolist()
    wrong = []
    for t in range(1, len(positions)):
        expected = 0
        if documents[t] == documents[t - 1]:
            expected = positions[t - 1] + 1
        if positions[t] != expected:
            wrong.append(
                f"wrong position: place {t} of document {documents[t]} has position {positions[t]}, expected {expected}"
            )
    return wrong


def verdicts(report: ProbeReport, most: int = 8) -> list[str]:
    """Return the report as lines: each change, up to ``most`` wrong targets or positions, and the verdict."""
    lines = []
    num_faults = 0
    for change in report.changes:
        start = f"document {change.document}, token at place {change.place} changed:"
        faults = []
        for other, places in change.leaks.items():
            faults.append(
                f"LEAK from document {change.document} into document {other}: {_ranges(places)}"
            )
        if change.blind:
            faults.append(
                "BLIND: the logits of the changed document did not change, so this model cannot be probed"
            )
        num_faults += len(faults)
        if not faults:
            own_places = _ranges(range(change.place, change.stop))
            lines.append(f"{start} its own logits moved (places {own_places}), no other: no leak")
        for fault in faults:
            lines.append(f"{start} {fault}")

    # One mistake in the data usually causes many wrong targets, so a few of them suffice.
    lines += report.wrong[:most]
    if len(report.wrong) > most:
        lines.append(f"... and {len(report.wrong) - most} more")
    if report.clean:
        return [
            *lines,
            "verdict: no leak; every target with loss is the next token of its own document",
        ]
    return [
        *lines,
        f"verdict: {num_faults} leaks or blind changes, {len(report.wrong)} wrong targets or positions",
    ]


def show_boundaries(
    batch: Batch, tokenizer: Tokenizer, around: int = 4, most: int = 8
) -> list[str]:
    """Return lines with ``around`` tokens on each side of the first ``most`` document boundaries of the first row."""
    from shardtrain.data import IGNORE

    assert batch.documents_BT is not None  # checked by _row
    tokens = batch.tokens_BT[0].tolist()
    targets = batch.targets_BT[0].tolist()
    positions = batch.positions_BT[0].tolist()
    documents = batch.documents_BT[0].tolist()
    num_losses = len(targets) - targets.count(IGNORE)
    num_documents = len(set(documents))
    lines = [
        f"sequence of {len(tokens)} tokens in {num_documents} documents; {num_losses} targets have a loss",
    ]
    boundaries = [t for t in range(1, len(tokens)) if documents[t] != documents[t - 1]]
    for boundary in boundaries[:most]:
        lines.append(f"boundary of documents {documents[boundary - 1]} and {documents[boundary]}:")
        first = max(0, boundary - around)
        stop = min(len(tokens), boundary + around)
        for t in range(first, stop):
            # Decode each token separately, including special tokens, to show where targets are shifted.
            target = "no loss"
            if targets[t] != IGNORE:
                target = f"-> {tokenizer.decode([targets[t]], True)!r}"
            token = repr(tokenizer.decode([tokens[t]], True))
            place = f"place {t:6}  document {documents[t]:4}  position {positions[t]:6}"
            lines.append(f"  {place}  {token:14} {target}")
    if len(boundaries) > most:
        lines.append(f"... and {len(boundaries) - most} more boundaries")
    return lines


def _ranges(places: Sequence[int]) -> str:
    """Format indices as ranges.

    >>> _ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    texts = []
    for first, last in runs[:8]:
        text = str(first)
        if last > first:
            text += f"-{last}"
        texts.append(text)
    if len(runs) > 8:
        texts.append("...")
    return ", ".join(texts)


def _model(config: Any) -> tuple[nn.Module, bool]:
    """Return the configured model with random weights, and True if it has experts."""
    from shardtrain import models
    from shardtrain.layout import Draw
    from shardtrain.ops import init_weights
    from shardtrain.ops.tied import to_empty

    module = models.find(config.model.name)
    models.check_documents(module, config.model.name)
    shape = models.shape_of(
        module, config.model.flavor, config.model.overrides, config.model.norm_type
    )
    model = models.build(module, shape)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    max_billions = MAX_PARAMETERS / 1e9
    if billions > max_billions:
        raise ConfigError(
            Problem(
                "model.flavor",
                config.model.flavor,
                rule=f"has {billions:.1f} billion parameters, more than the {max_billions:.0f} that probe runs",
                fix="use a smaller flavor or --model.overrides.num_layers 2; with the same [data] its mask is the same",
            )
        )
    # The memory of ``to_empty`` is undefined, and may contain NaN.
    to_empty(model)
    for buffer in model.buffers():
        buffer.zero_()
    # Draw with unit gain instead of the model's initialization, whose small or zero weights would hide
    # the effect of some parts.
    for name, parameter in model.named_parameters():
        distribution = Draw("ones")
        if parameter.ndim > 1:
            distribution = Draw("normal", std=parameter.size(-1) ** -0.5)
        init_weights.draw_(parameter, name, distribution, config.debug.seed)
    return model, bool(module.LAYOUT.expert)


def _kind(loaded: Any) -> str:
    """Return the kind of packing.

    "auto" depends on the dataset, and prepared shards may have other rows than data.format.
    """
    from shardtrain.data import build_dataset

    config = loaded.config
    sources = build_dataset.named_sources(config, config.training)
    tokenizer = build_dataset.tokenizer_of(config)
    # All sources of a mix are packed in the same way.
    packing = build_dataset.packing_of(config, config.training, tokenizer, sources[0])
    return str(packing.kind)


def _row(config: Any) -> tuple[Batch, Tokenizer]:
    """Return a batch of one row with at least two documents, and the tokenizer of the data.

    Raises:
        ConfigError: documents are padded or attend to each other.
        DataError: no sequence has two documents.
    """
    from shardtrain import data

    if config.data.packing == "padded":
        raise ConfigError(
            Problem(
                "data.packing",
                "padded",
                rule="puts each document into its own sequence, so there is nothing to probe",
                fix='probe "first_fit" or "concat"',
            )
        )
    stream = data.open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)
    for batch in itertools.islice(stream, MAX_BATCHES):
        if batch.documents_BT is None:
            raise ConfigError(
                Problem(
                    "data.document_mask",
                    config.data.document_mask,
                    rule="lets the documents of a sequence attend to each other, so there is nothing to probe",
                    fix='set it to "on"',
                )
            )
        # A row with a single long document cannot have a leak.
        for number, documents_T in enumerate(batch.documents_BT):
            has_several = bool((documents_T != documents_T[0]).any())
            if has_several:
                row = slice(number, number + 1)
                batch_of_row = data.Batch(
                    batch.tokens_BT[row],
                    batch.targets_BT[row],
                    batch.positions_BT[row],
                    batch.sample_ids_B[row],
                    batch.documents_BT[row],
                )
                return batch_of_row, stream.tokenizer
    raise DataError(
        f"no sequence of the first {MAX_BATCHES} batches has two documents; "
        "use a larger training.seq_len, or "
        'data.packing="first_fit"'
    )
