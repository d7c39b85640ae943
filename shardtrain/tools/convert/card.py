"""Model card: README.md with YAML front matter, written from the run folder and the checkpoint.

Unknown facts are omitted: the card guesses no license, base model or dataset. Options that cannot change
results, such as launch and log options, are omitted too, and with them the names of machines. Secrets are
redacted.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
_HUB_DATASETS = {
    "c4": "allenai/c4",
    "c4_validation": "allenai/c4",
    "openwebtext": "Skylion007/openwebtext",
}
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
        lines = self._front_matter()
        base_model = ""
        if self.base_model:
            base_model = (
                f" Base model: [{self.base_model}](https://huggingface.co/{self.base_model})."
            )
        lines += ["", f"# {self.name}", "", f"Trained with shardtrain.{base_model}", ""]
        if self.facts:
            lines += ["| | |", "|---|---|"]
            for name, value in self.facts:
                # A bar or a line break would end the cell.
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

    def _front_matter(self) -> list[str]:
        """Return the lines of the YAML block that the hub reads. Every value is JSON, which is also YAML."""
        fields: dict[str, Any] = {"library_name": self.library}
        generates = self.task not in ("classification", "reward_model")
        if self.library == "transformers" and generates:
            fields["pipeline_tag"] = "text-generation"
        if self.base_model:
            fields["base_model"] = self.base_model
        if self.license:
            fields["license"] = self.license
        if self.datasets:
            fields["datasets"] = list(self.datasets)
        fields["tags"] = ["shardtrain"]
        if self.task:
            fields["tags"].append(self.task)
        lines = ["---"]
        for key, value in fields.items():
            lines.append(f"{key}: {json.dumps(value, ensure_ascii=False)}")
        lines.append("---")
        return lines


def is_own(text: str) -> bool:
    """True if shardtrain wrote the card and nobody has changed it since."""
    # The mark at the end contains a hash of the text before it.
    mark = _MARK.search(text)
    if mark is None:
        return False
    body = text[: mark.start()].removesuffix("\n")
    return _digest(body) == mark[2]


def exported(folder: Path) -> str:
    """Return the identity of the exported weights from the card of a folder, or "" if the card is not shardtrain's."""
    try:
        text = bounded_reads.read_all(folder / CARD, _MAX_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    mark = _MARK.search(text)
    return mark[1] if mark else ""


def identity(checkpoint: Path, *options: object) -> str:
    """Return a hash of the options of an export and of the manifest, which contains a hash of each file."""
    digest = hashlib.sha256(manifest.read_bytes(checkpoint))
    digest.update(repr(options).encode())
    return digest.hexdigest()


def of_folder(folder: Path, base_model: str = "") -> Card:
    """Return the card of a Hugging Face folder whose run is unknown."""
    library = "transformers"
    if (folder / "adapter_config.json").is_file():
        library = "peft"
    name = os.path.basename(os.path.realpath(folder))
    return Card(name, library, base_model=base_model)


def of_checkpoint(
    checkpoint: Path,
    name: str,
    source: FolderSource | None,
    base_model: str = "",
    adapter: bool = False,
) -> Card:
    """Return the card of an exported checkpoint from its manifest and the files of its run, if they exist."""
    run = RunFolder(Path(os.path.realpath(checkpoint)).parent.parent)
    config = None
    if run.config.is_file():
        # An incompatible version may have written it.
        with contextlib.suppress(ShardtrainError):
            config = configs.load(run.config).config

    # Without the configuration of the run, the card has only the facts of the checkpoint.
    facts = []
    if config is not None:
        facts += _model_rows(config)

    # Training progress and the last metrics.
    state: Mapping[str, Any] = manifest.read(checkpoint).facts.get("state", {})
    step = int(state.get("step") or 0)
    tokens = state.get("tokens_seen")
    if step:
        facts.append(("Steps", f"{step:,}"))
    if tokens:
        facts.append(("Target tokens", f"{tokens:,} ({format_count(tokens)})"))
    facts += _measured(run.metrics, step, "Training")
    facts += _measured(run.validation, step, "Validation")

    card = Card(
        name=name,
        library="peft" if adapter else "transformers",
        base_model=base_model or _base_model(source),
        license=_license(source),
    )
    if config is None:
        return dataclasses.replace(card, facts=tuple(facts))

    # Precision and parallelism.
    facts += [
        (
            "Precision",
            f"stored {config.training.dtype}, computed in {derived.compute_dtype(config)}",
        ),
        ("Seed", str(config.debug.seed)),
        ("Mesh", _mesh(config, run.world_size())),
    ]
    versions_of_run = run.versions()
    if versions_of_run:
        facts.append(("Trained by", versions_of_run))
    # A task in a user's file has no name that others know.
    task = config.task.name
    if task.endswith(".py"):
        task = ""
    return dataclasses.replace(
        card,
        task=task,
        datasets=tuple(_hub_datasets(config)),
        facts=tuple(facts),
        options=_options(config),
    )


def _model_rows(config: Config) -> list[tuple[str, str]]:
    """Return rows about the model, the task and the data."""
    rows = [("Model", derived.model_label(config.model)), ("Task", config.task.name)]
    if config.task.teacher_path:
        rows.append(("Teacher", config.task.teacher_path))
    if config.lora.enable:
        rows.append(("Adapters", f"rank {config.lora.rank}, alpha {config.lora.alpha:g}"))
    data = _data(config)
    if data:
        rows.append(("Data", ", ".join(data)))
    return rows


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _measured(path: Path, step: int, title: str) -> list[tuple[str, str]]:
    """Return the metrics of the last record up to ``step`` as one row of the card, or [] if there is none."""
    last: dict[str, Any] = {}
    try:
        for record in run_files.records(path):
            if record is not None and record["step"] <= step:
                last = record
    except OSError:
        return []
    names = (
        "loss",
        "perplexity",
        "accuracy",
        "reward_accuracy",
        "reward_margin",
        "cross_entropy",
        "divergence",
    )
    texts = []
    for name in names:
        # A record has null instead of NaN and infinity.
        if isinstance(last.get(name), int | float):
            texts.append(f"{name} {last[name]:.4g}")
    if not texts:
        return []
    return [(title, f"{', '.join(texts)} (step {last['step']:,})")]


def _mesh(config: Config, world_size: int | None) -> str:
    parallelism = config.parallelism
    degrees = {
        "replicate": parallelism.data_parallel_replicate_degree,
        "shard": parallelism.data_parallel_shard_degree,
        "tensor": parallelism.tensor_parallel_degree,
        "context": parallelism.context_parallel_degree,
        "pipeline": parallelism.pipeline_parallel_degree,
        "expert": parallelism.expert_parallel_degree,
    }
    text = "an unknown number of ranks"
    if world_size:
        text = "1 rank" if world_size == 1 else f"{world_size} ranks"
    # The shard degree may be -1, which means all remaining ranks.
    axes = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    if axes:
        text += f": {', '.join(axes)}"
    return text


def _sources(config: Config) -> Iterable[tuple[str, str | None]]:
    if not config.data.sources:
        return [(config.training.dataset, config.training.dataset_path)]
    return [(source.dataset, source.dataset_path) for source in config.data.sources.values()]


def _data(config: Config) -> list[str]:
    """Return the datasets of the run.

    An absolute path belongs to a machine, so it is shortened to its last part.
    """
    texts = []
    for dataset, path in _sources(config):
        if path and path.startswith("/"):
            path = Path(path).name
        texts.append(f"{dataset} {path}" if path else dataset)
    return texts


def _hub_datasets(config: Config) -> list[str]:
    """Return the repositories on the Hugging Face Hub among the datasets of the run."""
    repositories = []
    for dataset, path in _sources(config):
        if dataset == "huggingface" and path and _REPO.fullmatch(path):
            # A relative path of a local folder looks like a repository.
            if not Path(path).exists():
                repositories.append(path)
        elif dataset in _HUB_DATASETS and not path:
            repositories.append(_HUB_DATASETS[dataset])
    return list(dict.fromkeys(repositories))


def _base_model(source: FolderSource | None) -> str:
    """Return the repository named by config.json of the initial weights, or ""."""
    if source is None:
        return ""
    name = str(source.config.get("_name_or_path") or "")
    # A local folder may have a name with one slash, too.
    if not _REPO.fullmatch(name) or Path(name).exists():
        return ""
    return name


def _license(source: FolderSource | None) -> str:
    """Return the license in the card of the initial weights, or ""."""
    if source is None:
        return ""
    try:
        text = bounded_reads.read_all(source.where / CARD, _MAX_BYTES).decode("utf-8", "replace")
    except (OSError, TypeError):
        return ""
    front = _FRONT.match(text.replace("\r\n", "\n"))
    if front is None:
        return ""
    license_line = _LICENSE.search(front[1])
    if license_line is None:
        return ""
    return license_line[1]


def _options(config: Config) -> str:
    """Return the changed options that may affect results, as a TOML file for ``shardtrain train``."""
    # An option is changed if its line differs from that of the default configuration.
    defaults: dict[str, list[str]] = {}
    for section, lines in _sections(configs.resolved_toml(Config())):
        defaults.setdefault(section, []).extend(lines)
    excluded = tuple(f"{name}." for name in _OF_A_MACHINE)
    text = ""
    for section, lines in _sections(configs.resolved_toml(config)):
        if f"{section}.".startswith(excluded):
            continue
        default_lines = defaults.get(section, [])
        changed = [line for line in lines if line.strip() and line not in default_lines]
        if changed:
            text += f"[{section}]\n" + "\n".join(changed) + "\n\n"
    # The name of a user belongs to a machine.
    text = text.replace(f'"{Path.home()}/', '"~/')

    # If a value has several lines, some of them may be missing. Use the full configuration then.
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return configs.resolved_toml(config)
    return text


def _sections(text: str) -> list[tuple[str, list[str]]]:
    """Split a TOML file into its sections, each with its lines."""
    sections: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        header = re.fullmatch(r"\[+([^\]]+)\]+", line.strip())
        if header:
            sections.append((header[1], []))
        elif sections and not line.startswith("#"):
            _, lines = sections[-1]
            lines.append(line)
    return sections
