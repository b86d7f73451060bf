"""Who may call, over what."""
