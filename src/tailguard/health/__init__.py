"""Watching: what is measured, and when a figure means that training went wrong."""
