"""Import and export of the weights of a ``transformers`` class, under the tensor names of its files.

Tensor names in files may lack the prefix of the base model, and a tied tensor may have any of its names.
``transformers`` also renames tensors and stacks experts when it loads a file, and reverses this when it saves
one (``transformers.conversion_mapping``). These rules are read as data.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardtrain.hf.mapping import Translation
from shardtrain.hf.weights import HubWeights
from shardtrain.hub_formats.format import CHANGEABLE, HubFormat, MergedExperts
from shardtrain.models import architecture
from shardtrain.ops.tied import tied_names, to_empty
from shardtrain.utils.errors import CheckpointError, ConfigError, Problem
from shardtrain.utils.log import logger

_IGNORED = ("*.inv_freq", "*.position_ids", "*.masked_bias", "*.token_type_ids")
"""Buffers in files of older versions. The model computes them from config.json."""
_STACKING = ([("MergeModulelist", 0)], [("MergeModulelist", 0), ("Concatenate", 1)])
"""Supported conversions of tensors: stacking experts, or stacking experts and then concatenating."""
_NOT_COMPARED = {
    "_name_or_path",
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}
"""Keys of config.json that do not define the model."""


def is_as_is(module: Any) -> bool:
    """True if a model file wraps a class of ``transformers``."""
    return bool(getattr(module, "AS_IS", False))


def translation(model: Any, config: Any) -> Translation:
    """Map the tensors of a model to their names in files. No file is read."""
    model_type = architecture.read(config.path).model_type
    rules = _conversions(model_type)
    shapes = {}
    sources = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        shapes[name] = tuple(tensor.shape)
        sources[name] = _in_files(_without_attribute(name), rules)
    hub = HubFormat(config.class_name, model_type, {}, lambda _: {}, lambda _: {}, _IGNORED)
    return Translation(hub, shapes, config, sources)


@dataclass(frozen=True)
class _Rule:
    """Conversion between names in ``transformers`` and names in files.

    Attributes:
        opened: Name in ``transformers``, or a part of a name.
        saved: Name in files. If tensors are concatenated, one name per part.
        stacks: True if the tensor in ``transformers`` stacks experts that are separate in files.
    """

    opened: str
    saved: tuple[str, ...]
    stacks: bool


def _conversions(model_type: str) -> list[_Rule]:
    """Return the rules of an architecture, stacked experts first. Return [] if any rule is unsupported."""
    try:
        from transformers.conversion_mapping import get_checkpoint_conversion_mapping
    except ImportError:
        # Before transformers 5, the names in files are those of the modules.
        return []
    rules = []
    for conversion in get_checkpoint_conversion_mapping(model_type) or ():
        operations = getattr(conversion, "operations", None) or ()
        steps = [(type(step).__name__, getattr(step, "dim", 0)) for step in operations]
        saved = [pattern.replace("\\.", ".") for pattern in conversion.source_patterns]
        if len(conversion.target_patterns) != 1 or any(_has_regex(pattern) for pattern in saved):
            return []
        # Either rename one tensor, or stack one tensor per expert.
        if not steps:
            is_supported = len(saved) == 1 and "*" not in saved[0]
        else:
            is_one_per_expert = all(pattern.count(".*.") == 1 for pattern in saved)
            is_supported = steps in _STACKING and is_one_per_expert
        if not is_supported:
            return []
        names = tuple(pattern.replace(".*.", ".#.") for pattern in saved)
        rules.append(_Rule(conversion.target_patterns[0], names, stacks=bool(steps)))
    return sorted(rules, key=lambda rule: not rule.stacks)


def _has_regex(pattern: str) -> bool:
    return re.search(r"[\\^$()\[\]+?|]", pattern) is not None


def _in_files(name: str, rules: Sequence[_Rule]) -> str | MergedExperts:
    """Return the name in files of a ``transformers`` tensor, or the names of its parts."""
    names = [name]
    is_stacked = False
    for rule in rules:
        if not rule.stacks:
            names = [part.replace(rule.opened, rule.saved[0]) for part in names]
        elif not is_stacked and name.endswith(rule.opened):
            is_stacked = True
            names = [name.removesuffix(rule.opened) + part for part in rule.saved]
    return MergedExperts(tuple(names)) if is_stacked else names[0]


def _without_attribute(name: str) -> str:
    """Return a tensor's name in ``transformers``: our name without the attribute that contains the network."""
    return name.partition(".")[2]


