"""Roads from a model and data to a `Posterior`; one file for each road."""
