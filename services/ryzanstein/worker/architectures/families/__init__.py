"""The rows of the table, by family: what distinguishes each architecture from Llama."""
