"""Makes docs/aptserve.md: what Apt-Serve claims, and what simulator and engine say."""
