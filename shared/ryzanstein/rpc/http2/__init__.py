"""gRPC's protocol over HTTP/2, for streams whose cost per message matters: frames, messages, and a client of one call."""
