"""Tiny experiments."""

from tiny import decoder, fresh_programs, own

__all__ = ["decoder", "fresh_programs", "own"]
