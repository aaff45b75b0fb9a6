"""Values that a user chooses, checked where they are made."""
