"""What only a checkout of the templates has: commands that make or plan a training.

In shared/, `python -m shared` alone uses it.
"""
