"""``shardtrain data probe``: changes one token of a packed document, and reports which logits move and which targets
carry loss, for this model and these data: a leak between documents or a lost mask is seen before step 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardtrain.config.command_line import take
from shardtrain.utils.errors import ConfigError, DataError, Problem

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shardtrain.data import Batch, Tokenizer

USAGE = """usage: shardtrain data probe [CONFIG.toml] [--section.key VALUE ...]

Takes a packed sequence of the configuration's data and its model, in float32 on the CPU, and changes one token of one
document at a time. No other document's logits may move; those of the document after the changed token must. Every
target that carries loss must be the next token of its own document.

Exit status: 0 documents keep apart, 1 a leak or a wrong target, 2 something to correct in the configuration.
"""
MAX_PARAMETERS = 2 * 10**9
"""Above these a model in float32 takes more than 8 GB and minutes on a CPU, and a smaller flavor tells the same."""
MAX_BATCHES = 64
"""Micro-batches among which a sequence with two documents is looked for."""
MAX_CHANGES = 4
"""Documents changed, one at a time, spread from the first of the sequence to the last."""
EXPERTS_TOLERANCE = 1e-5
"""Change of a logit, relative to the largest, that may be rounding in a model with experts.

Without experts every number of another document is the same sum in the same order, and must be equal to the last bit.
With experts a changed token may go to other experts, and the tokens of other documents then lie at other rows of an
expert's batch, where a matrix product may round otherwise: about 1e-7, and layers add up.
"""


@dataclass(frozen=True)
class TokenChange:
    """What one changed token did. Places count from 0 in the sequence; ``stop`` is one past the document's last.

    ``leaks`` maps the number of another document to its places that moved. ``blind`` says that the changed place or the
    next one of its document did not move: then nothing that did not move says anything.
    """

    document: int
    place: int
    stop: int
    leaks: dict[int, list[int]]
    blind: bool


@dataclass(frozen=True)
class ProbeReport:
    """All changes tried in one sequence, and what is wrong with its targets and positions, one sentence each."""

    changes: list[TokenChange]
    wrong: list[str]

    @property
    def clean(self) -> bool:
        """Whether documents keep apart, the probe could see, and targets and positions are right."""
        return not self.wrong and not any(c.leaks or c.blind for c in self.changes)


def main(words: list[str]) -> int:
    """Run the verb; returns the exit status.

    Raises:
        ConfigError: the configuration is wrong, its documents are not kept apart, or its model is too large.
        DataError: no sequence of the data has two documents.
    """
    found = take(words, {}, usage=USAGE)
    from shardtrain import config as configs

    loaded = configs.load(*found.configuration())
    if problems := configs.check(loaded):
        raise ConfigError(list(problems))
    model, has_experts = _model(loaded.config)
    batch, tokenizer = _row(loaded.config)
    tolerance = EXPERTS_TOLERANCE if has_experts else 0.0
    report = probe(model, batch, tolerance=tolerance, ends_are_inputs=_kind(loaded) == "concat")
    print("\n".join([*show_boundaries(batch, tokenizer), "", *verdicts(report)]))
    return 0 if report.clean else 1


def probe(
    model: nn.Module,
    batch: Batch,
    learned_BT: Tensor | None = None,
    tolerance: float = 0.0,
    ends_are_inputs: bool = True,
) -> ProbeReport:
    """Change one token of some documents of the batch's first row, one at a time, and watch all logits of the row.

    ``learned_BT`` says of each token whether it may carry loss where it is a target; None is all. ``tolerance`` is the
    change of a logit, relative to the largest, that is taken for rounding. ``ends_are_inputs`` says that the last token
    of a document is in the row, as "concat" has it; where documents are fitted it is the target of the one before it
    alone, and cannot be compared with the row. The model is left as it was.

    Raises:
        ValueError: when the batch has no numbers of documents, or its first row fewer than two documents.
    """
    import torch

    if batch.documents_BT is None:
        raise ValueError("a batch without documents_BT has nothing to keep apart")
    documents_T = batch.documents_BT[0]
    numbers, lengths = documents_T.unique_consecutive(return_counts=True)
    if len(numbers) < 2:
        raise ValueError("the first row has one document; a leak needs two")
    stops = lengths.cumsum(0).tolist()

    # The documents that are changed, each at its first token: some of them, spread over the sequence.
    count = len(stops)
    picked = {round(i * (count - 1) / (MAX_CHANGES - 1)) for i in range(MAX_CHANGES)}
    tokens_BT = batch.tokens_BT[:1]
    rest = (batch.positions_BT[:1], batch.documents_BT[:1])
    changes = []
    with torch.no_grad():
        logits_TV = model(tokens_BT, *rest)[0]
        for index in sorted(picked):
            place = stops[index] - int(lengths[index])
            changed_BT = tokens_BT.clone()
            changed_BT[0, place] = (changed_BT[0, place] + 1) % logits_TV.size(-1)
            moved_T = (model(changed_BT, *rest)[0] - logits_TV).abs().amax(-1)
            moved_T = ~(moved_T <= tolerance * logits_TV.abs().max())  # so that NaN counts as moved
            changes.append(_change(int(numbers[index]), place, stops[index], moved_T, documents_T))
    return ProbeReport(changes, _wrong_targets(batch, learned_BT, ends_are_inputs) + _wrong_positions(batch))


def _change(document: int, place: int, stop: int, moved_T: Tensor, documents_T: Tensor) -> TokenChange:
    """What moved: logits of other documents are leaks; where its own did not, the model cannot show a leak."""
    leaks: dict[int, list[int]] = {}
    for moved in moved_T.nonzero().flatten().tolist():
        other = int(documents_T[moved])
        if other != document:
            leaks.setdefault(other, []).append(moved)
    return TokenChange(document, place, stop, leaks, blind=not bool(moved_T[place : min(place + 2, stop)].all()))


def _wrong_targets(batch: Batch, learned_BT: Tensor | None, ends_are_inputs: bool) -> list[str]:
    """Targets of the first row that carry loss and are not the next token of their own document."""
    from shardtrain.data import IGNORE

    assert batch.documents_BT is not None  # probe has looked
    tokens = batch.tokens_BT[0].tolist()
    targets = batch.targets_BT[0].tolist()
    documents = batch.documents_BT[0].tolist()
    wrong = []
    for t, target in enumerate(targets[:-1]):  # the token after the last is not in the row
        if target == IGNORE:
            continue
        if documents[t] != documents[t + 1]:
            if not ends_are_inputs:
                continue
            wrong.append(f"loss across a boundary: place {t} of document {documents[t]} has a target though it is last")
        elif target != tokens[t + 1]:
            wrong.append(f"shifted target: place {t} has the target {target}, and the next token is {tokens[t + 1]}")
        elif learned_BT is not None and not learned_BT[0, t + 1]:
            wrong.append(f"loss on a masked token: place {t} has the target {target}, which is not to be learned")
    if all(target == IGNORE for target in targets):
        wrong.append("no target of the sequence carries loss")
    return wrong


def _wrong_positions(batch: Batch) -> list[str]:
    """Positions of the first row that do not count from 0 in each document; the first may continue from another row."""
    assert batch.documents_BT is not None  # probe has looked
    positions = batch.positions_BT[0].tolist()
    documents = batch.documents_BT[0].tolist()
    wrong = []
    for t in range(1, len(positions)):
        expected = positions[t - 1] + 1 if documents[t] == documents[t - 1] else 0
        if positions[t] != expected:
            wrong.append(f"wrong position: place {t} of document {documents[t]} is {positions[t]} and not {expected}")
    return wrong


def verdicts(report: ProbeReport, most: int = 8) -> list[str]:
    """The report as lines: what each change did, at most so many wrong targets, and the verdict last."""
    lines = []
    bad = 0
    for c in report.changes:
        start = f"document {c.document}, token at place {c.place} changed:"
        faults = [f"LEAK from document {c.document} into document {n}: {_ranges(p)}" for n, p in c.leaks.items()]
        if c.blind:
            faults.append("BLIND: its own document did not move, so this model cannot be probed")
        lines += [f"{start} {fault}" for fault in faults]
        bad += len(faults)
        if not faults:
            lines.append(f"{start} its own logits moved (places {_ranges(range(c.place, c.stop))}), no other: no leak")
    lines += report.wrong[:most]
    if len(report.wrong) > most:
        lines.append(f"... and {len(report.wrong) - most} more")
    if report.clean:
        return [*lines, "verdict: no leak; every target with loss is the next token of its own document"]
    return [*lines, f"verdict: {bad} leaks or blind changes, {len(report.wrong)} wrong targets or positions"]


def show_boundaries(batch: Batch, tokenizer: Tokenizer, around: int = 4, most: int = 8) -> list[str]:
    """The tokens on either side of each boundary of the first row: place, position, token, target or no loss."""
    from shardtrain.data import IGNORE

    assert batch.documents_BT is not None  # _row has looked
    tokens = batch.tokens_BT[0].tolist()
    targets = batch.targets_BT[0].tolist()
    positions = batch.positions_BT[0].tolist()
    documents = batch.documents_BT[0].tolist()
    with_loss = sum(target != IGNORE for target in targets)
    count = len(set(documents))
    lines = [f"sequence of {len(tokens)} tokens in {count} documents; {with_loss} targets carry loss"]
    boundaries = [t for t in range(1, len(tokens)) if documents[t] != documents[t - 1]]
    for boundary in boundaries[:most]:
        lines.append(f"boundary of documents {documents[boundary - 1]} and {documents[boundary]}:")
        for t in range(max(0, boundary - around), min(len(tokens), boundary + around)):
            target = "no loss" if targets[t] == IGNORE else f"-> {tokenizer.decode([targets[t]], True)!r}"
            token = repr(tokenizer.decode([tokens[t]], True))
            lines.append(f"  place {t:6}  document {documents[t]:4}  position {positions[t]:6}  {token:14} {target}")
    if len(boundaries) > most:
        lines.append(f"... and {len(boundaries) - most} more boundaries")
    return lines


def _ranges(places: Sequence[int]) -> str:
    """Places in short.

    >>> _ranges([3, 4, 5, 9])
    '3-5, 9'
    """
    runs: list[list[int]] = []
    for place in places:
        if runs and place == runs[-1][1] + 1:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in runs[:8]]
    return ", ".join(text) + (", ..." if len(runs) > 8 else "")


def _model(config: Any) -> tuple[nn.Module, bool]:
    """The configuration's model with random weights, and whether it has experts."""
    from shardtrain import models
    from shardtrain.layout import Draw
    from shardtrain.ops import init_weights
    from shardtrain.ops.tied import to_empty

    module = models.find(config.model.name)
    models.check_documents(module, config.model.name)
    shape = models.shape_of(module, config.model.flavor, config.model.overrides, config.model.norm_type)
    model = models.build(module, shape)
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > MAX_PARAMETERS:
        rule = f"has {count / 1e9:.1f} billion parameters, more than the {MAX_PARAMETERS / 1e9:.0f} that probe runs"
        fix = "give a smaller flavor, or --model.overrides.num_layers 2, with the same [data]: they mask alike"
        raise ConfigError(Problem("model.flavor", config.model.flavor, rule, fix))
    to_empty(model)
    for buffer in model.buffers():
        buffer.zero_()
    for name, parameter in model.named_parameters():
        # not the model's own start: unit gain shows every part, where small or zero weights would hide some
        gain = Draw("normal", std=parameter.size(-1) ** -0.5) if parameter.ndim > 1 else Draw("ones")
        init_weights.draw_(parameter, name, gain, config.debug.seed)
    return model, bool(module.LAYOUT.expert)


