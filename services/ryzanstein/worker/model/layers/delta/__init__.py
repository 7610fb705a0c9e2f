"""Layers with a gated delta rule in the place of attention."""
