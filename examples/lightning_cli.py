"""LightningCLI with a strategy object from YAML.

python examples/lightning_cli.py fit --config examples/lightning_cli.yaml
"""

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

if __name__ == "__main__":
    LightningCLI(BoringModel, BoringDataModule, save_config_callback=None)
