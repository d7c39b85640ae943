"""Parts of accelerator.py that do not time plain training: checkpoints, the transformers route, generation."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from shardtrain.checkpoint.folder import Checkpoints
from shardtrain.config import Loaded
from shardtrain.distributed.process_group import World, join
from shardtrain.models import find
from shardtrain.ops import accelerator, device_kernels
from shardtrain.tools.generate.engine import Generator
from shardtrain.train import resume, trainer

Row = dict[str, Any]
WARMUP_STEPS = 3
UNDISTURBED_STEPS = 4
MOST_STEPS_OF_A_SAVE = 400


def checkpoint_row(loaded: Loaded) -> Row:
    """Save in the background while training continues.

    Returns:
        Seconds of an undisturbed step, seconds that the save blocks training (the call, and the longer
        steps until its end), seconds until it is on disk, its bytes, and GB/s.
    """
    config = loaded.config
    with join(config.comm, config.training.device) as here, kernels(loaded, here):
        run = trainer.build(config, here)
        checkpoints = Checkpoints(config)
        run.resilience.saving = checkpoints.saving
        for _ in range(WARMUP_STEPS):
            trainer.step(run)
        undisturbed = sum(step_seconds(run) for _ in range(UNDISTURBED_STEPS)) / UNDISTURBED_STEPS

        started_at = time.perf_counter()
        resume.save(run, checkpoints, last=False)
        call_seconds = time.perf_counter() - started_at

        # A run polls an asynchronous save between steps. Time the steps until the save has finished.
        disturbed: list[float] = []
        while checkpoints.saving.writing is not None and len(disturbed) < MOST_STEPS_OF_A_SAVE:
            disturbed.append(step_seconds(run))
            checkpoints.poll()
        checkpoints.finish()
        save_seconds = time.perf_counter() - started_at
        files = Path(config.job.dump_folder).rglob("*")
        num_bytes = sum(path.stat().st_size for path in files if path.is_file())
        longer_seconds = sum(seconds - undisturbed for seconds in disturbed)
        return {
            "step_seconds": undisturbed,
            "call_seconds": call_seconds,
            "stall_seconds": call_seconds + max(0.0, longer_seconds),
            "stall_steps": (call_seconds + max(0.0, longer_seconds)) / undisturbed,
            "steps_during_the_save": len(disturbed),
            "save_seconds": save_seconds,
            "bytes": num_bytes,
            "gb_per_second": num_bytes / save_seconds / 1e9,
        }


def step_seconds(run: trainer.Run) -> float:
    """Run a step. Return the seconds from its start until the device is idle again."""
    started_at = time.perf_counter()
    outcome = trainer.step(run)
    assert outcome is not None, "the data have ended"
    accelerator.finish(run.mesh.device)
    return time.perf_counter() - started_at


def kernels(loaded: Loaded, here: World) -> Any:
    """Check the configuration, and return the context manager that selects the attention kernel."""
    trainer.configs.require(loaded, here.size, here.device.type, here.size)
    return device_kernels.prefer_attention(here.device, loaded.config.training.flash_attention)


def write_llama_folder(folder: Path, flavor: str, overrides: dict[str, Any]) -> None:
    """Write the config.json of a Llama with the sizes of a native flavor, for the transformers route."""
    import transformers

    module = find("llama3")
    sizes = module.Config(**{**module.FLAVORS[flavor], **overrides})
    config = transformers.LlamaConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.dim,
        num_hidden_layers=sizes.num_layers,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        intermediate_size=sizes.ffn_dim,
        tie_word_embeddings=False,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)


def route_rows(
    native: dict[str, Any],
    tiny_overrides: dict[str, Any],
    run: Callable[[dict[str, Any]], Row],
) -> Iterator[Row]:
    """Time a native Llama and the same sizes through ``model.name = "transformers"``."""
    yield {"case": "native", **run(native)}
    with tempfile.TemporaryDirectory() as folder:
        write_llama_folder(Path(folder), native["model.flavor"], tiny_overrides)
        of_run = {name: value for name, value in native.items() if not name.startswith("model.")}
        route = {
            "model.name": "transformers",
            "model.flavor": "folder",
            "model.overrides.path": folder,
        }
        yield {"case": "transformers", **run({**of_run, **route})}


@torch.inference_mode()
def generation_rows(device: torch.device, flavor: str, overrides: dict[str, Any]) -> Iterator[Row]:
    """Generate greedily with random weights in bfloat16: new tokens per second of 1 and of 8 rows."""
    module = find("llama3")
    sizes = module.Config(**{**module.FLAVORS[flavor], **overrides})
    with torch.device(device):
        model = module.Model(sizes).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    generator = Generator(model, module.LAYOUT)
    prompt_tokens, new_tokens = (16, 8) if overrides else (512, 128)
    for rows in (1, 8):
        prompts = []
        for row in range(rows):
            prompts.append([(row + place) % 250 + 1 for place in range(prompt_tokens)])
        generator.generate(prompts, 4)
        accelerator.finish(device)
        started_at = time.perf_counter()
        continuations = generator.generate(prompts, new_tokens)
        accelerator.finish(device)
        seconds = time.perf_counter() - started_at
        generated = sum(map(len, continuations))
        yield {
            "case": f"{flavor}, {rows} rows",
            "prompt_tokens": prompt_tokens,
            "new_tokens": generated,
            "seconds": seconds,
            "new_tokens_per_second": generated / seconds,
        }
