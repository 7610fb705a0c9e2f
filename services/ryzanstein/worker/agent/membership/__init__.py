"""The node in its cluster: what it registers and reports, and which models it then serves."""
