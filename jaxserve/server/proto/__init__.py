"""Generated from proto/jaxserve_v1/generation.proto by tools/generate_proto.py."""
