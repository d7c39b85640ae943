"""Train on the shared work with ``transformers.Trainer``."""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
from work import (
    BETAS,
    DIM,
    EPS,
    FFN,
    HEAD_DIM,
    HEADS,
    KEY_HEADS,
    LAYERS,
    LEARNING_RATE,
    MAX_NORM,
    PARAMETERS,
    ROWS,
    THETA,
    TOKENS,
    VOCABULARY,
    WEIGHT_DECAY,
    row,
)

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
parser.add_argument("--steps", type=int, default=8)
asked = parser.parse_args()


class Rows(Dataset):
    """Dataset of the shared rows. Labels equal the inputs, because the model shifts them itself."""

    def __len__(self) -> int:
        return asked.steps * ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": row(index), "labels": row(index)}


torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=DIM, intermediate_size=FFN, num_hidden_layers=LAYERS, head_dim=HEAD_DIM,
        num_attention_heads=HEADS, num_key_value_heads=KEY_HEADS, max_position_embeddings=TOKENS, rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA}, tie_word_embeddings=False, use_cache=False,
    )
)  # fmt: skip
assert sum(parameter.numel() for parameter in model.parameters()) == PARAMETERS
arguments = TrainingArguments(
    output_dir="out", max_steps=asked.steps, per_device_train_batch_size=ROWS, learning_rate=LEARNING_RATE,
    weight_decay=WEIGHT_DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], max_grad_norm=MAX_NORM, use_cpu=True,
    lr_scheduler_type="constant", logging_steps=1, save_strategy="no", bf16=asked.dtype == "bfloat16", report_to=[],
    disable_tqdm=True, dataloader_num_workers=0,
)  # fmt: skip
Trainer(model=model, args=arguments, train_dataset=Rows()).train()
