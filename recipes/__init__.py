"""Training recipes: `run.py` trains once, `compare.py` trains one task under several strategies.

* `data`: where samples come from: files, caches, downloads, stand-ins, batches.
* `models`: networks.
* `tasks`: what a network is trained for: loss, metric, optimizer, schedule.
* `strategies`: the choices of ``strategy=``.
* `launch`: processes: who starts them, on which hardware, with which environment variables.
* `measuring`: names of metrics, and what counts seconds, samples and bytes.
* `loggers`: where metrics are written.
* `training`: one run: from a configuration to its result.
* `overrides`, `arguments`, `signatures`, `limits`: command lines, and what is wrong with them.
* `opening`, `pace`: first words, and the time that is left.
* `comparison`: several runs: their plan, table, plots and dashboards.

Networks and images that benchmarks measure as well are in `workloads`, the look of pictures in `pictures`, and hosts
with slow links in `netlab`.
"""
