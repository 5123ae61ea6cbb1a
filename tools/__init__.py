"""What only a checkout of the templates has: commands that make or plan a training. Nothing in shared/ imports it."""
