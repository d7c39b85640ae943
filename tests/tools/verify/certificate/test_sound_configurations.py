"""The certificate of a sound configuration holds: there is no false alarm in any kind of configuration."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tools.verify.certificate.conftest import FIXTURES, SHORT_DOCUMENTS, verdicts_of

EXAMPLES = Path(__file__).parents[4] / "examples"
ALWAYS = ("task", "accumulation", "workers", "resume", "recompute", "offload")
"""Dimensions that apply to every configuration."""
LORA = ("--lora.enable", "true", "--lora.random_base", "true", "--lora.rank", "4")
PACKED = ("--data.packing", "best_fit", "--data.document_mask", "on")
VALIDATED = (
    *("--validation.enable", "true", "--validation.dataset", "jsonl"),
    *("--validation.dataset_path", str(FIXTURES / "documents.jsonl")),
)


class Row(NamedTuple):
    """A sound configuration.

    Attributes:
        options: Options of the run, or a function that returns them after it has created a folder.
        applies: Dimensions that hold in addition to those that always apply.
        unproven: Dimensions in which rounding may change a small model as much as a fault would.
        dtype: Compute dtype.
        data: Options of the data.
    """

    options: Sequence[str] | Callable[[], Sequence[str]]
    applies: tuple[str, ...] = ("mesh",)
    unproven: tuple[str, ...] = ()
    dtype: str = "float32"
    data: tuple[str, ...] = SHORT_DOCUMENTS

    @property
    def base(self) -> tuple[str, ...]:
        """The options that all rows have."""
        return (*self.data, "--training.mixed_precision_param", self.dtype)


def model(name: str, *options: str) -> tuple[str, ...]:
    """Return the options of a native model."""
    return ("--model.name", name, *options)


@functools.cache
def folder_of(name: str, **fields: object) -> str:
    """Return a folder of transformers with a tiny random network."""
    pytest.importorskip("transformers")
    from hf_architectures import hf_folder

    return str(hf_folder(name, **fields))


def architecture(name: str, *options: str, **fields: object) -> Callable[[], Sequence[str]]:
    """Return the options of an architecture of transformers."""

    def options_of_folder() -> Sequence[str]:
        folder = folder_of(name, **fields)
        overrides = ("--model.overrides.path", folder)
        return ("--model.name", "transformers", "--model.flavor", "folder", *overrides, *options)

    return options_of_folder


def distillation() -> Sequence[str]:
    """Return the options of a distillation from a teacher of another family."""
    pytest.importorskip("transformers")
    from hub_folders import build, save

    return ("--task.name", "distillation", "--task.teacher_path", str(teacher(build, save)))


@functools.cache
def teacher(build: Callable[..., object], save: Callable[..., Path]) -> Path:
    """Return the folder of a teacher."""
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="shardtrain-teacher-")) / "qwen3"
    return save(build("qwen3", vocab_size=512), folder)


def images() -> Sequence[str]:
    """Return the options of a task with images."""
    pytest.importorskip("transformers")
    from vision_folders import vision_folder

    folder = str(vision_folder("llava"))
    return (
        *("--model.name", "transformers", "--model.flavor", "folder", "--model.hf_assets_path"),
        *(folder, "--task.name", "image_text", "--training.dataset", "jsonl"),
        *("--training.dataset_path", str(image_rows()), "--training.seq_len", "128"),
    )


@functools.cache
def image_rows() -> Path:
    """Return a file of rows with images."""
    import tempfile

    from vision_folders import rows_with_images

    return rows_with_images(Path(tempfile.mkdtemp(prefix="shardtrain-images-")))


PRECISE = ("mesh", "precision")
SOUND = {
    # models
    "dense": Row(model("llama3")),
    "window": Row(model("mistral", *PACKED), ("mesh", "packing")),
    "parallel residual": Row(model("neox")),
    "experts": Row(model("mixtral")),
    "experts with a balance loss": Row(
        model(
            "qwen3_moe",
            *("--model.flavor", "debugmodel_moe", "--model.overrides.balance_loss_coeff", "0.01"),
            *("--model.overrides.load_balance_coeff", "0.01", *PACKED),
        ),
        ("mesh", "packing"),
    ),
    "chunks": Row(model("llama4", *PACKED), ("mesh", "packing")),
    "sinks": Row(model("gpt_oss", *PACKED), ("mesh", "packing")),
    "latent attention": Row(model("deepseek_v3", *PACKED), ("mesh", "packing")),
    "multi-token prediction": Row(
        model("deepseek_v3", "--model.overrides.num_nextn_predict_layers", "2", *PACKED),
        ("mesh", "packing"),
    ),
    "recurrent layers": Row(model("qwen3_next", *PACKED), ("mesh", "packing")),
    # architectures of transformers
    "transformers": Row(architecture("qwen3", *PACKED), ("mesh", "packing")),
    "transformers, learned positions": Row(architecture("gpt2")),
    "transformers, a balance loss": Row(
        architecture("qwen3_moe", *PACKED, output_router_logits=True), ("mesh", "packing")
    ),
    "transformers, recurrent layers": Row(architecture("bamba")),
    "transformers with adapters": Row(architecture("olmo3", *LORA)),
    # adapters
    "LoRA": Row((*LORA, *VALIDATED), ("mesh", "validation")),
    "rsLoRA": Row((*LORA, "--lora.rank_stabilized", "true")),
    "DoRA": Row((*LORA, "--lora.use_dora", "true")),
    "adapters of experts": Row(
        model("mixtral", *LORA, "--lora.target_parameters", '["experts.gate_up_proj"]')
    ),
    # tasks
    "DPO": Row(("--task.name", "preference", *VALIDATED), ("validation",)),
    "DPO with adapters": Row(("--task.name", "preference", *LORA), ()),
    "KTO": Row(("--task.name", "kto", "--task.label_field", "is_good"), ()),
    "ORPO": Row(("--task.name", "orpo"), ()),
    "SimPO": Row(("--task.name", "simpo"), ()),
    "reward model": Row(("--task.name", "reward_model"), ()),
    "classification": Row(("--task.name", "classification", "--task.num_labels", "4"), ()),
    "encoder": Row(
        model("encoder", "--task.name", "classification", "--task.num_labels", "4"), ()
    ),
    "distillation": Row(distillation, ()),
    "images": Row(images, (), data=()),
    # data
    "streamed documents": Row(("--data.mode", "stream", *PACKED), ("mesh", "packing")),
    "chat": Row(
        ("--data.format", "chat", "--data.chat_template", str(FIXTURES / "chat.jinja")),
        ("mesh", "packing"),
        data=(
            *("--training.dataset", "jsonl", "--training.seq_len", "128"),
            *("--training.dataset_path", str(FIXTURES / "conversations.jsonl")),
        ),
    ),
    # precision
    "bfloat16": Row((), PRECISE, dtype="bfloat16"),
    "float16": Row((), (*PRECISE, "skipped"), dtype="float16"),
    "stored in bfloat16": Row(
        (
            *("--training.dtype", "bfloat16", "--optimizer.state_dtype", "bfloat16"),
            *("--optimizer.bf16_stochastic_round", "true"),
        ),
        PRECISE,
        dtype="bfloat16",
    ),
    "float8": Row(
        (
            *("--model.converters", "quantize.linear.float8"),
            *("--quantize.linear.float8.emulate", "true"),
        ),
        unproven=("precision",),
        dtype="bfloat16",
    ),
    "MX": Row(
        (
            *("--model.converters", "quantize.linear.mx"),
            *("--quantize.linear.mx.recipe_name", "mxfp8_emulated"),
        ),
        unproven=("precision",),
        dtype="bfloat16",
    ),
    "skipped updates": Row(("--training.nonfinite_policy", "skip"), ("mesh", "skipped")),
    # optimizers and regularization
    "Muon": Row(("--optimizer.name", "Muon")),
    "AdamW in 8 bits": Row(("--optimizer.name", "AdamW8bit")),
    "Lion": Row(("--optimizer.name", str(EXAMPLES / "optimizers/lion.py"))),
    "Dion": Row(("--optimizer.name", str(EXAMPLES / "optimizers/dion.py"))),
    "NorMuon": Row(("--optimizer.name", str(EXAMPLES / "optimizers/normuon.py"))),
    "Schedule-Free": Row(("--optimizer.name", str(EXAMPLES / "optimizers/schedule_free.py"))),
    "clipped": Row(("--training.max_norm", "0.01", "--training.ema_decay", "0.99",
                    "--checkpoint.enable", "true")),
    "smoothed": Row(
        (
            *("--training.label_smoothing", "0.1", "--training.z_loss_weight", "0.001"),
            *("--training.neftune_noise_alpha", "5", *PACKED),
        ),
        ("mesh", "packing"),
    ),
    "ramps": Row(
        (
            *("--training.batch_ramp", "[[0, 4], [10, 8]]", "--training.global_batch_size", "8"),
            *("--training.local_batch_size", "4", "--lr_scheduler.decay_type", "cosine"),
            *("--lr_scheduler.min_lr_factor", "0.1"),
        ),
    ),
    "compiled": Row(("--compile.enable", "true"), ("mesh", "compile")),
}  # fmt: skip
"""Configurations that differ in kind. Every dimension of their certificates holds or does not apply."""


@pytest.mark.nightly("each takes up to a minute")
@pytest.mark.parametrize("name", SOUND)
def test_the_certificate_of_a_sound_configuration_holds(name, tmp_path):
    row = SOUND[name]
    options = row.options() if callable(row.options) else row.options
    verdicts = verdicts_of((*row.base, *options), tmp_path)
    unproven = {dimension for dimension, verdict in verdicts.items() if verdict == "not proven"}
    assert unproven == set(row.unproven), verdicts
    holds = {dimension for dimension, verdict in verdicts.items() if verdict == "holds"}
    assert holds == {*ALWAYS, *row.applies}, verdicts
    assert set(verdicts.values()) <= {"holds", "does not apply", "not proven"}, verdicts
