"""What `python -m shared COMMAND` runs; one module a command."""
