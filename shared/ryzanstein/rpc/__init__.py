"""gRPC, once for all services: the lifecycle of a server, channels, interceptors, and errors as statuses."""
