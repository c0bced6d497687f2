"""Pretraining of Spider, a byte-level recurrent-depth language model, from one TOML file."""
