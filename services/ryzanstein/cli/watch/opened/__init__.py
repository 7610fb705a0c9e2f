"""What a person opens of a row: its details, its log, its stacks. Lines of text, without a terminal."""
