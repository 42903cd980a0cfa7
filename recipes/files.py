"""Names of the files in the folder of a run."""

#: Every logged metric, a row per logging step.
METRICS_FILE = "metrics.csv"
#: The finished run in numbers.
RESULT_FILE = "result.json"
#: The id of the run in W&B, under which a resumed run continues.
WANDB_ID_FILE = "wandb_id.txt"
