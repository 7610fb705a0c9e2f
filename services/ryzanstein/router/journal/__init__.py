"""The journal of generations: it lets another router continue a generation that was lost."""
