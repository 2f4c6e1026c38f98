"""Measure a drafter: how many tokens a verify round yields."""
