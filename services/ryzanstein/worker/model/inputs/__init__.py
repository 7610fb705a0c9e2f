"""A step's plan as tensors: token ids, positions, cache slots, and the keys that each token sees.

The tensors are built once per step and used by every layer of a group. How a group's keys are read
(`GroupReader`) is chosen when the model is loaded.

In a group with a window a table begins with the first page that is still kept. Everything that is
read through a table counts positions from there: `begin_S`, `length_S`. Only a bias depends on a
key's true position.

Legend: T new tokens, S sequences, B blocks of the longest table, L keys of a sequence, P keys of
the longest, n new tokens of one sequence, R sampled rows, M blocks that are full now.
"""
