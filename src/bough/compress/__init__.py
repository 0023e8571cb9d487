"""Prompt compression as text: which spans of long messages are read, and which are left out."""
