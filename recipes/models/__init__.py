"""Networks that only recipes train; `workloads` has the networks that benchmarks measure as well."""
