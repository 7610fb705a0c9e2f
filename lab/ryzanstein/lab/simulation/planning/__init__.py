"""What one seed means, and how it is drawn."""
