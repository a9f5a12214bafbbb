"""The commands that are written in Python."""
