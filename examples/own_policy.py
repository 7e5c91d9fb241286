"""A window policy of your own under simulated load, beside those of this project: no model and no SGLang needed.

    PYTHONPATH=scheduler python examples/own_policy.py [--machine gpu] [--steps 300]

The policy here verifies what is more likely than not to be accepted, whatever a row costs. Under load it beats whole
blocks, alone it loses to them: rows are free then. That is why a window should follow the load.
"""

from __future__ import annotations

import argparse

import numpy as np

from dspark_scheduler import MACHINES, Load, SimulationResult, simulate, survival
from dspark_scheduler.acceptance import Acceptance
from dspark_scheduler.contenders import Setup, View, WholeBlock


def more_likely_than_not(setup: Setup) -> WholeBlock:
    """What makes the policy, once per simulation; `view` is what one step shows."""

    def windows(view: View) -> np.ndarray:
        return (survival(view.confidence) > 0.5).sum(axis=1)

    return WholeBlock(setup, windows)


def compare(machine: str, steps: int) -> list[SimulationResult]:
    """Every policy at one, sixteen and sixty-four requests; results carry tokens per second and mean windows."""
    policies = ("off", "static-7", more_likely_than_not, "causal")
    return [
        simulate(policy, Acceptance(("chat",)), MACHINES[machine](), Load(concurrency), steps=steps)
        for concurrency in (1, 16, 64)
        for policy in policies
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", choices=sorted(MACHINES), default="gpu")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args()
    for result in compare(options.machine, options.steps):
        said = f"{result.tokens_per_second:7,.0f} tokens/s, {result.mean_window:.1f} drafts verified"
        print(f"{result.load.label:>3} requests  {result.policy:<20} {said}")


if __name__ == "__main__":
    main()
