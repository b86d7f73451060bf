"""Makes the simulated part of docs/speculation.md: goodput with and without drafts."""
