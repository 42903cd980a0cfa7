"""Systems and bounds of the literature that are no configuration: simulations, optimizers, theory."""
