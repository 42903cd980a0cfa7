"""Local steps: each rank trains on its own, and the changes of all ranks are averaged every H steps."""
