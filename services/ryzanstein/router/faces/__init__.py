"""What clients speak to: gRPC and HTTP over one core."""
