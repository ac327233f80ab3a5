"""Numbers computed from posteriors: convergence, comparison, calibration."""
