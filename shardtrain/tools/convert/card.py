"""Model card: README.md with YAML front matter, written from the run folder and the checkpoint.

Unknown facts are omitted: the card guesses no license, base model or dataset. Options that cannot change results,
such as launch and log options, are omitted too, and with them the names of machines. Secrets are redacted.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardtrain import config as configs
from shardtrain.checkpoint import manifest
from shardtrain.config import derived
from shardtrain.config.schema import Config
from shardtrain.hf.source import FolderSource
from shardtrain.tools.runs import run_files
from shardtrain.tools.runs.run_files import RunFolder
from shardtrain.train.run_folder import versions
from shardtrain.utils import bounded_reads
from shardtrain.utils.errors import ShardtrainError
from shardtrain.utils.redact import redact, visible
from shardtrain.utils.units import format_count

CARD = "README.md"
_MAX_BYTES = 2**24
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_MARK = re.compile(r"<!-- shardtrain export ([0-9a-f]{64}) ([0-9a-f]{64}) -->\n?\Z")
_FRONT = re.compile(r"\A---\n(.*?)\n---\n", re.DOTALL)
_LICENSE = re.compile(r"^license:\s*[\"']?([\w.+-]+)[\"']?\s*$", re.MULTILINE)
_HUB_DATASETS = {"c4": "allenai/c4", "c4_validation": "allenai/c4", "openwebtext": "Skylion007/openwebtext"}
_OF_A_MACHINE = {
    "job", "launch", "comm", "metrics", "profiling", "memory_estimation", "fault_tolerance", "report", "watch",
    "compile", "validation.dataloader", "training.dataloader",
}  # fmt: skip
"""Configuration sections that cannot change results."""


@dataclass(frozen=True)
class Card:
    """Contents of a model card. Unknown values are empty."""

    name: str
    library: str
    task: str = ""
    base_model: str = ""
    license: str = ""
    datasets: tuple[str, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()
    options: str = ""
    made_by: str = field(default_factory=versions)

    def text(self, of: str) -> str:
        """Return the text of the file. ``of`` identifies the exported weights: a SHA-256 in hex."""
        tags = ["shardtrain", *([self.task] if self.task else [])]
        front: dict[str, Any] = {"library_name": self.library}
        if self.library == "transformers" and self.task not in ("classification", "reward_model"):
            front["pipeline_tag"] = "text-generation"
        for key, value in (("base_model", self.base_model), ("license", self.license), ("datasets", self.datasets)):
            if value:
                front[key] = list(value) if isinstance(value, tuple) else value
        front["tags"] = tags
        lines = ["---", *(f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in front.items()), "---"]
        lines += ["", f"# {self.name}", ""]
        began = ""
        if self.base_model:
            began = f" Base model: [{self.base_model}](https://huggingface.co/{self.base_model})."
        lines += [f"Trained with shardtrain.{began}", ""]
        if self.facts:
            lines += ["| | |", "|---|---|"]
            for name, value in self.facts:
                cell = " ".join(value.replace("|", "\\|").split())
                lines.append(f"| {name} | {cell} |")
            lines.append("")
        if self.options:
            lines += [
                "## How to reproduce", "",
                "`shardtrain train run.toml` with this file, the same data and the same initial weights. "
                "The number of devices does not affect the results.", "", "```toml", self.options.rstrip(), "```", "",
            ]  # fmt: skip
        lines += [f"Exported by {self.made_by}.", ""]
        body = redact(visible("\n".join(lines)))
        return f"{body}\n<!-- shardtrain export {of} {_digest(body)} -->\n"


def is_own(text: str) -> bool:
    """True if shardtrain wrote the card and nobody has changed it since."""
    mark = _MARK.search(text)
    return mark is not None and _digest(text[: mark.start()].removesuffix("\n")) == mark[2]


def exported(folder: Path) -> str:
    """Return the identity of the exported weights from the card of a folder, or "" if the card is not shardtrain's."""
    try:
        mark = _MARK.search(bounded_reads.whole(folder / CARD, _MAX_BYTES).decode("utf-8", "replace"))
    except OSError:
        return ""
    return mark[1] if mark else ""


def identity(checkpoint: Path, *options: object) -> str:
    """Return a hash of the options of an export and of the manifest, which contains a hash of each file."""
    found = hashlib.sha256(manifest.read_bytes(checkpoint))
    found.update(repr(options).encode())
    return found.hexdigest()


def of_folder(folder: Path, base_model: str = "") -> Card:
    """Return the card of a Hugging Face folder whose run is unknown."""
    adapter = (folder / "adapter_config.json").is_file()
    return Card(
        os.path.basename(os.path.realpath(folder)), "peft" if adapter else "transformers", base_model=base_model
    )


