"""The start, the reports and the checkpoints that the hook, local steps, FSDP2 and `all_reduce` share."""
