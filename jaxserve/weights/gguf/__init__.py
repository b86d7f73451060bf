"""The tensors of GGUF files, wide and as they are stored."""
