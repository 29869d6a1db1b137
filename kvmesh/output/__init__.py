"""What commands print: its form, what people read of it, and a standard output that is full or closed."""
