"""Tokenizers, with one Python file for each type. ``open_tokenizer`` chooses the type by a file's content."""
