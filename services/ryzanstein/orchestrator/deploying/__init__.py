"""What operators deploy: checked, stored, then in force."""
