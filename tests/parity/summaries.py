"""A tensor in five numbers: its norm and four projections, enough to notice any change that matters."""

import numpy as np


def summarize(tensor: np.ndarray) -> list:
    flat = tensor.astype(np.float64).ravel()
    random = np.random.RandomState(flat.size % 2**31)
    return [float(np.linalg.norm(flat))] + [float(flat @ random.standard_normal(flat.size)) for _ in range(4)]


def disagreement(tensor: np.ndarray, stored: list) -> float:
    """Largest difference of the five numbers, relative to the norm."""
    return float(np.abs(np.array(summarize(tensor)) - np.array(stored)).max() / stored[0])
