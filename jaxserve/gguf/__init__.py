"""GGUF, the format of llama.cpp: its header, and the config and tokenizer in it as Hugging Face
has them."""
