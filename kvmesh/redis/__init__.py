"""Redis: its address, one shared connection, scripts, and the schema's names and encodings."""
