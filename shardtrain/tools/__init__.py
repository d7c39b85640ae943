"""Programs in addition to the trainer, one package per verb. The trainer does not import them."""
