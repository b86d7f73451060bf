"""Generated from proto/jaxserve/v1/generation.proto by jaxserve/server/generate_proto.py."""
