"""The Hugging Face hub's format: weights and config in and out, as files; nothing in them is ever run."""
