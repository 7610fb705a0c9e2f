"""What a weight format costs in quality: `ryzanstein bench quality`."""
