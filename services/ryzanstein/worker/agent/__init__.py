"""The node's agent: its gRPC service, the routers linked to it, the model it hosts, its membership."""
