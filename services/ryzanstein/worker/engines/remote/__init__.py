"""An inference server that somebody else started, reached over its HTTP API."""
