"""Batches of best-effort requests that survive the server: `Journal` keeps them on disk,
`BatchRunner` serves them. Neither knows which frontend a batch came through."""