def _kind(loaded: Any) -> str:
    """How documents are packed; prepared shards may hold other rows than data.format says, which "auto" follows."""
    from shardtrain.data import build_dataset

    config = loaded.config
    named = build_dataset.named_sources(config, config.training)[0]
    return str(build_dataset.packing_of(config, config.training, build_dataset.tokenizer_of(config), named).kind)


def _row(config: Any) -> tuple[Batch, Tokenizer]:
    """A batch of one row with at least two documents, and the tokenizer of the data."""
    from shardtrain import data

    if config.data.packing == "padded":
        rule = "gives each document a sequence of its own, so there is nothing to probe"
        raise ConfigError(Problem("data.packing", "padded", rule, 'probe "first_fit" or "concat"'))
    stream = data.open_dataloader(config, batch_rank=0, num_batch_ranks=1, accumulation=1)
    for _, batch in zip(range(MAX_BATCHES), stream, strict=False):
        if batch.documents_BT is None:
            rule = "lets the documents of a sequence attend to each other, so there is nothing to probe"
            raise ConfigError(Problem("data.document_mask", config.data.document_mask, rule, 'set it to "on"'))
        for row, documents_T in enumerate(batch.documents_BT):
            if bool((documents_T != documents_T[0]).any()):
                one = slice(row, row + 1)
                columns = (batch.tokens_BT, batch.targets_BT, batch.positions_BT, batch.sample_ids_B)
                tokens_BT, targets_BT, positions_BT, ids_B = (column[one] for column in columns)
                return data.Batch(tokens_BT, targets_BT, positions_BT, ids_B, batch.documents_BT[one]), stream.tokenizer
    raise DataError(
        f"no sequence of the first {MAX_BATCHES} batches has two documents; use a larger training.seq_len, or "
        'data.packing="first_fit"'
    )
