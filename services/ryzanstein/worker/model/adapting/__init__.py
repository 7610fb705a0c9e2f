"""What an adapter is to a decoder: the factors that its layers add."""
