"""Local steps: each rank trains by itself, and the changes of all ranks' models are averaged seldom."""
