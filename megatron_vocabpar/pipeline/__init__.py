"""One rank's iteration, entered from Megatron. Read in this order:

options.py, rules/       what can be asked for, and what cannot be combined
forward_backward.py      megatron-core's forward-backward function, running our schedules
preparation.py           before an iteration: record what ``forward_step`` feeds, share it with every rank
iteration.py             what the handlers of one iteration share
handlers/                one method an instruction; each file owns one kind of data
model/                   a rank's chunk, with its rows of both vocabulary layers
split_w/, tuning/, graphs/    weight gradients apart from B; plans from measured times; CUDA graphs
"""
