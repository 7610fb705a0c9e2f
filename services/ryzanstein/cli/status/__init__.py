"""`ryzanstein status`: what a cluster reports about itself."""
