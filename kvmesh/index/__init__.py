"""The index, read: lookups in Redis, what is known without asking, and the twin in memory."""
