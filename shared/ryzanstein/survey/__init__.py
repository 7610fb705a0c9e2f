"""What a cluster reports about itself: queried once, as values, with the problems in them."""
