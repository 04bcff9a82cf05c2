"""A run watched while it goes: a page on this machine, or a terminal."""
