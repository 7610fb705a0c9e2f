"""The stream to a node: connecting, its frames, and the detection of failures. Knows one node alone."""
