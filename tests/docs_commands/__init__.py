"""The commands that the pages show: found, parsed, and listed with what is done about each."""
