"""What is asked and how it is scored: the Task protocol and the built-in tasks."""
