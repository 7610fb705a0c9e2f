"""gRPC for all services: server lifecycle, channels, interceptors, and errors as statuses."""
