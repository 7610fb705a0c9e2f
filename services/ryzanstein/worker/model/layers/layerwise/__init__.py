"""What layers of Gemma 4 have of their own: heads, inputs, and experts beside an MLP."""
