"""Clients of OpenAI-compatible servers: a stress test that compares outputs, and a benchmark."""
