"""What a cheap posterior forgets: bands of f(x) in a gap of the data, under three guides and NUTS.

python examples/gap_sine.py --out gap_sine.png       some minutes
python examples/gap_sine.py --smoke                  seconds, for tests
"""

import argparse
from pathlib import Path

import matplotlib
import torch

import pbnn
from pbnn.plots import legend_below, plot_band, save
from pbnn.plots.figures import grid

MODEL = Path(__file__).parents[1] / "models" / "regression.py"


def gap_sine(rows: int = 60, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x `(rows, 1)` in two clusters and y `(rows,)`, a sine with noise of scale 0.2."""
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.rand(2, rows // 2, generator=generator)
    x = torch.cat([left - 2.0, right + 1.0])
    return x[:, None], torch.sin(2.0 * x) + 0.2 * torch.randn(len(x), generator=generator)


def main() -> None:
    """Fit the four posteriors and draw them side by side."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/gap_sine.png"))
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    arguments = parser.parse_args()
    steps, warmup, draws, depth = (50, 10, 10, 3) if arguments.smoke else (3000, 300, 200, 10)

    x, y = gap_sine()
    model = pbnn.load_model(MODEL, in_features=1, hidden=10, weight_scale=3.0)
    fits = {
        guide: pbnn.fit_svi(model, x, y, guide=guide, steps=steps)
        for guide in ("normal", "lowrank", "kronecker")
    }
    fits["nuts"] = pbnn.fit_nuts(
        model, x, y, warmup=warmup, draws=draws, max_tree_depth=depth, compile=not arguments.smoke
    )

    line = torch.linspace(-3.0, 3.0, 121)[:, None]
    panels = grid(len(fits))
    for axes, (name, posterior) in zip(panels, fits.items(), strict=True):
        f = pbnn.predictive(model, posterior, line)["f"]
        plot_band(
            f.numpy(),
            line[:, 0].numpy(),
            points=(x[:, 0].numpy(), y.numpy()),
            legend=False,
            ax=axes,
        )
        axes.set_title(name)
        axes.label_outer()
    legend_below(panels)
    print(save(panels, arguments.out))


if __name__ == "__main__":
    matplotlib.use("Agg")
    main()
