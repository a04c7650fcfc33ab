"""Environments that are packages of others, in an interpreter of their own."""
