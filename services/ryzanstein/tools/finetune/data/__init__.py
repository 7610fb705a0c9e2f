"""Training data: lines of a file to tokens, of which some are learned."""
