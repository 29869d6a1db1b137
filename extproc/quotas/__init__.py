"""What tenants may use, shared by all pickers through Redis."""
