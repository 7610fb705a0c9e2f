"""`ryzanstein ca`: certificates of services and operators."""
