"""What a training run is made of: data, networks, the LightningModule, callbacks, loggers, baselines."""
