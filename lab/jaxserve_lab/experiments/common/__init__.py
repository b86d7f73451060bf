"""What the pages of several experiments share: runs, claims, charts."""
