"""Low-rank adapters beside frozen weights (LoRA, Hu et al. 2021): which modules have them, their files, their sum.

``linear.py`` is an adapted module, ``targets.py`` says which modules are, ``spec.py`` what a checkpoint says of them,
``base_weights.py`` loads the frozen weights, ``peft.py`` reads and writes the format of PEFT, ``merging.py`` adds
adapters to the weights, ``quantize.py`` holds frozen weights in 4 or 8 bits. How an adapted module is split over
tensor-parallel ranks is in ``distributed/adapters.py``.
"""

FACT = "lora"
"""Name of what a checkpoint says of its adapters, among its facts."""
PATH = "checkpoint.initial_load_path"
"""The option that names the frozen weights."""
