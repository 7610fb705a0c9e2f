"""Engines that are not ours: inference servers that compute tokens for an agent."""
