"""The model whose text we owe: weights, forward pass and KV cache."""
