"""A tokenizer from a model's files.

vocabulary.py   Vocabulary: tokens, their bytes, and which of them are special
from_folder.py  from a Hugging Face folder: tokenizer.json and the files beside it
from_gguf.py    from the tokenizer.ggml.* keys of a GGUF file
"""
