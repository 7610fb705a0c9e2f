"""How ranks come to be: forked, wired, loaded."""
