"""What the plots read: draws, inputs and observed values, from arrays or from inference data."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pbnn.errors import DataError
from pbnn.inference_data import Container, group, groups

__all__ = ["band_of", "flat", "is_container", "predictive_of", "probabilities_of", "scales_of"]


def is_container(data: Any) -> bool:
    """Whether the data are inference data, of either version of ArviZ."""
    return hasattr(data, "groups")


def flat(draws: ArrayLike) -> NDArray[Any]:
    """Draws `(…, n)` as `(draws, n)`."""
    values = np.asarray(draws)
    if values.ndim < 2:
        raise DataError(f"draws have shape {values.shape}; expected (chain, draw, n) or (draws, n)")
    return values.reshape(-1, values.shape[-1])


def predictive_of(
    data: Container | ArrayLike, y: ArrayLike | None, site: str, group_name: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Predictive draws `(draws, n)` and observed values `(n,)`."""
    if is_container(data):
        values = _variable(data, group_name, site)
        if values.ndim != 3:
            raise DataError(
                f"{group_name}: {site} has several outputs {values.shape[3:]}; pass the draws of "
                f"one, (chain, draw, n), and its y"
            )
        draws = flat(values)
        y = _variable(data, "observed_data", site) if y is None else y
    else:
        draws = flat(data)
        if y is None:
            raise DataError("predictive draws come without y; pass y of shape (n,)")
    observed = np.asarray(y)
    if observed.shape != draws.shape[1:]:
        raise DataError(f"y has shape {observed.shape}; expected {draws.shape[1:]} as the draws")
    return draws, observed


def _variable(data: Container, group_name: str, name: str) -> NDArray[Any]:
    dataset = group(data, group_name)
    if name not in dataset:
        raise DataError(f"{group_name} has no {name!r}; it has {', '.join(map(str, dataset))}")
    return np.asarray(dataset[name])


def band_of(
    data: Container, feature: int | str, site: str
) -> tuple[NDArray[Any], NDArray[Any], tuple[NDArray[Any], NDArray[Any]], str]:
    """Draws of f, their input, the training points, and the name of the input."""
    new = "predictions" in groups(data)
    column, name = _column(data, "predictions_constant_data" if new else "constant_data", feature)
    f = flat(_variable(data, "predictions" if new else "posterior", "f"))
    points = (_column(data, "constant_data", feature)[0], _variable(data, "observed_data", site))
    return f, column, points, name


def scales_of(data: Container | ArrayLike) -> NDArray[Any]:
    """Scales `(n,)` as they are, or those of f over the draws of inference data."""
    if not is_container(data):
        return np.asarray(data, float)
    name = "predictions" if "predictions" in groups(data) else "posterior"
    f = _variable(data, name, "f")
    if f.ndim != 3:
        raise DataError(f"{name}: f has several outputs {f.shape[3:]}; pass the scales of one")
    return np.asarray(flat(f).std(0), float)


def probabilities_of(
    data: Container | ArrayLike, y: ArrayLike | None, site: str, group_name: str
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Class probabilities `(n, classes)`, and observed classes `(n,)`.

    Those of inference data are the frequencies of the classes among predictive draws.
    """
    if is_container(data):
        draws, observed = predictive_of(data, y, site, group_name)
        classes = range(int(max(draws.max(), observed.max())) + 1)
        return np.stack([(draws == k).mean(0) for k in classes], -1), observed
    p = np.asarray(data, float)
    if y is None:
        raise DataError("probabilities come without y; pass y of shape (n,)")
    return np.stack([1 - p, p], -1) if p.ndim == 1 else p, np.asarray(y)


def _column(data: Container, group_name: str, feature: int | str) -> tuple[NDArray[Any], str]:
    """One column of x, and its name."""
    x = group(data, group_name)["x"]
    if x.ndim == 1:
        return np.asarray(x), "x"
    labels = [str(label) for label in x["feature"].values]
    place = labels.index(feature) if feature in labels else feature
    if not isinstance(place, int) or place >= len(labels):
        raise DataError(f"feature {feature!r} is no column of x; it has {', '.join(labels)}")
    return np.asarray(x)[:, place], labels[place] if not labels[place].isdigit() else f"x {place}"
