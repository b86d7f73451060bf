"""Makes docs/cookbook/: a page for each model family."""
