"""How many pods a pool wants, by role: work in busy pods, its forecast, the wanted number with its reason, scalers."""
