"""What a campaign found, as a document and a page."""
