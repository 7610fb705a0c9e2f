"""The nodes of this router: links, the frames on them, failure detection, circuit breakers."""
