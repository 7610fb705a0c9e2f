"""The protocols that clients speak to a router: gRPC and HTTP over one core."""