def fit(model: Any, config: Any, weights: HubWeights) -> tuple[Translation, list[str]]:
    """Map the tensors of a model to those of a file.

    If the file was saved from another class, it may lack tensors outside the base model, or have additional
    ones. Missing tensors keep their random initialization, and additional tensors are skipped.

    Returns:
        The mapping, and regular expressions for the tensors that are skipped.

    Raises:
        CheckpointError: the file has names that only ``transformers`` can convert.
    """
    plain = translation(model, config)
    in_file = set(weights.names())
    hf = model.hf
    sources = dict(plain.sources)
    repeated = []

    # Find the name of each tensor in the file. It may have the prefix of the base model or not, an older name
    # of LayerNorm, or any name of a tied tensor. A second name is skipped only if its values are equal.
    prefix = f"{hf.base_model_prefix}."
    aliases = {names[0]: names[1:] for names in tied_names(model)}
    renamed = _renamed(hf, in_file)
    for ours, theirs in plain.sources.items():
        if isinstance(theirs, MergedExperts):
            # The file contains the experts separately or stacked.
            for form in _forms(_without_attribute(ours), prefix):
                if form in in_file:
                    sources[ours] = form
                    break
            # A file writes all parts of a tensor in the same form, so try form by form.
            forms_of_parts = [_forms(name, prefix) for name in theirs.names]
            for names in zip(*forms_of_parts, strict=True):
                if names[0].replace("#", "0") in in_file:
                    sources[ours] = MergedExperts(names)
                    break
            continue
        names_of_tensor = [str(theirs), _without_attribute(ours)]
        names_of_tensor += [_without_attribute(alias) for alias in aliases.get(ours, ())]
        existing: list[str] = []
        for name in names_of_tensor:
            existing += [form for form in _forms(name, prefix) if form in in_file]
        if not existing and _without_attribute(ours) in renamed:
            existing = [renamed[_without_attribute(ours)]]
        # Of equal copies of a tied tensor, read the first.
        if existing:
            sources[ours] = existing[0]
            for name in existing[1:]:
                if _same(weights, existing[0], name):
                    repeated.append(re.escape(name))

    # Skip the same tensors as transformers: those that match patterns of its modules, and computed buffers.
    patterns: set[str] = set()
    for module in hf.modules():
        patterns.update(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ())
    skipped = [f".*(?:{pattern}).*" for pattern in sorted(patterns)]
    for name in model.computed:
        skipped += [re.escape(form) for form in _forms(name, prefix)]

    # Find missing and additional tensors.
    mapping = Translation(plain.hub, plain.shapes, config, sources)
    missing = []
    for ours in sources:
        names_in_file = {piece.name for piece in mapping.pieces_of(ours)}
        if not names_in_file <= in_file:
            missing.append(ours)
    surplus = in_file - mapping.their_shapes().keys()
    if missing and any(".experts." in name for name in surplus):
        raise CheckpointError(
            f"{weights.folder} has tensor names of {config.class_name} that only transformers can "
            f"convert, such as {min(surplus)}; use a model file of this package, if one exists"
        )
    # A class for another task has a new head. Skip the head in the file.
    if config.class_name not in (architecture.read(config.path).architectures or []):
        new = [ours for ours in missing if not _without_attribute(ours).startswith(prefix)]
        skipped += [re.escape(name) for name in surplus if not name.startswith(prefix)]
        for ours in new:
            del sources[ours]
        if new:
            logger.info(
                f"{len(new)} tensors are not in {weights.folder} and keep their random initialization: "
                f"{', '.join(new[:10])}"
            )
    return Translation(plain.hub, plain.shapes, config, sources), [*skipped, *repeated]


