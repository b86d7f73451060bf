"""Apt-Serve: values, the greedy over both kinds of cache, who starts and who goes on."""
