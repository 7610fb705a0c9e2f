"""The functions of the C sources by subject, with tensors for pointers."""
