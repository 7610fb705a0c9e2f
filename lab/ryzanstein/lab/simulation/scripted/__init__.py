"""A model whose answers are computed, not learned."""
