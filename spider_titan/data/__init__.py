"""Documents in, packed rows of ids out: sources, held-out split, order, mixture, packing, shards, loader."""
