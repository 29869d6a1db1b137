"""What a person starts on one machine: the whole mesh, and the commands that show a running one."""
