"""Engines that score what a student has written."""
