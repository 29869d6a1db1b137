"""State that the pickers of one deployment share through Redis: load, sessions and the quotas of tenants."""
