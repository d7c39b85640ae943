"""Programs beside the trainer, one package per verb; the trainer imports none of them."""
