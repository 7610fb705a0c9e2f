"""Clients of the simulated cluster: what they ask, how they read it, and what they check.

They speak gRPC with the generated stubs and follow the documentation: they attach again where a
stream broke, wait as long as RetryInfo says, and name a request so that it is not answered twice.
"""
