"""Names of the logged metrics, and the callbacks that count seconds, samples and bytes."""
