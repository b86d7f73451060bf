"""From HTTP and gRPC to the engine and back: requests, admission, streams, outcomes."""