def _renamed(hf: Any, in_file: set[str]) -> dict[str, str]:
    """Map names of tensors in ``transformers`` to other names in a file, by the library's own rules.

    Models with several parts, such as a vision tower, have rules for each part. Only names are mapped.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, rename_source_key
    except ImportError:
        # Before transformers 5, the names in files are those of the modules.
        return {}
    parameters = dict(hf.named_parameters())
    if in_file >= parameters.keys():
        return {}
    conversions = get_model_conversion_mapping(hf)
    renamings = [rule for rule in conversions if isinstance(rule, WeightRenaming)]
    renamed = {}
    for name in sorted(in_file - parameters.keys()):
        new_name, _ = rename_source_key(name, renamings, [], hf.base_model_prefix, parameters)
        if new_name in parameters:
            renamed[new_name] = name
    return renamed


def own_sizes(config: Any) -> Any:
    """Return a model's Config with the vocabulary size of its folder.

    Raises:
        ConfigError: the model's vocabulary is smaller than that of the folder.
    """
    check_rows(config.vocab_size, config.own_vocab_size)
    return dataclasses.replace(config, vocab_size=config.own_vocab_size)


def check_rows(vocab_size: int, stored_rows: int) -> None:
    """Raise ConfigError if the vocabulary is smaller than the number of embedding rows in the initial weights."""
    if vocab_size < stored_rows:
        raise ConfigError(
            Problem(
                "model.overrides.vocab_size",
                vocab_size,
                rule=f"is below the {stored_rows} rows of the folder, and rows cannot be removed",
                fix=f"use {stored_rows} or more",
            )
        )


def check_same(config: Any, folder: Path) -> None:
    """Raise ConfigError if the weights in ``folder`` have another config.json than the configured folder.

    Keys that match ``CHANGEABLE`` may differ. The configured folder's values are used then, with a warning.

    Raises:
        ConfigError: another key differs. The message lists up to ten of them.
    """
    ours = dict(architecture.read(config.path).to_dict())
    theirs = dict(architecture.read(str(folder)).to_dict())
    differences = []
    for key in sorted((ours.keys() | theirs.keys()) - _NOT_COMPARED):
        our_value = ours.get(key)
        their_value = theirs.get(key)
        if our_value == their_value:
            continue
        # A run may choose its own positions, attention window and dropout.
        if CHANGEABLE.fullmatch(key):
            logger.warning(
                f"{key}={our_value!r} of {config.path} is used; {folder} has {their_value!r}"
            )
        else:
            differences.append(f"{key}={their_value!r} instead of {our_value!r}")
    if differences:
        more = ""
        if len(differences) > 10:
            more = f" and {len(differences) - 10} more"
        raise ConfigError(
            f"{folder} contains another model than {config.path}: {'; '.join(differences[:10])}{more}; "
            "name the same folder in model.hf_assets_path and checkpoint.initial_load_path"
        )


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Disable the progress bars of ``transformers``, because this package logs its own progress."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


@torch.no_grad()
def both_logits(
    model: Any,
    read: Mapping[str, Tensor],
    folder: Path,
    tokens_BT: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return the logits of our weights and of an exported folder for the same tokens, in float32 on the CPU.

    Args:
        read: Our weights by name.
    """
    import transformers

    to_empty(model)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor.copy_(read[name])
    theirs = getattr(transformers, type(model.hf).__name__)
    with without_progress_bar():
        opened = theirs.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    eos = getattr(model.hf.config, "eos_token_id", None)
    # Some classifiers, such as BART, read the scores at the EOS token, so give
    # each row exactly one, at its end.
    if model.kind == "classification" and isinstance(eos, int):
        other_token = 0 if eos else 1
        tokens_BT = tokens_BT.masked_fill(tokens_BT == eos, other_token)
        tokens_BT[:, -1] = eos
    their_inputs = {"input_ids": tokens_BT}
    decoded_BS = None
    if model.kind == "sequence_to_sequence":
        decoded_BS = tokens_BT.flip(1)
        first_B1 = torch.full_like(tokens_BT[:, :1], opened.config.decoder_start_token_id)
        their_inputs["decoder_input_ids"] = torch.cat((first_B1, decoded_BS[:, :-1]), dim=1)
    our_logits = model.eval()(tokens_BT, decoded_BS=decoded_BS)
    return our_logits, opened(**their_inputs).logits


def _forms(name: str, prefix: str) -> list[str]:
    """Return the possible names in files: as given, with or without the prefix of the base model,
    and an older name.
    """
    other = name.removeprefix(prefix) if name.startswith(prefix) else prefix + name
    old = re.sub(r"LayerNorm\.bias$", "LayerNorm.beta", name)
    old = re.sub(r"LayerNorm\.weight$", "LayerNorm.gamma", old)
    return list(dict.fromkeys((name, other, old)))


def _same(weights: HubWeights, one: str, other: str) -> bool:
    if weights.shape(one) != weights.shape(other):
        return False
    box = [slice(0, size) for size in weights.shape(one)]
    return torch.equal(weights.read(one, box), weights.read(other, box))
