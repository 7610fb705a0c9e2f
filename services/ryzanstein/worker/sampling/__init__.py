"""Draws tokens from logits. Used by every engine."""
