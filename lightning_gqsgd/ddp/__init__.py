"""The hook for DistributedDataParallel, and `all_reduce` for any tensor."""
