"""The protocols that clients speak to a router: gRPC, HTTP and WebSocket over one core."""
