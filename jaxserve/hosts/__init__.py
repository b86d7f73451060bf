"""Several hosts that serve one model: their ranks, and the messages between them."""
