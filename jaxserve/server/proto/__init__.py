"""Generated from proto/jaxserve/v1/generation.proto by tools/generate_proto.py."""
