"""Create a folder of a pytorch_universal_trainer user: parameters.yml, TSV files and a BART model."""

from __future__ import annotations

import functools
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

WORDS = ["the", "film", "plot", "is", "a", "long", "story", "of", "two", "cats"]
TELLING = {0: ["bad", "dull"], 1: ["good", "fine"]}

PARAMETERS = """\
---
data-params:
    data_dir: '{data_dir}'
    is_dev_file: {is_dev_file}

transformers-params:
    mode: '{mode}'
    continue_training: {continue_training}
    continue_training_path: "{continue_training_path}"
    pretrained_model_dir: '{pretrained_model_dir}'
    model_dir: '{model_dir}'
    is_distributed: {is_distributed}
    use_native_fp16: {use_native_fp16}
    use_fairscale_optimizer_sharding: {optimizer_sharding}
    use_fairscale_model_sharding: {model_sharding}
    use_fairscale_autowrap: {autowrap}
    use_fairscale_reshard_forward: {reshard_forward}
    num_loader_workers: 0
    batch_size: {batch_size}
    use_max_length: {use_max_length}
    max_length: {max_length}
    num_epochs: {num_epochs}
    gradient_accumulation_steps: {gradient_accumulation_steps}
    log_steps_ratio: 10
    save_steps_ratio: 1
    learning_rate: {learning_rate}
    warmup_proportion: 0.01
    num_labels: 2
{own}
dist-params:
    nodes: {nodes}
    gpus: {gpus}
    current_node: {current_node}
    master_addr: '{master_addr}' # insert your own master ip
    master_port: '{master_port}' # insert your own any available port number
"""
VALUES: dict[str, Any] = {
    "data_dir": "data",
    "is_dev_file": True,
    "mode": "train",
    "continue_training": False,
    "continue_training_path": "",
    "pretrained_model_dir": "bart",
    "model_dir": "models/baseline",
    "is_distributed": True,
    "use_native_fp16": False,
    "optimizer_sharding": False,
    "model_sharding": False,
    "autowrap": False,
    "reshard_forward": False,
    "batch_size": 8,
    "use_max_length": True,
    "max_length": 24,
    "num_epochs": 3,
    "gradient_accumulation_steps": 1,
    "learning_rate": "2e-03",
    "own": "",
    "nodes": 1,
    "gpus": 2,
    "current_node": 0,
    "master_addr": "127.0.0.1",
    "master_port": "29500",
}


def rows(count: int, seed: int) -> list[tuple[str, int]]:
    """Return sentences whose label depends on a single keyword."""
    rng = random.Random(seed)
    sentences = []
    for _ in range(count):
        label = rng.randrange(2)
        words = rng.choices(WORDS, k=rng.randint(1, 6))
        words.insert(rng.randrange(len(words) + 1), rng.choice(TELLING[label]))
        sentences.append((" ".join(words), label))
    return sentences


def write_parameters(folder: Path, **values: Any) -> Path:
    """Write parameters.yml with the comments and quotes of the original file. Return the file."""
    file = folder / "parameters.yml"
    file.write_text(PARAMETERS.format(**{**VALUES, **values}))
    return file


@functools.cache
def _bart(dropout: float, with_head: bool) -> Path:
    """Return the folder of a tiny BART as ``save_pretrained`` wrote it in 2022, with pytorch_model.bin."""
    import tokenizers
    import torch
    import transformers
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers

    folder = Path(tempfile.mkdtemp(prefix="shardtrain-tests-"))
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    tokenizer = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=special,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for text, _ in rows(300, 7)], trainer)
    tokenizer.post_processor = processors.RobertaProcessing(
        ("</s>", 2), ("<s>", 0), add_prefix_space=False
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    saved = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(saved["vocab"]))
    merges = [" ".join(pair) if isinstance(pair, list) else pair for pair in saved["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    config = transformers.BartConfig(
        vocab_size=tokenizer.get_vocab_size(),
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        dropout=dropout,
        classifier_dropout=dropout,
        num_labels=2,
        init_std=0.1,
    )
    torch.manual_seed(3)
    network = (transformers.BartForSequenceClassification if with_head else transformers.BartModel)(
        config
    )
    config.architectures = [type(network).__name__]
    config.save_pretrained(folder)
    torch.save(network.state_dict(), folder / "pytorch_model.bin")
    return folder


def make(
    folder: Path, train: int = 200, dropout: float = 0.1, with_head: bool = False, **values: Any
) -> Path:
    """Create the complete folder. Return its parameters.yml. ``values`` override ``VALUES``."""
    (folder / "data").mkdir(parents=True)
    for part, (count, seed) in {"train": (train, 0), "dev": (50, 1), "test": (70, 2)}.items():
        text = "".join(f"{sentence}\t{label}\n" for sentence, label in rows(count, seed))
        (folder / "data" / f"sentiment-{part}").write_text(text)
    if values.get("pretrained_model_dir", "bart") == "bart":
        shutil.copytree(_bart(dropout, with_head), folder / "bart")
    return write_parameters(folder, **values)
