"""What every flavor of a model is made of: parameters by part and FLOPs a byte. Needs no memory for the weights."""

from __future__ import annotations

from typing import Any

import tyro
from timing import print_table

from spider_titan.spec import ModelSpec, get_model_spec


def describe(spec: ModelSpec, config: Any, seq_len: int) -> dict[str, str]:
    """Builds the model on the meta device; returns what a column of the table shows."""
    model = spec.build(config, device="meta")
    counts = {part: f"{count:,}" for part, count in spec.parameter_counts(model).items()}
    return {**counts, "forward FLOPs a byte": f"{spec.flops_per_byte(config, seq_len):,.0f}"}


def main(model: str = "spider", seq_len: int = 2048) -> None:
    """Prints all flavors of a model side by side.

    Args:
        model: Name of its spec.
        seq_len: Bytes a row, on which the FLOPs of attention depend.
    """
    spec = get_model_spec(model)
    flavors = {name: describe(spec, config, seq_len) for name, config in spec.flavors.items()}
    labels = next(iter(flavors.values()))
    print(f"flavors of {model}, rows of {seq_len} bytes\n")
    print_table(
        ["parameters", *flavors], [[label, *(flavor[label] for flavor in flavors.values())] for label in labels]
    )


if __name__ == "__main__":
    tyro.cli(main)
