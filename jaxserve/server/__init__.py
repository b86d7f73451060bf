"""The gRPC server over an engine: `Server` in runner.py is the way in."""
