"""The command line.

It starts services as processes and talks to them over gRPC; it imports none of them.
"""
