"""python -m training_templates COMMAND: the same as the script."""

from training_templates import main

main()
