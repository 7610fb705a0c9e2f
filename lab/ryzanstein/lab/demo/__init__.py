"""Trains and evaluates the embedded demo model."""
