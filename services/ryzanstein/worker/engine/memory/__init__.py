"""Blocks, block tables and the prefix cache. Plain Python."""
