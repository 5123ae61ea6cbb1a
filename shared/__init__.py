"""What is tedious or silently wrong when written by hand, for the scripts in `templates/`."""

__version__ = "0.1.0"