def of_checkpoint(
    checkpoint: Path, name: str, source: FolderSource | None, base_model: str = "", adapter: bool = False
) -> Card:
    """Return the card of an exported checkpoint from its manifest and the files of its run, if they exist."""
    run = RunFolder(Path(os.path.realpath(checkpoint)).parent.parent)
    state: Mapping[str, Any] = manifest.read(checkpoint).facts.get("state", {})

    # Facts from the run's configuration.
    config = None
    facts = []
    if run.config.is_file():
        try:
            config = configs.load(run.config).config
        except ShardtrainError:  # written by an incompatible version
            config = None
    if config is not None:
        model = config.model
        facts += [("Model", derived.model_label(model)), ("Task", config.task.name)]
        if config.task.teacher_path:
            facts.append(("Teacher", config.task.teacher_path))
        if config.lora.enable:
            facts.append(("Adapters", f"rank {config.lora.rank}, alpha {config.lora.alpha:g}"))
        if data := _data(config):
            facts.append(("Data", ", ".join(data)))

    # Training progress and the last metrics.
    if state.get("step"):
        facts.append(("Steps", f"{state['step']:,}"))
    if state.get("tokens_seen"):
        facts.append(("Target tokens", f"{state['tokens_seen']:,} ({format_count(state['tokens_seen'])})"))
    step = int(state.get("step") or 0)
    facts += _measured(run.metrics, step, "Training")
    facts += _measured(run.validation, step, "Validation")

    # Precision and parallelism.
    if config is not None:
        facts += [
            ("Precision", f"stored {config.training.dtype}, computed in {derived.compute_dtype(config)}"),
            ("Seed", str(config.debug.seed)),
            ("Mesh", _mesh(config, run.world_size())),
        ]
        if trained_by := run.versions():
            facts.append(("Trained by", trained_by))
    return Card(
        name=name,
        library="peft" if adapter else "transformers",
        task=config.task.name if config is not None and not config.task.name.endswith(".py") else "",
        base_model=base_model or _base_model(source),
        license=_license(source),
        datasets=tuple(_hub_datasets(config)) if config is not None else (),
        facts=tuple(facts),
        options=_options(config) if config is not None else "",
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _measured(path: Path, step: int, what: str) -> list[tuple[str, str]]:
    """Return the metrics of the last record up to ``step`` as one row of the card, or [] if there is none."""
    last: dict[str, Any] = {}
    try:
        for record in run_files.records(path):
            if record is not None and record["step"] <= step:
                last = record
    except OSError:
        return []
    names = ("loss", "perplexity", "accuracy", "reward_accuracy", "reward_margin", "cross_entropy", "divergence")
    said = [f"{name} {last[name]:.4g}" for name in names if isinstance(last.get(name), int | float)]
    return [(what, f"{', '.join(said)} (step {last['step']:,})")] if said else []


def _mesh(config: Config, world_size: int | None) -> str:
    p = config.parallelism
    degrees = {
        "replicate": p.data_parallel_replicate_degree, "shard": p.data_parallel_shard_degree,
        "tensor": p.tensor_parallel_degree, "context": p.context_parallel_degree,
        "pipeline": p.pipeline_parallel_degree, "expert": p.expert_parallel_degree,
    }  # fmt: skip
    split = ", ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)
    ranks = f"{world_size} rank{'s' if world_size != 1 else ''}" if world_size else "an unknown number of ranks"
    return f"{ranks}{': ' + split if split else ''}"


def _sources(config: Config) -> Iterable[tuple[str, str | None]]:
    if not config.data.sources:
        return [(config.training.dataset, config.training.dataset_path)]
    return [(source.dataset, source.dataset_path) for source in config.data.sources.values()]


def _data(config: Config) -> list[str]:
    def of(dataset: str, path: str | None) -> str:
        shown = path and (Path(path).name if path.startswith("/") else path)
        return f"{dataset} {shown}" if shown else dataset

    return [of(dataset, path) for dataset, path in _sources(config)]


def _hub_datasets(config: Config) -> list[str]:
    found = []
    for dataset, path in _sources(config):
        if dataset == "huggingface" and path and _REPO.fullmatch(path) and not Path(path).exists():
            found.append(path)
        elif dataset in _HUB_DATASETS and not path:
            found.append(_HUB_DATASETS[dataset])
    return list(dict.fromkeys(found))


def _base_model(source: FolderSource | None) -> str:
    """Return the repository named by config.json of the initial weights, or ""."""
    said = str((source.config if source is not None else {}).get("_name_or_path") or "")
    return said if _REPO.fullmatch(said) and not Path(said).exists() else ""


def _license(source: FolderSource | None) -> str:
    """Return the license in the card of the initial weights, or ""."""
    try:
        text = (
            bounded_reads.whole(source.where / CARD, _MAX_BYTES).decode("utf-8", "replace")
            if source is not None
            else ""
        )
    except (OSError, TypeError):
        return ""
    front = _FRONT.match(text.replace("\r\n", "\n"))
    found = _LICENSE.search(front[1]) if front else None
    return found[1] if found else ""


def _options(config: Config) -> str:
    """Return the changed options that may affect results, as a TOML file for ``shardtrain train``."""
    plain = {(section, line) for section, lines in _sections(configs.resolved_toml(Config())) for line in lines}
    text = ""
    for section, lines in _sections(configs.resolved_toml(config)):
        if any(section == name or section.startswith(f"{name}.") for name in _OF_A_MACHINE):
            continue
        changed = [line for line in lines if line.strip() and (section, line) not in plain]
        if changed:
            text += f"[{section}]\n" + "\n".join(changed) + "\n\n"
    text = text.replace(f'"{Path.home()}/', '"~/')
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:  # a value has several lines, so use the full configuration
        return configs.resolved_toml(config)
    return text


def _sections(text: str) -> list[tuple[str, list[str]]]:
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        if header := re.fullmatch(r"\[+([^\]]+)\]+", line.strip()):
            found.append((header[1], []))
        elif found and not line.startswith("#"):
            found[-1][1].append(line)
    return found
