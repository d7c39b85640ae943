"""Where metrics go: the console, ``metrics.jsonl``, TensorBoard and Weights & Biases. A sink never stops training."""
