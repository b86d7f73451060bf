"""The engine without a server: `LLM` in llm.py."""
