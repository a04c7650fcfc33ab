"""Conformance: whether a serving engine computes with the weights that an update brought, whoever wrote the engine."""
