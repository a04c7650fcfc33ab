"""Engines of teachers, which score a student's responses."""
