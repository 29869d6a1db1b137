"""How many pods a pool wants, by role and variant: work, its forecast, the number and its reason, plans, scalers."""
