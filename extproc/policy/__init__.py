"""What a policy says: its sections as values, their kinds, how documents are read, and how several merge."""
