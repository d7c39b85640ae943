"""Configurations of other systems, one of each kind, rewritten in the style of their users."""

from __future__ import annotations

import json
from pathlib import Path

LLAMA = {
    "train_micro_batch_size_per_gpu": 8,
    "train_batch_size": 32,
    "steps_per_print": 1,
    "gradient_clipping": 1.0,
    "lr-decay-style": "cosine",
    "warmup": 0.1,
    "precision": "bfloat16",
    "bf16": {"enabled": True},
    "fp16": {"enabled": False},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_optimization": {
        "stage": 0,
        "allgather_bucket_size": 5e8,
        "overlap_comm": True,
        "reduce_scatter": True,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "eps": 1e-6}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 1e-6, "warmup_max_lr": 5e-5, "warmup_num_steps": 50},
    },
    "min_lr": 5e-7,
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "profile": False,
    },
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": False, "profile_step": 1, "output_file": None},
}
"""FMEngine's first preset: a DeepSpeed JSON with additional keys, three of which are unused."""

FILES = {
    "llama.json": json.dumps(LLAMA, indent=1),
    "parameters.yml": """\
---
data-params:
    data_dir: '~/pytorch_universal_trainer/data'
    is_dev_file: True
transformers-params:
    mode: 'train'
    continue_training: False
    continue_training_path: ""
    pretrained_model_dir: '~/facebook/bart-base'
    model_dir: '~/pytorch_universal_trainer/models/baseline'
    is_distributed: True
    use_native_fp16: True
    use_fairscale_optimizer_sharding: False
    use_fairscale_model_sharding: False
    use_fairscale_autowrap: False
    use_fairscale_reshard_forward: False
    num_loader_workers: 0
    batch_size: 32
    use_max_length: False
    max_length: 200
    num_epochs: 3
    gradient_accumulation_steps: 2
    log_steps_ratio: 2
    save_steps_ratio: 1
    learning_rate: 2e-05
    warmup_proportion: 0.01
    num_labels: 2
dist-params:
    nodes: 1
    gpus: 2
    current_node: 0
    master_addr: '10.0.0.1' # of the first node
    master_port: '1234'
""",
    "training_arguments.json": """\
{
  "per_device_train_batch_size": 2,
  "gradient_accumulation_steps": 8,
  "learning_rate": 3e-4,
  "num_train_epochs": 2,
  "warmup_ratio": 0.03,
  "lr_scheduler_type": "cosine",
  "weight_decay": 0.1,
  "adam_beta2": 0.95,
  "bf16": true,
  "gradient_checkpointing": true,
  "save_strategy": "steps",
  "save_steps": 200,
  "save_total_limit": 3,
  "logging_steps": 10,
  "evaluation_strategy": "steps",
  "eval_steps": 100,
  "load_best_model_at_end": true,
  "report_to": ["tensorboard", "wandb"],
  "dataloader_num_workers": 4,
  "dataloader_prefetch_factor": 4,
  "max_seq_length": 1024,
  "model_name_or_path": "org/model-1b",
  "output_dir": "outputs/args",
  "push_to_hub": false,
  "seed": 7
}
""",
    "accelerate.yaml": """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
use_cpu: false
""",
    "axolotl.yml": """\
base_model: org/model-7b
datasets:
  - path: ./data/chats.jsonl
    type: chat_template
    roles_to_train:
      - assistant
val_set_size: 0.0
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_fan_in_fan_out:
sequence_len: 4096
sample_packing: true
pad_to_sequence_len: true
gradient_accumulation_steps: 2
micro_batch_size: 4
num_epochs: 3
optimizer: paged_adamw_8bit
lr_scheduler: cosine
learning_rate: 2e-4
train_on_inputs: false
bf16: auto
tf32: false
gradient_checkpointing: true
flash_attention: true
warmup_ratio: 0.1
saves_per_epoch: 1
weight_decay: 0.0
neftune_noise_alpha: 5
wandb_project:
output_dir: ./outputs/chats
""",
    "torchtune.yaml": """\
root: /models
output_dir: ${root}/out
model:
  _component_: torchtune.models.llama3_2.lora_llama3_2_1b
  lora_attn_modules: ['q_proj', 'v_proj', 'output_proj']
  apply_lora_to_mlp: True
  lora_rank: 64
  lora_alpha: 128
tokenizer:
  _component_: torchtune.models.llama3.llama3_tokenizer
  path: ${checkpointer.checkpoint_dir}/tokenizer.model
  max_seq_len: 512
checkpointer:
  _component_: torchtune.training.FullModelHFCheckpointer
  checkpoint_dir: ${root}/Llama-3.2-1B
  checkpoint_files: [model.safetensors]
  model_type: LLAMA3_2
dataset:
  _component_: torchtune.datasets.instruct_dataset
  source: json
  data_files: data/train.json
  train_on_input: False
  packed: False
seed: null
shuffle: True
batch_size: 2
epochs: 1
max_steps_per_epoch: null
gradient_accumulation_steps: 8
clip_grad_norm: null
optimizer:
  _component_: torch.optim.AdamW
  fused: True
  weight_decay: 0.01
  lr: 3e-4
lr_scheduler:
  _component_: torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup
  num_warmup_steps: 100
loss:
  _component_: torchtune.modules.loss.CEWithChunkedOutputLoss
compile: False
device: cuda
dtype: bf16
enable_activation_checkpointing: True
log_every_n_steps: 1
metric_logger:
  _component_: torchtune.training.metric_logging.DiskLogger
  log_dir: ${output_dir}/logs
profiler:
  _component_: torchtune.training.setup_torch_profiler
  enabled: False
  wait_steps: 5
""",
}


def write(folder: Path, name: str) -> Path:
    """Write one of the files. Return its path."""
    file = folder / name
    file.write_text(FILES[name])
    return file
