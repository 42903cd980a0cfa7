"""Systems and bounds of the literature that need more than a configuration: simulations, optimizers, theory."""
