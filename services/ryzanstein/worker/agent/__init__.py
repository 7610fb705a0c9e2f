"""The node's agent: its gRPC service, links to routers, model and cluster membership."""
