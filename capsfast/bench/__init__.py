"""Measures capsfast against the other ways of writing the same routing; nothing below imports it."""
