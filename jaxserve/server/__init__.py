"""A server over an engine, by gRPC and HTTP: `Server` in server.py is the way in."""
