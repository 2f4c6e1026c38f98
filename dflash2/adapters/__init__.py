"""Thin layers between the drafter and host engines."""
