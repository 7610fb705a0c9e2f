"""The router's WebSocket face: many generations on one connection, over the same core as HTTP and gRPC."""
