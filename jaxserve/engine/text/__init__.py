"""Text: detokenising, stop conditions, grammars."""
