"""Resolved configurations: loaded from files and overrides, shown as text, and kept in the directory of a run."""
