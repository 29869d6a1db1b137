"""What outsiders may do to a whole mesh, and that nobody else feels it: one program an attack, innocents beside it."""
