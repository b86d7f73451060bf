"""From any door of the server to the engine and back: `EngineRequests` in requests.py."""
