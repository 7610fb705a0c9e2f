"""Generations: the frozen values that travel from a face to a node and back. Standard library only.

A generation has `n` choices; each choice is a sequence of tokens with the indices 0, 1, 2, ...
Everything that determines the rest of an answer is data here (prompt and generated tokens
separately, seed, parameters), so that any node can continue it.
"""
