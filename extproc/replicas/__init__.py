"""What the pickers of one deployment share through Redis."""
