"""Checkpoints by name, and what their files say of tokenizers and chats."""
