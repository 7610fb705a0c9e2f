"""A gRPC server over HTTP/2 on the event loop's own transports."""
