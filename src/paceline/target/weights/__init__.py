"""From files to tensors under canonical names. In reading order:

reader.py        load: every tensor the forward pass needs, decoded; load_embeddings: those draft heads borrow
checkpoint.py    a model on disk, independent of its format
model_config.py  the configuration of a decoder
gguf.py          a GGUF file as a checkpoint
hf_folder.py     a Hugging Face folder as a checkpoint
safetensors.py   tensor entries of the safetensors files in a folder
pooling.py       how a model pools its hidden states to embeddings
tensors.py       a tensor's entry in a file, its bytes, and the fingerprint of a model
dequant.py       the block encodings of GGUF, decoded to float32
"""
