"""Kinds of tokenizers, one file each; ``shardtrain.data.tokenizer.open_tokenizer`` chooses by what a file holds."""
