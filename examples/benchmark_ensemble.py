"""What members cost: one and ten MAP members of a 6-50-1 network, as Markdown.

python examples/benchmark_ensemble.py             a minute
python examples/benchmark_ensemble.py --smoke     seconds, for tests

Whole fits on 308 rows, from the front door to the posterior, in turn, so that all see the same
machine; the fastest of each counts.
"""

import argparse
import time
from pathlib import Path

import torch

import pbnn

ROOT = Path(__file__).parents[1]
MEMBERS = (1, 10)


def seconds(members: int, steps: int, batch_size: int | None) -> float:
    """Return the seconds of one fit."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(308, 6, generator=generator)
    y = torch.sin(x[:, 0]) + 0.3 * torch.randn(308, generator=generator)
    model = pbnn.load_model(ROOT / "models" / "regression.py", in_features=6, hidden=50)
    started = time.perf_counter()
    pbnn.fit_ensemble(
        model, x, y, members=members, steps=steps, batch_size=batch_size, progress=False
    )
    return time.perf_counter() - started


def main() -> None:
    """Time the fits and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--smoke", action="store_true", help="a few steps, to see that it runs")
    args = parser.parse_args()
    steps, repeats = (5, 1) if args.smoke else (args.steps, args.repeats)
    sizes = (None,) if args.smoke else (None, 32)
    torch.set_num_threads(1)
    print(f"{steps} steps, one thread, best of {repeats}\n")
    print(f"| rows in a step | {MEMBERS[0]} member, s | {MEMBERS[1]} members, s | ratio |")
    print("|---|---|---|---|")
    for batch_size in sizes:
        times = [[seconds(m, steps, batch_size) for m in MEMBERS] for _ in range(repeats)]
        one, ten = (min(column) for column in zip(*times, strict=True))
        print(f"| {batch_size or 'all'} | {one:.2f} | {ten:.2f} | {ten / one:.1f} |", flush=True)


if __name__ == "__main__":
    main()
