"""Clients of the laboratory, over every transport."""
