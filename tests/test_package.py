from importlib.metadata import entry_points


def test_entry_point_resolves() -> None:
    (entry,) = entry_points(group="torch.backends", name="lightning_gqsgd")
    entry.load()()
