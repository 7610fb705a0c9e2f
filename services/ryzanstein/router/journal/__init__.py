"""The journal of generations: what lets another router go on where one was lost."""
