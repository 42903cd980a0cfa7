"""The hook of DistributedDataParallel, and the mean of any tensor."""
