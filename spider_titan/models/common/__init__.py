"""Parts that several models are made of."""
