"""What others ask of a node: its gRPC services, and the streams of its routers."""
