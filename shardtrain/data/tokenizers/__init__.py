"""Kinds of tokenizers, one file each.

``open_tokenizer`` chooses the kind by the content of the file.
"""
