"""The answers of people: read from the cluster, laid out for the page, kept within bounds and over restarts."""
