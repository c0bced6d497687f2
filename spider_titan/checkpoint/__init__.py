"""Checkpoints: saved states of a run, from which it goes on as if nothing had happened."""
