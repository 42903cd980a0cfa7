"""Names of the logged metrics: the same in the CSV, in W&B and in TensorBoard.

`Metric` has the names of the metric that a task is judged by.
"""

from __future__ import annotations

from recipes.measuring.metrics import Metric

TRAIN_LOSS = "train/loss"
LEARNING_RATE = "train/lr"
VAL_LOSS = "val/loss"
TEST_LOSS = "test/loss"

TOP5 = "acc5"  # last part of the names of top-5 accuracy, 0 to 1

TRAIN_TIME = "train_time"  # seconds in training steps since the start, those of resumed runs included
SAMPLES = "samples"  # number of training samples that all processes together have seen
STEP_S = "perf/step_s"  # seconds of one training step
EXPOSED_S = "perf/exposed_s"  # seconds of one step in which backward waited for communication
MB_SENT = "comm/mb_sent"  # 10^6 bytes of gradients that this process has sent since the start

# Lightning adds these to each row. In the CSV the step is called "step"; in TensorBoard it is the step of the event.
EPOCH = "epoch"
GLOBAL_STEP = "trainer/global_step"

# The strategy of the package logs these.
BYTES_SENT = "gqsgd/bytes_sent"
MESSAGE_BITS = "gqsgd/bits_per_coordinate"  # of one rank's messages
ENCODE_S = "gqsgd/encode_s"
DECODE_S = "gqsgd/decode_s"
REL_L2 = "gqsgd/rel_l2"
NONFINITE_BLOCKS = "gqsgd/nonfinite_blocks"
GQSGD = (
    BYTES_SENT,
    MESSAGE_BITS,
    ENCODE_S,
    "gqsgd/wait_s",
    DECODE_S,
    "gqsgd/exposed_s",
    REL_L2,
    NONFINITE_BLOCKS,
)


def against_time(metric: Metric) -> tuple[str, ...]:
    """Names of everything that dashboards plot against training seconds."""
    of_task = (TRAIN_LOSS, metric.train, LEARNING_RATE, VAL_LOSS, metric.val, TEST_LOSS, metric.test)
    return (*of_task, SAMPLES, STEP_S, EXPOSED_S, MB_SENT, *GQSGD)
