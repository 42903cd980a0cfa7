"""Where the metrics of a run are written: CSV, TensorBoard, Weights & Biases."""
