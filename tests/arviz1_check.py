"""Opens files of inference data under ArviZ 1.x, runs ArviZ on them and prints what it saw as JSON.

Run by test_inference_data.py with a Python that has ArviZ 1.x and no torch:

    python tests/arviz1_check.py nuts.nc svi.nc
"""

import json
import sys
from pathlib import Path

import arviz as az
import matplotlib as mpl

mpl.use("Agg")

ROWS = "obs_id"


def look_at(path: Path) -> dict[str, object]:
    """Run every function that the files promise to serve; each raises where it cannot."""
    data = az.from_netcdf(path)
    az.summary(data)
    az.plot_trace(data, var_names=["layers.0.weight"])
    az.plot_ppc_dist(data)
    if "energy" in data["sample_stats"]:
        az.plot_energy(data)
        az.bfmi(data)
    return {
        "attrs": {
            key: value if isinstance(value, str) else float(value)
            for key, value in data.attrs.items()
        },
        "elpd": float(az.loo(data).elpd),
        "dims": {
            f"{name}/{key}": list(variable.dims)
            for name, node in data.children.items()
            for key, variable in node.data_vars.items()
        },
    }


def main(paths: list[Path]) -> None:
    """Print one JSON object: the version, and what was seen in each file by its stem."""
    report: dict[str, object] = {path.stem: look_at(path) for path in paths}
    table = az.compare({path.stem: az.from_netcdf(path) for path in paths})
    print(json.dumps({"arviz": az.__version__, "ranks": list(table.index), **report}))


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
