"""Low-rank adapters next to frozen weights (LoRA, Hu et al. 2021): modules, files and merging.

``linear.py`` defines an adapted linear module. ``adapter_targets.py`` selects the modules to adapt.
``spec.py`` reads and writes the description of the adapters in checkpoints. ``peft.py`` reads and writes
PEFT's format. ``merging.py`` adds adapters to the base weights. ``quantize.py`` stores frozen weights in 4 or
8 bits. ``train/base_weights.py`` loads the frozen weights, and ``distributed/adapter_styles.py`` shards
adapted modules over tensor-parallel ranks.
"""

FACT = "lora"
"""Key of the description of the adapters in the facts of a checkpoint."""
PATH = "checkpoint.initial_load_path"
"""The option that names the frozen weights."""
