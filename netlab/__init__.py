"""Several hosts on one machine, joined by links of a given rate: for trainings and benchmarks that need slow links.

`netlab.lab` builds the hosts, `netlab.ranks` runs a command on all of them, `python -m netlab` is the command line, and
`netlab.machine` names the devices of the one machine that all hosts share. Nothing here imports torch.
"""
