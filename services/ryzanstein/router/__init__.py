"""The router: two faces (gRPC and HTTP) over one core that admits, chooses a node, and keeps exactly-once token logs."""
