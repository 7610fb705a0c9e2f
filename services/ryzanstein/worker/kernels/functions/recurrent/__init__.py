"""The functions of kernels that read and write slots of states."""
