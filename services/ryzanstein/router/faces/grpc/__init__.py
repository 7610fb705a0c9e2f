"""The gRPC face: one servicer per service."""
