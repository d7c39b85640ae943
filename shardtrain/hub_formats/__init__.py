"""Hugging Face file formats as data: keys of config.json and tensor names of each native family. No torch."""
