"""Where the counts of months are kept."""
