"""What the pickers of one deployment tell each other through Redis."""
